// Starting the engine's threads: named, with every signal blocked, and without an exception when there are too many.
// The returned std::thread is the caller's, who joins it.
// Any thread may call it.
#pragma once

#include <functional>
#include <string>
#include <thread>

#include "base/status.h"

namespace gpufs {

// Signals belong to the program that loaded the engine: its handlers must never run on a native thread, where they
// would interrupt transfers and where Python does not expect them. name: at most 15 characters are shown.
// EAGAIN when the system gives no more threads.
Result<std::thread> start_thread(const std::string& name, std::function<void()> body);

}  // namespace gpufs
