// An inode's attributes, and the rules by which operations change them.
// Values; whoever holds one guards it.
// Any thread may call any function.
#pragma once

#include <linux/fuse.h>

#include <compare>
#include <cstdint>

#include "gpufs.h"

namespace gpufs::fuse {

struct Timestamp {
  std::int64_t seconds = 0;
  std::uint32_t nanoseconds = 0;

  static Timestamp now();
  friend bool operator==(const Timestamp&, const Timestamp&) = default;
  friend auto operator<=>(const Timestamp&, const Timestamp&) = default;
};

// A read sets the access time only if it is not later than the last change, or is a day old.
[[nodiscard]] bool atime_is_due(const gpufs_attributes& attributes, Timestamp now);

void set_atime(gpufs_attributes& attributes, Timestamp time);
void set_mtime(gpufs_attributes& attributes, Timestamp time);
void set_ctime(gpufs_attributes& attributes, Timestamp time);

// The mode after a write by somebody who may not keep set-id bits: without set-user-id, and without set-group-id where
// the group may execute (where it may not, the bit means something else).
[[nodiscard]] std::uint32_t mode_without_set_id(std::uint32_t mode);

[[nodiscard]] bool is_regular(std::uint32_t mode);

// Fills in all but the inode number and the flags, which stay as they are.
void fill_attr(const gpufs_attributes& attributes, fuse_attr& attr);

}  // namespace gpufs::fuse
