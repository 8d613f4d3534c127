// Messages between the kernel and the control plane, changed on their way: requests that pyfuse3 does not know become
// ones that it knows; its replies get the attributes of the inode table and open flags that it cannot set.
// Functions without state; the messages are the caller's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "fuse/init_negotiation.h"
#include "fuse/inode_table.h"
#include "fuse/protocol.h"
#include "fuse/request.h"

namespace gpufs::fuse {

// Changes a request in place, or makes another one in `memory`. 0, or the errno to answer with.
int adapt_request(Request& request, InitNegotiation& init, std::vector<std::byte>& memory);

// Changes a successful reply in place, or makes another one in `memory`; returns the body for the kernel. A reply that
// is too short stays as it is: the kernel judges it.
std::span<const std::byte> adapt_reply(std::uint32_t opcode, std::span<std::byte> message, const InodeTable& table,
                                       InitNegotiation& init, StatxOut& memory);

// With these flags the kernel opens a buffer.
[[nodiscard]] std::uint32_t buffer_open_flags(const InitNegotiation& init);

// What a successful reply hands out, for a reply that the kernel never got: references, and the request that closes
// what was opened (empty: nothing was), which the control plane answers.
struct HandedOver {
  std::vector<fuse_forget_one> references;
  std::vector<std::byte> release;
};
[[nodiscard]] HandedOver handed_over_by(std::uint32_t opcode, std::span<const std::byte> reply);

}  // namespace gpufs::fuse
