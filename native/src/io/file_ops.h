// The system calls that transfers make on files, virtual so that tests can make each of them fail.
// Thread-safe. Each may block for as long as the file's device or server does.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace gpufs {

// Like the system calls of these names: -1 and errno on failure; EINTR and short counts occur.
class FileOps {
 public:
  virtual ~FileOps() = default;
  virtual ssize_t read_at(int fd, void* destination, std::size_t bytes, std::uint64_t offset);
  virtual ssize_t write_at(int fd, const void* source, std::size_t bytes, std::uint64_t offset);
  // Like write_at, without the lock that lets only one thread at a time write a file in memory. The kernel writes the
  // pages through a mapping, so that truncating the file at the same time causes an error and no signal. The file must
  // reach to the end of the range and be open for both; its modification time does not change.
  virtual ssize_t write_pages_at(int fd, const void* source, std::size_t bytes, std::uint64_t offset);
  virtual int sync(int fd, bool data_only);
  virtual int truncate(int fd, std::uint64_t size);
  virtual int allocate(int fd, int mode, std::uint64_t offset, std::uint64_t bytes);
  // The size of a regular file or a block device.
  virtual int size(int fd, std::uint64_t* bytes);
  // The bytes that a regular file occupies: less than its size if it has holes (or is compressed).
  virtual int stored_bytes(int fd, std::uint64_t* bytes);
  // lseek(2) with SEEK_DATA or SEEK_HOLE.
  virtual int seek(int fd, std::uint64_t offset, int whence, std::uint64_t* found);
  // How many bytes of the range are in the page cache, in whole pages.
  virtual int cached_bytes(int fd, std::uint64_t offset, std::uint64_t bytes, std::uint64_t* cached);

  static FileOps& system();
};

}  // namespace gpufs
