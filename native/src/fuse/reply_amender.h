// Changes the control plane's replies on their way to the kernel: attributes from the inode table, open flags that its
// library cannot set.
// A function without state; the message is the caller's.
// Any thread may call it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "fuse/inode_table.h"
#include "fuse/protocol.h"

namespace gpufs::fuse {

// message: a whole reply with its header, as long as the header says. A reply that carries an error, is of another
// opcode or is shorter than it should be stays as it is: the kernel judges it.
// direct_io: whether buffers are opened for direct input and output.
void amend_reply(std::uint32_t opcode, std::span<std::byte> message, const InodeTable& table, bool direct_io);

// The body of a reply to STATX, in `room`, from a whole reply to GETATTR; one that is too short is handed on as it is.
std::span<const std::byte> statx_reply_from(std::span<const std::byte> message, StatxOut& room);

}  // namespace gpufs::fuse
