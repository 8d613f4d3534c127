// A mutex that can be waited for until a time. As std::timed_mutex, whose wait the thread sanitizer does not know.
// Owned by what it guards.
// Any thread.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <utility>

namespace gpufs {

class TimedMutex {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  void lock() {
    std::unique_lock lock(mutex_);
    released_.wait(lock, [this] { return !held_; });
    held_ = true;
  }
  void unlock() {
    {
      const std::lock_guard lock(mutex_);
      held_ = false;
    }
    released_.notify_one();
  }
  bool try_lock() {
    const std::lock_guard lock(mutex_);
    return !std::exchange(held_, true);
  }
  bool try_lock_until(TimePoint deadline) {
    std::unique_lock lock(mutex_);
    if (!released_.wait_until(lock, deadline, [this] { return !held_; })) return false;
    return held_ = true;
  }

 private:
  std::mutex mutex_;  // guards held_; innermost
  std::condition_variable released_;
  bool held_ = false;
};

}  // namespace gpufs
