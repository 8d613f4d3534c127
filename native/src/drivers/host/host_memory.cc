#include "drivers/host/host_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "base/log.h"
#include "base/math.h"

namespace gpufs {

// The whole range maps the memfd from the start, holes too. So a range is one mapping to the kernel, which allows few
// of them (vm.max_map_count), however many holes a file has.
class HostMemory::Range : public AddressRange {
 public:
  static Result<std::shared_ptr<Range>> map(std::shared_ptr<HostFile> file, std::uint64_t bytes) {
    // One granule more, for alignment: huge pages need it, and code that also runs on a GPU may rely on it.
    const std::uint64_t mapped_bytes = bytes + kHostGranule;
    void* const wide = ::mmap(nullptr, mapped_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (wide == MAP_FAILED) {
      return Status::from_errno(ENOMEM, "reserving " + std::to_string(bytes) + " bytes of addresses");
    }
    const auto start = reinterpret_cast<DeviceAddress>(wide);
    const DeviceAddress base = round_up(start, kHostGranule);
    const DeviceAddress end = base + bytes;
    if (base > start) ::munmap(wide, base - start);
    if (start + mapped_bytes > end) ::munmap(reinterpret_cast<void*>(end), start + mapped_bytes - end);
    void* const address =
        ::mmap(reinterpret_cast<void*>(base), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file->fd(), 0);
    if (address == MAP_FAILED) {
      const int error = errno;
      ::munmap(reinterpret_cast<void*>(base), bytes);
      return Status::from_errno(error, "mapping " + std::to_string(bytes) + " bytes of a memfd");
    }
    // A forked child must not keep a buffer's memory. Huge pages are used if the kernel's settings allow them.
    ::madvise(address, bytes, MADV_DONTFORK);
    ::madvise(address, bytes, MADV_DONTDUMP);  // core files must not contain users' data
    ::madvise(address, bytes, MADV_HUGEPAGE);
    return std::make_shared<Range>(std::move(file), base, bytes);
  }

  Range(std::shared_ptr<HostFile> file, DeviceAddress base, std::uint64_t bytes)
      : AddressRange(base, bytes), file_(std::move(file)) {}
  ~Range() override { ::munmap(reinterpret_cast<void*>(base()), bytes()); }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  const std::shared_ptr<HostFile> file_;
};

Result<std::unique_ptr<DeviceMemory>> HostMemory::create(std::shared_ptr<Ledger> limit,
                                                         std::shared_ptr<SharedHostFiles> shared,
                                                         std::shared_ptr<MemoryKeeper> keeper) {
  Result<std::shared_ptr<HostFile>> file = HostFile::create(std::move(limit), std::move(shared), std::move(keeper));
  if (!file.ok()) return file.status();
  return std::unique_ptr<DeviceMemory>(new HostMemory(file.take()));
}

Result<std::unique_ptr<DeviceMemory>> HostMemory::restore(std::shared_ptr<Ledger> limit,
                                                          std::shared_ptr<SharedHostFiles> shared,
                                                          std::shared_ptr<MemoryKeeper> keeper, std::uint64_t number,
                                                          std::span<const Extent> populated) {
  Result<std::shared_ptr<HostFile>> file =
      HostFile::restore(std::move(limit), std::move(shared), std::move(keeper), number, populated);
  if (!file.ok()) return file.status();
  return std::unique_ptr<DeviceMemory>(new HostMemory(file.take()));
}

Result<std::shared_ptr<AddressRange>> HostMemory::reserve(std::uint64_t bytes, std::span<const Extent> /*populated*/) {
  Result<std::shared_ptr<Range>> made = Range::map(file_, round_up(bytes, kHostGranule));
  if (!made.ok()) return made.status();
  range_ = made.take();
  return std::shared_ptr<AddressRange>(range_);
}

Status HostMemory::populate(std::span<const Extent> spans, Wait /*wait*/) {
  for (std::size_t i = 0; i < spans.size(); ++i) {
    Status status = populate_one(spans[i]);
    if (status.ok()) continue;
    release(spans.first(i));
    return status;
  }
  return {};
}

Status HostMemory::populate_one(const Extent& span) {
  const auto [offset, bytes] = span;
  Status status = file_->allocate(offset, bytes);
  if (!status.ok()) return status;
  // Touching all pages in one call costs less than page by page during the first copy. Only speed depends on it.
  ::madvise(reinterpret_cast<void*>(range_->base() + offset), bytes, MADV_POPULATE_WRITE);
  return {};
}

void HostMemory::release(std::span<const Extent> spans) {
  for (const Extent& span : spans) release_one(span);
}

void HostMemory::release_one(const Extent& span) {
  const auto [offset, bytes] = span;
  const int error = file_->release(offset, bytes);
  if (error != 0) {
    // The file keeps it until it is closed, and populating it again must find zeros.
    log_warning("releasing ", bytes, " bytes of memory: errno ", error);
    std::memset(reinterpret_cast<void*>(range_->base() + offset), 0, bytes);
  }
}

Result<std::vector<ExportedMemory>> HostMemory::export_memory(std::uint64_t from, std::uint64_t end,
                                                              std::size_t capacity, bool writable) {
  std::vector<ExportedMemory> exported;
  end = round_up(end, kHostGranule);
  if (from >= end || capacity == 0) return exported;
  if (writable) file_->share();
  const std::string path = "/proc/self/fd/" + std::to_string(file_->fd());
  UniqueFd copy(writable ? ::fcntl(file_->fd(), F_DUPFD_CLOEXEC, 3) : ::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!copy.valid()) {
    return Status::from_errno(errno, writable ? "duplicating a buffer's memfd" : "opening a buffer's memfd: " + path);
  }
  exported.push_back(ExportedMemory{{from, end - from}, std::move(copy)});
  return exported;
}

}  // namespace gpufs
