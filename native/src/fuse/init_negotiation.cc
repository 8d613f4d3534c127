#include "fuse/init_negotiation.h"

#include <algorithm>
#include <cerrno>

#include "base/pages.h"

namespace gpufs::fuse {

namespace {

constexpr std::uint16_t kBackground = 64;        // asynchronous requests at once
constexpr std::uint32_t kPagesWithoutFlag = 32;  // a request's limit where MAX_PAGES is not offered

// What is requested wherever the kernel offers it. Not among it: splicing (the control plane has a socket),
// HANDLE_KILLPRIV (set-id bits would never be cleared), locks (the kernel's own serve), write-back caching (native code
// would see writes late), caching of symbolic links' targets (those below backing/ are checked each time that one is
// followed), ATOMIC_O_TRUNC (without it the kernel truncates by SETATTR once OPEN has succeeded, so an open that fails
// leaves the contents), READDIRPLUS_AUTO (READDIR would be needed, too), and whatever changes the layout of messages
// (SECURITY_CTX, CREATE_SUPP_GROUP) except for SETXATTR_EXT.
constexpr std::uint64_t kWanted = kInitAsyncRead | kInitExportSupport | kInitBigWrites | kInitAutoInvalData |
                                  kInitDoReaddirplus | kInitAsyncDio | kInitParallelDirops | kInitMaxPages |
                                  kInitDirectIoAllowMmap | kInitSetxattrExt | kInitHasResend;
// Access control lists need both: gpufs applies the umask, unless the directory's default list replaces it.
constexpr std::uint64_t kAclFlags = kInitPosixAcl | kInitDontMask;

constexpr std::size_t kInitInShort = offsetof(fuse_init_in, flags2);  // what kernels before 7.36 send

}  // namespace

Result<fuse_init_out> InitNegotiation::answer(std::span<const std::byte> request) {
  fuse_init_in in{};
  const std::span<const std::byte> body = request.subspan(std::min(request.size(), kBodyOffset));
  if (body.size() < kInitInShort) return Status(EPROTO, "the INIT request is too short");
  std::memcpy(&in, body.data(), std::min(body.size(), sizeof(in)));
  if (in.major != FUSE_KERNEL_VERSION) return Status(EPROTO, "the kernel speaks another FUSE protocol");

  std::uint64_t offered = in.flags;
  if ((in.flags & kInitExtended) != 0) offered |= std::uint64_t{in.flags2} << 32;
  offered &= ~options_.mask_flags;
  if ((offered & kInitExtended) == 0) offered &= UINT32_MAX;
  offered_ = offered;

  std::uint64_t granted = kWanted & offered;
  if ((offered & kAclFlags) == kAclFlags) granted |= kAclFlags;
  if ((granted >> 32) != 0) granted |= kInitExtended;
  granted_ = granted;

  const bool many_pages = (granted & kInitMaxPages) != 0;
  const std::uint32_t wanted = std::min<std::uint32_t>((options_.max_write + kPageBytes - 1) / kPageBytes, UINT16_MAX);
  const std::uint32_t pages = many_pages ? wanted : kPagesWithoutFlag;
  fuse_init_out out{};
  out.major = FUSE_KERNEL_VERSION;
  out.minor = FUSE_KERNEL_MINOR_VERSION;
  out.flags = static_cast<std::uint32_t>(granted);
  out.flags2 = static_cast<std::uint32_t>(granted >> 32);
  out.max_write = std::min(options_.max_write, pages * kPageBytes);
  out.max_pages = many_pages ? static_cast<std::uint16_t>(pages) : std::uint16_t{0};
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
