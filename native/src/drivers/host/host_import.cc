#include "drivers/host/host_import.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "base/math.h"

namespace gpufs {

Result<std::unique_ptr<ImportedRange>> HostImport::create(std::uint64_t capacity, bool writable) {
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  if (capacity == 0 || capacity > UINT64_MAX - page) return Status(EINVAL, "a mapping of size zero, or too large");
  capacity = round_up(capacity, page);
  void* const base = ::mmap(nullptr, capacity, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return Status::from_errno(errno, "reserving " + std::to_string(capacity) + " addresses");
  return std::unique_ptr<ImportedRange>(new HostImport(reinterpret_cast<DeviceAddress>(base), capacity, writable));
}

HostImport::~HostImport() { ::munmap(reinterpret_cast<void*>(base_), capacity_); }

Status HostImport::map(const ExportedMemory& piece) {
  struct stat file {};
  if (::fstat(piece.descriptor.get(), &file) != 0) return Status::from_errno(errno, "a piece of shared memory");
  // A mapping beyond the end would make accesses fatal.
  if (static_cast<std::uint64_t>(file.st_size) < piece.offset + piece.bytes) {
    return Status(EINVAL, "the descriptor of the shared memory is shorter than the piece");
  }
  void* const address = reinterpret_cast<void*>(base_ + piece.offset);
  const int protection = writable_ ? PROT_READ | PROT_WRITE : PROT_READ;
  if (::mmap(address, piece.bytes, protection, MAP_SHARED | MAP_FIXED, piece.descriptor.get(),
             static_cast<off_t>(piece.offset)) == MAP_FAILED) {
    return Status::from_errno(errno, "mapping " + std::to_string(piece.bytes) + " bytes of shared memory");
  }
  ::madvise(address, piece.bytes, MADV_HUGEPAGE);
  return {};
}

}  // namespace gpufs
