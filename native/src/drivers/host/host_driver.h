// The host driver: simulated devices whose memory is the machine's own, in memfds, with a limit each.
// Owned by whoever opened it, like every Driver.
// Any thread may call any function of its devices: nothing is bound to a thread.
#pragma once

#include <memory>

#include "drivers/driver.h"

namespace gpufs {

// options.devices: 0 means one; options.memory_bytes: required, the limit of each device. EINVAL for bad options,
// ENODEV where the kernel gives no memfd.
Result<std::unique_ptr<Driver>> open_host_driver(const DriverOptions& options);

}  // namespace gpufs
