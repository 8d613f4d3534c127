// The process behind a request, and the rights that the kernel's own permission checks would use.
// The functions read /proc, which takes some 20 microseconds.
#pragma once

#include <cstdint>

#include "fuse/protocol.h"

namespace gpufs::fuse {

struct Caller {
  std::uint32_t gid = 0;
  std::uint32_t pid = 0;  // 0: not of this PID namespace

  static Caller of(const fuse_in_header& header) { return {header.gid, header.pid}; }

  // By its group or its supplementary groups.
  [[nodiscard]] bool in_group(std::uint32_t group) const;
  // CAP_FSETID outside of all user namespaces: its changes to a file leave set-id bits.
  [[nodiscard]] bool keeps_set_id() const;
  // The caller's changes to a file of this group leave set-gid: it is in the group, or may keep all such bits.
  [[nodiscard]] bool keeps_set_gid_of(std::uint32_t group) const { return in_group(group) || keeps_set_id(); }
  // The caller has been killed or is exiting, so the results of its calls do not matter. False if it is not visible.
  [[nodiscard]] bool dying() const;
  // CAP_SYS_ADMIN outside of all user namespaces: it may list trusted.* attributes.
  [[nodiscard]] bool administers() const;
};

}  // namespace gpufs::fuse
