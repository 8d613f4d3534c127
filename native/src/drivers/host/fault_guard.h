// Keeps the process alive when it touches memory of a file that another program has made smaller: SIGBUS. The first
// access that fails replaces the range from that page on by private zeros and marks the range; the access is repeated
// and succeeds. System calls on such memory return EFAULT as ever.
// A program could otherwise end a mount's daemon by truncating what it shares: the files of POSIX shared memory
// cannot be sealed against that.
// Ownership: the mapping's owner has a FaultGuard, and destroys it after the last access and before munmap(2).
// Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/status.h"

namespace gpufs {

class FaultGuard {
 public:
  // Whole pages, mapped by the caller. ENFILE: the process guards as many ranges as it can.
  static Result<std::unique_ptr<FaultGuard>> watch(std::uintptr_t start, std::size_t bytes);
  ~FaultGuard();
  FaultGuard(const FaultGuard&) = delete;
  FaultGuard& operator=(const FaultGuard&) = delete;

  // Whether an access has failed. From then on the range no longer shows the file.
  [[nodiscard]] bool broken() const;

 private:
  explicit FaultGuard(std::size_t slot) : slot_(slot) {}

  const std::size_t slot_;
};

}  // namespace gpufs
