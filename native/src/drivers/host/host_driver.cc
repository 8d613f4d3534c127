#include "drivers/host/host_driver.h"

#include <cerrno>
#include <string>
#include <utility>

#include "base/math.h"
#include "drivers/host/host_device.h"

namespace gpufs {
namespace {

constexpr int kMaximumDevices = 64;

}  // namespace

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
  const auto pins = std::make_shared<HostPins>();
  std::vector<std::shared_ptr<Device>> devices;
  devices.reserve(static_cast<std::size_t>(count));
  for (int index = 0; index < count; ++index) {
    devices.push_back(std::make_unique<HostDevice>(index, memory, pins));
    // Reports now, not at the first write, if memfds do not work here.
    Result<std::unique_ptr<DeviceMemory>> probe = devices.back()->create_memory();
    if (!probe.ok()) {
      return Status(ENODEV, "host is not available: " + probe.status().message(), probe.status().device_code());
    }
  }
  return std::make_unique<Driver>("host", std::move(devices));
}

Result<std::shared_ptr<Device>> open_host_device(const std::string& /*pci_address*/) {
  return std::shared_ptr<Device>(std::make_shared<HostDevice>(0, 0, std::make_shared<HostPins>()));
}

}  // namespace gpufs
