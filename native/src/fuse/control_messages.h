// Messages between the kernel and the control plane, changed on their way: requests of which there are
// several forms get one; replies get the attributes of the inode table and open flags.
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

// Changes a request in place. 0, or the errno to answer with.
int adapt_request(Request& request);

// Changes a successful reply in place, or makes another one in `memory`; returns the body for the kernel. A reply that
// is too short stays as it is: the kernel judges it.
std::span<const std::byte> adapt_reply(std::uint32_t opcode, std::span<std::byte> message, const InodeTable& table,
                                       const InitNegotiation& init, StatxOut& memory);

// With these flags the kernel opens a buffer.
[[nodiscard]] std::uint32_t buffer_open_flags(const InitNegotiation& init);

// What a successful reply hands out, for a reply that the kernel never got: references, and the request that closes
// what was opened (empty: nothing was), which the control plane answers.
struct KernelReferences {
  std::vector<fuse_forget_one> references;
  std::vector<std::byte> release;
};
[[nodiscard]] KernelReferences references_in(std::uint32_t opcode, std::span<const std::byte> reply);

}  // namespace gpufs::fuse
