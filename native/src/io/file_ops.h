// The system calls that transfers make on files, behind an interface so that tests can make each of them fail.
// The system's own implementation is one object for the process; others belong to the test that made them.
// Any thread may call any function; each may block for as long as the file's device or server does.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

namespace gpufs {

// As the system calls of these names: -1 and errno on failure, EINTR and short counts included.
class FileOps {
 public:
  virtual ~FileOps() = default;
  virtual ssize_t read_at(int fd, void* destination, std::size_t bytes, std::uint64_t offset) = 0;
  virtual ssize_t write_at(int fd, const void* source, std::size_t bytes, std::uint64_t offset) = 0;
  // As write_at, without the file's own lock, which keeps writers of one file in memory apart: the range's pages are
  // written through a mapping, by the kernel, so that a file that is cut off meanwhile gives an error and no signal.
  // The file must reach to the range's end, be open for both, and is not marked as modified.
  virtual ssize_t write_pages_at(int fd, const void* source, std::size_t bytes, std::uint64_t offset) = 0;
  virtual int sync(int fd, bool data_only) = 0;
  virtual int truncate(int fd, std::uint64_t size) = 0;
  virtual int allocate(int fd, int mode, std::uint64_t offset, std::uint64_t bytes) = 0;
  // The size of a regular file or a block device.
  virtual int size(int fd, std::uint64_t* bytes) = 0;
  // What a regular file takes up where it is stored: less than its size if it has holes (or is compressed).
  virtual int stored_bytes(int fd, std::uint64_t* bytes) = 0;
  // lseek(2) with SEEK_DATA or SEEK_HOLE.
  virtual int seek(int fd, std::uint64_t offset, int whence, std::uint64_t* found) = 0;
  // How many bytes of the range the page cache holds, counted in whole pages.
  virtual int cached_bytes(int fd, std::uint64_t offset, std::uint64_t bytes, std::uint64_t* cached) = 0;

  static FileOps& system();
};

}  // namespace gpufs
