#include "base/thread.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

namespace gpufs {

Result<std::thread> start_thread(const std::string& name, std::function<void()> body) {
  // A new thread inherits the mask, so every signal is blocked from its first instruction on, except the one that the
  // thread itself causes when memory that a program shares has become smaller (drivers/host/fault_guard.h).
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::sigdelset(&all, SIGBUS);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread thread;
  int error = 0;
  try {
    thread = std::thread([short_name = name.substr(0, 15), run = std::move(body)] {
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

Status leave_descriptors() {
  if (::unshare(CLONE_FILES) != 0 || ::close_range(STDERR_FILENO + 1, ~0U, 0) != 0) {
    return Status::from_errno(errno, "a thread's own descriptors");
  }
  return {};
}

Status run_apart(const std::string& name, const std::function<Status()>& work) {
  Status status;
  std::thread thread = TRY(start_thread(name, [&] {
    status = leave_descriptors();
    if (status.ok()) status = work();
  }));
  thread.join();
  return status;
}

}  // namespace gpufs
