// The HIP driver: every device that libamdhip64 shows (HIP_VISIBLE_DEVICES is libamdhip64's own affair).
// Thread-safe.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "drivers/driver.h"

namespace gpufs {

// ENODEV, with a text for users, if there is no runtime, no device, or fewer devices than asked for.
Result<std::unique_ptr<Driver>> open_hip_driver(const DriverOptions& options);
// The same with the first of these libraries that works, for tests.
Result<std::unique_ptr<Driver>> open_hip_driver_from(const std::vector<std::string>& candidates,
                                                     const DriverOptions& options);
// See open_device().
Result<std::shared_ptr<Device>> open_hip_device(const std::string& pci_address);
Result<std::shared_ptr<Device>> open_hip_device_from(const std::vector<std::string>& candidates,
                                                     const std::string& pci_address);

}  // namespace gpufs
