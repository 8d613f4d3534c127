// Short forms of what tests ask of streams and events.
// Any thread.
#pragma once

#include <cstddef>
#include <thread>

#include "base/status.h"
#include "drivers/driver.h"

namespace gpufs::testing {

inline Status copy_in(Stream& stream, DeviceAddress to, const void* from, std::size_t bytes) {
  const HostCopy copy{to, const_cast<void*>(from), bytes};
  return stream.copy(CopyDirection::kToDevice, {&copy, 1});
}

inline Status copy_out(Stream& stream, void* to, DeviceAddress from, std::size_t bytes) {
  const HostCopy copy{from, to, bytes};
  return stream.copy(CopyDirection::kToHost, {&copy, 1});
}

// Returns once the work before the event is done, with its outcome.
inline Status finished(Event& event) {
  for (;; std::this_thread::yield()) {
    const Result<bool> done = event.query();
    if (!done.ok()) return done.status();
    if (done.value()) return {};
  }
}

}  // namespace gpufs::testing
