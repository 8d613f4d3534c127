#include "fuse/init_negotiation.h"

#include <algorithm>
#include <cerrno>
#include <cstddef>

#include "fuse/protocol.h"

namespace gpufs::fuse {

namespace {

constexpr std::uint32_t kPage = 4096;
constexpr std::uint16_t kBackground = 64;        // asynchronous requests at once
constexpr std::uint32_t kPagesWithoutFlag = 32;  // a request's limit where MAX_PAGES is not offered

// What the control plane may see and take. Everything else is hidden from it: splicing (its descriptor is a socket),
// HANDLE_KILLPRIV (its library takes it by default, and then set-id bits would never be cleared), locks (the kernel's
// own serve), write-back caching (native code would see writes late), caching of symbolic links' targets (those below
// backing/ are checked each time that one is followed), ATOMIC_O_TRUNC (without it the kernel truncates by SETATTR once
// OPEN has succeeded, so an open that fails leaves the contents), access control lists (native code keeps them), and
// whatever changes the layout of messages (SETXATTR_EXT, which is translated when it is relayed; SECURITY_CTX and
// CREATE_SUPP_GROUP come with flags2, which is hidden entirely).
constexpr std::uint64_t kShown = kInitAsyncRead | kInitExportSupport | kInitBigWrites | kInitDontMask |
                                 kInitAutoInvalData | kInitDoReaddirplus | kInitReaddirplusAuto | kInitAsyncDio |
                                 kInitParallelDirops | kInitMaxPages | kInitExplicitInvalData;

// What is requested on its behalf wherever the kernel offers it.
constexpr std::uint64_t kAdded = kInitAsyncRead | kInitBigWrites | kInitAsyncDio | kInitParallelDirops | kInitMaxPages |
                                 kInitDirectIoAllowMmap | kInitSetxattrExt;
// Access control lists need both: gpufs applies the umask, unless the directory's default list replaces it.
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

  std::uint64_t offered = in.flags;
  if (extended && (in.flags & kInitExtended) != 0) offered |= std::uint64_t{in.flags2} << 32;
  offered &= ~options_.mask_flags;
  if ((offered & kInitExtended) == 0) offered &= UINT32_MAX;
  offered_ = offered;

  in.flags = static_cast<std::uint32_t>(offered & kShown);
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

  const std::uint64_t offered = offered_;
  std::uint64_t granted = ((out.flags & kShown) | kAdded) & offered;
  if ((offered & kAclFlags) == kAclFlags) granted |= kAclFlags;
  if ((granted >> 32) != 0) granted |= kInitExtended;

  const bool many_pages = (granted & kInitMaxPages) != 0;
  const std::uint32_t wanted = std::min<std::uint32_t>((options_.max_write + kPage - 1) / kPage, UINT16_MAX);
  const std::uint32_t pages = many_pages ? wanted : kPagesWithoutFlag;
  granted_ = granted;

  out.flags = static_cast<std::uint32_t>(granted);
  out.flags2 = static_cast<std::uint32_t>(granted >> 32);
  out.max_write = std::min(options_.max_write, pages * kPage);
  out.max_pages = many_pages ? static_cast<std::uint16_t>(pages) : std::uint16_t{0};
  out.max_readahead = std::min(out.max_readahead, relay_bytes_);
  out.max_background = std::max(out.max_background, kBackground);
  out.congestion_threshold =
      std::max(out.congestion_threshold, static_cast<std::uint16_t>(std::uint32_t{out.max_background} * 3 / 4));
  write_struct(message, kReplyAt, out);
  return {};
}

void InitNegotiation::write_statistics(JsonWriter& json) const {
  json.number("offered", offered_);
  json.number("granted", granted_);
  json.boolean("direct_io", direct_io());
}

}  // namespace gpufs::fuse
