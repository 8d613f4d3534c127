#include "drivers/cuda/cuda_driver.h"

#include <cerrno>
#include <utility>
#include <vector>

#include "drivers/cuda/cuda_context.h"
#include "drivers/cuda/cuda_library.h"
#include "drivers/gpu/gpu_device.h"

namespace gpufs {

Result<std::unique_ptr<Driver>> open_cuda_driver(const DriverOptions& options) {
  return open_cuda_driver_from(cuda::Library::kSoname, options);
}

Result<std::unique_ptr<Driver>> open_cuda_driver_from(const std::string& library_path, const DriverOptions& options) {
  Result<std::shared_ptr<const cuda::Library>> loaded = cuda::Library::load(library_path);
  if (!loaded.ok()) return loaded.status();
  const std::shared_ptr<const cuda::Library> library = loaded.take();

  int found = 0;
  const gpu::api::Code code = library->call<&cuda::Functions::device_count>(&found);
  if (code != gpu::api::kSuccess) {
    return Status{ENODEV, "cuda is not available: cuDeviceGetCount: " + library->describe(code), code};
  }
  if (found == 0) return Status{ENODEV, "cuda is not available: the driver shows no device"};
  return gpu::open_devices<cuda::CudaContext>("cuda", library, found, options);
}

}  // namespace gpufs
