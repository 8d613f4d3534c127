#include "device/device_context.h"

#include <algorithm>
#include <cerrno>

namespace gpufs {
namespace {

// The most objects that the pools keep for their next users.
constexpr std::size_t kIdleEvents = 4096;
constexpr std::size_t kIdleStreams = 64;

}  // namespace

DeviceContext::DeviceContext(std::shared_ptr<Driver> driver, Device& device, std::uint64_t copy_chunk_bytes,
                             observe::DeviceCounters counters)
    : driver_(std::move(driver)),
      device_(device),
      copy_chunk_bytes_(copy_chunk_bytes),
      events_(driver_, device_, &Device::create_event, kIdleEvents),
      streams_(driver_, device_, &Device::create_stream, kIdleStreams),
      pinned_(device_),
      counters_(std::move(counters)),
      releases_(device_.info().total_bytes) {}

Result<std::shared_ptr<DeviceContext>> DeviceContext::create(std::shared_ptr<Driver> driver, std::size_t index,
                                                             std::uint64_t copy_chunk_bytes) {
  if (index >= driver->devices().size()) return Status(EINVAL, "no such device");
  Device& device = *driver->devices()[index];
  std::shared_ptr<observe::Region> region = TRY(observe::Region::create(1, ""));
  std::shared_ptr<DeviceContext> context(
      new DeviceContext(std::move(driver), device, copy_chunk_bytes, {std::move(region), 0}));
  return context;
}

// Slabs release memory through this context.
DeviceContext::~DeviceContext() { slabs_.reset(); }

Result<MemoryInfo> DeviceContext::memory() const {
  Result<MemoryInfo> found = device_.memory();
  if (!found.ok()) return found;
  MemoryInfo info = found.value();
  info.free_bytes = std::min(info.free_bytes + reclaimable_.load(std::memory_order_relaxed), info.total_bytes);
  return info;
}

}  // namespace gpufs
