#include "observe/counters.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <thread>
#include <utility>

#include "base/math.h"
#include "base/pages.h"

namespace gpufs::observe {
namespace {

constexpr std::size_t kMostStripes = 16;
constexpr std::array<char, 8> kMagic = {'G', 'P', 'U', 'F', 'S', 'T', 'A', 'T'};

std::uint64_t wall_clock_ns() {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
          .count());
}

// There are as many as threads can run at the same time, so that they rarely share one.
std::size_t choose_stripes() {
  const std::size_t cpus = std::max(1U, std::thread::hardware_concurrency());
  return std::min(std::bit_ceil(cpus), kMostStripes);
}

}  // namespace

std::uint32_t Region::thread_number() {
  static std::atomic<std::uint32_t> next{0};
  thread_local const std::uint32_t mine = next.fetch_add(1, std::memory_order_relaxed);
  return mine;
}

Result<std::shared_ptr<Region>> Region::create(std::size_t devices, const std::string& path) {
  UniqueFd file;
  if (!path.empty()) {
    // A file of this name is left over; a process that has it mapped keeps its pages.
    if (::unlink(path.c_str()) != 0 && errno != ENOENT) return Status::from_errno(errno, path);
    file = UniqueFd(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (!file.valid()) return Status::from_errno(errno, path);
  }
  std::shared_ptr<Region> region(new Region(devices, choose_stripes()));
  Status mapped = region->map(std::move(file));
  if (mapped.ok()) return region;
  if (!path.empty()) ::unlink(path.c_str());
  return path.empty() ? mapped : mapped.with_context(path);
}

Status Region::map(UniqueFd file) {
  std::size_t end = kHeaderBytes;
  const auto place = [&end](std::size_t bytes, std::size_t alignment = 1) {
    const std::size_t offset = round_up(end, alignment);
    end = offset + bytes;
    return offset;
  };
  const std::size_t gauges = place(sizeof(EngineGauges));
  const std::size_t counters = place(sizeof(EngineCounters));
  const std::size_t device_gauges = place(devices_ * sizeof(DeviceGauges));
  const std::size_t details = place(devices_ * kFlowCount * sizeof(TransferDetails));
  const std::size_t blocks = place(stripes_ * devices_ * kBackendCount * kFlowCount * sizeof(Block), alignof(Block));
  bytes_ = round_up(end, kPageBytes);

  int flags = MAP_PRIVATE | MAP_ANONYMOUS;
  if (file.valid()) {
    // Allocated now: a full file system must not end the process when it counts.
    const int outcome = ::posix_fallocate(file.get(), 0, static_cast<off_t>(bytes_));
    if (outcome != 0) return Status::from_errno(outcome, "space for the statistics");
    struct flock lock {};
    lock.l_type = F_WRLCK;
    if (::fcntl(file.get(), F_OFD_SETLK, &lock) != 0) return Status::from_errno(errno, "locking the statistics");
    flags = MAP_SHARED;
  }
  void* const base = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, flags, file.valid() ? file.get() : -1, 0);
  if (base == MAP_FAILED) return Status::from_errno(errno, "mapping the statistics");
  base_ = base;
  file_ = std::move(file);

  // The memory is zeroed, which is the initial state of every counter.
  auto* const start = static_cast<std::byte*>(base);
  header_ = std::launder(reinterpret_cast<Header*>(start));
  gauges_ = std::launder(reinterpret_cast<EngineGauges*>(start + gauges));
  counters_ = std::launder(reinterpret_cast<EngineCounters*>(start + counters));
  device_gauges_ = std::launder(reinterpret_cast<DeviceGauges*>(start + device_gauges));
  details_ = std::launder(reinterpret_cast<TransferDetails*>(start + details));
  blocks_ = std::launder(reinterpret_cast<Block*>(start + blocks));

  header_->version = kFormatVersion;
  header_->header_bytes = kHeaderBytes;
  header_->file_bytes = bytes_;
  header_->devices = static_cast<std::uint32_t>(devices_);
  header_->stripes = static_cast<std::uint32_t>(stripes_);
  header_->backends = kBackendCount;
  header_->flows = kFlowCount;
  header_->buckets = kBuckets;
  header_->reasons = kReasons;
  header_->process = static_cast<std::uint32_t>(::getpid());
  header_->gauges_offset = gauges;
  header_->counters_offset = counters;
  header_->device_gauges_offset = device_gauges;
  header_->details_offset = details;
  header_->blocks_offset = blocks;
  header_->device_gauges_bytes = sizeof(DeviceGauges);
  header_->details_bytes = sizeof(TransferDetails);
  header_->created = wall_clock_ns();
  touch();
  header_->magic = kMagic;  // last: a file without it is still being created
  return {};
}

Region::~Region() {
  if (base_ != nullptr) ::munmap(base_, bytes_);
}

Status Region::describe(std::string_view json) {
  if (json.size() > kTextBytes) return Status(EFBIG, "the description of the statistics is too long");
  const std::lock_guard lock(text_mutex_);
  header_->text_bytes.store(0, std::memory_order_release);
  std::memcpy(header_->text.data(), json.data(), json.size());
  header_->text_bytes.store(static_cast<std::uint32_t>(json.size()), std::memory_order_release);
  return {};
}

void Region::touch() { header_->updated.store(wall_clock_ns(), std::memory_order_relaxed); }

void DeviceCounters::refuse(Backend backend, Flow flow, std::uint32_t reasons) const {
  if (reasons == 0) return;
  Block& block = region_->block(device_, backend, flow);
  for (std::size_t bit = 0; bit < kReasons; ++bit) {
    if ((reasons >> bit & 1U) != 0) count(block.refusals[bit]);
  }
}

}  // namespace gpufs::observe
