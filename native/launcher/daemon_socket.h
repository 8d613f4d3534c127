// From a mount's device number to a connection with its daemon.
// The connection is the caller's.
// Any thread may call these functions.
#pragma once

#include <sys/types.h>

#include <vector>

#include "base/unique_fd.h"
#include "io/mount_table.h"

namespace gpufs::launcher {

// Whether files with this st_dev are on a gpufs.
bool is_mounted_gpufs(const std::vector<MountEntry>& mounts, dev_t device);

// Connected to the daemon of that mount, who may have this user's descriptors: it is his own, or root's. Not
// valid where that cannot be had; gpufs/client/_find.py tells why.
UniqueFd connect_to_daemon(const std::vector<MountEntry>& mounts, dev_t device);

}  // namespace gpufs::launcher
