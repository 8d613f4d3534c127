// Starts the engine's threads, and marks those that must not wait.
// Ownership: the caller joins the thread that it gets.
// Thread-safe.
#pragma once

#include <functional>
#include <string>
#include <thread>

#include "base/status.h"

namespace gpufs {

// Starts a thread with every signal blocked: signal handlers belong to the program that loaded the engine, and must not
// interrupt transfers. The first 15 characters of `name` are shown. EAGAIN if the system allows no more threads.
Result<std::thread> start_thread(const std::string& name, std::function<void()> body);

// A thread that serves every client must not wait for one file or device. What would wait there fails with EAGAIN on
// such a thread (see Buffer), and another thread does it.
void forbid_waiting();  // for the calling thread, for good
[[nodiscard]] bool this_thread_may_wait();

// Forbids it for as long as the object lives.
class NoWaiting {
 public:
  NoWaiting();
  ~NoWaiting();
  NoWaiting(const NoWaiting&) = delete;
  NoWaiting& operator=(const NoWaiting&) = delete;

 private:
  const bool before_;
};

}  // namespace gpufs
