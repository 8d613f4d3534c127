#include "drivers/host/shared_file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

#include "base/math.h"

namespace gpufs {
namespace {

// Before anything is asked of the file: only files in memory have seals, and asking for them calls no file system. So a
// descriptor of a FUSE mount, perhaps of ours, cannot make this wait.
Status check_kind(int fd) {
  struct statfs found = {};
  if (::fcntl(fd, F_GET_SEALS) < 0 || ::fstatfs(fd, &found) != 0 || found.f_type != TMPFS_MAGIC) {
    return Status(EINVAL, "the descriptor is not of memory that programs share (memfd_create, shm_open)");
  }
  return {};
}

Status check_access(int fd, bool writable) {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 || (flags & O_PATH) != 0) return Status(EINVAL, "the descriptor of the memory is not open");
  const int access = flags & O_ACCMODE;
  if (access == O_RDWR || (access == O_RDONLY && !writable)) return {};
  return Status(EACCES, writable ? "the descriptor of the memory is not open for reading and writing"
                                 : "the descriptor of the memory is not open for reading");
}

}  // namespace

Result<std::unique_ptr<ForeignMapping>> SharedFile::map(const ForeignMemory& memory) {
  if (memory.kind != ShareKind::kFile) {
    return Status(EINVAL, "this is memory of a GPU, and the file would be on a device of host memory");
  }
  UniqueFd file(::fcntl(memory.descriptor.get(), F_DUPFD_CLOEXEC, 3));
  if (!file.valid()) return Status::from_errno(errno, "duplicating the descriptor of the memory");
  Status status = check_kind(file.get());
  if (status.ok()) status = check_access(file.get(), memory.writable);
  if (!status.ok()) return status;
  struct stat found = {};
  if (::fstat(file.get(), &found) != 0) return Status::from_errno(errno, "fstat of the memory's file");
  const auto size = static_cast<std::uint64_t>(found.st_size);
  std::uint64_t end = 0;
  if (memory.bytes == 0 || add_overflows(memory.offset, memory.bytes, &end) || end > size) {
    return Status(EINVAL, "the memory is " + std::to_string(memory.bytes) + " bytes at offset " +
                              std::to_string(memory.offset) + " of a file of " + std::to_string(size) + " bytes");
  }
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const std::uint64_t start = round_down(memory.offset, page);
  const std::uint64_t bytes = round_up(end - start, page);
  const int protection = memory.writable ? PROT_READ | PROT_WRITE : PROT_READ;
  void* const mapped = ::mmap(nullptr, bytes, protection, MAP_SHARED, file.get(), static_cast<off_t>(start));
  if (mapped == MAP_FAILED) return Status::from_errno(errno, "mapping the memory");
  // As for buffers: neither forked children nor core files get it.
  ::madvise(mapped, bytes, MADV_DONTFORK);
  ::madvise(mapped, bytes, MADV_DONTDUMP);
  const auto address = reinterpret_cast<DeviceAddress>(mapped);
  std::unique_ptr<SharedFile> shared(new SharedFile(std::move(file), address, bytes, start, memory.offset, end));
  Result<std::unique_ptr<FaultGuard>> guard = FaultGuard::watch(address, bytes);
  if (!guard.ok()) return guard.status();
  shared->guard_ = guard.take();
  return std::unique_ptr<ForeignMapping>(std::move(shared));
}

SharedFile::~SharedFile() {
  guard_.reset();
  ::munmap(reinterpret_cast<void*>(mapped_), mapped_bytes_);
}

// A file that is large enough again has lost what was cut off, but shows it as its owner sees it.
bool SharedFile::intact() {
  struct stat found = {};
  return !guard_->broken() && ::fstat(file_.get(), &found) == 0 && static_cast<std::uint64_t>(found.st_size) >= end_;
}

}  // namespace gpufs
