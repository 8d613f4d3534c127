// Opens the CUDA driver: every device that libcuda shows (CUDA_VISIBLE_DEVICES is libcuda's own affair).
// Owned by the Engine that opened it.
// open_cuda_driver(): any thread.
#pragma once

#include <memory>
#include <string>

#include "drivers/driver.h"

namespace gpufs {

// ENODEV, with a text for users, where there is no driver, no device, or fewer devices than asked for.
Result<std::unique_ptr<Driver>> open_cuda_driver(const DriverOptions& options);
// The same through another library: for tests, which have one of their own.
Result<std::unique_ptr<Driver>> open_cuda_driver_from(const std::string& library_path, const DriverOptions& options);

}  // namespace gpufs
