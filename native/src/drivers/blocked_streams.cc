#include "drivers/blocked_streams.h"

namespace gpufs {

bool BlockedStreams::add(Clock::duration timeout) {
  std::unique_lock lock(mutex_);
  if (!removed_.wait_for(lock, timeout, [this] { return count_ < kMost; })) return false;
  if (count_++ == 0) last_progress_ = Clock::now();
  return true;
}

void BlockedStreams::add_lost() {
  const std::lock_guard lock(mutex_);
  if (count_++ == 0) last_progress_ = Clock::now();
}

void BlockedStreams::remove() {
  {
    const std::lock_guard lock(mutex_);
    --count_;
  }
  removed_.notify_one();
}

void BlockedStreams::note_progress() {
  const std::lock_guard lock(mutex_);
  last_progress_ = Clock::now();
}

bool BlockedStreams::any() const {
  const std::lock_guard lock(mutex_);
  return count_ > 0;
}

std::chrono::milliseconds BlockedStreams::stalled_for() const {
  const std::lock_guard lock(mutex_);
  if (count_ == 0) return {};
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - last_progress_);
}

}  // namespace gpufs
