// The INIT exchange between the kernel and the control plane, amended on its way in both directions: the control plane
// is not shown what it must not take, and the kernel is asked for what the control plane cannot know.
// Owned by the Session.
// amend_request() and amend_reply() are called once each, in this order; the rest by any thread after amend_reply().
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "fuse/protocol.h"
#include "fuse/statistics.h"

namespace gpufs::fuse {

class InitNegotiation {
 public:
  struct Options {
    std::uint32_t max_write = 1 << 20;  // page multiple
    std::uint64_t mask_flags = 0;       // treated as not offered
    std::uint32_t max_background = 64;
    std::uint32_t relay_bytes = 1 << 20;  // the largest read-ahead that a relayed file may ask for
  };

  explicit InitNegotiation(const Options& options) : options_(options) {}

  // The kernel's request, in place. EPROTO when it cannot be understood.
  Status amend_request(std::span<std::byte> message);
  // The control plane's reply, in place; a reply that carries an error is left alone. EPROTO when it is too short.
  Status amend_reply(std::span<std::byte> message);

  // Flags that both sides have agreed on.
  [[nodiscard]] bool granted(std::uint64_t flag) const { return (granted_ & flag) == flag; }
  // Buffers are opened for direct input and output only where such files can still be mapped.
  [[nodiscard]] bool direct_io() const { return granted(kInitDirectIoAllowMmap); }
  [[nodiscard]] bool acls() const { return granted(kInitPosixAcl); }
  [[nodiscard]] std::uint32_t max_write() const { return max_write_; }

  void write_statistics(JsonWriter& json) const;

 private:
  const Options options_;
  std::uint32_t kernel_minor_ = 0;
  std::uint64_t offered_ = 0;
  std::uint64_t granted_ = 0;
  std::uint32_t max_write_ = 0;
  std::uint32_t max_pages_ = 0;
};

}  // namespace gpufs::fuse
