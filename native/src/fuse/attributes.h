// An inode's attributes, and the rules by which requests change them.
#pragma once

#include <linux/fuse.h>

#include <compare>
#include <cstdint>
#include <optional>

#include "fuse/protocol.h"
#include "gpufs.h"

namespace gpufs::fuse {

inline constexpr std::uint32_t kPermissionBits = 07777;  // of a mode, with the set-id bits and the sticky bit

struct Timestamp {
  std::int64_t seconds = 0;
  std::uint32_t nanoseconds = 0;

  static Timestamp now();
  friend bool operator==(const Timestamp&, const Timestamp&) = default;
  friend auto operator<=>(const Timestamp&, const Timestamp&) = default;  // NOLINT(modernize-use-nullptr): no pointer
};

// The attributes that a request changes; the others stay.
struct AttributeChanges {
  std::optional<std::uint32_t> mode;
  std::optional<std::uint32_t> uid;
  std::optional<std::uint32_t> gid;
  std::optional<std::uint64_t> size;  // of a regular file: resizes the buffer
  std::optional<Timestamp> atime;
  std::optional<Timestamp> mtime;
};

// Which reads set the access time (mount options).
enum class AccessTimes : std::uint8_t {
  kRelative,  // if it is not later than the last change, or a day old
  kAlways,
  kNever,
};
[[nodiscard]] bool atime_is_due(AccessTimes policy, const gpufs_attributes& attributes, Timestamp now);

void set_atime(gpufs_attributes& attributes, Timestamp time);
void set_mtime(gpufs_attributes& attributes, Timestamp time);
void set_ctime(gpufs_attributes& attributes, Timestamp time);

// Which set-id bits a change of a regular file's contents clears.
enum class SetIdLoss : std::uint8_t {
  kNone,
  kExecutable,  // set-user-id, and set-group-id where the group may execute
  kAll,         // set-group-id in any case
};
[[nodiscard]] std::uint32_t mode_without_set_id(std::uint32_t mode, SetIdLoss loss);
// True if the mode has set-group-id without execution for the group, which only changes by others than its members
// clear.
[[nodiscard]] bool has_bare_set_gid(std::uint32_t mode);

[[nodiscard]] bool is_regular(std::uint32_t mode);
// False for a regular file with a set-id bit: writing to it clears the bit without the kernel's knowledge, so the
// kernel must ask for its attributes each time.
[[nodiscard]] bool may_be_cached(std::uint32_t mode);

// For how many seconds the kernel may cache names and attributes.
inline constexpr std::uint64_t kValidSeconds = 1;

// Fills in all fields except the inode number and the flags.
void fill_attr(const gpufs_attributes& attributes, fuse_attr& attr);
// The same as statx(2) has it, with the time of birth.
[[nodiscard]] struct statx statx_of(const gpufs_attributes& attributes, Timestamp birth);
// A reply to GETATTR as one to STATX, without a time of birth.
[[nodiscard]] struct statx statx_of(const fuse_attr& attr);

}  // namespace gpufs::fuse
