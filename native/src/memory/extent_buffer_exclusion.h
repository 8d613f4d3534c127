// Keeps writers, or all users of a part, out of an ExtentBuffer while its memory changes.
// Ownership: on the stack of the function that changes the memory and has mutation_mutex_, one at a time for each
// buffer.
#pragma once

#include <cstdint>
#include <mutex>

#include "memory/extent_buffer.h"

namespace gpufs {

class ExtentBuffer::Exclusion {
 public:
  explicit Exclusion(ExtentBuffer& buffer) : buffer_(buffer) {}
  ~Exclusion() {
    if (!begun_) return;
    {
      const std::lock_guard lock(buffer_.state_mutex_);
      buffer_.write_limit_ = kNoLimit;
      buffer_.publish_limit_ = kNoLimit;
      buffer_.gate_ = {};
    }
    buffer_.state_changed_.notify_all();
  }
  Exclusion(const Exclusion&) = delete;
  Exclusion& operator=(const Exclusion&) = delete;

  // No write begins any more that ends above `limit`. Needs state_mutex_.
  void limit_writers_locked(std::uint64_t limit) {
    begun_ = true;
    buffer_.write_limit_ = limit;
  }

  // No write begins any more, and none is in progress when this returns true. False: one is, and the caller must not
  // wait.
  [[nodiscard]] bool stop_writers(Wait wait) {
    std::unique_lock lock(buffer_.state_mutex_);
    limit_writers_locked(0);
    if (wait == Wait::kForbidden) return buffer_.writers_.empty();
    buffer_.state_changed_.wait(lock, [this] { return buffer_.writers_.empty(); });
    return true;
  }

  // Nobody uses the buffer when this returns true, or begins to. False: somebody still does at the deadline, or a load
  // is in progress.
  [[nodiscard]] bool stop_everybody(TimePoint deadline) {
    {
      std::unique_lock lock(buffer_.state_mutex_);
      limit_writers_locked(0);
      buffer_.gate_ = {0, kNoLimit};
      if (!buffer_.claims_.empty()) return false;
      if (!buffer_.state_changed_.wait_until(lock, deadline, [this] { return buffer_.writers_.empty(); })) return false;
    }
    // Readers hold the snapshot that this replaces.
    buffer_.replace(buffer_.make_snapshot(buffer_.snapshot_->extents));
    return buffer_.await_readers(deadline);
  }

  // Closes the gate around what the driver moves when it releases `removed`. True if that is more than `removed`. Needs
  // both mutexes.
  bool close_gate_locked(const Extents& removed) {
    bool moves = false;
    std::uint64_t start = kNoLimit;
    std::uint64_t end = 0;
    for (const Extent& extent : removed) {
      const Extent span = buffer_.here_->memory->release_span(extent.offset, extent.bytes);
      moves = moves || span.offset < extent.offset || span.end() > extent.end();
      start = std::min(start, span.offset);
      end = std::max(end, span.end());
    }
    if (!moves) return false;
    begun_ = true;
    buffer_.gate_ = Extent::between(start, end);
    return true;
  }

 private:
  ExtentBuffer& buffer_;
  bool begun_ = false;
};

}  // namespace gpufs
