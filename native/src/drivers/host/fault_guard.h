// Keeps the process alive when it touches memory of a file that another program has made smaller: SIGBUS. The first
// access that fails replaces the range from that page on by private zeros and marks the range; the access is repeated
// and succeeds. System calls on such memory return EFAULT as ever.
// A program could otherwise end a mount's daemon by truncating what it shares: the files of POSIX shared memory
// cannot be sealed against that.
// Ownership: the mapping's owner has a FaultGuard, and destroys it after the last access and before munmap(2).
// Thread-safe.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/status.h"
#include "drivers/host/signal_ranges.h"

namespace gpufs {

class FaultGuard {
 public:
  using Ranges = SignalRanges<std::atomic<bool>, 8192>;  // whether an access has failed

  // Whole pages, mapped by the caller. ENFILE: the process guards as many ranges as it can.
  static Result<std::unique_ptr<FaultGuard>> watch(std::uintptr_t start, std::size_t bytes);
  ~FaultGuard();
  FaultGuard(const FaultGuard&) = delete;
  FaultGuard& operator=(const FaultGuard&) = delete;

  // Whether an access has failed. From then on the range no longer shows the file.
  [[nodiscard]] bool broken() const { return slot_.detail.load(std::memory_order_acquire); }

 private:
  explicit FaultGuard(Ranges::Slot& slot) : slot_(slot) {}

  Ranges::Slot& slot_;
};

}  // namespace gpufs
