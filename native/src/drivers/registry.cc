#include <array>
#include <cerrno>
#include <string_view>

#include "drivers/cuda/cuda_driver.h"
#include "drivers/driver.h"
#include "drivers/hip/hip_driver.h"
#include "drivers/host/host_driver.h"

namespace gpufs {
namespace {

struct DriverEntry {
  std::string_view name;
  Result<std::unique_ptr<Driver>> (*open)(const DriverOptions& options);
  Result<std::shared_ptr<Device>> (*open_device)(const std::string& pci_address);
};

constexpr std::array<DriverEntry, 3> kDrivers{{
    {"host", open_host_driver, open_host_device},
    {"cuda", open_cuda_driver, open_cuda_device},
    {"hip", open_hip_driver, open_hip_device},
}};

Status unknown_driver(const std::string& name) {
  return {EINVAL, "unknown driver \"" + name + "\": there are host, cuda and hip"};
}

}  // namespace

Result<std::unique_ptr<Driver>> open_driver(const std::string& name, const DriverOptions& options) {
  for (const DriverEntry& entry : kDrivers) {
    if (entry.name != name) continue;
    if (options.devices < 0) return Status(EINVAL, "the number of devices is negative");
    return entry.open(options);
  }
  return unknown_driver(name);
}

Result<std::shared_ptr<Device>> open_device(const std::string& driver, const std::string& pci_address) {
  for (const DriverEntry& entry : kDrivers) {
    if (entry.name == driver) return entry.open_device(pci_address);
  }
  return unknown_driver(driver);
}

}  // namespace gpufs
