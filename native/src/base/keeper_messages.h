// Messages between a mount's daemon and its keeper: native/keeper/keeper.cc describes them.
#pragma once

#include <sys/socket.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace gpufs::keeper {

enum class Kind : std::uint32_t {
  kHold = 1,
  kDrop = 2,
  kRestart = 3,
  kGiveUp = 4,
  kHandOver = 5,
  kEnd = 6,
  kSettle = 7,
  kServes = 8,
  kWhy = 9,
  kHeld = 16,
  kReady = 17,
  kReleased = 18,
};

// The most bytes of one READ or WRITE of a mount. The keeper must be able to read what it refuses, too.
constexpr std::uint32_t kLargestMaxWrite = 16U << 20;
constexpr std::size_t kBatch = 200;  // numbers in a message; the kernel passes 253 descriptors at most

struct Message {
  Kind kind;
  std::uint32_t count;
  std::uint64_t numbers[kBatch];
};
constexpr std::size_t kHeaderBytes = offsetof(Message, numbers);

// Sends up to kBatch numbers, and descriptors with them. Negative as sendmsg(2), with errno.
inline ssize_t send(int socket, Kind kind, std::span<const std::uint64_t> numbers, std::span<const int> descriptors) {
  Message message{kind, static_cast<std::uint32_t>(numbers.size()), {}};
  std::ranges::copy(numbers, message.numbers);
  iovec part{&message, kHeaderBytes + numbers.size_bytes()};
  alignas(cmsghdr) char control[CMSG_SPACE(kBatch * sizeof(int))] = {};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (!descriptors.empty()) {
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
    cmsghdr* const rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(descriptors.size_bytes());
    std::memcpy(CMSG_DATA(rights), descriptors.data(), descriptors.size_bytes());
  }
  return ::sendmsg(socket, &header, MSG_NOSIGNAL);
}

}  // namespace gpufs::keeper
