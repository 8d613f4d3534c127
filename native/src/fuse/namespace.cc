#include "fuse/namespace.h"

#include <linux/fs.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <climits>

#include "base/log.h"
#include "base/pages.h"
#include "memory/account.h"

namespace gpufs::fuse {

namespace {

// Programs read so much at once: a larger size only makes small reads slow.
constexpr std::uint32_t kBufferBlock = 1 << 20;

bool is_special(std::string_view name) { return name == "." || name == ".." || name.empty(); }

Status check_name(std::string_view name) {
  return name.size() > NAME_MAX ? Status(ENAMETOOLONG, "a name of more than 255 bytes") : Status();
}

// Whether a directory takes this new name.
Status check_new_name(const Inode& directory, const InodeNames& names, std::string_view name) {
  if (!directory.is_directory()) return Status(ENOTDIR, "not a directory");
  TRY(check_name(name));
  if (is_special(name) || names.entries().contains(name)) return Status(EEXIST, "the name exists");
  if (directory.is_fixed()) return Status(EPERM, "the directory belongs to the mount");
  if (names.closed()) return Status(ENOENT, "the directory has been removed");
  return {};
}

// Whether users may change the names in a directory.
Status check_users_directory(const Inode& directory) {
  if (!directory.is_directory()) return Status(ENOTDIR, "not a directory");
  return directory.is_fixed() ? Status(EPERM, "the directory belongs to the mount") : Status();
}

// The inode that a name leads to.
Result<std::shared_ptr<Inode>> find_entry(const InodeNames& names, std::string_view name) {
  TRY(check_name(name));
  const auto found = names.entries().find(name);
  if (found == names.entries().end()) return Status(ENOENT, "no such name");
  return found->second.inode;
}

// Names do not move or link between devices, nor across the border of a limited directory.
bool same_realm(const Inode& one, const Inode& other) {
  return one.device() == other.device() && one.directory_account() == other.directory_account();
}

Status check_replaceable(const Inode& inode, const Inode& target, const InodeNames& target_names) {
  if (target.is_directory()) {
    if (!inode.is_directory()) return Status(EISDIR, "a directory");
    if (!target_names.entries().empty()) return Status(ENOTEMPTY, "the directory has entries");
  } else if (inode.is_directory()) {
    return Status(ENOTDIR, "not a directory");
  }
  return {};
}

}  // namespace

Namespace::~Namespace() {
  // Directories and what is in them own each other.
  for (const InodePointer& inode : table_.all()) NamesWriter::drop(*inode);
}

// ---- new inodes ----

Result<Namespace::InodePointer> Namespace::place(std::uint64_t directory, std::string_view name,
                                                 gpufs_attributes attributes, std::string_view target) {
  NamesWriter writer(mutex_, table_);
  const InodePointer above = table_.find(directory);
  if (directory != 0 && (!above || !above->is_directory())) return Status(ENOENT, "no such directory");
  const Timestamp now = Timestamp::now();
  set_atime(attributes, now);
  set_mtime(attributes, now);
  set_ctime(attributes, now);
  attributes.nlink = S_ISDIR(attributes.mode) ? 2 : 1;
  attributes.blksize = kPageBytes;
  if (!target.empty()) attributes.size = target.size();
  if (!above) attributes.ino = InodeTable::kRootInode;
  InodePointer known = above ? nullptr : table_.find(InodeTable::kRootInode);
  if (above) {
    const auto entry = above->names_.entries().find(name);
    if (entry != above->names_.entries().end()) known = entry->second.inode;
  }
  if (known) {
    Inode::Writer(*known)->record.attributes.size = attributes.size;
    return known;
  }
  Result<InodePointer> added = table_.add({.attributes = attributes, .target = target});
  if (added.ok() && above) writer.attach(*above, name, added.value());
  return added;
}

Result<Namespace::InodePointer> Namespace::add(Inode& directory, const NewInode& wanted, std::uint32_t links,
                                               std::uint64_t references, bool is_unnamed) {
  const std::uint32_t kind = wanted.mode & S_IFMT;
  gpufs_attributes attributes{};
  attributes.mode = kind | (wanted.mode & kPermissionBits);
  attributes.nlink = links;
  attributes.uid = wanted.uid;
  attributes.gid = wanted.gid;
  attributes.rdev = kind == S_IFCHR || kind == S_IFBLK ? wanted.rdev : 0;
  attributes.size = wanted.target.size();
  attributes.blksize = kind == S_IFREG ? kBufferBlock : kPageBytes;
  attributes.device = directory.device();
  const Timestamp now = Timestamp::now();
  set_atime(attributes, now);
  set_mtime(attributes, now);
  set_ctime(attributes, now);
  return table_.add({.attributes = attributes,
                     .target = wanted.target,
                     .references = references,
                     .parent = &directory,
                     .umask = wanted.umask,
                     .first_directory = is_unnamed ? directory.ino() : 0});
}

Result<Namespace::InodePointer> Namespace::make(NamesWriter& writer, Inode& directory,
                                                std::optional<std::string_view> name, const NewInode& wanted) {
  const bool is_named = name.has_value();
  TRY(is_named ? check_new_name(directory, directory.names_, *name) : check_users_directory(directory));
  const std::uint32_t links = S_ISDIR(wanted.mode) ? 2 : 1;
  Result<InodePointer> added = add(directory, wanted, is_named ? links : 0, 1, !is_named);
  if (!added.ok()) return added;
  if (is_named) {
    writer.attach(directory, *name, added.value());
  } else {
    NamesWriter::set_parent(*added.value(), directory.shared_from_this());
  }
  return added;
}

Result<Namespace::InodePointer> Namespace::create(Inode& directory, std::string_view name, const NewInode& wanted,
                                                  Responder& request) {
  NamesWriter writer(mutex_, table_);
  Result<InodePointer> made = make(writer, directory, name, wanted);
  if (made.ok()) records_.done(request, {made.value()->ino(), 0});
  return made;
}

Result<Namespace::Opened> Namespace::create_open(Inode& directory, std::optional<std::string_view> name,
                                                 const NewInode& wanted, int flags, Responder& request) {
  NamesWriter writer(mutex_, table_);
  const InodePointer made = TRY(make(writer, directory, name, wanted));
  const std::uint64_t handle = TRY(table_.open(made, flags, request));
  return Opened{made, handle};
}

// ---- changes of names ----

Status Namespace::link(const InodePointer& inode, Inode& directory, std::string_view name, Responder& request) {
  NamesWriter writer(mutex_, table_);
  const InodeNames& names = inode->names_;
  if (inode->is_directory() || inode->is_fixed()) return Status(EPERM, "an inode that has one name");
  TRY(check_new_name(directory, directory.names_, name));
  if (!same_realm(*inode, directory)) return Status(EXDEV, "another device, or across a limited directory");
  const bool is_unnamed = Inode::Reader(*inode)->record.first_directory != 0;
  if (names.names().empty() && !is_unnamed) return Status(ENOENT, "the file has been removed");
  // First: the limit for metadata may be reached.
  TRY(table_.set_links(inode, static_cast<std::uint32_t>(names.names().size() + 1)));
  writer.attach(directory, name, inode);
  if (is_unnamed) Inode::Writer(*inode)->record.first_directory = 0;
  records_.done(request, {inode->ino(), 0});
  return {};
}

Status Namespace::remove(Inode& directory, std::string_view name, bool removes_directory, Responder& request) {
  NamesWriter writer(mutex_, table_);
  TRY(check_users_directory(directory));
  if (removes_directory && name == ".") return Status(EINVAL, "a name that cannot be removed");
  if (removes_directory && name == "..") return Status(ENOTEMPTY, "the directory has entries");
  InodePointer inode = TRY(find_entry(directory.names_, name));
  if (inode->is_directory() && !removes_directory) return Status(EISDIR, "a directory");
  if (!inode->is_directory() && removes_directory) return Status(ENOTDIR, "not a directory");
  if (!inode->names_.entries().empty()) return Status(ENOTEMPTY, "the directory has entries");
  writer.detach(directory, name);
  writer.settle(std::move(inode));
  records_.done(request, {});
  return {};
}

void Namespace::remove_names(Inode& inode) {
  if (inode.is_directory()) return;
  for (;;) {
    NamesWriter writer(mutex_, table_);  // for each: there may be many, and requests wait for it
    if (inode.names_.names().empty()) return;
    const InodeNames::Name name = inode.names_.names().back();
    writer.detach(*name.directory, *name.text);
    writer.settle(inode.shared_from_this());
  }
}

Status Namespace::rename(Inode& from, std::string_view old_name, Inode& to, std::string_view new_name,
                         std::uint32_t flags, std::uint32_t uid, std::uint32_t gid, Responder& request) {
  constexpr std::uint32_t kKnown = RENAME_NOREPLACE | RENAME_EXCHANGE | RENAME_WHITEOUT;
  const bool exchanges = (flags & RENAME_EXCHANGE) != 0;
  if ((flags & ~kKnown) != 0 || (exchanges && flags != RENAME_EXCHANGE)) return Status(EINVAL, "unknown flags");
  NamesWriter writer(mutex_, table_);
  for (const Inode* const directory : {&from, &to}) {
    TRY(check_users_directory(*directory));
  }
  if (to.names_.closed()) return Status(ENOENT, "the directory has been removed");
  TRY(check_name(new_name));
  if (is_special(old_name) || is_special(new_name)) return Status(EBUSY, "a name that cannot change");
  const InodePointer inode = TRY(find_entry(from.names_, old_name));
  const auto taken = to.names_.entries().find(new_name);
  InodePointer target = taken != to.names_.entries().end() ? taken->second.inode : nullptr;
  if ((flags & RENAME_NOREPLACE) != 0 && target) return Status(EEXIST, "the name exists");
  if (exchanges && !target) return Status(ENOENT, "no such name");
  if (!same_realm(from, to)) return Status(EXDEV, "another device, or across a limited directory");
  if (NamesWriter::is_below(*inode, &to)) return Status(EINVAL, "into a directory below itself");
  if (exchanges) {
    if (NamesWriter::is_below(*target, &from)) return Status(EINVAL, "into a directory below itself");
    if (inode != target) writer.exchange(from, old_name, to, new_name);
    records_.done(request, {});
    return {};
  }
  if (inode == target) return {};
  if (target) {
    TRY(check_replaceable(*inode, *target, target->names_));
  }
  InodePointer whiteout;
  if ((flags & RENAME_WHITEOUT) != 0) {  // first: without memory for it nothing changes
    whiteout = TRY(add(from, {.mode = S_IFCHR, .uid = uid, .gid = gid}, 1, 0));
  }
  writer.attach(to, new_name, inode);
  if (whiteout) {
    writer.attach(from, old_name, whiteout);
  } else {
    writer.detach(from, old_name);
  }
  writer.update_links(inode);
  if (target) writer.settle(std::move(target));
  records_.done(request, {});
  return {};
}

// ---- limits ----

Status Namespace::limit_directory(std::uint64_t ino, std::optional<std::uint64_t> bytes) {
  const InodePointer directory = table_.find(ino);
  const std::string path = directory ? path_of(*directory).value_or("") : "";  // as it is now, for messages
  const NamesWriter writer(mutex_, table_);
  if (!directory || !directory->is_directory() || directory->is_fixed() || directory->names_.closed()) {
    return Status(EINVAL, "only directories on a device, MOUNT/gpu0 and below, can have a limit");
  }
  std::shared_ptr<Account> account = table_.quotas().directory(ino);
  std::vector<InodePointer> members;
  for (InodePointer& inode : table_.all()) {
    const std::shared_ptr<Account> charged = inode->directory_account();
    // A file that the last process had, and that has no name any more, is known by its record.
    const bool is_below =
        NamesWriter::is_below(*directory, inode.get()) || Inode::Reader(*inode)->record.limited_directory == ino;
    if (is_below && charged && charged != account) {
      return Status(EBUSY, "a directory above or below it has a limit, and limits cannot be nested");
    }
    if (is_below || (charged && charged == account)) members.push_back(std::move(inode));
  }
  const bool is_new = account == nullptr;
  if (is_new && bytes) account = std::make_shared<Account>("directory " + path);
  if (!bytes) account = nullptr;
  if (account) account->set_limit(*bytes);
  if (is_new || !bytes) {
    for (const InodePointer& inode : members) table_.charge_to(*inode, ino, account);
  }
  table_.quotas().limit_directory(ino, std::move(account));
  return {};
}

// ---- another process's names ----

// Whether its name was lost, as opposed to removed: that would have set its links to 0.
bool Namespace::lacks_name(const Inode& inode) {
  const Inode::Reader reader(inode);
  return inode.names_.names().empty() && inode.ino() != InodeTable::kRootInode && reader->record.first_directory == 0 &&
         reader->record.attributes.nlink != 0;
}

void Namespace::name_again(NamesWriter& writer, const InodePointer& inode) {
  const InodePointer root = table_.find(InodeTable::kRootInode);
  if (!root || inode->is_fixed()) return;
  const std::string device = table_.directory_of(inode->device());
  const std::string name = "lost+" + std::to_string(inode->ino());
  const auto found = root->names_.entries().find(device);
  if (found == root->names_.entries().end()) {
    if (inode->is_directory()) writer.attach(*root, device, inode);  // the directory is the device's own
  } else if (!found->second.inode->names_.entries().contains(name)) {
    log_error("inode ", inode->ino(), " has lost its name: it is ", device, "/", name, " now");
    writer.attach(*found->second.inode, name, inode);
  }
}

Status Namespace::restore() {
  {
    NamesWriter writer(mutex_, table_);
    std::vector<std::uint64_t> lost;
    InodePointer directory;  // of the last one: mostly of many
    records_.each_name([&](std::uint64_t id, const NameRecord& record) {
      if (!directory || directory->ino() != record.directory) directory = table_.find(record.directory);
      const InodePointer inode = table_.find(record.inode);
      if (!directory || !inode || !NamesWriter::restore(id, record, directory, inode)) {
        log_error("the name of inode ", record.inode, " in directory ", record.directory, " is lost");
        lost.push_back(id);
      }
    });
    for (const std::uint64_t id : lost) records_.remove({journal::kName, id});
    for (InodePointer& inode : table_.all()) {
      const std::uint64_t first_directory = Inode::Reader(*inode)->record.first_directory;
      if (first_directory != 0 && inode->names_.names().empty()) {
        NamesWriter::set_parent(*inode, table_.find(first_directory));
      }
      if (lacks_name(*inode)) name_again(writer, inode);
      writer.restore_links(std::move(inode));
    }
  }
  for (const auto& [ino, bytes] : records_.limits(journal::kDirectoryLimit)) {
    if (const Status limited = limit_directory(ino, bytes); !limited.ok()) {
      log_error("the limit of directory ", ino, " is lost: ", limited.message());
    }
  }
  return {};
}

// ---- questions ----

Namespace::InodePointer Namespace::look_up(const InodePointer& directory, std::string_view name) const {
  if (name == ".") return directory;
  if (name == "..") return parent_of(directory);
  const std::shared_lock lock(mutex_);
  const auto found = directory->names_.entries().find(name);
  return found == directory->names_.entries().end() ? nullptr : found->second.inode;
}

Namespace::InodePointer Namespace::find(std::string_view path) const {
  InodePointer inode = table_.find(InodeTable::kRootInode);
  while (inode && !path.empty()) {
    const std::size_t end = std::min(path.find('/'), path.size());
    inode = look_up(inode, path.substr(0, end));
    path.remove_prefix(std::min(end + 1, path.size()));
  }
  return inode;
}

Namespace::InodePointer Namespace::parent_of(const InodePointer& inode) const {
  const std::shared_lock lock(mutex_);
  return inode->names_.parent() ? inode->names_.parent() : table_.find(InodeTable::kRootInode);
}

std::optional<std::string> Namespace::path_of(const Inode& inode) const {
  std::string path;
  const std::shared_lock lock(mutex_);
  for (const Inode* at = &inode; at->ino() != InodeTable::kRootInode; at = at->names_.names().back().directory) {
    if (at->names_.names().empty()) return std::nullopt;
    path.insert(0, "/" + *at->names_.names().back().text);
  }
  if (!path.empty()) path.erase(0, 1);
  return path;
}

}  // namespace gpufs::fuse
