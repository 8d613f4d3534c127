// How tests wait: for what must come, and at a door that they open.
// Owned by the test.
// Thread-safe.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace gpufs::testing {

inline constexpr std::chrono::milliseconds kPatience{60'000};  // for what must come, which only a hang exceeds

// True once `condition` is.
inline bool soon(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

// Holds up who passes, a fake operation for example, until it opens.
class Door {
 public:
  explicit Door(bool open = false) : open_(open) {}
  void pass() {
    std::unique_lock lock(mutex_);
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_; });
    --waiting_;
  }
  void close() { set(false); }
  void open() { set(true); }
  // Until so many wait.
  bool await(int count) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kPatience, [&] { return waiting_ >= count; });
  }
  int waiting() {
    const std::lock_guard lock(mutex_);
    return waiting_;
  }

 private:
  void set(bool open) {
    const std::lock_guard lock(mutex_);
    open_ = open;
    changed_.notify_all();
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_;
  int waiting_ = 0;
};

}  // namespace gpufs::testing
