// Drops references on a thread of its own, because dropping the last one may wait: freeing memory of a device may wait
// for all of its streams, and closing a file for a server. So no thread that streams depend on has to wait for either.
// Shared by the AsyncEngine and the thread. Thread-safe.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace gpufs {

class Reaper : public std::enable_shared_from_this<Reaper> {
 public:
  Reaper() = default;
  Reaper(const Reaper&) = delete;
  Reaper& operator=(const Reaper&) = delete;

  using References = std::vector<std::shared_ptr<void>>;
  // Drops them soon, in this order. Starts the thread if there is none; without one they stay until the next call or
  // shutdown().
  void drop(References references);
  // Drops what is left and ends the thread. False if that took longer than `grace`, so the thread is left behind.
  bool shutdown(std::chrono::milliseconds grace);

 private:
  void thread_main();

  std::mutex mutex_;  // guards all below; nothing is dropped under it
  std::condition_variable changed_;
  References waiting_;
  std::thread thread_;
  bool ending_ = false;
  bool ended_ = false;
};

}  // namespace gpufs
