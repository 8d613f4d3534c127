// Waiting for an event.
// Any thread.
#pragma once

#include <thread>

#include "base/status.h"
#include "drivers/driver.h"

namespace gpufs::testing {

// Returns once the work before the event is done, with its outcome.
inline Status finished(Event& event) {
  for (;; std::this_thread::yield()) {
    const Result<bool> done = event.query();
    if (!done.ok()) return done.status();
    if (done.value()) return {};
  }
}

}  // namespace gpufs::testing
