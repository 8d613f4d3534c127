#include "drivers/cuda/cuda_driver.h"

#include <cerrno>
#include <utility>
#include <vector>

#include "drivers/cuda/cuda_context.h"
#include "drivers/cuda/cuda_device.h"
#include "drivers/cuda/cuda_library.h"

namespace gpufs {
namespace cuda {
namespace {

class CudaDriver final : public Driver {
 public:
  explicit CudaDriver(std::vector<std::unique_ptr<Device>> devices) : devices_(std::move(devices)) {}
  [[nodiscard]] const char* name() const override { return "cuda"; }
  [[nodiscard]] const std::vector<std::unique_ptr<Device>>& devices() const override { return devices_; }

 private:
  std::vector<std::unique_ptr<Device>> devices_;
};

// Lets every device reach the memory of every other that it can, so that copies between them go directly.
void open_to_peers(const Library& library, const std::vector<std::shared_ptr<Context>>& contexts) {
  for (const auto& owner : contexts) {
    if (!owner->virtual_memory()) continue;
    std::vector<CuAccess> access = owner->access();
    for (const auto& peer : contexts) {
      int reachable = 0;
      if (peer == owner) continue;
      // Where this fails there is no direct way, and copy_to_peer() says so.
      if (library.call<&Functions::device_can_access_peer>(&reachable, peer->device(), owner->device()) == kCuSuccess &&
          reachable != 0) {
        access.push_back({{kCuLocationDevice, peer->device()}, kCuAccessReadWrite});
      }
    }
    owner->set_access(std::move(access));
  }
}

}  // namespace
}  // namespace cuda

Result<std::unique_ptr<Driver>> open_cuda_driver(const DriverOptions& options) {
  return open_cuda_driver_from(cuda::Library::kSoname, options);
}

Result<std::unique_ptr<Driver>> open_cuda_driver_from(const std::string& library_path, const DriverOptions& options) {
  if (options.devices < 0) return Status{EINVAL, "cuda: the number of devices cannot be negative"};
  Result<std::shared_ptr<const cuda::Library>> loaded = cuda::Library::load(library_path);
  if (!loaded.ok()) return loaded.status();
  const std::shared_ptr<const cuda::Library> library = loaded.take();

  int count = 0;
  const cuda::CuResult code = library->call<&cuda::Functions::device_count>(&count);
  if (code != cuda::kCuSuccess) {
    return Status{ENODEV, "cuda is not available: cuDeviceGetCount: " + library->describe(code), code};
  }
  if (count == 0) return Status{ENODEV, "cuda is not available: the driver shows no device"};
  if (options.devices > count) {
    return Status{ENODEV, "cuda: " + std::to_string(options.devices) + " devices asked for, but there are " +
                              std::to_string(count)};
  }
  if (options.devices != 0) count = options.devices;

  std::vector<std::shared_ptr<cuda::Context>> contexts;
  for (int index = 0; index < count; ++index) {
    Result<std::shared_ptr<cuda::Context>> context = cuda::Context::open(library, index, options.memory_bytes);
    if (!context.ok()) return context.status();
    contexts.push_back(context.take());
  }
  cuda::open_to_peers(*library, contexts);
  std::vector<std::unique_ptr<Device>> devices;
  devices.reserve(contexts.size());
  for (auto& context : contexts) devices.push_back(std::make_unique<cuda::CudaDevice>(std::move(context)));
  return std::unique_ptr<Driver>(std::make_unique<cuda::CudaDriver>(std::move(devices)));
}

}  // namespace gpufs
