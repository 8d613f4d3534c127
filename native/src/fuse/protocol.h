// The kernel's FUSE protocol: the distribution's header, names that are newer than it, and structures in messages.
#pragma once

#include <linux/fuse.h>
#include <sys/stat.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace gpufs::fuse {

// INIT flags as one 64-bit number: the upper half travels as flags2.
inline constexpr std::uint64_t kInitDirectIoAllowMmap = 1ULL << 36;
inline constexpr std::uint64_t kInitHasResend = 1ULL << 39;

// Has the kernel send the requests again that were read and not answered, with the uppermost bit of their numbers set.
inline constexpr std::int32_t kNotifyResend = 7;

inline constexpr std::uint32_t kOpcodeStatx = 52;
inline constexpr std::uint32_t kOpcodeCopyFileRange64 = 53;

// The reply to STATX: the structure of statx(2) at its end.
struct StatxOut {
  std::uint64_t attr_valid;
  std::uint32_t attr_valid_nsec;
  std::uint32_t flags;
  std::uint64_t spare[2];
  struct statx stat;
};
static_assert(sizeof(StatxOut) == 288);

// The bit of a request's number that says that the kernel has sent it before (FUSE_UNIQUE_RESEND).
inline constexpr std::uint64_t kSentAgain = std::uint64_t{1} << 63;

// Where the arguments of a request begin.
inline constexpr std::size_t kBodyOffset = sizeof(fuse_in_header);
// The part of a WRITE before its payload.
inline constexpr std::size_t kWriteHeaderBytes = kBodyOffset + sizeof(fuse_write_in);
static_assert(kWriteHeaderBytes == 80);

// The kernel refuses larger error numbers in replies: the reply would be lost.
inline constexpr int kMaximumErrno = 511;

// "read"; "other" without a name.
[[nodiscard]] inline const char* opcode_name(std::uint32_t opcode) {
  static constexpr auto kNames = std::to_array<const char*>({
      nullptr,        "lookup",        "forget",      "getattr",  "setattr",  "readlink",
      "symlink",      nullptr,         "mknod",       "mkdir",    "unlink",   "rmdir",
      "rename",       "link",          "open",        "read",     "write",    "statfs",
      "release",      nullptr,         "fsync",       "setxattr", "getxattr", "listxattr",
      "removexattr",  "flush",         "init",        "opendir",  "readdir",  "releasedir",
      "fsyncdir",     "getlk",         "setlk",       "setlkw",   "access",   "create",
      "interrupt",    "bmap",          "destroy",     "ioctl",    "poll",     "notify_reply",
      "batch_forget", "fallocate",     "readdirplus", "rename2",  "lseek",    "copy_file_range",
      "setupmapping", "removemapping", "syncfs",      "tmpfile",  "statx",    "copy_file_range_64",
  });
  const char* name = opcode < kNames.size() ? kNames[opcode] : nullptr;
  return name != nullptr ? name : "other";
}

// The structure at `offset` of a message, or false if the message is too short.
template <typename T>
[[nodiscard]] bool read_struct(std::span<const std::byte> message, std::size_t offset, T* out) {
  if (offset > message.size() || message.size() - offset < sizeof(T)) return false;
  std::memcpy(out, message.data() + offset, sizeof(T));
  return true;
}

// Writes the structure back to where read_struct() found it.
template <typename T>
void write_struct(std::span<std::byte> message, std::size_t offset, const T& value) {
  std::memcpy(message.data() + offset, &value, sizeof(T));
}

}  // namespace gpufs::fuse
