// Which of a vendor's devices a mount uses: the first ones, or some by their numbers and UUIDs.
// Thread-safe.
#pragma once

#include <vector>

#include "base/status.h"
#include "drivers/driver.h"
#include "drivers/gpu/vendor_library.h"

namespace gpufs::gpu {

// The ordinals of the devices that the options choose among `found`, in the options' order. ENXIO, with a list of what
// there is, for a device that does not exist; EINVAL for one that is chosen twice, and for a UUID's beginning that
// several devices share.
Result<std::vector<int>> choose_devices(const char* driver, const VendorLibrary& library, int found,
                                        const DriverOptions& options);

}  // namespace gpufs::gpu
