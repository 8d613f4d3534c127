// Copies between two addresses in device memory, of one device or of two.
// Thread-safe; the caller holds both memories.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "device/device_context.h"
#include "drivers/driver.h"

namespace gpufs {

// Synchronous, by the shortest way that the devices have.
Status copy_between(const DeviceContext& to, DeviceAddress destination, const DeviceContext& from, DeviceAddress source,
                    std::uint64_t bytes);

}  // namespace gpufs
