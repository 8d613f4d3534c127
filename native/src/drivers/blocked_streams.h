// Streams of one device that wait for operations of the engine, and the bound on their number.
// Thread-safe. Owned by the Device.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace gpufs {

class BlockedStreams {
 public:
  // All streams of a device share its few hardware queues. On an H200 (CUDA 13, 8 queues) five blocked streams never
  // held up copies, fills or new streams of others; six sometimes did, and eight always. One is kept in reserve.
  static constexpr int kMost = 4;

  // Counts one more stream; waits up to `timeout` while there are kMost. False if there still are.
  bool add(std::chrono::steady_clock::duration timeout);
  // Counts one that was given up on. It is never removed, so pinned memory of the device stays pinned.
  void add_lost();
  void remove();
  // An operation is over, so its stream goes on.
  void note_progress();

  // How long to wait for what was cancelled, and for blocked streams to go on, before that fails with ETIMEDOUT. What
  // the engine gives a device at a time takes milliseconds. Tests set it.
  [[nodiscard]] std::chrono::milliseconds stall_timeout() const { return stall_timeout_; }
  void set_stall_timeout(std::chrono::milliseconds timeout) { stall_timeout_ = timeout; }

  // Whether there is any: drivers make those who unpin memory wait for all of them.
  [[nodiscard]] bool any() const;
  // How long none of them has gone on; 0 if there are none.
  [[nodiscard]] std::chrono::milliseconds stalled_for() const;

 private:
  using Clock = std::chrono::steady_clock;

  std::chrono::milliseconds stall_timeout_{10'000};
  mutable std::mutex mutex_;  // guards all below; a leaf
  std::condition_variable removed_;
  int count_ = 0;
  Clock::time_point last_progress_;
};

}  // namespace gpufs
