// Memory that requests are read into: a header part, and after it a page-aligned payload.
// Ownership: a reader thread of a transport, which alone uses it, or a thread of its rings, whose entries lie in it.
#pragma once

#include <cstddef>
#include <functional>
#include <span>

#include "base/status.h"

namespace gpufs::fuse {

// Locks memory for the devices that copy from and to it. If pin fails, the memory must not be used.
struct PinHooks {
  std::function<Status(void* address, std::size_t bytes)> pin;
  std::function<void(void* address, std::size_t bytes)> unpin;
};

class PayloadMemory {
 public:
  // payload_bytes is rounded up to pages. Memory that is used all the time is populated, locked (best effort), and
  // pinned as the hooks say.
  static Result<PayloadMemory> create(std::size_t payload_bytes, const PinHooks* hooks, bool populated = true);

  PayloadMemory(PayloadMemory&& other) noexcept;
  PayloadMemory& operator=(PayloadMemory&& other) = delete;
  ~PayloadMemory();

  // For a whole message: a WRITE's payload then starts on a page.
  [[nodiscard]] std::span<std::byte> message() const;
  [[nodiscard]] std::span<std::byte> payload() const;

 private:
  PayloadMemory(std::byte* base, std::size_t bytes, const PinHooks* hooks)
      : base_(base), bytes_(bytes), hooks_(hooks) {}

  std::byte* base_;
  std::size_t bytes_;
  const PinHooks* hooks_;  // of the transport, which lives longer
};

}  // namespace gpufs::fuse
