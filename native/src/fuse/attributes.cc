#include "fuse/attributes.h"

#include <linux/stat.h>
#include <sys/stat.h>

#include <ctime>

namespace gpufs::fuse {

namespace {

statx_timestamp time_of(std::int64_t seconds, std::uint32_t nanoseconds) { return {seconds, nanoseconds, {}}; }

}  // namespace

Timestamp Timestamp::now() {
  timespec time{};
  ::clock_gettime(CLOCK_REALTIME, &time);
  return {time.tv_sec, static_cast<std::uint32_t>(time.tv_nsec)};
}

bool atime_is_due(AccessTimes policy, const gpufs_attributes& attributes, Timestamp now) {
  if (policy != AccessTimes::kRelative) return policy == AccessTimes::kAlways;
  constexpr std::int64_t kDay = std::int64_t{24} * 60 * 60;
  const Timestamp atime{attributes.atime, attributes.atime_ns};
  return atime <= Timestamp{attributes.mtime, attributes.mtime_ns} ||
         atime <= Timestamp{attributes.ctime, attributes.ctime_ns} || now.seconds - atime.seconds >= kDay;
}

void set_atime(gpufs_attributes& attributes, Timestamp time) {
  attributes.atime = time.seconds;
  attributes.atime_ns = time.nanoseconds;
}

void set_mtime(gpufs_attributes& attributes, Timestamp time) {
  attributes.mtime = time.seconds;
  attributes.mtime_ns = time.nanoseconds;
}

void set_ctime(gpufs_attributes& attributes, Timestamp time) {
  attributes.ctime = time.seconds;
  attributes.ctime_ns = time.nanoseconds;
}

std::uint32_t mode_without_set_id(std::uint32_t mode, SetIdLoss loss) {
  if (!is_regular(mode) || loss == SetIdLoss::kNone) return mode;
  std::uint32_t cleared = mode & ~static_cast<std::uint32_t>(S_ISUID);
  if ((mode & S_IXGRP) != 0 || loss == SetIdLoss::kAll) cleared &= ~static_cast<std::uint32_t>(S_ISGID);
  return cleared;
}

bool has_bare_set_gid(std::uint32_t mode) { return is_regular(mode) && (mode & (S_ISGID | S_IXGRP)) == S_ISGID; }

bool is_regular(std::uint32_t mode) { return (mode & S_IFMT) == S_IFREG; }

bool may_be_cached(std::uint32_t mode) { return !is_regular(mode) || (mode & (S_ISUID | S_ISGID)) == 0; }

void fill_attr(const gpufs_attributes& attributes, fuse_attr& attr) {
  attr.size = attributes.size;
  attr.blocks = attributes.blocks;
  attr.atime = static_cast<std::uint64_t>(attributes.atime);
  attr.mtime = static_cast<std::uint64_t>(attributes.mtime);
  attr.ctime = static_cast<std::uint64_t>(attributes.ctime);
  attr.atimensec = attributes.atime_ns;
  attr.mtimensec = attributes.mtime_ns;
  attr.ctimensec = attributes.ctime_ns;
  attr.mode = attributes.mode;
  attr.nlink = attributes.nlink;
  attr.uid = attributes.uid;
  attr.gid = attributes.gid;
  attr.rdev = attributes.rdev;
  attr.blksize = attributes.blksize;
}

struct statx statx_of(const gpufs_attributes& attributes, Timestamp birth) {
  fuse_attr attr{};
  attr.ino = attributes.ino;
  fill_attr(attributes, attr);
  struct statx stat = statx_of(attr);
  stat.stx_mask |= STATX_BTIME;
  stat.stx_btime = time_of(birth.seconds, birth.nanoseconds);
  return stat;
}

struct statx statx_of(const fuse_attr& attr) {
  struct statx stat {};
  stat.stx_mask = STATX_BASIC_STATS;
  stat.stx_blksize = attr.blksize;
  stat.stx_nlink = attr.nlink;
  stat.stx_uid = attr.uid;
  stat.stx_gid = attr.gid;
  stat.stx_mode = static_cast<std::uint16_t>(attr.mode);
  stat.stx_ino = attr.ino;
  stat.stx_size = attr.size;
  stat.stx_blocks = attr.blocks;
  stat.stx_atime = time_of(static_cast<std::int64_t>(attr.atime), attr.atimensec);
  stat.stx_ctime = time_of(static_cast<std::int64_t>(attr.ctime), attr.ctimensec);
  stat.stx_mtime = time_of(static_cast<std::int64_t>(attr.mtime), attr.mtimensec);
  // In the kernel's 32-bit encoding.
  stat.stx_rdev_major = (attr.rdev >> 8) & 0xfff;
  stat.stx_rdev_minor = (attr.rdev & 0xff) | ((attr.rdev >> 12) & 0xfff00);
  return stat;
}

}  // namespace gpufs::fuse
