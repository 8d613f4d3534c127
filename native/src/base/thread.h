// Starts the engine's threads, and says whether a call on one may wait.
// Ownership: the caller joins the thread that it gets.
// Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <thread>

#include "base/status.h"

namespace gpufs {

// Starts a thread with every signal blocked: signal handlers belong to the program that loaded the engine, and must not
// interrupt transfers. The first 15 characters of `name` are shown. EAGAIN if the system allows no more threads.
Result<std::thread> start_thread(const std::string& name, std::function<void()> body);

// Whether a call may wait for a file or a device that others use. A thread that serves every client must not: what
// would wait there fails with EAGAIN (see Buffer), and another thread does it.
enum class Wait : std::uint8_t { kAllowed, kForbidden };

}  // namespace gpufs
