// The streams of a device: created in batches on its worker, bounded, idle when handed out.
// Owned by its DeviceContext.
// Any thread may call any function.
#pragma once

#include "device/pool.h"

namespace gpufs {

// A stream that comes back with work in it is waited for before it is handed out again. Keep what that work names
// alive until it is done: giving the stream back does not end it.
class StreamPool : public DevicePool<Stream> {
 public:
  using DevicePool<Stream>::DevicePool;
};

}  // namespace gpufs
