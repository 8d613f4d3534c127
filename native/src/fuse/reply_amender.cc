#include "fuse/reply_amender.h"

#include <cstddef>

#include "fuse/backing_table.h"
#include "fuse/protocol.h"

namespace gpufs::fuse {

namespace {

constexpr std::size_t kBody = sizeof(fuse_out_header);

void amend_entry(std::span<std::byte> message, std::size_t at, const InodeTable& table) {
  fuse_entry_out entry{};
  if (!read_struct(message, at, &entry) || entry.nodeid == 0) return;  // 0: a name that is not there
  const std::shared_ptr<Inode> inode = table.find(entry.nodeid);
  if (!inode) return;
  fill_attr(inode->attributes(), entry.attr);
  if (!may_be_cached(entry.attr.mode)) {
    entry.attr_valid = 0;
    entry.attr_valid_nsec = 0;
  }
  write_struct(message, at, entry);
}

void amend_open(std::span<std::byte> message, std::size_t at, const InodeTable& table, bool direct_io) {
  fuse_open_out out{};
  if (!read_struct(message, at, &out)) return;
  if (table.file(out.fh)) {
    // Whoever opens a buffer sees what is in it now: never the pages of an earlier opening.
    out.open_flags = kOpenNoFlush | (direct_io ? kOpenDirectIo | kOpenParallelDirectWrites : 0);
  } else if (BackingTable::is_backing(out.fh)) {
    // What others do to the host's file must show here at once.
    out.open_flags = direct_io ? kOpenDirectIo | kOpenParallelDirectWrites : 0;
  } else {
    out.open_flags &= ~kOpenKeepCache;
  }
  write_struct(message, at, out);
}

void amend_directory(std::span<std::byte> message, const InodeTable& table) {
  std::size_t at = kBody;
  fuse_direntplus entry{};
  constexpr std::size_t kFixed = offsetof(fuse_direntplus, dirent) + offsetof(fuse_dirent, name);
  while (at <= message.size() && message.size() - at >= kFixed) {
    std::memcpy(static_cast<void*>(&entry), message.data() + at, kFixed);
    const std::size_t bytes = FUSE_REC_ALIGN(kFixed + std::size_t{entry.dirent.namelen});
    if (bytes > message.size() - at) return;
    amend_entry(message, at, table);
    at += bytes;
  }
}

}  // namespace

std::span<const std::byte> statx_reply_from(std::span<const std::byte> message, StatxOut& room) {
  fuse_attr_out from{};
  if (!read_struct(message, kBody, &from)) return message.subspan(kBody);
  room = {};
  room.attr_valid = from.attr_valid;
  room.attr_valid_nsec = from.attr_valid_nsec;
  room.stat = statx_of(from.attr);
  return std::as_bytes(std::span(&room, 1));
}

void amend_reply(std::uint32_t opcode, std::span<std::byte> message, const InodeTable& table, bool direct_io) {
  fuse_out_header header{};
  if (!read_struct(message, 0, &header) || header.error != 0) return;
  switch (opcode) {
    case FUSE_LOOKUP:
    case FUSE_MKNOD:
    case FUSE_MKDIR:
    case FUSE_SYMLINK:
    case FUSE_LINK:
      return amend_entry(message, kBody, table);
    case FUSE_CREATE:
    case FUSE_TMPFILE:
      amend_entry(message, kBody, table);
      return amend_open(message, kBody + sizeof(fuse_entry_out), table, direct_io);
    case FUSE_OPEN:
      return amend_open(message, kBody, table, direct_io);
    case FUSE_READDIRPLUS:
      return amend_directory(message, table);
    default:
      return;
  }
}

}  // namespace gpufs::fuse
