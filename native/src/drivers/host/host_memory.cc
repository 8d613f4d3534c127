#include "drivers/host/host_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "base/log.h"
#include "base/math.h"

namespace gpufs {
namespace {

// A signal makes fallocate(2) of a memfd undo all its work. In steps, a signal costs one step only.
constexpr std::uint64_t kAllocateStep = std::uint64_t{256} << 20;

int retrying_fallocate(int fd, int mode, std::uint64_t offset, std::uint64_t bytes) {
  while (::fallocate(fd, mode, static_cast<off_t>(offset), static_cast<off_t>(bytes)) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

int free_file_memory(int fd, std::uint64_t offset, std::uint64_t bytes) {
  return retrying_fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes);
}

int protect(DeviceAddress address, std::uint64_t bytes, int protection) {
  return ::mprotect(reinterpret_cast<void*>(address), bytes, protection) == 0 ? 0 : errno;
}

}  // namespace

struct HostMemory::File {
  File(UniqueFd descriptor, std::shared_ptr<Ledger> charged_to)
      : fd(std::move(descriptor)), limit(std::move(charged_to)) {}
  ~File() { limit->give(charged.load(std::memory_order_relaxed)); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  UniqueFd fd;
  std::shared_ptr<Ledger> limit;
  std::atomic<std::uint64_t> charged{0};  // to the limit, until the last range is gone
};

// The whole range maps the memfd from the start, without any access; mprotect opens what is populated. So a stray
// access to a hole faults instead of allocating memory silently, and adjacent granules are one mapping to the kernel
// (vm.max_map_count).
class HostMemory::Range : public AddressRange {
 public:
  static Result<std::shared_ptr<Range>> map(std::shared_ptr<File> file, std::uint64_t bytes) {
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
        ::mmap(reinterpret_cast<void*>(base), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file->fd.get(), 0);
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

  Range(std::shared_ptr<File> file, DeviceAddress base, std::uint64_t bytes)
      : AddressRange(base, bytes), file_(std::move(file)) {}
  ~Range() override { ::munmap(reinterpret_cast<void*>(base()), bytes()); }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  const std::shared_ptr<File> file_;
};

Result<std::unique_ptr<DeviceMemory>> HostMemory::create(std::shared_ptr<Ledger> limit) {
  UniqueFd fd(::memfd_create("gpufs-buffer", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return Status::from_errno(errno, "creating a memfd");
  // Other programs get descriptors of it (export_memory()). They must not be able to open a read-only one for writing,
  // nor to make the memory smaller under this process, which would die of SIGBUS.
  if (::fchmod(fd.get(), S_IRUSR) != 0) return Status::from_errno(errno, "setting the mode of a memfd");
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL) != 0) {
    return Status::from_errno(errno, "sealing a memfd");
  }
  auto file = std::make_shared<File>(std::move(fd), std::move(limit));
  return std::unique_ptr<DeviceMemory>(new HostMemory(std::move(file)));
}

Result<std::shared_ptr<AddressRange>> HostMemory::reserve(std::uint64_t bytes, std::span<const MemorySpan> populated) {
  Result<std::shared_ptr<Range>> made = Range::map(file_, round_up(bytes, kHostGranule));
  if (!made.ok()) return made.status();
  const std::shared_ptr<Range> range = made.take();
  for (const MemorySpan& span : populated) {
    const int error = protect(range->base() + span.offset, span.bytes, PROT_READ | PROT_WRITE);
    if (error != 0) return Status::from_errno(error, "mapping a buffer's memory at its new addresses");
  }
  range_ = range;
  return std::shared_ptr<AddressRange>(range);
}

Status HostMemory::populate(std::span<const MemorySpan> spans) {
  for (std::size_t i = 0; i < spans.size(); ++i) {
    Status status = populate_one(spans[i]);
    if (status.ok()) continue;
    release(spans.first(i));
    return status;
  }
  return {};
}

Status HostMemory::populate_one(const MemorySpan& span) {
  const auto [offset, bytes] = span;
  if (!file_->limit->take(bytes)) {
    return Status(ENOSPC, "No space left on device for " + std::to_string(bytes) + " bytes more");
  }
  int error = 0;
  for (std::uint64_t done = 0; done < bytes && error == 0; done += kAllocateStep) {
    error = retrying_fallocate(file_->fd.get(), 0, offset + done, std::min(kAllocateStep, bytes - done));
  }
  if (error == 0) error = protect(range_->base() + offset, bytes, PROT_READ | PROT_WRITE);
  if (error != 0) {
    file_->limit->give(bytes);
    const int undone = free_file_memory(file_->fd.get(), offset, bytes);
    if (undone != 0) log_error("releasing memory after a failure: errno ", undone);
    // The machine has less than the limit promised, or a limit of the process (RLIMIT_FSIZE) is lower: to a file's
    // user both are a full device.
    if (error == ENOMEM || error == EFBIG) error = ENOSPC;
    return Status::from_errno(error, "taking " + std::to_string(bytes) + " bytes of memory");
  }
  file_->charged.fetch_add(bytes, std::memory_order_relaxed);
  // Touching all pages in one call costs less than page by page during the first copy. Only speed depends on it.
  ::madvise(reinterpret_cast<void*>(range_->base() + offset), bytes, MADV_POPULATE_WRITE);
  return {};
}

void HostMemory::release(std::span<const MemorySpan> spans) {
  for (const MemorySpan& span : spans) release_one(span);
}

void HostMemory::release_one(const MemorySpan& span) {
  const auto [offset, bytes] = span;
  const int error = free_file_memory(file_->fd.get(), offset, bytes);
  if (error != 0) {
    // The file keeps it until it is closed, and populating it again must find zeros.
    log_warning("releasing ", bytes, " bytes of memory: errno ", error);
    std::memset(reinterpret_cast<void*>(range_->base() + offset), 0, bytes);
  }
  // This may fail if the process has too many mappings. The memory is released all the same; only the guard against
  // stray accesses is missing.
  if (protect(range_->base() + offset, bytes, PROT_NONE) != 0) log_debug("a hole of a buffer stays accessible");
  file_->charged.fetch_sub(bytes, std::memory_order_relaxed);
  file_->limit->give(bytes);
}

Result<std::vector<ExportedMemory>> HostMemory::export_memory(std::uint64_t from, std::uint64_t end,
                                                              std::size_t capacity, bool writable) {
  std::vector<ExportedMemory> exported;
  end = round_up(end, kHostGranule);
  if (from >= end || capacity == 0) return exported;
  const std::string path = "/proc/self/fd/" + std::to_string(file_->fd.get());
  UniqueFd copy(writable ? ::fcntl(file_->fd.get(), F_DUPFD_CLOEXEC, 3) : ::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!copy.valid()) {
    return Status::from_errno(errno, writable ? "duplicating a buffer's memfd" : "opening a buffer's memfd: " + path);
  }
  exported.push_back(ExportedMemory{from, end - from, std::move(copy)});
  return exported;
}

}  // namespace gpufs
