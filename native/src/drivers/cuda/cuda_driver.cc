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
  const cuda::CuResult code = library->call<&cuda::Functions::device_count>(&found);
  if (code != cuda::kCuSuccess) {
    return Status{ENODEV, "cuda is not available: cuDeviceGetCount: " + library->describe(code), code};
  }
  if (found == 0) return Status{ENODEV, "cuda is not available: the driver shows no device"};
  Result<int> count = gpu::wanted_devices("cuda", options, found);
  if (!count.ok()) return count.status();

  std::vector<std::shared_ptr<cuda::CudaContext>> contexts;
  for (int index = 0; index < count.value(); ++index) {
    Result<std::shared_ptr<cuda::CudaContext>> context = cuda::CudaContext::open(library, index, options.memory_bytes);
    if (!context.ok()) return context.status();
    context.value()->keep_spares(options.keep_freed);
    contexts.push_back(context.take());
  }
  for (const auto& context : contexts) context->open_to(contexts);
  return std::unique_ptr<Driver>(std::make_unique<gpu::GpuDriver>(
      "cuda", std::vector<std::shared_ptr<gpu::Context>>(contexts.begin(), contexts.end())));
}

}  // namespace gpufs
