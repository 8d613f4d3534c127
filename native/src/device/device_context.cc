#include "device/device_context.h"

#include <cerrno>
#include <utility>
#include <vector>

namespace gpufs {
namespace {

// What the pools keep for their next users.
constexpr std::size_t kIdleEvents = 4096;
constexpr std::size_t kIdleStreams = 64;

// Creates objects until so many exist.
template <typename T>
Status fill(DevicePool<T>& pool, std::size_t count) {
  std::vector<std::shared_ptr<T>> taken;
  while (pool.existing() < count) {
    Result<std::shared_ptr<T>> object = pool.acquire();
    if (!object.ok()) return object.status();
    taken.push_back(object.take());
  }
  return {};
}

}  // namespace

DeviceContext::DeviceContext(std::shared_ptr<Driver> driver, Device& device, std::uint64_t copy_chunk_bytes)
    : driver_(std::move(driver)),
      device_(device),
      copy_chunk_bytes_(copy_chunk_bytes),
      events_(driver_, device_, &Device::create_event, kIdleEvents),
      streams_(driver_, device_, &Device::create_stream, kIdleStreams) {}

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

Status DeviceContext::prepare_to_stand() {
  if (!info().streams_share_queues) return {};
  // One each for the threads of the transfers, those included that stand in for threads which hang.
  constexpr std::size_t kStreams = 16;
  constexpr std::size_t kEvents = 64;
  Status status = device_.prepare_to_stand(kStreams);
  if (status.ok()) status = fill(streams_, kStreams);
  if (status.ok()) status = fill(events_, kEvents);
  return status;
}

void DeviceContext::streams_stand(int change) {
  if (!info().streams_share_queues) return;
  standing_.fetch_add(change);
  device_.streams_stand(change);
}

std::chrono::milliseconds DeviceContext::awaited() const {
  const DeviceWaits* const waits = device_.waits();
  return waits == nullptr ? std::chrono::milliseconds{} : waits->longest();
}

bool DeviceContext::stands_still() const {
  const DeviceWaits* const waits = device_.waits();
  return waits != nullptr && waits->longest() >= waits->patience();
}

std::string DeviceContext::standstill() const {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(awaited());
  return "gpu " + std::to_string(info().index) + " (" + info().name + ") has done nothing for " +
         std::to_string(seconds.count()) + " s of what was queued there";
}

bool DeviceContext::wait_while_it_moves(const std::function<bool(std::chrono::milliseconds)>& done) const {
  constexpr std::chrono::milliseconds kLook{20};
  const auto earliest = std::chrono::steady_clock::now() + kNotice;
  while (!done(kLook)) {
    if (std::chrono::steady_clock::now() >= earliest && stands_still()) return false;
  }
  return true;
}

void DeviceContext::set_counters(observe::DeviceCounters counters) { counters_ = std::move(counters); }

void DeviceContext::add_trimmable(const Buffer* key, std::weak_ptr<Buffer> buffer) {
  const std::lock_guard lock(trimmable_mutex_);
  trimmable_[key] = std::move(buffer);
}

void DeviceContext::remove_trimmable(const Buffer* key, bool released) {
  {
    const std::lock_guard lock(trimmable_mutex_);
    trimmable_.erase(key);
  }
  if (released) trim_count_.fetch_add(1, std::memory_order_release);
}

std::vector<std::weak_ptr<Buffer>> DeviceContext::trimmable() const {
  std::vector<std::weak_ptr<Buffer>> buffers;
  const std::lock_guard lock(trimmable_mutex_);
  buffers.reserve(trimmable_.size());
  for (const auto& [key, buffer] : trimmable_) buffers.push_back(buffer);
  return buffers;
}

void DeviceContext::set_host_locks(std::shared_ptr<HostLocks> locks) { host_locks_ = std::move(locks); }

void DeviceContext::set_slabs(std::shared_ptr<SlabPool> slabs) { slabs_ = std::move(slabs); }

}  // namespace gpufs
