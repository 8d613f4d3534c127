// The host driver: simulated devices whose memory is the machine's own, in memfds, with a limit for each.
// Thread-safe.
#pragma once

#include <memory>
#include <string>

#include "drivers/driver.h"

namespace gpufs {

// options.devices: 0 means one; options.memory_bytes: required, the limit of each device. EINVAL for bad options,
// ENODEV: the kernel provides no memfd.
Result<std::unique_ptr<Driver>> open_host_driver(const DriverOptions& options);
// See open_device().
Result<std::shared_ptr<Device>> open_host_device(const std::string& pci_address);

}  // namespace gpufs
