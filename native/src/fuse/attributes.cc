#include "fuse/attributes.h"

#include <sys/stat.h>

#include <ctime>

namespace gpufs::fuse {

Timestamp Timestamp::now() {
  timespec time{};
  ::clock_gettime(CLOCK_REALTIME, &time);
  return {time.tv_sec, static_cast<std::uint32_t>(time.tv_nsec)};
}

bool atime_is_due(const gpufs_attributes& attributes, Timestamp now) {
  constexpr std::int64_t kDay = 24 * 60 * 60;
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

std::uint32_t mode_without_set_id(std::uint32_t mode) {
  if (!is_regular(mode)) return mode;
  std::uint32_t cleared = mode & ~static_cast<std::uint32_t>(S_ISUID);
  if ((mode & S_IXGRP) != 0) cleared &= ~static_cast<std::uint32_t>(S_ISGID);
  return cleared;
}

bool is_regular(std::uint32_t mode) { return (mode & S_IFMT) == S_IFREG; }

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

}  // namespace gpufs::fuse
