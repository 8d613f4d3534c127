// Memory that requests are read into: a header part, and after it a page-aligned payload.
// Ownership: a reader thread of the transport, which alone uses it.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "base/status.h"
#include "memory/host_locks.h"

namespace gpufs::fuse {

class PayloadMemory {
 public:
  // payload_bytes is rounded up to pages. The memory is populated, and locked in RAM (best effort). locks: locks it for
  // devices as well, or fails if that is mandatory; null: no device copies from and to it.
  static Result<PayloadMemory> create(std::size_t payload_bytes, const std::shared_ptr<HostLocks>& locks);

  PayloadMemory(PayloadMemory&& other) noexcept;
  PayloadMemory& operator=(PayloadMemory&& other) = delete;
  ~PayloadMemory();

  // For a whole message: a WRITE's payload then starts on a page.
  [[nodiscard]] std::span<std::byte> message() const;
  [[nodiscard]] std::span<std::byte> payload() const;

 private:
  PayloadMemory(std::byte* base, std::size_t bytes) : base_(base), bytes_(bytes) {}

  std::byte* base_;
  std::size_t bytes_;
  std::shared_ptr<HostLocks> locks_;  // that have locked it
};

}  // namespace gpufs::fuse
