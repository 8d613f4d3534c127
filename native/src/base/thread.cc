#include "base/thread.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <system_error>

namespace gpufs {
namespace {

// The C library makes room for a thread's own variables of this library when it first uses one, and aborts the process
// where there is no memory then. So it happens where a thread starts, which has just got memory for its stack.
void make_room_for_own_variables() {
  thread_local std::atomic<bool> used{false};
  used.store(true, std::memory_order_relaxed);
}

}  // namespace

Result<std::thread> start_thread(const std::string& name, std::function<void()> body) {
  // A new thread inherits the mask, so it is blocked from its first instruction on.
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread;
  int error = 0;
  try {
    thread = std::thread([short_name = name.substr(0, 15), run = std::move(body)] {
      make_room_for_own_variables();
      ::pthread_setname_np(::pthread_self(), short_name.c_str());
      run();
    });
  } catch (const std::system_error& failure) {
    error = failure.code().value();
  }
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error != 0) return Status::from_errno(error, "starting thread " + name);
  return thread;
}

}  // namespace gpufs
