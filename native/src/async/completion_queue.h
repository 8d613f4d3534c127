// The operations of a batch, or of all futures of an engine: those under way, and those that are over and not
// collected. Shared by its handle and its operations. Thread-safe.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "async/operation.h"

namespace gpufs {

class CompletionQueue {
 public:
  // capacity: of operations under way and not collected together.
  explicit CompletionQueue(std::size_t capacity) : capacity_(capacity) {}

  // Adds operations that are about to start: all of them, or none. EAGAIN: beyond the capacity. ESHUTDOWN after
  // close().
  Status add(const std::vector<std::shared_ptr<Operation>>& operations);
  // Removes one that was not started after all.
  void remove(std::uint64_t id);
  // An operation is over.
  void deliver(Completion completion);

  // Collects up to `most` that are over, in the order in which they ended, once there are `fewest` or as many as there
  // can be; waits for that up to `timeout`.
  std::vector<Completion> collect(std::size_t fewest, std::size_t most, std::chrono::milliseconds timeout);

  // Asks an operation to stop, 0: all of them. ENOENT: no such operation is under way.
  Status cancel(std::uint64_t id);
  // Cancels all, refuses new ones, and waits until none uses its memory. ETIMEDOUT: some have not ended within
  // `timeout`; they can be collected once they have.
  Status close(std::chrono::milliseconds timeout);

  [[nodiscard]] std::vector<std::shared_ptr<Operation>> under_way() const;

 private:
  const std::size_t capacity_;

  mutable std::mutex mutex_;  // guards all below; no other lock is taken under it
  std::condition_variable changed_;
  std::map<std::uint64_t, std::shared_ptr<Operation>> under_way_;  // by id
  std::deque<Completion> done_;
  bool closed_ = false;
};

}  // namespace gpufs
