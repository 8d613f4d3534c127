// Memory of other programs as the host driver maps it.

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
#include "base/pages.h"
#include "base/unique_fd.h"
#include "drivers/host/fault_guard.h"
#include "drivers/host/host_device.h"

namespace gpufs {
namespace {

class HostImport final : public ImportedRange {
 public:
  HostImport(DeviceAddress base, std::uint64_t capacity, ImportAccess access)
      : ImportedRange(base, capacity), access_(access) {}
  ~HostImport() override { ::munmap(reinterpret_cast<void*>(base()), capacity()); }

 private:
  Status map(const ExportedMemory& piece) override {
    struct stat file {};
    if (::fstat(piece.descriptor.get(), &file) != 0) return Status::from_errno(errno, "a piece of shared memory");
    // A mapping beyond the end would make accesses fatal.
    if (static_cast<std::uint64_t>(file.st_size) < piece.end()) {
      return Status(EINVAL, "the descriptor of the shared memory is shorter than the piece");
    }
    void* const address = reinterpret_cast<void*>(base() + piece.offset);
    const int protection = access_ == ImportAccess::kRead ? PROT_READ : PROT_READ | PROT_WRITE;
    const int sharing = access_ == ImportAccess::kPrivate ? MAP_PRIVATE : MAP_SHARED;
    if (::mmap(address, piece.bytes, protection, sharing | MAP_FIXED, piece.descriptor.get(),
               static_cast<off_t>(piece.offset)) == MAP_FAILED) {
      return Status::from_errno(errno, "mapping " + std::to_string(piece.bytes) + " bytes of shared memory");
    }
    ::madvise(address, piece.bytes, MADV_HUGEPAGE);
    return {};
  }

  Status unmap_all() override {
    void* const start = reinterpret_cast<void*>(base());
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (bytes() == 0 || ::mmap(start, bytes(), PROT_NONE, flags, -1, 0) != MAP_FAILED) return {};
    return Status::from_errno(errno, "unmapping " + std::to_string(bytes()) + " bytes of shared memory");
  }

  const ImportAccess access_;
};

class SharedFile final : public ForeignMapping {
 public:
  // limit: mapped_bytes are charged to it. The destructor releases them.
  SharedFile(UniqueFd file, DeviceAddress mapped, std::uint64_t mapped_bytes, std::uint64_t start, std::uint64_t end,
             std::unique_ptr<FaultGuard> guard, std::shared_ptr<Ledger> limit)
      : ForeignMapping(mapped + start % page_bytes()),
        file_(std::move(file)),
        mapped_(mapped),
        mapped_bytes_(mapped_bytes),
        start_(start),
        end_(end),
        guard_(std::move(guard)),
        limit_(std::move(limit)) {}
  ~SharedFile() override {
    guard_.reset();
    ::munmap(reinterpret_cast<void*>(mapped_), mapped_bytes_);
    limit_->release(mapped_bytes_);
  }

  // A file that is large enough again has lost what was cut off, but shows it as its owner sees it.
  [[nodiscard]] bool intact() override {
    struct stat found = {};
    return !guard_->broken() && ::fstat(file_.get(), &found) == 0 && static_cast<std::uint64_t>(found.st_size) >= end_;
  }

  Status copy_out(std::byte* destination, std::uint64_t offset, std::size_t bytes) override {
    for (std::size_t done = 0; done < bytes;) {
      const ssize_t read =
          ::pread(file_.get(), destination + done, bytes - done, static_cast<off_t>(start_ + offset + done));
      if (read < 0 && errno == EINTR) continue;
      if (read < 0) return Status::from_errno(errno, "reading memory of another program");
      if (read == 0) return Status(ESTALE, "the file of the memory has become shorter");
      done += static_cast<std::size_t>(read);
    }
    return {};
  }
  [[nodiscard]] std::uint64_t next_data(std::uint64_t offset) override { return seek(offset, SEEK_DATA); }
  [[nodiscard]] std::uint64_t next_hole(std::uint64_t offset) override { return seek(offset, SEEK_HOLE); }

 private:
  // No data above the offset, or a file that has become shorter: the end of the memory.
  [[nodiscard]] std::uint64_t seek(std::uint64_t offset, int whence) const {
    // The program shares the position of its descriptor, which must stay.
    const UniqueFd own(::open(("/proc/self/fd/" + std::to_string(file_.get())).c_str(), O_RDONLY | O_CLOEXEC));
    if (!own.valid()) return whence == SEEK_DATA ? offset : end_ - start_;  // all of it is data
    const off_t found = ::lseek(own.get(), static_cast<off_t>(start_ + offset), whence);
    return (found < 0 ? end_ : static_cast<std::uint64_t>(found)) - start_;
  }

  const UniqueFd file_;
  const DeviceAddress mapped_;  // whole pages around the memory
  const std::uint64_t mapped_bytes_;
  const std::uint64_t start_;  // of the memory in the file
  const std::uint64_t end_;
  std::unique_ptr<FaultGuard> guard_;
  const std::shared_ptr<Ledger> limit_;
};

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

Result<std::unique_ptr<ImportedRange>> import_host_memory(std::uint64_t capacity, ImportAccess access) {
  if (capacity == 0 || capacity > UINT64_MAX - page_bytes()) {
    return Status(EINVAL, "a mapping of size zero, or too large");
  }
  capacity = round_up(capacity, page_bytes());
  void* const base = ::mmap(nullptr, capacity, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return Status::from_errno(errno, "reserving " + std::to_string(capacity) + " addresses");
  return std::unique_ptr<ImportedRange>(
      std::make_unique<HostImport>(reinterpret_cast<DeviceAddress>(base), capacity, access));
}

Result<std::unique_ptr<ForeignMapping>> map_shared_file(const ForeignMemory& memory, std::shared_ptr<Ledger> limit) {
  if (memory.kind != ShareKind::kFile) {
    return Status(EINVAL, "this is memory of a GPU, and the file would be on a device of host memory");
  }
  UniqueFd file(::fcntl(memory.descriptor.get(), F_DUPFD_CLOEXEC, 3));
  if (!file.valid()) return Status::from_errno(errno, "duplicating the descriptor of the memory");
  TRY(check_kind(file.get()));
  TRY(check_access(file.get(), memory.writable));
  struct stat found = {};
  if (::fstat(file.get(), &found) != 0) return Status::from_errno(errno, "fstat of the memory's file");
  const auto size = static_cast<std::uint64_t>(found.st_size);
  std::uint64_t end = 0;
  if (memory.bytes == 0 || add_overflows(memory.offset, memory.bytes, &end) || end > size) {
    return Status(EINVAL, "the memory is " + std::to_string(memory.bytes) + " bytes at offset " +
                              std::to_string(memory.offset) + " of a file of " + std::to_string(size) + " bytes");
  }
  const std::uint64_t start = round_down(memory.offset, page_bytes());
  const std::uint64_t bytes = round_up(end - start, page_bytes());
  if (!limit->take(bytes)) {
    return Status(ENOSPC, "No space left on device: " + std::to_string(bytes) +
                              " bytes of registered memory count as " + "memory of the device, which has " +
                              std::to_string(limit->available()) + " bytes left");
  }
  const int protection = memory.writable ? PROT_READ | PROT_WRITE : PROT_READ;
  void* const mapped = ::mmap(nullptr, bytes, protection, MAP_SHARED, file.get(), static_cast<off_t>(start));
  if (mapped == MAP_FAILED) {
    const int error = errno;
    limit->release(bytes);
    return Status::from_errno(error, "mapping the memory");
  }
  // Neither forked children nor core files get it, as with buffers.
  ::madvise(mapped, bytes, MADV_DONTFORK);
  ::madvise(mapped, bytes, MADV_DONTDUMP);
  const auto base = reinterpret_cast<DeviceAddress>(mapped);
  Result<std::unique_ptr<FaultGuard>> guard = FaultGuard::watch(base, bytes);
  if (!guard.ok()) {
    ::munmap(mapped, bytes);
    limit->release(bytes);
    return guard.status();
  }
  return std::unique_ptr<ForeignMapping>(
      std::make_unique<SharedFile>(std::move(file), base, bytes, memory.offset, end, guard.take(), std::move(limit)));
}

}  // namespace gpufs
