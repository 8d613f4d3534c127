// The socket pair between the two planes, and sending and receiving whole messages over it.
// The native end is the Relay's; the other end is the control plane's library's.
// Any thread may call any function.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "base/unique_fd.h"

namespace gpufs::fuse {

struct RelayPair {
  UniqueFd native;
  UniqueFd control;
};

// A SOCK_SEQPACKET pair, close-on-exec, with room for messages of a megabyte at both ends, or for as much as the
// system allows (net.core.wmem_max).
Result<RelayPair> make_relay_pair();

// The largest message that a socket with this send buffer carries, header included.
[[nodiscard]] std::size_t largest_message(int socket);

}  // namespace gpufs::fuse
