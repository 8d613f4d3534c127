// The events of a device: created in batches on its worker, bounded, recorded anew by each user.
// Owned by its DeviceContext.
// Any thread may call any function.
#pragma once

#include "device/pool.h"

namespace gpufs {

// An event from the pool may still show its last user's recording: record it before asking it anything.
class EventPool : public DevicePool<Event> {
 public:
  using DevicePool<Event>::DevicePool;
};

}  // namespace gpufs
