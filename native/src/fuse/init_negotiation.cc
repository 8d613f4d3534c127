#include "fuse/init_negotiation.h"

#include <algorithm>
#include <cerrno>

#include "base/pages.h"

namespace gpufs::fuse {

namespace {

constexpr std::uint16_t kBackground = 64;  // asynchronous requests at once

// What every supported kernel offers. Not among it: splicing (the control plane has a socket),
// HANDLE_KILLPRIV (set-id bits would never be cleared), locks (the kernel's own serve), write-back caching (native code
// would see writes late), caching of symbolic links' targets (those below backing/ are checked each time that one is
// followed), ATOMIC_O_TRUNC (without it the kernel truncates by SETATTR once OPEN has succeeded, so an open that fails
// leaves the contents), READDIRPLUS_AUTO (READDIR would be needed, too), and whatever changes the layout of messages
// (SECURITY_CTX, CREATE_SUPP_GROUP) except for SETXATTR_EXT.
// POSIX_ACL comes with DONT_MASK: gpufs applies the umask, unless the directory's default list replaces it.
constexpr std::uint64_t kNeeded = FUSE_ASYNC_READ | FUSE_EXPORT_SUPPORT | FUSE_BIG_WRITES | FUSE_DONT_MASK |
                                  FUSE_AUTO_INVAL_DATA | FUSE_DO_READDIRPLUS | FUSE_ASYNC_DIO | FUSE_PARALLEL_DIROPS |
                                  FUSE_POSIX_ACL | FUSE_MAX_PAGES | FUSE_SETXATTR_EXT | FUSE_INIT_EXT;
// Requested wherever the kernel offers it.
constexpr std::uint64_t kWanted = kInitDirectIoAllowMmap | kInitHasResend;

}  // namespace

Result<fuse_init_out> InitNegotiation::answer(std::span<const std::byte> request) {
  fuse_init_in in{};
  if (!read_struct(request, kBodyOffset, &in)) return Status(EPROTO, "the INIT request is too short");
  if (in.major != FUSE_KERNEL_VERSION) return Status(EPROTO, "the kernel speaks another FUSE protocol");

  const std::uint64_t offered = (in.flags | (std::uint64_t{in.flags2} << 32)) & ~options_.mask_flags;
  if ((offered & kNeeded) != kNeeded) return Status(EPROTO, "the kernel is older than Linux 6.1");
  const std::uint64_t granted = (kNeeded | kWanted) & offered;
  offered_ = offered;
  granted_ = granted;

  fuse_init_out out{};
  out.major = FUSE_KERNEL_VERSION;
  out.minor = FUSE_KERNEL_MINOR_VERSION;
  out.flags = static_cast<std::uint32_t>(granted);
  out.flags2 = static_cast<std::uint32_t>(granted >> 32);
  out.max_write = options_.max_write;
  out.max_pages = static_cast<std::uint16_t>(options_.max_write / kPageBytes);
  out.max_readahead = std::min(in.max_readahead, relay_bytes_);
  out.max_background = kBackground;
  out.congestion_threshold = kBackground * 3 / 4;
  out.time_gran = 1;
  return out;
}

void InitNegotiation::restore(std::uint64_t offered, std::uint64_t granted) {
  offered_ = offered;
  granted_ = granted;
}

}  // namespace gpufs::fuse
