// INIT: what this mount asks of the kernel, among what that offers.
// Ownership: the Relay's.
// answer() is called once; any thread may call the rest.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "fuse/protocol.h"

namespace gpufs::fuse {

class InitNegotiation {
 public:
  struct Options {
    std::uint32_t max_write = 1 << 20;  // page multiple
    std::uint64_t mask_flags = 0;       // treated as not offered
  };

  // relay_bytes: the largest read-ahead of a relayed file.
  InitNegotiation(const Options& options, std::uint32_t relay_bytes) : options_(options), relay_bytes_(relay_bytes) {}

  // The reply to the kernel's request. EPROTO when that cannot be understood.
  Result<fuse_init_out> answer(std::span<const std::byte> request);

  // The features that the last process has agreed on with the kernel.
  void restore(std::uint64_t offered, std::uint64_t granted);

  [[nodiscard]] std::uint64_t offered() const { return offered_; }
  [[nodiscard]] std::uint64_t granted() const { return granted_; }
  // Flags that both sides have agreed on.
  [[nodiscard]] bool granted(std::uint64_t flag) const { return (granted_.load() & flag) == flag; }
  // Buffers are opened for direct input and output only where such files can still be mapped.
  [[nodiscard]] bool direct_io() const { return granted(kInitDirectIoAllowMmap); }

 private:
  const Options options_;
  const std::uint32_t relay_bytes_;
  std::atomic<std::uint64_t> offered_{0};
  std::atomic<std::uint64_t> granted_{0};
};

}  // namespace gpufs::fuse
