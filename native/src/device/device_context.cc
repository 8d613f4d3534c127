#include "device/device_context.h"

#include <cerrno>
#include <utility>
#include <vector>

namespace gpufs {
namespace {

// How long those who need memory wait until it is given back by others who hold it ahead of use.
constexpr std::chrono::milliseconds kReclaimPatience{1000};

// What the pools keep for their next users.
constexpr std::size_t kIdleEvents = 4096;
constexpr std::size_t kIdleStreams = 64;

}  // namespace

DeviceContext::DeviceContext(std::shared_ptr<Driver> driver, Device& device, std::uint64_t copy_chunk_bytes)
    : driver_(std::move(driver)),
      device_(device),
      copy_chunk_bytes_(copy_chunk_bytes),
      events_(driver_, device_, &Device::create_event, kIdleEvents),
      streams_(driver_, device_, &Device::create_stream, kIdleStreams),
      pinned_(device_) {}

Result<std::shared_ptr<DeviceContext>> DeviceContext::create(std::shared_ptr<Driver> driver, std::size_t index,
                                                             std::uint64_t copy_chunk_bytes) {
  if (index >= driver->devices().size()) return Status(EINVAL, "no such device");
  Device& device = *driver->devices()[index];
  Result<std::shared_ptr<observe::Region>> region = observe::Region::create(1, "");
  if (!region.ok()) return region.status();
  std::shared_ptr<DeviceContext> context(new DeviceContext(std::move(driver), device, copy_chunk_bytes));
  context->counters_ = observe::DeviceCounters(region.take(), 0);
  return context;
}

// Slabs release memory through this context.
DeviceContext::~DeviceContext() { slabs_.reset(); }

void DeviceContext::set_counters(observe::DeviceCounters counters) { counters_ = std::move(counters); }

void DeviceContext::hold_ahead(std::weak_ptr<AheadHolder> holder, const AheadHolder* key) {
  const std::lock_guard lock(ahead_mutex_);
  ahead_holders_[key] = std::move(holder);
}

void DeviceContext::drop_ahead(const AheadHolder* key) {
  const std::lock_guard lock(ahead_mutex_);
  ahead_holders_.erase(key);
  ahead_returns_.fetch_add(1, std::memory_order_release);
}

bool DeviceContext::reclaim_ahead(std::uint64_t noted) {
  std::map<const AheadHolder*, std::weak_ptr<AheadHolder>> holders;
  {
    const std::lock_guard lock(ahead_mutex_);
    holders = ahead_holders_;
  }
  // For all of them together.
  const auto deadline = std::chrono::steady_clock::now() + kReclaimPatience;
  bool ending = false;  // some holder, which takes along what it has
  for (const auto& [key, weak] : holders) {
    if (const std::shared_ptr<AheadHolder> holder = weak.lock()) {
      holder->give_back_ahead(deadline);
    } else {
      ending = true;
    }
  }
  return ending || ahead_returns() != noted;
}

void DeviceContext::set_host_locks(std::shared_ptr<HostLocks> locks) { host_locks_ = std::move(locks); }

void DeviceContext::set_slabs(std::shared_ptr<SlabPool> slabs) { slabs_ = std::move(slabs); }

}  // namespace gpufs
