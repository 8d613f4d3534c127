// The HIP driver: every device that libamdhip64 shows (HIP_VISIBLE_DEVICES is libamdhip64's own affair).
// Thread-safe.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "drivers/driver.h"
#include "drivers/hip/hip_library.h"

namespace gpufs {

// Uses the first of the candidates that works. ENODEV, with a text for users: no runtime, no device, or fewer devices
// than requested.
Result<std::unique_ptr<Driver>> open_hip_driver(const DriverOptions& options,
                                                const std::vector<std::string>& candidates = hip::Library::names());
// See open_device().
Result<std::shared_ptr<Device>> open_hip_device(const std::string& pci_address,
                                                const std::vector<std::string>& candidates = hip::Library::names());

}  // namespace gpufs
