#include "drivers/host/host_device.h"

#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

#include "base/math.h"
#include "drivers/host/host_stream.h"

namespace gpufs {
namespace {

constexpr int kMaximumDevices = 64;

}  // namespace

Status HostPins::pin(void* address, std::size_t bytes) {
  const auto start = reinterpret_cast<std::uintptr_t>(address);
  std::uintptr_t end = 0;
  if (address == nullptr || bytes == 0 || __builtin_add_overflow(start, bytes, &end)) {
    return Status(EINVAL, "pinning an empty range, or one that wraps around");
  }
  const std::lock_guard lock(mutex_);
  const auto next = ranges_.lower_bound(start);
  const bool overlaps_next = next != ranges_.end() && next->first < end;
  const bool overlaps_previous = next != ranges_.begin() && std::prev(next)->first + std::prev(next)->second > start;
  if (overlaps_next || overlaps_previous) return Status(EEXIST, "the range, or a part of it, is pinned already");
  ranges_.emplace(start, bytes);
  return {};
}

Status HostPins::unpin(void* address) {
  const std::lock_guard lock(mutex_);
  if (ranges_.erase(reinterpret_cast<std::uintptr_t>(address)) == 0)
    return Status(ENOENT, "no pinned range starts there");
  return {};
}

Result<PinnedHostRange> HostPins::around(const void* address) const {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  const std::lock_guard lock(mutex_);
  const auto next = ranges_.upper_bound(at);
  if (next != ranges_.begin() && std::prev(next)->first + std::prev(next)->second > at) {
    return PinnedHostRange{std::prev(next)->first, std::prev(next)->first + std::prev(next)->second};
  }
  return Status(ENOENT, "nothing is pinned there");
}

HostDevice::HostDevice(int index, std::uint64_t memory_bytes, std::shared_ptr<HostPins> pins, bool host_tier)
    : limit_(std::make_shared<Ledger>(memory_bytes)), pins_(std::move(pins)) {
  info_.index = index;
  info_.name = "host memory";
  info_.total_bytes = memory_bytes;
  info_.granule = kHostGranule;
  info_.cpu_addressable = true;
  info_.host_tier = host_tier;
}

Result<MemoryInfo> HostDevice::memory(Wait /*wait*/) {
  shared_files_->release_foreign();
  return MemoryInfo{limit_->limit(), limit_->available()};
}

Result<std::unique_ptr<DeviceMemory>> HostDevice::create_memory() {
  return HostMemory::create({limit_, shared_files_, keeper()});
}

Result<std::unique_ptr<DeviceMemory>> HostDevice::restore_memory(std::uint64_t number,
                                                                 std::span<const Extent> populated) {
  return HostMemory::restore({limit_, shared_files_, keeper()}, number, populated);
}

Result<std::unique_ptr<ForeignMapping>> HostDevice::map_foreign(const ForeignMemory& memory) {
  return map_shared_file(memory, limit_);
}

Result<std::unique_ptr<ImportedRange>> HostDevice::create_import(std::uint64_t capacity, ImportAccess access) {
  return import_host_memory(capacity, access);
}

Result<std::unique_ptr<Stream>> HostDevice::create_stream() { return HostStream::create(info_.index); }

Result<std::unique_ptr<Stream>> HostDevice::adopt_stream(NativeStream native, bool /*certain*/) {
  return HostStream::adopt(native, info_.index);
}

Result<std::unique_ptr<Event>> HostDevice::create_event() {
  return std::unique_ptr<Event>(std::make_unique<HostEvent>());
}

Status HostDevice::copy_in(DeviceAddress destination, const void* source, std::size_t bytes) {
  if (bytes != 0) copy_to_memory(reinterpret_cast<void*>(destination), source, bytes);
  return {};
}

Status HostDevice::copy_out(void* destination, DeviceAddress source, std::size_t bytes) {
  if (bytes != 0) std::memcpy(destination, reinterpret_cast<const void*>(source), bytes);
  return {};
}

Status HostDevice::copy_within(DeviceAddress destination, DeviceAddress source, std::size_t bytes) {
  if (bytes != 0) std::memmove(reinterpret_cast<void*>(destination), reinterpret_cast<const void*>(source), bytes);
  return {};
}

Status HostDevice::zero(DeviceAddress destination, std::size_t bytes) {
  if (bytes != 0) std::memset(reinterpret_cast<void*>(destination), 0, bytes);
  return {};
}

Status HostDevice::copy_to_peer(Device& peer, DeviceAddress destination, DeviceAddress source, std::size_t bytes) {
  // All devices share one memory. The check finds mistakes that would fail on a GPU.
  if (!peer.info().cpu_addressable) return Status(EOPNOTSUPP, "the peer's memory cannot be addressed from here");
  return copy_within(destination, source, bytes);
}

Result<std::unique_ptr<Driver>> open_host_driver(const DriverOptions& options) {
  if (!options.chosen.empty()) {
    return Status(EINVAL, "the host driver simulates devices: say how many, not which");
  }
  const int count = options.devices == 0 ? 1 : options.devices;
  if (count < 0 || count > kMaximumDevices) {
    return Status(EINVAL, "the host driver simulates 1 to " + std::to_string(kMaximumDevices) + " devices, not " +
                              std::to_string(count));
  }
  const std::uint64_t memory = round_down(options.memory_bytes, kHostGranule);
  if (memory == 0) {
    return Status(EINVAL, "the host driver needs a memory size of at least " + std::to_string(kHostGranule) +
                              " bytes a device, not " + std::to_string(options.memory_bytes));
  }
  const std::uint64_t host_tier = round_down(options.host_memory_bytes, kHostGranule);
  if (options.host_memory_bytes != 0 && host_tier == 0) {
    return Status(EINVAL, "host memory for parked files takes at least " + std::to_string(kHostGranule) +
                              " bytes, not " + std::to_string(options.host_memory_bytes));
  }
  const auto pins = std::make_shared<HostPins>();
  std::vector<std::shared_ptr<Device>> devices;
  devices.reserve(static_cast<std::size_t>(count) + 1);
  for (int index = 0; index < count; ++index) {
    devices.push_back(std::make_unique<HostDevice>(index, memory, pins));
    // Reports now, not at the first write, if memfds do not work here.
    Result<std::unique_ptr<DeviceMemory>> probe = devices.back()->create_memory();
    if (!probe.ok()) {
      return Status(ENODEV, "host is not available: " + probe.status().message(), probe.status().device_code());
    }
  }
  if (host_tier != 0) devices.push_back(std::make_shared<HostDevice>(count, host_tier, pins, /*host_tier=*/true));
  return std::make_unique<Driver>("host", std::move(devices));
}

Result<std::shared_ptr<Device>> open_host_device(const std::string& /*pci_address*/) {
  return std::shared_ptr<Device>(std::make_shared<HostDevice>(0, 0, std::make_shared<HostPins>()));
}

}  // namespace gpufs
