#include "observe/counters.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <thread>
#include <utility>

namespace gpufs::observe {
namespace {

constexpr std::size_t kMostStripes = 16;
constexpr std::array<char, 8> kMagic = {'G', 'P', 'U', 'F', 'S', 'T', 'A', 'T'};
constexpr std::size_t kPage = 4096;

std::uint64_t wall_clock_ns() {
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
          .count());
}

// As many as threads can really run at once, so that most never share one.
std::size_t choose_stripes() {
  const std::size_t cpus = std::max(1U, std::thread::hardware_concurrency());
  return std::min(std::bit_ceil(cpus), kMostStripes);
}

}  // namespace

std::uint32_t thread_number() {
  static std::atomic<std::uint32_t> next{0};
  thread_local const std::uint32_t mine = next.fetch_add(1, std::memory_order_relaxed);
  return mine;
}

Result<std::shared_ptr<Region>> Region::create(std::size_t devices, const std::string& path) {
  if (path.empty()) return map(devices, UniqueFd());
  // One of that name can only be left over; whoever has it mapped keeps it.
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) return Status::from_errno(errno, path);
  UniqueFd file(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!file.valid()) return Status::from_errno(errno, path);
  Result<std::shared_ptr<Region>> made = map(devices, std::move(file));
  if (!made.ok()) {
    ::unlink(path.c_str());
    return made.status().with_context(path);
  }
  return made;
}

Result<std::shared_ptr<Region>> Region::map(std::size_t devices, UniqueFd file) {
  std::shared_ptr<Region> region(new Region(devices, choose_stripes()));
  const std::size_t used = kHeaderBytes + sizeof(EngineGauges) + devices * sizeof(DeviceGauges) +
                           devices * kFlowCount * sizeof(TransferDetails) + alignof(Block) +
                           region->stripes_ * devices * kBackendCount * kFlowCount * sizeof(Block);
  const std::size_t bytes = (used + kPage - 1) / kPage * kPage;
  int flags = MAP_PRIVATE | MAP_ANONYMOUS;
  if (file.valid()) {
    // Taken now: a full file system must not end the process at its first count.
    const int outcome = ::posix_fallocate(file.get(), 0, static_cast<off_t>(bytes));
    if (outcome != 0) return Status::from_errno(outcome, "room for the statistics");
    struct flock lock {};
    lock.l_type = F_WRLCK;
    if (::fcntl(file.get(), F_OFD_SETLK, &lock) != 0) return Status::from_errno(errno, "locking the statistics");
    flags = MAP_SHARED;
  }
  void* const base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, file.valid() ? file.get() : -1, 0);
  if (base == MAP_FAILED) return Status::from_errno(errno, "mapping the statistics");
  region->base_ = base;
  region->bytes_ = bytes;
  region->file_ = std::move(file);
  region->lay_out();
  return region;
}

// The memory is zeroed; constructing counters there writes nothing but zeros.
void Region::lay_out() {
  auto* const start = static_cast<std::byte*>(base_);
  std::size_t offset = kHeaderBytes;
  const auto place = [&](std::size_t bytes) { return std::exchange(offset, offset + bytes); };
  const std::size_t gauges = place(sizeof(EngineGauges));
  const std::size_t device_gauges = place(devices_ * sizeof(DeviceGauges));
  const std::size_t details = place(devices_ * kFlowCount * sizeof(TransferDetails));
  const std::size_t blocks = (offset + alignof(Block) - 1) / alignof(Block) * alignof(Block);
  header_ = std::launder(reinterpret_cast<Header*>(start));
  gauges_ = std::launder(reinterpret_cast<EngineGauges*>(start + gauges));
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
  header_->block_bytes = sizeof(Block);
  header_->buckets = kBuckets;
  header_->reasons = kReasons;
  header_->process = static_cast<std::uint32_t>(::getpid());
  header_->engine_gauges_offset = gauges;
  header_->device_gauges_offset = device_gauges;
  header_->details_offset = details;
  header_->blocks_offset = blocks;
  header_->engine_gauges_bytes = sizeof(EngineGauges);
  header_->device_gauges_bytes = sizeof(DeviceGauges);
  header_->details_bytes = sizeof(TransferDetails);
  header_->created = wall_clock_ns();
  touch();
  header_->magic = kMagic;  // last: without it the file is none of ours
}

Region::~Region() {
  if (base_ != nullptr) ::munmap(base_, bytes_);
}

const Block& Region::stripe_block(std::size_t stripe, std::size_t device, Backend backend, Flow flow) const {
  return blocks_[((stripe * devices_ + device) * kBackendCount + static_cast<std::size_t>(backend)) * kFlowCount +
                 static_cast<std::size_t>(flow)];
}

std::uint64_t Region::sum(std::size_t device, Backend backend, Flow flow, Counter Block::*member) const {
  std::uint64_t total = 0;
  for (std::size_t stripe = 0; stripe < stripes_; ++stripe) {
    total += (stripe_block(stripe, device, backend, flow).*member).load(std::memory_order_relaxed);
  }
  return total;
}

std::uint64_t Region::refusals(std::size_t device, Backend backend, Flow flow, std::size_t bit) const {
  std::uint64_t total = 0;
  for (std::size_t stripe = 0; stripe < stripes_; ++stripe) {
    total += stripe_block(stripe, device, backend, flow).refusals[bit].load(std::memory_order_relaxed);
  }
  return total;
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
  if (!region_ || reasons == 0) return;
  Block& block = region_->block(device_, backend, flow);
  for (std::size_t bit = 0; bit < kReasons; ++bit) {
    if ((reasons >> bit & 1U) != 0) count(block.refusals[bit]);
  }
}

}  // namespace gpufs::observe
