#include "io/file_io.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <vector>

#include "base/pages.h"
#include "base/scope_guard.h"

namespace gpufs {
namespace {

constexpr long kCachestatCall = 451;  // Linux 6.5; the build's headers may be older

// The value is that of linux/mman.h of 6.5 and later.
struct CachestatRange {
  std::uint64_t offset;
  std::uint64_t bytes;
};
struct Cachestat {
  std::uint64_t cached;
  std::uint64_t dirty;
  std::uint64_t writeback;
  std::uint64_t evicted;
  std::uint64_t recently_evicted;
};

std::atomic<bool> has_cachestat{true};

// Unmaps at the end of a scope and leaves errno alone.
auto unmap_later(void* mapping, std::size_t bytes) {
  return ScopeGuard([mapping, bytes] {
    const int error = errno;
    ::munmap(mapping, bytes);
    errno = error;
  });
}

int resident_by_mincore(int fd, std::uint64_t offset, std::uint64_t bytes, std::uint64_t* cached) {
  const std::uint64_t start = round_down(offset, page_bytes());
  const std::uint64_t length = round_up(offset - start + bytes, page_bytes());
  void* const mapping = ::mmap(nullptr, length, PROT_READ, MAP_SHARED, fd, static_cast<off_t>(start));
  if (mapping == MAP_FAILED) return -1;
  const auto unmap = unmap_later(mapping, length);
  std::vector<unsigned char> pages(length / page_bytes());
  if (::mincore(mapping, length, pages.data()) != 0) return -1;
  std::uint64_t resident = 0;
  for (const unsigned char page : pages) resident += page & 1U;
  *cached = resident * page_bytes();
  return 0;
}

// The first offset from `offset` on at which a hole may begin, with data before it.
std::uint64_t hole_start(const HoleSearch& search, std::uint64_t unit, std::uint64_t offset) {
  const std::uint64_t start = round_up(search.target_offset + offset, search.granule) - search.target_offset;
  return start + (round_up(search.file_offset + start, unit) - (search.file_offset + start));
}

// The last offset up to `offset` at which a hole may end, with data after it; 0 if there is none.
std::uint64_t hole_end(const HoleSearch& search, std::uint64_t unit, std::uint64_t offset) {
  const std::uint64_t end = round_down(search.target_offset + offset, search.granule);
  if (end <= search.target_offset) return 0;
  const std::uint64_t relative = end - search.target_offset;
  return relative - std::min(relative, (search.file_offset + relative) % unit);
}

}  // namespace

// ---- system calls ----

ssize_t FileOps::read_at(int fd, void* destination, std::size_t bytes, std::uint64_t offset) {
  return ::pread(fd, destination, bytes, static_cast<off_t>(offset));
}

ssize_t FileOps::write_at(int fd, const void* source, std::size_t bytes, std::uint64_t offset) {
  return ::pwrite(fd, source, bytes, static_cast<off_t>(offset));
}

ssize_t FileOps::write_pages_at(int fd, const void* source, std::size_t bytes, std::uint64_t offset) {
  const std::uint64_t start = round_down(offset, page_bytes());
  const std::uint64_t lead = offset - start;
  const std::size_t length = static_cast<std::size_t>(lead) + bytes;
  void* const mapping = ::mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(start));
  if (mapping == MAP_FAILED) return -1;
  const auto unmap = unmap_later(mapping, length);
  const iovec from{const_cast<void*>(source), bytes};
  const iovec to{static_cast<std::byte*>(mapping) + lead, bytes};
  return ::process_vm_writev(::getpid(), &from, 1, &to, 1, 0);
}

int FileOps::sync(int fd, bool data_only) { return data_only ? ::fdatasync(fd) : ::fsync(fd); }

int FileOps::truncate(int fd, std::uint64_t size) { return ::ftruncate(fd, static_cast<off_t>(size)); }

int FileOps::allocate(int fd, int mode, std::uint64_t offset, std::uint64_t bytes) {
  return ::fallocate(fd, mode, static_cast<off_t>(offset), static_cast<off_t>(bytes));
}

int FileOps::size(int fd, std::uint64_t* bytes) {
  struct stat status = {};
  if (::fstat(fd, &status) != 0) return -1;
  if (S_ISBLK(status.st_mode)) return ::ioctl(fd, BLKGETSIZE64, bytes);
  *bytes = static_cast<std::uint64_t>(status.st_size);
  return 0;
}

int FileOps::stored_bytes(int fd, std::uint64_t* bytes) {
  struct stat status = {};
  if (::fstat(fd, &status) != 0) return -1;
  *bytes = static_cast<std::uint64_t>(status.st_blocks) * 512;
  return 0;
}

int FileOps::seek(int fd, std::uint64_t offset, int whence, std::uint64_t* found) {
  const off_t position = ::lseek(fd, static_cast<off_t>(offset), whence);
  if (position < 0) return -1;
  *found = static_cast<std::uint64_t>(position);
  return 0;
}

int FileOps::cached_bytes(int fd, std::uint64_t offset, std::uint64_t bytes, std::uint64_t* cached) {
  if (has_cachestat.load(std::memory_order_relaxed)) {
    const CachestatRange range{offset, bytes};
    Cachestat found = {};
    if (::syscall(kCachestatCall, fd, &range, &found, 0) == 0) {
      *cached = found.cached * page_bytes();
      return 0;
    }
    if (errno == ENOSYS) has_cachestat.store(false, std::memory_order_relaxed);
    // EPERM comes from seccomp filters that do not know this call. They may allow mincore.
    if (errno != ENOSYS && errno != EPERM) return -1;
  }
  return resident_by_mincore(fd, offset, bytes, cached);
}

FileOps& FileOps::system() {
  static FileOps operations;
  return operations;
}

// ---- whole ranges ----

Result<std::uint64_t> size_of(BackingFile& file) {
  std::uint64_t bytes = 0;
  if (file.operations().size(file.buffered_fd(), &bytes) == 0) return bytes;
  return Status::from_errno(errno, "the backing file's size");
}

Moved read_range(BackingFile& file, IoMode mode, std::byte* destination, std::uint64_t bytes, std::uint64_t offset) {
  const int fd = mode == IoMode::kDirect ? file.direct_fd() : file.buffered_fd();
  const std::uint64_t align = mode == IoMode::kDirect ? file.facts().offset_align : 1;
  return move_all(bytes, align, "reading the file", [&](std::uint64_t done, std::size_t want) {
    return file.operations().read_at(fd, destination + done, want, offset + done);
  });
}

Moved write_range(BackingFile& file, IoMode mode, const std::byte* source, std::uint64_t bytes, std::uint64_t offset) {
  const int fd = mode == IoMode::kDirect ? file.direct_fd() : file.buffered_fd();
  const std::uint64_t align = mode == IoMode::kDirect ? file.facts().offset_align : 1;
  Moved moved = move_all(bytes, align, "writing the file", [&](std::uint64_t done, std::size_t want) {
    return file.operations().write_at(fd, source + done, want, offset + done);
  });
  // A file system that accepts nothing and reports no error would keep us here forever.
  if (moved.status.ok() && moved.bytes < bytes && moved.bytes % align == 0) {
    moved.status = Status(EIO, "writing the file: no progress");
  }
  return moved;
}

bool direct_fits(const BackingFile& file, const void* memory, std::uint64_t bytes, std::uint64_t offset) {
  const BackingFacts& facts = file.facts();
  return file.direct_fd() >= 0 && bytes > 0 && offset % facts.unit == 0 && bytes % facts.unit == 0 &&
         reinterpret_cast<std::uintptr_t>(memory) % facts.memory_align == 0;
}

Moved write_split(BackingFile& file, const std::byte* source, std::uint64_t bytes, std::uint64_t offset) {
  const std::uint64_t unit = file.facts().unit;
  const std::uint64_t body_start = std::min(round_up(offset, unit), offset + bytes) - offset;
  const std::uint64_t body_end = std::max(round_down(offset + bytes, unit), offset + body_start) - offset;
  if (!direct_fits(file, source + body_start, body_end - body_start, offset + body_start)) {
    return write_range(file, IoMode::kBuffered, source, bytes, offset);
  }
  Moved moved = write_range(file, IoMode::kBuffered, source, body_start, offset);
  if (!moved.status.ok()) return moved;
  const Moved body =
      write_range(file, IoMode::kDirect, source + body_start, body_end - body_start, offset + body_start);
  moved.bytes += body.bytes;
  // EINVAL: the file system's alignment is not what it reported.
  if (!body.status.ok() && body.status.error() != EINVAL) {
    moved.status = body.status;
    return moved;
  }
  const Moved rest =
      write_range(file, IoMode::kBuffered, source + moved.bytes, bytes - moved.bytes, offset + moved.bytes);
  moved.bytes += rest.bytes;
  moved.status = rest.status;
  return moved;
}

Moved write_pages(BackingFile& file, const std::byte* source, std::uint64_t bytes, std::uint64_t offset) {
  const ssize_t count =
      file.operations().write_pages_at(file.buffered_fd(), source, static_cast<std::size_t>(bytes), offset);
  const std::uint64_t done = count > 0 ? static_cast<std::uint64_t>(count) : 0;
  if (done == bytes) return Moved{bytes, Status{}};
  Moved rest = write_range(file, IoMode::kBuffered, source + done, bytes - done, offset + done);
  rest.bytes += done;
  return rest;
}

Moved write_zeros(BackingFile& file, std::uint64_t bytes, std::uint64_t offset, bool sparse, std::uint64_t* holed) {
  *holed = 0;
  if (sparse) {
    constexpr int kPunch = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
    if (TEMP_FAILURE_RETRY(file.operations().allocate(file.buffered_fd(), kPunch, offset, bytes)) == 0) {
      *holed = bytes;
      return Moved{bytes, Status{}};
    }
  }
  Moved moved;
  while (moved.bytes < bytes && moved.status.ok()) {
    const std::uint64_t want = std::min<std::uint64_t>(bytes - moved.bytes, zeros().size());
    const Moved part = write_range(file, IoMode::kBuffered, zeros().data(), want, offset + moved.bytes);
    moved.bytes += part.bytes;
    moved.status = part.status;
  }
  return moved;
}

// ---- holes ----

Result<Extents> holes_of(BackingFile& file, const HoleSearch& search, const std::atomic<bool>& cancelled) {
  Extents holes;
  FileOps& system = file.operations();
  const int fd = file.buffered_fd();
  const std::uint64_t unit = file.facts().unit;
  std::uint64_t stored = 0;
  if (file.facts().block_device || system.stored_bytes(fd, &stored) != 0 || stored >= search.file_size) return holes;
  for (std::uint64_t position = 0; position < search.bytes;) {
    if (cancelled) return Status(ECANCELED, "cancelled");
    std::uint64_t data = 0;
    if (system.seek(fd, search.file_offset + position, SEEK_DATA, &data) == 0) {
      data = std::min(data - search.file_offset, search.bytes);
    } else if (errno == ENXIO) {
      data = search.bytes;
    } else {
      break;
    }
    const std::uint64_t end = data == search.bytes ? data : hole_end(search, unit, data);
    if (end > position) holes.push_back({position, end - position});
    if (data == search.bytes) break;
    std::uint64_t hole = 0;
    if (system.seek(fd, search.file_offset + data, SEEK_HOLE, &hole) != 0) break;
    position = hole_start(search, unit, std::max(hole - search.file_offset, data + 1));
  }
  return holes;
}

}  // namespace gpufs
