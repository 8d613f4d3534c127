#include "fuse/name_operations.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstddef>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "base/math.h"
#include "base/status.h"
#include "fuse/control_messages.h"
#include "fuse/protocol.h"

namespace gpufs::fuse {

namespace {

// In listings, "." and ".." come before the names.
constexpr std::uint64_t kDots = 2;
constexpr std::uint32_t kTypeShift = 12;                    // from the type in a mode to the one in a listing
constexpr std::uint64_t kForever = 10LL * 365 * 24 * 3600;  // seconds

// The reply to CREATE.
struct Created {
  fuse_entry_out entry;
  fuse_open_out open;
};

// The texts behind the arguments, each with a zero at its end; nullopt if there are fewer or more.
template <std::size_t kCount>
std::optional<std::array<std::string_view, kCount>> texts(const Request& request, std::size_t arguments) {
  std::array<std::string_view, kCount> found;
  for (std::string_view& text : found) {
    const std::optional<std::string_view> next = request.text(arguments);
    if (!next) return std::nullopt;
    text = *next;
    arguments += text.size() + 1;
  }
  return kBodyOffset + arguments == request.message.size() ? std::optional(found) : std::nullopt;
}

NewInode wanted_by(const Request& request, std::uint32_t kind, std::uint32_t mode, std::uint32_t umask) {
  return {
      .mode = kind | (mode & kPermissionBits), .umask = umask, .uid = request.header.uid, .gid = request.header.gid};
}

}  // namespace

bool NameOperations::crosses_to_host(const Request& request) {
  switch (request.header.opcode) {
    case FUSE_LINK:
    case FUSE_RENAME:
    case FUSE_RENAME2: {
      const auto other = request.arguments<std::uint64_t>();  // with it all three begin
      return (other >= kFirstHostInode) != (request.header.nodeid >= kFirstHostInode);
    }
    default:
      return false;
  }
}

// ---- replies ----

fuse_entry_out NameOperations::entry_of(const Inode& inode) const {
  fuse_entry_out out{};
  out.nodeid = inode.ino();
  if (inode.is_directory()) {
    // Once the mount is dead, asking for a name again makes the kernel drop it. Nothing can be mounted below a
    // directory without its name, also not upon a bind of it, by which containers that run get the next mount.
    out.entry_valid = kForever;
  } else if (!inode.is_registered()) {  // its names go without the kernel's knowledge
    out.entry_valid = kValidSeconds;
  }
  out.attr.ino = inode.ino();
  fill_attr(inode.attributes(), out.attr);
  if (may_be_cached(out.attr.mode)) out.attr_valid = kValidSeconds;
  return out;
}

void NameOperations::reply_made(const Result<InodePointer>& made, Responder& responder) const {
  made.ok() ? reply_entry(*made.value(), responder) : responder.error(made.error());
}

void NameOperations::reply_open(std::uint64_t fh, std::uint32_t more_flags, Responder& responder) const {
  fuse_open_out out = opened(fh);
  out.open_flags |= more_flags;
  responder.body(out);
}

void NameOperations::reply_created(const Inode& inode, std::uint64_t fh, const Request& request,
                                   Responder& responder) const {
  Created out{entry_of(inode), opened(fh)};
  // gpufs.register() creates files so, which are about to be registered: see entry_of().
  if ((request.arguments<fuse_create_in>().flags & O_NOATIME) != 0)
    out.entry.entry_valid = out.entry.entry_valid_nsec = 0;
  responder.body(out);
}

fuse_open_out NameOperations::opened(std::uint64_t fh) const {
  fuse_open_out out{};
  out.fh = fh;
  out.open_flags = buffer_open_flags(relay_.init());
  return out;
}

// ---- names ----

void NameOperations::lookup(const InodePointer& inode, Request& request, Responder responder) {
  const auto name = texts<1>(request, 0);
  if (!name || name->front().empty()) return responder.error(EINVAL);
  // "." is looked up in other inodes than directories, too: by file handles of an NFS export.
  if (!inode->is_directory() && name->front() != ".") return responder.error(ENOTDIR);
  if (name->front().size() > NAME_MAX) return responder.error(ENAMETOOLONG);
  const InodePointer found = names_.look_up(inode, name->front());
  bool held = false;
  if (found) {
    const Records::Change change(table_.records());
    held = found->hold();
    if (held) table_.records().done(responder, {found->ino(), 0});
  }
  if (held) return reply_entry(*found, responder);
  fuse_entry_out none{};  // without an inode: the kernel may remember that the name does not exist
  none.entry_valid = kValidSeconds;
  responder.body(none);
}

void NameOperations::create(const InodePointer& directory, Request& request, Responder responder) {
  const auto in = request.arguments<fuse_create_in>();
  const auto name = texts<1>(request, sizeof(in));
  if (!name) return responder.error(EINVAL);
  const NewInode wanted = wanted_by(request, S_IFREG, in.mode, in.umask);
  std::optional<std::string_view> given = name->front();
  if (request.header.opcode == FUSE_TMPFILE) given.reset();
  const Result<Namespace::Opened> made =
      names_.create_open(*directory, given, wanted, static_cast<int>(in.flags), responder);
  // The kernel remembers that there was no such name. On ESTALE it looks the name up again and opens the file.
  if (made.error() == EEXIST && (in.flags & O_EXCL) == 0) return responder.error(ESTALE);
  if (!made.ok()) return responder.error(made.error());
  reply_created(*made.value().inode, made.value().handle, request, responder);
}

void NameOperations::mknod(const InodePointer& directory, Request& request, Responder responder) {
  const auto in = request.arguments<fuse_mknod_in>();
  const auto name = texts<1>(request, sizeof(in));
  const std::uint32_t kind = (in.mode & S_IFMT) != 0 ? in.mode & S_IFMT : S_IFREG;
  constexpr std::uint32_t kKinds[] = {S_IFREG, S_IFIFO, S_IFSOCK, S_IFCHR, S_IFBLK};
  if (!name || std::ranges::find(kKinds, kind) == std::end(kKinds)) return responder.error(EINVAL);
  NewInode wanted = wanted_by(request, kind, in.mode, in.umask);
  wanted.rdev = in.rdev;
  reply_made(names_.create(*directory, name->front(), wanted, responder), responder);
}

void NameOperations::mkdir(const InodePointer& directory, Request& request, Responder responder) {
  const auto in = request.arguments<fuse_mkdir_in>();
  const auto name = texts<1>(request, sizeof(in));
  if (!name) return responder.error(EINVAL);
  reply_made(names_.create(*directory, name->front(), wanted_by(request, S_IFDIR, in.mode, in.umask), responder),
             responder);
}

void NameOperations::symlink(const InodePointer& directory, Request& request, Responder responder) {
  const auto name_and_target = texts<2>(request, 0);
  if (!name_and_target) return responder.error(EINVAL);
  NewInode wanted = wanted_by(request, S_IFLNK, 0777, 0);
  wanted.target = name_and_target->back();
  reply_made(names_.create(*directory, name_and_target->front(), wanted, responder), responder);
}

void NameOperations::link(const InodePointer& directory, Request& request, Responder responder) {
  const auto in = request.arguments<fuse_link_in>();
  const auto name = texts<1>(request, sizeof(in));
  if (!name) return responder.error(EINVAL);
  const InodePointer inode = table_.find(in.oldnodeid);
  if (!inode || !inode->hold()) return responder.error(ESTALE);
  const Status status = names_.link(inode, *directory, name->front(), responder);
  if (status.ok()) return reply_entry(*inode, responder);
  table_.forget(inode->ino(), 1);
  responder.error(status.error());
}

void NameOperations::remove(const InodePointer& directory, Request& request, Responder responder) {
  const auto name = texts<1>(request, 0);
  if (!name) return responder.error(EINVAL);
  responder.answer(names_.remove(*directory, name->front(), request.header.opcode == FUSE_RMDIR, responder).error());
}

void NameOperations::rename(const InodePointer& directory, Request& request, Responder responder) {
  fuse_rename2_in in{};
  const bool has_flags = request.header.opcode == FUSE_RENAME2;
  if (has_flags) {
    in = request.arguments<fuse_rename2_in>();
  } else {
    in.newdir = request.arguments<fuse_rename_in>().newdir;
  }
  const auto both = texts<2>(request, has_flags ? sizeof(fuse_rename2_in) : sizeof(fuse_rename_in));
  if (!both) return responder.error(EINVAL);
  const InodePointer to = table_.find(in.newdir);
  if (!to) return responder.error(ESTALE);
  const fuse_in_header& caller = request.header;
  responder.answer(
      names_.rename(*directory, both->front(), *to, both->back(), in.flags, caller.uid, caller.gid, responder).error());
}

void NameOperations::readlink(const InodePointer& inode, Request& /*request*/, Responder responder) {
  if (!S_ISLNK(inode->kind())) return responder.error(EINVAL);
  table_.was_read(*inode);
  const std::string_view target = inode->target();
  responder.data(std::as_bytes(std::span(target)));
}

// ---- open files and directories ----

void NameOperations::open(const InodePointer& inode, Request& request, Responder responder) {
  const Result<std::uint64_t> fh =
      table_.open(inode, static_cast<int>(request.arguments<fuse_open_in>().flags), responder);
  if (!fh.ok()) return responder.error(fh.error());
  reply_open(fh.value(), read_ahead_.is_own(request.header.pid) ? FOPEN_KEEP_CACHE : 0, responder);
}

void NameOperations::opendir(const InodePointer& inode, Request& /*request*/, Responder responder) {
  if (!inode->is_directory()) return responder.error(ENOTDIR);
  auto directory = std::make_shared<OpenDirectory>();
  directory->inode = inode;
  fuse_open_out out{};
  {
    const Records::Change together(table_.records());
    out.fh = directories_.add(std::move(directory));
    table_.records().done(responder, {inode->ino(), out.fh});
  }
  responder.body(out);
}

void NameOperations::restore_directories() {
  directories_.restore([this](const FileRecord& record) -> std::shared_ptr<OpenDirectory> {
    auto directory = std::make_shared<OpenDirectory>();
    directory->inode = table_.find(record.inode);
    if (!directory->inode) return nullptr;
    directory->end = names_.next_number(*directory->inode);
    return directory;
  });
}

void NameOperations::releasedir(const Directory& /*directory*/, Request& request, Responder responder) {
  static_cast<void>(close_directory(request.arguments<std::uint64_t>()));
  responder.ok();
}

void NameOperations::fsyncdir(const Directory& /*directory*/, Request& /*request*/, Responder responder) {
  responder.answer(table_.asks_for_fsync() ? 0 : ENOSYS);
}

void NameOperations::readdirplus(const Directory& open, Request& request, Responder responder) {
  const auto in = request.arguments<fuse_read_in>();
  OpenDirectory& directory = *open;
  if (in.offset == 0) {  // also after rewinddir(3)
    directory.end = names_.next_number(*directory.inode);
    if ((in.flags & O_NOATIME) == 0) table_.was_read(*directory.inode);
  }
  const std::span<std::byte> space = request.payload.first(std::min<std::size_t>(in.size, request.payload.size()));
  std::size_t used = 0;
  // False if the entry does not fit. cookie: where a listing continues that has read this entry.
  const auto add = [&](std::uint64_t cookie, std::string_view name, Inode& inode, bool counts) {
    const std::size_t end = FUSE_NAME_OFFSET_DIRENTPLUS + name.size();
    const std::size_t bytes = round_up(end, sizeof(std::uint64_t));
    if (bytes > space.size() - used) return false;
    if (counts && !inode.hold()) return true;
    fuse_direntplus entry{};
    entry.entry_out = entry_of(inode);
    entry.dirent.ino = inode.ino();
    entry.dirent.off = cookie;
    entry.dirent.namelen = static_cast<std::uint32_t>(name.size());
    entry.dirent.type = inode.kind() >> kTypeShift;
    std::byte* const at = space.data() + used;
    std::memcpy(at, &entry, FUSE_NAME_OFFSET_DIRENTPLUS);
    std::memcpy(at + FUSE_NAME_OFFSET_DIRENTPLUS, name.data(), name.size());
    std::memset(at + end, 0, bytes - end);
    used += bytes;
    return true;
  };
  // The kernel takes no references to "." and "..".
  const bool dots_fit = (in.offset >= 1 || add(1, ".", *directory.inode, false)) &&
                        (in.offset >= kDots || add(kDots, "..", *names_.parent_of(directory.inode), false));
  if (dots_fit) {
    names_.list(*directory.inode, in.offset - std::min(in.offset, kDots), directory.end,
                [&](std::uint64_t number, const std::string& name, Inode& inode) {
                  return add(number + kDots + 1, name, inode, true);
                });
  }
  responder.data(space.first(used));
}

void NameOperations::forget(const Request& request) {
  std::vector<fuse_forget_one> all;
  if (request.header.opcode == FUSE_FORGET) {
    fuse_forget_in in{};
    if (read_struct(request.message, kBodyOffset, &in)) all.push_back({request.header.nodeid, in.nlookup});
  } else {
    fuse_batch_forget_in in{};
    constexpr std::size_t kFirst = kBodyOffset + sizeof(in);
    if (read_struct(request.message, kBodyOffset, &in) &&
        (request.message.size() - kFirst) / sizeof(fuse_forget_one) >= in.count) {
      all.resize(in.count);
      if (in.count != 0) std::memcpy(all.data(), request.message.data() + kFirst, in.count * sizeof(fuse_forget_one));
    }
  }
  if (all.empty()) return count(counters_.bad_requests);
  std::erase_if(all, [this](const fuse_forget_one& one) { return table_.forget(one.nodeid, one.nlookup); });
  relay_.forget(all);
}

}  // namespace gpufs::fuse
