#include "fuse/control_messages.h"

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string_view>

#include "fuse/attributes.h"
#include "fuse/open_files.h"

namespace gpufs::fuse {

namespace {

constexpr std::size_t kOut = sizeof(fuse_out_header);

// ---- requests ----

// A TMPFILE is a CREATE in every field but the name, which the kernel gives as "/": no file can have that name, and the
// control plane recognizes it.
int tmpfile_as_create(Request& request) {
  constexpr std::size_t kName = kBodyOffset + sizeof(fuse_create_in);
  std::array<char, 2> name{};
  if (request.message.size() != kName + name.size() || !read_struct(request.message, kName, &name) ||
      name != std::array{'/', '\0'}) {
    return EOPNOTSUPP;
  }
  request.header.opcode = FUSE_CREATE;
  write_struct(request.message, 0, request.header);
  return 0;
}

// A STATX begins as a GETATTR. (ENOSYS would end STATX for all inodes.)
int statx_as_getattr(Request& request) {
  if (request.message.size() < kBodyOffset + sizeof(fuse_getattr_in)) return EINVAL;
  request.header.opcode = FUSE_GETATTR;
  request.header.len = kBodyOffset + sizeof(fuse_getattr_in);
  request.message = request.message.first(request.header.len);
  write_struct(request.message, 0, request.header);
  return 0;
}

// ---- replies ----

// The references that a reply gives the kernel: entries and an open handle, by their place in the message.
struct ReplyLayout {
  bool entry = false;
  bool directory = false;       // entries, from the beginning of the body on
  std::size_t open_at = 0;      // 0: nothing is opened
  std::uint32_t closed_by = 0;  // opcode
};

ReplyLayout layout_of(std::uint32_t opcode) {
  switch (opcode) {
    case FUSE_LOOKUP:
    case FUSE_MKNOD:
    case FUSE_MKDIR:
    case FUSE_SYMLINK:
    case FUSE_LINK:
      return {.entry = true};
    case FUSE_CREATE:
    case FUSE_TMPFILE:
      return {.entry = true, .open_at = kOut + sizeof(fuse_entry_out), .closed_by = FUSE_RELEASE};
    case FUSE_OPEN:
      return {.open_at = kOut, .closed_by = FUSE_RELEASE};
    case FUSE_OPENDIR:
      return {.open_at = kOut, .closed_by = FUSE_RELEASEDIR};
    case FUSE_READDIRPLUS:
      return {.directory = true};
    default:
      return {};
  }
}

// Calls visit(offset, name) for each entry of a reply; entries outside directories have no name.
template <typename Visit>
void for_each_entry(const ReplyLayout& layout, std::span<const std::byte> message, Visit visit) {
  if (layout.entry) visit(kOut, std::string_view());
  if (!layout.directory) return;
  fuse_direntplus entry{};
  for (std::size_t at = kOut; at <= message.size() && message.size() - at >= FUSE_NAME_OFFSET_DIRENTPLUS;) {
    std::memcpy(static_cast<void*>(&entry), message.data() + at, FUSE_NAME_OFFSET_DIRENTPLUS);
    const std::size_t bytes = FUSE_DIRENTPLUS_SIZE(&entry);
    if (bytes > message.size() - at) return;
    visit(at, std::string_view(reinterpret_cast<const char*>(message.data() + at + FUSE_NAME_OFFSET_DIRENTPLUS),
                               entry.dirent.namelen));
    at += bytes;
  }
}

void fill_entry(std::span<std::byte> message, std::size_t at, const InodeTable& table) {
  fuse_entry_out entry{};
  if (!read_struct(message, at, &entry) || entry.nodeid == 0) return;  // 0: no such name
  const std::shared_ptr<Inode> inode = table.find(entry.nodeid);
  if (!inode) return;
  fill_attr(inode->attributes(), entry.attr);
  if (!may_be_cached(entry.attr.mode)) {
    entry.attr_valid = 0;
    entry.attr_valid_nsec = 0;
  }
  write_struct(message, at, entry);
}

std::uint32_t direct_flags(const InitNegotiation& init) {
  return init.direct_io() ? FOPEN_DIRECT_IO | FOPEN_PARALLEL_DIRECT_WRITES : 0;
}

void set_open_flags(std::span<std::byte> message, std::size_t at, const InitNegotiation& init) {
  fuse_open_out out{};
  if (!read_struct(message, at, &out)) return;
  if (is_backing(out.fh)) {
    // Changes of the host's file by others must show here at once.
    out.open_flags = direct_flags(init);
  } else {
    out.open_flags &= ~std::uint32_t{FOPEN_KEEP_CACHE};
  }
  write_struct(message, at, out);
}

}  // namespace

int adapt_request(Request& request) {
  switch (request.header.opcode) {
    case FUSE_TMPFILE:
      return tmpfile_as_create(request);
    case kOpcodeStatx:
      return statx_as_getattr(request);
    default:
      return 0;
  }
}

std::span<const std::byte> adapt_reply(std::uint32_t opcode, std::span<std::byte> message, const InodeTable& table,
                                       const InitNegotiation& init, StatxOut& memory) {
  fuse_attr_out from{};
  if (opcode == kOpcodeStatx && read_struct(message, kOut, &from)) {
    memory = {};
    memory.attr_valid = from.attr_valid;
    memory.attr_valid_nsec = from.attr_valid_nsec;
    memory.stat = statx_of(from.attr);
    return std::as_bytes(std::span(&memory, 1));
  }
  const ReplyLayout layout = layout_of(opcode);
  for_each_entry(layout, message, [&](std::size_t at, std::string_view) { fill_entry(message, at, table); });
  if (layout.open_at != 0 && opcode != FUSE_OPENDIR) {
    set_open_flags(message, layout.open_at, init);
  }
  return message.subspan(kOut);
}

std::uint32_t buffer_open_flags(const InitNegotiation& init) {
  // Opening a buffer shows its present content, never pages that an earlier open left in the cache.
  return FOPEN_NOFLUSH | direct_flags(init);
}

KernelReferences references_in(std::uint32_t opcode, std::span<const std::byte> reply) {
  KernelReferences found;
  const ReplyLayout layout = layout_of(opcode);
  fuse_out_header answered{};
  fuse_open_out open{};
  if (read_struct(reply, 0, &answered) && layout.open_at != 0 && read_struct(reply, layout.open_at, &open)) {
    found.release.resize(kBodyOffset + sizeof(fuse_release_in));
    const auto length = static_cast<std::uint32_t>(found.release.size());
    fuse_in_header header{};  // kernels differ in its last fields
    header.len = length;
    header.opcode = layout.closed_by;
    header.unique = answered.unique;
    write_struct(found.release, 0, header);
    write_struct(found.release, kBodyOffset, fuse_release_in{open.fh, 0, 0, 0});
  }
  for_each_entry(layout, reply, [&](std::size_t at, std::string_view name) {
    fuse_entry_out entry{};
    if (!read_struct(reply, at, &entry) || entry.nodeid == 0) return;
    if (name != "." && name != "..") found.references.push_back({entry.nodeid, 1});  // these are not references
  });
  return found;
}

}  // namespace gpufs::fuse
