// The device memory of one transfer while it runs: allocated ahead of a load, pinned chunk by chunk, and released at
// the end. Thread-safe. Ownership: its Transfer.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "base/status.h"
#include "io/plan.h"
#include "memory/extent_buffer.h"
#include "observe/counters.h"

namespace gpufs {

// Offsets are relative to the request.
class TargetMemory {
 public:
  // smallest_step: allocating less than this ahead of a load is not worth a call.
  TargetMemory(std::shared_ptr<TransferTarget> target, std::uint64_t target_offset, Direction direction,
               std::uint64_t smallest_step)
      : target_(std::move(target)),
        growing_(target_->growing()),
        load_(direction == Direction::kLoad),
        offset_(target_offset),
        smallest_step_(smallest_step) {}

  // Every access to the memory happens while an AccessGuard exists. It is empty once the transfer was left behind: then
  // nothing may reach the memory. A thread must not wait for a file that may hang while it has one.
  struct EndAccess {
    void operator()(TargetMemory* memory) const;
  };
  using AccessGuard = std::unique_ptr<TargetMemory, EndAccess>;
  [[nodiscard]] AccessGuard access();

  [[nodiscard]] bool can_have_holes() const { return growing_ != nullptr; }

  // The next four are for a thread with an AccessGuard.
  [[nodiscard]] TransferTarget& target() const { return *target_; }
  // Must be called before the first byte of a load is written. Claims the memory, so that the buffer does not move
  // later.
  void claim(std::uint64_t bytes);
  // Removes what the buffer held in the holes of a load, which get no memory. ECANCELED once *cancelled is true.
  Status punch(Extents holes, const std::atomic<bool>& cancelled);
  // The memory of one chunk. May wait for other threads' pins; EAGAIN if that is forbidden.
  Result<TransferTarget::Pin> pin(std::uint64_t offset, std::uint64_t bytes, Wait wait = Wait::kAllowed);

  // Not null if the calling thread is to allocate memory ahead of `position`, up to which chunks were handed out. It
  // must then call allocate_ahead() next, with no pins.
  [[nodiscard]] AccessGuard start_ahead(std::uint64_t position);
  void allocate_ahead(AccessGuard access);

  // Ends a load at `reached`: publishes the size and frees what was allocated beyond. touched: end of the highest
  // chunk that was handed out. A buffer that was made smaller in the meantime stays so, as if that had come after the
  // load: what it removed must not come back as zeros.
  Status finish_load(std::uint64_t reached, std::uint64_t touched);

  // From now on there are no new accesses. False, without effect, if the memory is in use and `force` is not set.
  bool close(bool force);
  [[nodiscard]] bool in_use() const;
  // Closes, and drops the memory unless it is in use.
  void release();
  // Counts bytes in the statistics of the memory's file.
  void note(observe::Backend backend, observe::Flow flow, std::uint64_t bytes) const;

 private:
  // In the order of the offsets: what a full device still has then goes to the chunks that come first.
  Status allocate_to(std::uint64_t end, Wait wait);
  Status allocate_on(std::unique_lock<std::mutex>& lock, std::uint64_t end);
  Status allocate_data(std::uint64_t start, std::uint64_t end);
  [[nodiscard]] std::uint64_t next_step_locked() const;

  std::shared_ptr<TransferTarget> target_;  // null once released
  ExtentBuffer* const growing_;             // TransferTarget::growing()
  const bool load_;
  const std::uint64_t offset_;
  const std::uint64_t smallest_step_;
  // Constant once the transfer is prepared.
  std::uint64_t total_ = 0;
  Extents holes_;
  std::shared_ptr<const ExtentBuffer::Claim> claim_;  // of a load into a buffer, until its end

  // Guards all below. No call of the buffer is made under it.
  mutable std::mutex mutex_;
  int accesses_ = 0;
  bool closed_ = false;
  std::uint64_t allocated_end_ = 0;
  std::uint64_t largest_step_ = ~std::uint64_t{0};  // for which the device has had space
  bool allocating_ = false;
  std::condition_variable allocated_;  // allocating_ became false
};

}  // namespace gpufs
