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

// Gives the calling thread a table of descriptors of its own, with the first three alone. A thread that waits for a
// reply of its own process needs it: when the process is killed, its descriptors must close, or nobody else gives that
// reply.
Status leave_descriptors();
// Runs work() on a thread with such a table, and returns what it returns.
Status run_apart(const std::string& name, const std::function<Status()>& work);

// Whether a call may wait for a file or a device that others use. A thread that serves every client must not: what
// would wait there fails with EAGAIN (see Buffer), and another thread does it.
enum class Wait : std::uint8_t { kAllowed, kForbidden };

}  // namespace gpufs
