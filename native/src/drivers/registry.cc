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
};

constexpr std::array<DriverEntry, 3> kDrivers{{
    {"host", open_host_driver},
    {"cuda", open_cuda_driver},
    {"hip", open_hip_driver},
}};

}  // namespace

Result<std::unique_ptr<Driver>> open_driver(const std::string& name, const DriverOptions& options) {
  for (const DriverEntry& entry : kDrivers) {
    if (entry.name != name) continue;
    if (options.devices < 0) return Status(EINVAL, "the number of devices is negative");
    return entry.open(options);
  }
  return Status(EINVAL, "unknown driver \"" + name + "\": there are host, cuda and hip");
}

}  // namespace gpufs
