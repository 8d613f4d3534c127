#include "fuse/init_negotiation.h"

#include <algorithm>
#include <cerrno>
#include <cstddef>

#include "fuse/protocol.h"

namespace gpufs::fuse {

namespace {

constexpr std::uint32_t kPage = 4096;
constexpr std::uint32_t kPagesWithoutFlag = 32;  // a request's limit where MAX_PAGES is not offered

// What the control plane may see and take. Everything else is hidden from it: splicing (its descriptor is a socket),
// HANDLE_KILLPRIV (its library takes it by default, and then nobody would clear set-id bits), locks (the kernel's own
// serve), write-back caching (native code would see writes late), caching of symbolic links' targets (those below
// backing/ are judged each time that one is followed), ATOMIC_O_TRUNC (without it the kernel truncates by SETATTR once
// OPEN has succeeded, so an open that fails leaves the contents), access control lists (native code keeps them), and
// whatever changes the layout of messages (SETXATTR_EXT, which native code takes back before it relays; SECURITY_CTX
// and CREATE_SUPP_GROUP come with flags2, which it is not shown at all).
constexpr std::uint64_t kShown = kInitAsyncRead | kInitExportSupport | kInitBigWrites | kInitDontMask |
                                 kInitAutoInvalData | kInitDoReaddirplus | kInitReaddirplusAuto | kInitAsyncDio |
                                 kInitParallelDirops | kInitMaxPages | kInitExplicitInvalData;

// What is asked for in its name wherever the kernel offers it.
constexpr std::uint64_t kAdded = kInitAsyncRead | kInitBigWrites | kInitAsyncDio | kInitParallelDirops | kInitMaxPages |
                                 kInitDirectIoAllowMmap | kInitSetxattrExt;
// Access control lists need both: who makes a file applies the umask, unless the directory's list stands in for it.
constexpr std::uint64_t kAclFlags = kInitPosixAcl | kInitDontMask;

constexpr std::size_t kInitInShort = offsetof(fuse_init_in, flags2);  // what kernels before 7.36 send
constexpr std::size_t kReplyAt = sizeof(fuse_out_header);

}  // namespace

Status InitNegotiation::amend_request(std::span<std::byte> message) {
  if (message.size() < sizeof(fuse_in_header) + kInitInShort) return Status(EPROTO, "the INIT request is too short");
  fuse_init_in in{};
  const bool extended = message.size() >= sizeof(fuse_in_header) + sizeof(in);
  const std::size_t bytes = extended ? sizeof(in) : kInitInShort;
  std::memcpy(&in, message.data() + sizeof(fuse_in_header), bytes);
  if (in.major != FUSE_KERNEL_VERSION) return Status(EPROTO, "the kernel speaks another FUSE protocol");

  kernel_minor_ = in.minor;
  offered_ = in.flags;
  if (extended && (in.flags & kInitExtended) != 0) offered_ |= std::uint64_t{in.flags2} << 32;
  offered_ &= ~options_.mask_flags;
  if ((offered_ & kInitExtended) == 0) offered_ &= UINT32_MAX;

  in.flags = static_cast<std::uint32_t>(offered_ & kShown);
  in.flags2 = 0;
  std::memcpy(message.data() + sizeof(fuse_in_header), &in, bytes);
  return {};
}

Status InitNegotiation::amend_reply(std::span<std::byte> message) {
  fuse_out_header header{};
  fuse_init_out out{};
  if (!read_struct(message, 0, &header)) return Status(EPROTO, "the INIT reply is too short");
  if (header.error != 0) return {};
  if (!read_struct(message, kReplyAt, &out)) return Status(EPROTO, "the INIT reply is too short");

  granted_ = ((out.flags & kShown) | kAdded) & offered_;
  if ((offered_ & kAclFlags) == kAclFlags) granted_ |= kAclFlags;
  if ((granted_ >> 32) != 0) granted_ |= kInitExtended;

  const std::uint32_t pages = (options_.max_write + kPage - 1) / kPage;
  max_pages_ = granted(kInitMaxPages) ? std::min<std::uint32_t>(pages, UINT16_MAX) : kPagesWithoutFlag;
  max_write_ = std::min(options_.max_write, max_pages_ * kPage);

  out.flags = static_cast<std::uint32_t>(granted_);
  out.flags2 = static_cast<std::uint32_t>(granted_ >> 32);
  out.max_write = max_write_;
  out.max_pages = granted(kInitMaxPages) ? static_cast<std::uint16_t>(max_pages_) : std::uint16_t{0};
  out.max_readahead = std::min(out.max_readahead, options_.relay_bytes);
  const std::uint32_t background = std::min<std::uint32_t>(options_.max_background, UINT16_MAX);
  out.max_background = std::max(out.max_background, static_cast<std::uint16_t>(background));
  out.congestion_threshold =
      std::max(out.congestion_threshold, static_cast<std::uint16_t>(std::uint32_t{out.max_background} * 3 / 4));
  write_struct(message, kReplyAt, out);
  return {};
}

void InitNegotiation::write_statistics(JsonWriter& json) const {
  json.number("kernel_minor", kernel_minor_);
  json.number("offered", offered_);
  json.number("granted", granted_);
  json.number("max_write", max_write_);
  json.number("max_pages", max_pages_);
  json.boolean("direct_io", direct_io());
}

}  // namespace gpufs::fuse
