// The CUDA driver: every device that libcuda shows (CUDA_VISIBLE_DEVICES is libcuda's own affair).
// Thread-safe.
#pragma once

#include <memory>
#include <string>

#include "drivers/driver.h"

namespace gpufs {

inline constexpr const char* kCudaLibrary = "libcuda.so.1";

// ENODEV, with a text for users, if there is no libcuda, no device, or fewer devices than asked for.
Result<std::unique_ptr<Driver>> open_cuda_driver(const DriverOptions& options,
                                                 const std::string& library = kCudaLibrary);
// See open_device().
Result<std::shared_ptr<Device>> open_cuda_device(const std::string& pci_address,
                                                 const std::string& library = kCudaLibrary);

}  // namespace gpufs
