#include <array>
#include <cerrno>
#include <string_view>

#include "drivers/driver.h"
#include "drivers/host/host_driver.h"
#if __has_include("drivers/cuda/cuda_driver.h")
#include "drivers/cuda/cuda_driver.h"
#define GPUFS_OPEN_CUDA open_cuda_driver
#else
#define GPUFS_OPEN_CUDA nullptr
#endif
#if __has_include("drivers/hip/hip_driver.h")
#include "drivers/hip/hip_driver.h"
#define GPUFS_OPEN_HIP open_hip_driver
#else
#define GPUFS_OPEN_HIP nullptr
#endif

namespace gpufs {
namespace {

struct DriverEntry {
  std::string_view name;
  Result<std::unique_ptr<Driver>> (*open)(const DriverOptions& options);  // null: not in this build
};

constexpr std::array<DriverEntry, 3> kDrivers{{
    {"host", open_host_driver},
    {"cuda", GPUFS_OPEN_CUDA},
    {"hip", GPUFS_OPEN_HIP},
}};

}  // namespace

Result<std::unique_ptr<Driver>> open_driver(const std::string& name, const DriverOptions& options) {
  for (const DriverEntry& entry : kDrivers) {
    if (entry.name != name) continue;
    if (entry.open == nullptr) {
      return Status(ENODEV, name + " is not available: this build has no " + name + " driver");
    }
    if (options.devices < 0) return Status(EINVAL, "the number of devices is negative");
    return entry.open(options);
  }
  return Status(EINVAL, "unknown driver \"" + name + "\": there are host, cuda and hip");
}

}  // namespace gpufs
