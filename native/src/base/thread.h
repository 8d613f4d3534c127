// Starting the engine's threads: named, with every signal blocked, and without an exception when there are too many.
// The returned std::thread is the caller's, who joins it.
// Any thread may call it.
#pragma once

#include <cerrno>
#include <functional>
#include <new>
#include <string>
#include <thread>
#include <utility>

#include "base/status.h"

namespace gpufs {

// The C library makes room for a thread's own variables of a library that was loaded late when the thread first uses
// one, and ends the process where there is no memory then: as in the first exception of a thread, that there is none.
// This makes it happen now, after having made sure that there is memory. False: there is none, and nothing has
// happened. For threads that others have started; start_thread() sees to its own.
bool make_room_for_own_variables() noexcept;

Result<std::thread> start_thread_function(const std::string& name, std::function<void()> body);

// Signals belong to the program that loaded the engine: its handlers must never run on a native thread, where they
// would interrupt transfers and where Python does not expect them. name: at most 15 characters are shown.
// EAGAIN when the system gives no more threads, ENOMEM without memory for one.
template <typename Body>
Result<std::thread> start_thread(const std::string& name, Body&& body) {
  try {
    return start_thread_function(name, std::function<void()>(std::forward<Body>(body)));
  } catch (const std::bad_alloc&) {
    return Status(ENOMEM, "");
  }
}

// Threads that answer everybody must not wait for one file or device: what would wait there is EAGAIN for them (see
// Buffer), and is done by another thread.
void forbid_waiting();  // to the calling thread, for ever
[[nodiscard]] bool this_thread_may_wait();

}  // namespace gpufs
