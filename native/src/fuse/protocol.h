// The kernel's FUSE protocol: the distribution's header, names that are newer than it, and structures in messages.
#pragma once

#include <linux/fuse.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace gpufs::fuse {

// INIT flags as one 64-bit number: the upper half travels as flags2. They have names of their own, since the kernel's
// are macros in one release, enumerators in another and missing in a third.
inline constexpr std::uint64_t kInitAsyncRead = 1ULL << 0;
inline constexpr std::uint64_t kInitExportSupport = 1ULL << 4;
inline constexpr std::uint64_t kInitBigWrites = 1ULL << 5;
inline constexpr std::uint64_t kInitDontMask = 1ULL << 6;
inline constexpr std::uint64_t kInitSpliceWrite = 1ULL << 7;
inline constexpr std::uint64_t kInitSpliceMove = 1ULL << 8;
inline constexpr std::uint64_t kInitSpliceRead = 1ULL << 9;
inline constexpr std::uint64_t kInitAutoInvalData = 1ULL << 12;
inline constexpr std::uint64_t kInitDoReaddirplus = 1ULL << 13;
inline constexpr std::uint64_t kInitReaddirplusAuto = 1ULL << 14;
inline constexpr std::uint64_t kInitAsyncDio = 1ULL << 15;
inline constexpr std::uint64_t kInitWritebackCache = 1ULL << 16;
inline constexpr std::uint64_t kInitParallelDirops = 1ULL << 18;
inline constexpr std::uint64_t kInitHandleKillpriv = 1ULL << 19;
inline constexpr std::uint64_t kInitPosixAcl = 1ULL << 20;
inline constexpr std::uint64_t kInitMaxPages = 1ULL << 22;
inline constexpr std::uint64_t kInitHandleKillprivV2 = 1ULL << 28;
inline constexpr std::uint64_t kInitSetxattrExt = 1ULL << 29;
inline constexpr std::uint64_t kInitExtended = 1ULL << 30;  // flags2 is meant
inline constexpr std::uint64_t kInitDirectIoAllowMmap = 1ULL << 36;
inline constexpr std::uint64_t kInitPassthrough = 1ULL << 37;
inline constexpr std::uint64_t kInitHasResend = 1ULL << 39;

inline constexpr std::uint32_t kOpenDirectIo = 1U << 0;
inline constexpr std::uint32_t kOpenKeepCache = 1U << 1;
inline constexpr std::uint32_t kOpenNoFlush = 1U << 5;
inline constexpr std::uint32_t kOpenParallelDirectWrites = 1U << 6;

inline constexpr std::uint32_t kWriteKillSetId = 1U << 2;  // FUSE_WRITE_KILL_SUIDGID

// SETXATTR's long form, and its flag: setting an access control list clears set-group-id.
inline constexpr std::uint32_t kSetxattrAclKillSgid = 1U << 0;
struct SetxattrIn {
  std::uint32_t size;
  std::uint32_t flags;
  std::uint32_t setxattr_flags;  // not in the short form
  std::uint32_t padding;
};
inline constexpr std::size_t kSetxattrShort = 8;
static_assert(sizeof(SetxattrIn) == 16);

// Has the kernel send the requests again that were read and not answered, with the uppermost bit of their numbers set.
inline constexpr std::int32_t kNotifyResend = 7;

inline constexpr std::uint32_t kOpcodeStatx = 52;
inline constexpr std::uint32_t kOpcodeCopyFileRange64 = 53;

// The reply to COPY_FILE_RANGE_64; COPY_FILE_RANGE is answered with fuse_write_out, whose count has 32 bits.
struct CopyFileRangeOut {
  std::uint64_t bytes_copied;
};

// STATX begins as GETATTR does.
struct StatxIn {
  std::uint32_t getattr_flags;
  std::uint32_t reserved;
  std::uint64_t fh;
  std::uint32_t sx_flags;
  std::uint32_t sx_mask;
};
static_assert(sizeof(StatxIn) == 24);

struct SxTime {
  std::int64_t seconds;
  std::uint32_t nanoseconds;
  std::int32_t reserved;
};

// As statx(2).
struct Statx {
  std::uint32_t mask;
  std::uint32_t blksize;
  std::uint64_t attributes;
  std::uint32_t nlink;
  std::uint32_t uid;
  std::uint32_t gid;
  std::uint16_t mode;
  std::uint16_t spare0;
  std::uint64_t ino;
  std::uint64_t size;
  std::uint64_t blocks;
  std::uint64_t attributes_mask;
  SxTime atime;
  SxTime btime;
  SxTime ctime;
  SxTime mtime;
  std::uint32_t rdev_major;
  std::uint32_t rdev_minor;
  std::uint32_t dev_major;
  std::uint32_t dev_minor;
  std::uint64_t spare2[14];
};
static_assert(sizeof(Statx) == 256);

struct StatxOut {
  std::uint64_t attr_valid;
  std::uint32_t attr_valid_nsec;
  std::uint32_t flags;
  std::uint64_t spare[2];
  Statx stat;
};

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
