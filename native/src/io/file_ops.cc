#include "io/file_ops.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <vector>

#include "base/math.h"
#include "base/scope_guard.h"

namespace gpufs {
namespace {

constexpr long kCachestatCall = 451;  // Linux 6.5; the build's headers may be older

// As in linux/mman.h of 6.5 and later.
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

std::uint64_t page_bytes() {
  static const auto bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

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

}  // namespace

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

}  // namespace gpufs
