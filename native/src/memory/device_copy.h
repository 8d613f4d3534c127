// Copies from a buffer to addresses in device memory, of one device or of two.
// Thread-safe; the caller holds both memories.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "device/device_context.h"
#include "drivers/driver.h"
#include "memory/buffer.h"

namespace gpufs {

// Copies pieces of `from`, or zeros for holes, one after the other to `destination`. Synchronous, by the shortest way
// that the devices have. *copied: the bytes, also after a failure.
Status copy_pieces(const DeviceContext& to, DeviceAddress destination, const DeviceContext& from,
                   const std::vector<Buffer::Piece>& pieces, std::uint64_t* copied);

}  // namespace gpufs
