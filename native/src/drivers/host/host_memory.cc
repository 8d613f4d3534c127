#include "drivers/host/host_memory.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <string>

#include "base/log.h"
#include "base/math.h"

namespace gpufs {
namespace {

// A signal makes fallocate(2) of a memfd undo all its work. In steps, a signal costs one step only.
constexpr std::uint64_t kAllocateStep = std::uint64_t{256} << 20;

// In place of the bytes that the keeper's descriptor is of, which is of all: other programs may write to the memory.
constexpr std::uint64_t kShared = 1;

int retrying_fallocate(int fd, int mode, std::uint64_t offset, std::uint64_t bytes) {
  const auto call = [&] { return ::fallocate(fd, mode, static_cast<off_t>(offset), static_cast<off_t>(bytes)); };
  return TEMP_FAILURE_RETRY(call()) == 0 ? 0 : errno;
}

int punch(int fd, std::uint64_t offset, std::uint64_t bytes) {
  return retrying_fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes);
}

}  // namespace

HostFile::~HostFile() {
  if (number_ != 0) owners_.keeper->drop(key_);
  owners_.limit->release(own_.size() * kHostGranule);
}

Result<std::shared_ptr<HostFile>> HostFile::create(HostOwners owners) {
  UniqueFd fd(::memfd_create("gpufs-buffer", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return Status::from_errno(errno, "creating a memfd");
  // Other programs get descriptors of it (export_memory()). They must not be able to open a read-only one for writing,
  // nor to make the memory smaller under this process, which would die of SIGBUS.
  if (::fchmod(fd.get(), S_IRUSR) != 0) return Status::from_errno(errno, "setting the mode of a memfd");
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL) != 0) {
    return Status::from_errno(errno, "sealing a memfd");
  }
  std::uint64_t number = 0;
  std::uint64_t key = 0;
  // Also on a reader of requests, which then waits for a keeper that reads slowly, five seconds at most: a reply must
  // not promise memory that the next daemon would lack.
  if (owners.keeper != nullptr) {
    number = owners.keeper->new_memory();
    key = owners.keeper->hold(number, 0, 0, fd.get());
  }
  return std::shared_ptr<HostFile>(new HostFile(std::move(fd), std::move(owners), number, key));
}

Result<std::shared_ptr<HostFile>> HostFile::restore(HostOwners owners, std::uint64_t number,
                                                    std::span<const Extent> populated) {
  std::vector<MemoryKeeper::KeptPiece> kept = owners.keeper->take(number);
  if (kept.empty()) return Status(ENOENT, "memory " + std::to_string(number) + " was not kept");
  std::ranges::sort(kept, std::ranges::greater(),
                    &MemoryKeeper::KeptPiece::bytes);  // share() may have been interrupted
  for (std::size_t i = 1; i < kept.size(); ++i) owners.keeper->drop(kept[i].key);
  const std::shared_ptr<HostFile> file(
      new HostFile(std::move(kept.front().descriptor), std::move(owners), number, kept.front().key));
  struct stat found = {};
  if (::fstat(file->fd(), &found) != 0) return Status::from_errno(errno, "looking at a memfd");
  if (!populated.empty() && populated.back().end() > static_cast<std::uint64_t>(found.st_size)) {
    return Status(EPROTO, "memory " + std::to_string(number) + " is smaller than the file in it");
  }
  for (const auto& [offset, bytes] : populated) {
    file->owners_.limit->add(bytes);  // the memory is there already
    for (std::uint64_t granule = offset; granule < offset + bytes; granule += kHostGranule) file->own_.insert(granule);
  }
  if (kept.front().bytes == kShared) {  // other programs may have it still
    file->shared_ = true;
    file->owners_.shared->add(file);
  }
  file->release_foreign();  // and what the last process had allocated, or was releasing
  return file;
}

Status HostFile::allocate(std::uint64_t offset, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (!owners_.limit->take(bytes)) {
    return Status(ENOSPC, "No space left on device for " + std::to_string(bytes) + " bytes more");
  }
  int error = shared_ ? punch(fd(), offset, bytes) : 0;
  for (std::uint64_t done = 0; done < bytes && error == 0; done += kAllocateStep) {
    error = retrying_fallocate(fd(), 0, offset + done, std::min(kAllocateStep, bytes - done));
  }
  if (error != 0) {
    owners_.limit->release(bytes);
    const int undone = punch(fd(), offset, bytes);
    if (undone != 0) log_error("releasing memory after a failure: errno ", undone);
    // The machine has less than the limit promised, or a limit of the process (RLIMIT_FSIZE) is lower: to a file's
    // user both are a full device.
    if (error == ENOMEM || error == EFBIG) error = ENOSPC;
    return Status::from_errno(error, "taking " + std::to_string(bytes) + " bytes of memory");
  }
  for (std::uint64_t granule = offset; granule < offset + bytes; granule += kHostGranule) own_.insert(granule);
  if (shared_) release_foreign_locked();
  return {};
}

int HostFile::release(std::uint64_t offset, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const int error = punch(fd(), offset, bytes);
  own_.erase(own_.lower_bound(offset), own_.lower_bound(offset + bytes));
  owners_.limit->release(bytes);
  return error;
}

void HostFile::share() {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(shared_, true)) return;
    if (number_ != 0) {  // the next process must know
      const std::uint64_t fresh = owners_.keeper->hold(number_, 0, kShared, fd());
      owners_.keeper->drop(std::exchange(key_, fresh));
    }
  }
  owners_.shared->add(weak_from_this());
}

void HostFile::release_foreign() {
  // Callers do not wait while the file is being allocated, which takes seconds: allocate() releases it then.
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (lock) release_foreign_locked();
}

void HostFile::release_foreign_locked() {
  struct stat found = {};
  if (::fstat(fd(), &found) != 0) return;
  if (static_cast<std::uint64_t>(found.st_blocks) * 512 <= own_.size() * kHostGranule) return;
  std::uint64_t at = 0;
  for (const std::uint64_t granule : own_) {
    if (granule > at) static_cast<void>(punch(fd(), at, granule - at));
    at = granule + kHostGranule;
  }
  const auto end = static_cast<std::uint64_t>(found.st_size);
  if (end > at) static_cast<void>(punch(fd(), at, end - at));
}

void SharedHostFiles::add(std::weak_ptr<HostFile> file) {
  const std::lock_guard lock(mutex_);
  files_.push_back(std::move(file));
}

void SharedHostFiles::release_foreign() {
  std::vector<std::shared_ptr<HostFile>> alive;  // the last reference may go here: after the lock
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(files_, [&alive](const std::weak_ptr<HostFile>& file) {
      alive.push_back(file.lock());
      return alive.back() == nullptr;
    });
  }
  for (const std::shared_ptr<HostFile>& file : alive) {
    if (file != nullptr) file->release_foreign();
  }
}

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

 private:
  const std::shared_ptr<HostFile> file_;
};

Result<std::unique_ptr<DeviceMemory>> HostMemory::show(Result<std::shared_ptr<HostFile>> file) {
  if (!file.ok()) return file.status();
  return std::unique_ptr<DeviceMemory>(new HostMemory(file.take()));
}

Result<std::shared_ptr<AddressRange>> HostMemory::reserve(std::uint64_t bytes, std::span<const Extent> /*populated*/) {
  range_ = TRY(Range::map(file_, round_up(bytes, kHostGranule)));
  return std::shared_ptr<AddressRange>(range_);
}

Status HostMemory::populate_all(std::span<const Extent> spans, Wait /*wait*/) {
  for (std::size_t i = 0; i < spans.size(); ++i) {
    const auto [offset, bytes] = spans[i];
    if (Status status = file_->allocate(offset, bytes); !status.ok()) {
      release_all(spans.first(i));
      return status;
    }
    // Touching all pages in one call costs less than page by page during the first copy. Only speed depends on it.
    ::madvise(reinterpret_cast<void*>(range_->base() + offset), bytes, MADV_POPULATE_WRITE);
  }
  return {};
}

void HostMemory::release_all(std::span<const Extent> spans) {
  for (const auto& [offset, bytes] : spans) {
    const int error = file_->release(offset, bytes);
    if (error == 0) continue;
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

// ---- copies into it ----

#ifdef __SSE2__

namespace {

constexpr std::size_t kLeast = std::size_t{256} << 10;  // smaller blocks may stay in a core's own cache
constexpr std::size_t kLine = 64;

}  // namespace

void copy_to_memory(void* destination, const void* source, std::size_t bytes) {
  if (bytes < kLeast) {
    std::memcpy(destination, source, bytes);
    return;
  }
  auto* to = static_cast<std::byte*>(destination);
  const auto* from = static_cast<const std::byte*>(source);
  // Whole lines only: the CPU would read a line that is written in part.
  const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine;
  std::memcpy(to, from, head);
  to += head;
  from += head;
  bytes -= head;
  for (; bytes >= kLine; to += kLine, from += kLine, bytes -= kLine) {
    const auto* lanes = reinterpret_cast<const __m128i*>(from);
    auto* line = reinterpret_cast<__m128i*>(to);
    const __m128i first = _mm_loadu_si128(lanes);
    const __m128i second = _mm_loadu_si128(lanes + 1);
    const __m128i third = _mm_loadu_si128(lanes + 2);
    const __m128i fourth = _mm_loadu_si128(lanes + 3);
    _mm_stream_si128(line, first);
    _mm_stream_si128(line + 1, second);
    _mm_stream_si128(line + 2, third);
    _mm_stream_si128(line + 3, fourth);
  }
  _mm_sfence();  // nothing else orders such stores
  std::memcpy(to, from, bytes);
}

#else

void copy_to_memory(void* destination, const void* source, std::size_t bytes) {
  std::memcpy(destination, source, bytes);
}

#endif

}  // namespace gpufs
