// Memory that requests are read into: a header part, and after it a page-aligned payload.
// Owned by one reader thread of a transport.
// Only that thread uses it; it may be created and destroyed on any thread.
#pragma once

#include <cstddef>
#include <functional>
#include <span>

#include "base/status.h"

namespace gpufs::fuse {

// Page-locks memory for the devices that copy from and to it; best effort, so it returns nothing.
struct PinHooks {
  std::function<void(void* address, std::size_t bytes)> pin;
  std::function<void(void* address, std::size_t bytes)> unpin;
};

class PayloadMemory {
 public:
  // Populated and, best effort, locked and pinned. payload_bytes is rounded up to pages.
  static Result<PayloadMemory> create(std::size_t payload_bytes, const PinHooks* hooks);

  PayloadMemory(PayloadMemory&& other) noexcept;
  PayloadMemory& operator=(PayloadMemory&& other) = delete;
  ~PayloadMemory();

  // Where a whole message goes: a WRITE's payload then starts on a page.
  [[nodiscard]] std::span<std::byte> message() const;
  [[nodiscard]] std::span<std::byte> payload() const;

 private:
  PayloadMemory(std::byte* base, std::size_t bytes, const PinHooks* hooks)
      : base_(base), bytes_(bytes), hooks_(hooks) {}

  std::byte* base_;
  std::size_t bytes_;
  const PinHooks* hooks_;  // the transport's, which lives longer
};

}  // namespace gpufs::fuse
