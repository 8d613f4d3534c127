#include <cerrno>

#include "drivers/cuda/cuda_driver.h"
#include "drivers/driver.h"
#include "drivers/hip/hip_driver.h"
#include "drivers/host/host_driver.h"

namespace gpufs {

Result<std::unique_ptr<Driver>> open_driver(const std::string& name, const DriverOptions& options) {
  if (name == "host") return open_host_driver(options);
  if (name == "cuda") return open_cuda_driver(options);
  if (name == "hip") return open_hip_driver(options);
  return Status(EINVAL, "unknown driver \"" + name + "\": there are host, cuda and hip");
}

}  // namespace gpufs
