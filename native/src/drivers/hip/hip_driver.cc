#include "drivers/hip/hip_driver.h"

#include <unistd.h>

#include <cerrno>
#include <utility>

#include "drivers/gpu/gpu_device.h"
#include "drivers/hip/hip_context.h"
#include "drivers/hip/hip_library.h"

namespace gpufs {
namespace {

// What is wrong with the kernel's side, as far as this process can see it.
std::string kernel_side() {
  if (::access(hip::kKernelDriver, R_OK | W_OK) == 0) return "";
  if (errno == ENOENT)
    return std::string(" (there is no ") + hip::kKernelDriver + ": the kernel's amdgpu driver is not loaded)";
  return std::string(" (") + hip::kKernelDriver + " cannot be opened: is this user in the groups render and video?)";
}

}  // namespace

Result<std::unique_ptr<Driver>> open_hip_driver(const DriverOptions& options) {
  return open_hip_driver_from(hip::Library::names(), options);
}

Result<std::unique_ptr<Driver>> open_hip_driver_from(const std::vector<std::string>& candidates,
                                                     const DriverOptions& options) {
  Result<std::shared_ptr<const hip::Library>> loaded = hip::Library::load(candidates);
  if (!loaded.ok()) return loaded.status();
  const std::shared_ptr<const hip::Library> library = loaded.take();

  int found = 0;
  const gpu::api::Code code = library->call<&hip::Functions::device_count>(&found);
  if (code != gpu::api::kSuccess && code != gpu::api::kNoDevice) {
    return Status{ENODEV,
                  "hip is not available: " + library->name() + ": hipGetDeviceCount: " + library->describe(code), code};
  }
  if (code == gpu::api::kNoDevice || found == 0) {
    return Status{ENODEV, "hip is not available: no device: " + library->name() + " shows none" + kernel_side(), code};
  }
  return gpu::open_devices<hip::HipContext>("hip", library, found, options);
}

}  // namespace gpufs
