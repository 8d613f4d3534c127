// A thread for its owner's tasks, and for a check that it repeats between them.
// Ownership: the owner calls stop() before it destroys anything that tasks or the check use.
// Thread-safe. Nothing runs or is destroyed under its lock.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"

namespace gpufs {

class Worker {
 public:
  using Clock = std::chrono::steady_clock;
  using Task = std::function<void()>;
  // Returns when it is due again.
  using Check = std::function<Clock::time_point()>;
  static constexpr Clock::time_point kNever = Clock::time_point::max();

  // check: due when the thread starts, after each wake(), and when it says.
  explicit Worker(std::string name, Check check = {});
  ~Worker() { stop(); }

  // Starts the thread if there is none, as post() and wake() do. EAGAIN if the system allows no more threads, ESHUTDOWN
  // after stop().
  Status start();
  // Runs the task after those that were posted before. False after stop(): it never runs, and is destroyed with the
  // Worker.
  bool post(Task task);
  // The check is due now.
  void wake();
  // Ends the thread once it has run all tasks; the caller runs them if no thread could be started. False if that takes
  // longer than `grace`: the thread is left behind, so there must be no check. A second call does nothing.
  bool stop(std::optional<std::chrono::milliseconds> grace = {});

 private:
  // Shared with the thread, which may be left behind.
  struct State {
    Check check;       // constant
    std::mutex mutex;  // guards all below, and the Worker's thread_
    std::condition_variable changed;
    std::vector<Task> tasks;
    Clock::time_point due;  // of the check
    bool stopping = false;
    bool ended = false;

    void run();
  };
  Status start_locked();
  // Calls change() under the lock and wakes the thread. False after stop().
  template <typename Change>
  bool notify(Change change);

  const std::string name_;
  const std::shared_ptr<State> state_ = std::make_shared<State>();
  std::thread thread_;
};

}  // namespace gpufs
