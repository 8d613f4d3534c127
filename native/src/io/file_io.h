// Reads and writes of backing files: the system calls (FileOps), and what transfers do with whole ranges: move them
// from and to host memory, write zeros, find holes. What is about ranges resumes after EINTR and continues after short
// counts. Thread-safe. Each function blocks for as long as the file does.
#pragma once

#include <sys/types.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>

#include "base/math.h"
#include "base/status.h"
#include "io/backing_file.h"
#include "io/plan.h"

namespace gpufs {

// The most that the kernel moves in one call, read(2).
inline constexpr std::uint64_t kKernelLimit = 0x7ffff000;

// Virtual so that tests can make each of them fail. Like the system calls of these names: -1 and errno on failure;
// EINTR and short counts occur.
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

// Calls call(done, rest), which is like read(2), until all bytes are moved. Stops with success when it moves nothing,
// or a count that is not a multiple of `align`.
template <typename Call>
Moved move_all(std::uint64_t bytes, std::uint64_t align, const char* what, Call call) {
  Moved moved;
  while (moved.bytes < bytes) {
    const std::uint64_t limit = round_down(kKernelLimit, align);
    const std::uint64_t want = std::min(bytes - moved.bytes, limit);
    const ssize_t count = call(moved.bytes, static_cast<std::size_t>(want));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      moved.status = Status::from_errno(errno, what);
      break;
    }
    if (count == 0) break;
    moved.bytes += static_cast<std::uint64_t>(count);
    if (static_cast<std::uint64_t>(count) % align != 0) break;
  }
  return moved;
}

// The size of the file or block device now.
Result<std::uint64_t> size_of(BackingFile& file);

// kDirect: by O_DIRECT; memory, offset and size aligned. Stops with success after a short count that is not aligned, as
// at the end of a file.
enum class IoMode { kBuffered, kDirect };

// Fewer bytes with success: the end of the file.
Moved read_range(BackingFile& file, IoMode mode, std::byte* destination, std::uint64_t bytes, std::uint64_t offset);
Moved write_range(BackingFile& file, IoMode mode, const std::byte* source, std::uint64_t bytes, std::uint64_t offset);

// Whether the range is aligned for O_DIRECT.
bool direct_fits(const BackingFile& file, const void* memory, std::uint64_t bytes, std::uint64_t offset);

// Writes the aligned part by O_DIRECT and the edges through the page cache.
Moved write_split(BackingFile& file, const std::byte* source, std::uint64_t bytes, std::uint64_t offset);

// Through the pages of a file in memory, which several threads can do at once. What cannot be written that way is left
// to write_range(), which also reports the error.
Moved write_pages(BackingFile& file, const std::byte* source, std::uint64_t bytes, std::uint64_t offset);

// Makes a range read as zeros: punches a hole if `sparse` is set and the file system can, otherwise writes zeros.
// holed: bytes for which no zeros were written.
Moved write_zeros(BackingFile& file, std::uint64_t bytes, std::uint64_t offset, bool sparse, std::uint64_t* holed);

struct HoleSearch {
  std::uint64_t file_offset = 0;
  std::uint64_t file_size = 0;
  std::uint64_t target_offset = 0;
  std::uint64_t bytes = 0;
  std::uint64_t granule = 1;  // in which the target allocates memory, a power of two
};

// The holes in order, not adjacent, each from data to data or to the request's ends. Next to data they end at granules
// of the target, since a part of one saves nothing, and at units of the file's O_DIRECT. A file that occupies its whole
// size costs one system call, others at most two for each granule with data. None if the file system does not report
// holes. ECANCELED once `cancelled` is true.
Result<Extents> holes_of(BackingFile& file, const HoleSearch& search, const std::atomic<bool>& cancelled);

}  // namespace gpufs
