#include "fuse/relay_socket.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

namespace gpufs::fuse {

namespace {

// A message of a megabyte, and a few small ones behind it.
constexpr int kWantedBuffer = 4 << 20;
// The kernel's own part of a message, generously.
constexpr std::size_t kMessageOverhead = 4096;
constexpr std::size_t kLargestMessage = (std::size_t{1} << 20) + 4096;
constexpr std::size_t kSmallestMessage = 64 << 10;

void raise_buffer(int socket, int forced, int ordinary) {
  const int bytes = kWantedBuffer;
  if (::setsockopt(socket, SOL_SOCKET, forced, &bytes, sizeof(bytes)) == 0) return;
  static_cast<void>(::setsockopt(socket, SOL_SOCKET, ordinary, &bytes, sizeof(bytes)));  // clipped to the limit
}

}  // namespace

Result<RelayPair> make_relay_pair() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    return Status::from_errno(errno, "the socket pair between the planes");
  }
  for (const int end : ends) {
    raise_buffer(end, SO_SNDBUFFORCE, SO_SNDBUF);
    raise_buffer(end, SO_RCVBUFFORCE, SO_RCVBUF);
  }
  return RelayPair{UniqueFd(ends[0]), UniqueFd(ends[1])};
}

std::size_t largest_message(int socket) {
  int bytes = 0;
  socklen_t length = sizeof(bytes);
  if (::getsockopt(socket, SOL_SOCKET, SO_SNDBUF, &bytes, &length) != 0 || bytes < 0) return kSmallestMessage;
  const std::size_t limit = static_cast<std::size_t>(bytes);
  return std::clamp(limit > kMessageOverhead ? limit - kMessageOverhead : 0, kSmallestMessage, kLargestMessage);
}

}  // namespace gpufs::fuse
