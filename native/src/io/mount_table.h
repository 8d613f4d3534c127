// The mounts that this process sees, from /proc/self/mountinfo: what a backing file's file system is, where a gpufs is.
// A value owned by its reader.
// Any thread may call any function.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace gpufs {

struct MountEntry {
  std::uint64_t id = 0;
  std::uint32_t major = 0;
  std::uint32_t minor = 0;
  std::string root;           // the directory of the file system that is shown at the path
  std::string path;           // where it is mounted
  std::string type;           // "ext4", "fuse.gpufs"
  std::string super_options;  // of the file system, not of the mount: "rw,data=journal"
};

// Lines that it cannot make sense of are left out.
std::vector<MountEntry> parse_mount_table(std::string_view text);
Result<std::vector<MountEntry>> read_mount_table();

// The value of "name=value" in a comma separated list; empty where it is not there.
std::string_view option_value(std::string_view options, std::string_view name);

// "mnt_id:" in /proc/self/fdinfo, which asks no file system anything.
Result<std::uint64_t> mount_id_of(int fd);

}  // namespace gpufs
