#include "fuse/namespace.h"

#include <linux/fs.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <mutex>
#include <string>
#include <vector>

#include "base/log.h"
#include "base/pages.h"
#include "memory/account.h"

namespace gpufs::fuse {

namespace {

// What programs read at once: larger only makes small reads slow.
constexpr std::uint32_t kBufferBlock = 1 << 20;

bool is_directory(const Inode& inode) { return S_ISDIR(inode.kind()); }

bool is_special(std::string_view name) { return name == "." || name == ".." || name.empty(); }

// Whether the kernel takes this name from a listing; it refuses the listing otherwise.
bool is_possible(std::string_view name) {
  return !is_special(name) && name.size() <= NAME_MAX && name.find('/') == name.npos && name.find('\0') == name.npos;
}

Status check_name(std::string_view name) {
  return name.size() > NAME_MAX ? Status(ENAMETOOLONG, "a name of more than 255 bytes") : Status();
}

// Whether a directory takes this new name.
Status check_new_name(const Inode& directory, const InodeNames& names, std::string_view name) {
  if (!is_directory(directory)) return Status(ENOTDIR, "not a directory");
  if (Status status = check_name(name); !status.ok()) return status;
  if (is_special(name) || names.entries.contains(name)) return Status(EEXIST, "the name exists");
  if (directory.is_fixed()) return Status(EPERM, "the directory belongs to the mount");
  if (names.closed) return Status(ENOENT, "the directory has been removed");
  return {};
}

// Whether users may change the names in a directory.
Status check_users_directory(const Inode& directory) {
  if (!is_directory(directory)) return Status(ENOTDIR, "not a directory");
  return directory.is_fixed() ? Status(EPERM, "the directory belongs to the mount") : Status();
}

Result<InodeNames::Entries::iterator> find_entry(InodeNames& names, std::string_view name) {
  if (Status status = check_name(name); !status.ok()) return status;
  const auto found = names.entries.find(name);
  if (found == names.entries.end()) return Status(ENOENT, "no such name");
  return found;
}

// Names do not move or link between devices, nor across the border of a limited directory.
bool same_realm(const Inode& one, const Inode& other) {
  return one.device() == other.device() && one.directory_account() == other.directory_account();
}

Status check_replaceable(const Inode& inode, const Inode& target, const InodeNames& target_names) {
  if (is_directory(target)) {
    if (!is_directory(inode)) return Status(EISDIR, "a directory");
    if (!target_names.entries.empty()) return Status(ENOTEMPTY, "the directory has entries");
  } else if (is_directory(inode)) {
    return Status(ENOTDIR, "not a directory");
  }
  return {};
}

}  // namespace

Namespace::~Namespace() {
  // Directories and what is in them own each other.
  const std::vector<InodePointer> all = table_.all();
  for (const InodePointer& inode : all) inode->names_ = {};
}

// ---- new inodes ----

Result<Namespace::InodePointer> Namespace::place(std::uint64_t directory, std::string_view name,
                                                 gpufs_attributes attributes, std::string_view target) {
  const std::unique_lock lock(mutex_);
  const InodePointer above = table_.find(directory);
  if (directory != 0 && (!above || !is_directory(*above))) return Status(ENOENT, "no such directory");
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
    const auto entry = above->names_.entries.find(name);
    if (entry != above->names_.entries.end()) known = entry->second.inode;
  }
  if (known) {
    const std::lock_guard own(known->mutex_);
    known->attributes_.size = attributes.size;
    known->record_locked();
    return known;
  }
  Result<InodePointer> added = table_.add(attributes);
  if (!added.ok()) return added;
  set_target(*added.value(), target);
  if (above) attach(*above, name, added.value());
  return added;
}

Result<Namespace::InodePointer> Namespace::add(Inode& directory, const NewInode& wanted, std::uint32_t links,
                                               std::uint64_t references) {
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
  Result<InodePointer> added = table_.add(attributes, &directory, wanted.umask, references);
  if (added.ok()) set_target(*added.value(), wanted.target);
  return added;
}

void Namespace::set_target(Inode& inode, std::string_view target) {
  if (target.empty()) return;
  const std::lock_guard lock(inode.mutex_);
  inode.names_.target = target;
  inode.record_locked();
}

Result<Namespace::InodePointer> Namespace::create(Inode& directory, std::string_view name, const NewInode& wanted) {
  const std::unique_lock lock(mutex_);
  const Records::Change change(records_);
  if (Status status = check_new_name(directory, directory.names_, name); !status.ok()) return status;
  Result<InodePointer> added = add(directory, wanted, S_ISDIR(wanted.mode) ? 2 : 1, 1);
  if (!added.ok()) return added;
  attach(directory, name, added.value());
  records_.done({added.value()->ino(), 0});
  return added;
}

Result<Namespace::InodePointer> Namespace::create_unnamed(Inode& directory, const NewInode& wanted) {
  const std::unique_lock lock(mutex_);
  const Records::Change change(records_);
  if (Status status = check_users_directory(directory); !status.ok()) return status;
  Result<InodePointer> added = add(directory, wanted, 0, 1);
  if (!added.ok()) return added;
  added.value()->names_.parent = directory.shared_from_this();
  added.value()->names_.may_get_first_name = true;
  records_.put_unnamed(added.value()->ino(), directory.ino());
  records_.done({added.value()->ino(), 0});
  return added;
}

// ---- changes of names ----

Status Namespace::link(const InodePointer& inode, Inode& directory, std::string_view name) {
  const std::unique_lock lock(mutex_);
  const Records::Change change(records_);
  InodeNames& names = inode->names_;
  if (is_directory(*inode) || inode->is_fixed()) return Status(EPERM, "an inode that has one name");
  if (Status status = check_new_name(directory, directory.names_, name); !status.ok()) return status;
  if (!same_realm(*inode, directory)) return Status(EXDEV, "another device, or across a limited directory");
  if (names.names.empty() && !names.may_get_first_name) return Status(ENOENT, "the file has been removed");
  // First: the limit for metadata may be reached.
  if (Status status = table_.set_links(inode, static_cast<std::uint32_t>(names.names.size() + 1)); !status.ok()) {
    return status;
  }
  attach(directory, name, inode);
  if (std::exchange(names.may_get_first_name, false)) records_.remove_unnamed(inode->ino());
  records_.done({inode->ino(), 0});
  return {};
}

Status Namespace::unlink(Inode& directory, std::string_view name) {
  const std::unique_lock lock(mutex_);
  const Records::Change change(records_);
  if (Status status = check_users_directory(directory); !status.ok()) return status;
  const Result<InodeNames::Entries::iterator> entry = find_entry(directory.names_, name);
  if (!entry.ok()) return entry.status();
  InodePointer inode = entry.value()->second.inode;
  if (is_directory(*inode)) return Status(EISDIR, "a directory");
  detach(directory, entry.value());
  settle(std::move(inode));
  records_.done({});
  return {};
}

std::vector<std::pair<std::uint64_t, std::string>> Namespace::remove_names(Inode& inode) {
  std::vector<std::pair<std::uint64_t, std::string>> removed;
  if (is_directory(inode)) return removed;
  for (;;) {
    const std::unique_lock lock(mutex_);  // for each: there may be many, and requests wait for it
    if (inode.names_.names.empty()) return removed;
    const Records::Change change(records_);
    const InodeNames::Name name = inode.names_.names.back();
    removed.emplace_back(name.directory->ino(), *name.text);
    detach(*name.directory, name.directory->names_.entries.find(*name.text));
    settle(inode.shared_from_this());
  }
}

std::vector<std::pair<std::uint64_t, std::string>> Namespace::names_of(const Inode& inode) const {
  std::vector<std::pair<std::uint64_t, std::string>> found;
  if (is_directory(inode)) return found;
  const std::shared_lock lock(mutex_);
  for (const InodeNames::Name& name : inode.names_.names) found.emplace_back(name.directory->ino(), *name.text);
  return found;
}

Status Namespace::rmdir(Inode& directory, std::string_view name) {
  const std::unique_lock lock(mutex_);
  const Records::Change change(records_);
  if (Status status = check_users_directory(directory); !status.ok()) return status;
  if (name == ".") return Status(EINVAL, "a name that cannot be removed");
  if (name == "..") return Status(ENOTEMPTY, "the directory has entries");
  const Result<InodeNames::Entries::iterator> entry = find_entry(directory.names_, name);
  if (!entry.ok()) return entry.status();
  InodePointer inode = entry.value()->second.inode;
  if (!is_directory(*inode)) return Status(ENOTDIR, "not a directory");
  if (!inode->names_.entries.empty()) return Status(ENOTEMPTY, "the directory has entries");
  detach(directory, entry.value());
  settle(std::move(inode));
  records_.done({});
  return {};
}

Status Namespace::rename(Inode& from, std::string_view old_name, Inode& to, std::string_view new_name,
                         std::uint32_t flags, std::uint32_t uid, std::uint32_t gid) {
  constexpr std::uint32_t kKnown = RENAME_NOREPLACE | RENAME_EXCHANGE | RENAME_WHITEOUT;
  const bool exchanges = (flags & RENAME_EXCHANGE) != 0;
  if ((flags & ~kKnown) != 0 || (exchanges && flags != RENAME_EXCHANGE)) return Status(EINVAL, "unknown flags");
  const std::unique_lock lock(mutex_);
  const Records::Change change(records_);
  for (const Inode* const directory : {&from, &to}) {
    if (Status status = check_users_directory(*directory); !status.ok()) return status;
  }
  if (to.names_.closed) return Status(ENOENT, "the directory has been removed");
  if (Status status = check_name(new_name); !status.ok()) return status;
  if (is_special(old_name) || is_special(new_name)) return Status(EBUSY, "a name that cannot change");
  const Result<InodeNames::Entries::iterator> source = find_entry(from.names_, old_name);
  if (!source.ok()) return source.status();
  const InodePointer inode = source.value()->second.inode;
  const auto taken = to.names_.entries.find(new_name);
  InodePointer target = taken != to.names_.entries.end() ? taken->second.inode : nullptr;
  if ((flags & RENAME_NOREPLACE) != 0 && target) return Status(EEXIST, "the name exists");
  if (exchanges && !target) return Status(ENOENT, "no such name");
  if (!same_realm(from, to)) return Status(EXDEV, "another device, or across a limited directory");
  if (contains(*inode, &to)) return Status(EINVAL, "into a directory below itself");
  if (exchanges) {
    if (contains(*target, &from)) return Status(EINVAL, "into a directory below itself");
    if (inode != target) exchange(from, source.value(), to, taken);
    records_.done({});
    return {};
  }
  if (inode == target) return {};
  if (target) {
    if (Status status = check_replaceable(*inode, *target, target->names_); !status.ok()) return status;
  }
  InodePointer whiteout;
  if ((flags & RENAME_WHITEOUT) != 0) {  // first: without memory for it nothing changes
    Result<InodePointer> added = add(from, {.mode = S_IFCHR, .uid = uid, .gid = gid}, 1, 0);
    if (!added.ok()) return added.status();
    whiteout = added.take();
  }
  attach(to, new_name, inode);
  if (whiteout) {
    attach(from, old_name, whiteout);
  } else {
    detach(from, source.value());
  }
  update_links(inode);
  if (target) settle(std::move(target));
  records_.done({});
  return {};
}

void Namespace::exchange(Inode& from, InodeNames::Entries::iterator one, Inode& to,
                         InodeNames::Entries::iterator other) {
  const InodePointer first = one->second.inode;
  const InodePointer second = other->second.inode;
  attach(from, one->first, second);
  attach(to, other->first, first);
  update_links(first);
  update_links(second);
}

void Namespace::attach(Inode& directory, std::string_view name, const InodePointer& inode) {
  InodeNames& names = directory.names_;
  auto [entry, is_new] = names.entries.try_emplace(std::string(name));
  bool is_subdirectory = false;
  if (is_new) {
    entry->second.number = names.next_number++;
    entry->second.record = records_.new_name();
    names.by_number.emplace(entry->second.number, entry);
  } else {
    is_subdirectory = is_directory(*entry->second.inode);
    lose_place(*entry->second.inode, entry->second.place);
  }
  entry->second.inode = inode;
  entry->second.place = inode->names_.names.insert(inode->names_.names.end(), {&directory, &entry->first});
  inode->names_.parent = directory.shared_from_this();
  records_.put_name(entry->second.record, {directory.ino(), entry->second.number, inode->ino(), entry->first});
  changed(directory, static_cast<int>(is_directory(*inode)) - static_cast<int>(is_subdirectory));
}

void Namespace::detach(Inode& directory, InodeNames::Entries::iterator entry) {
  InodeNames& names = directory.names_;
  const InodePointer inode = std::move(entry->second.inode);
  lose_place(*inode, entry->second.place);
  records_.remove_name(entry->second.record);
  names.by_number.erase(entry->second.number);
  names.entries.erase(entry);
  changed(directory, -static_cast<int>(is_directory(*inode)));
}

void Namespace::lose_place(Inode& inode, std::list<InodeNames::Name>::iterator place) {
  InodeNames& names = inode.names_;
  names.names.erase(place);
  if (!names.names.empty()) names.parent = names.names.back().directory->shared_from_this();
}

void Namespace::changed(Inode& directory, int subdirectories) {
  directory.names_.subdirectories += static_cast<std::uint32_t>(subdirectories);
  const Timestamp now = Timestamp::now();
  const std::lock_guard lock(directory.mutex_);
  directory.attributes_.nlink = 2 + directory.names_.subdirectories;
  set_mtime(directory.attributes_, now);
  set_ctime(directory.attributes_, now);
  directory.record_locked();
}

void Namespace::update_links(const InodePointer& inode) {
  const InodeNames& names = inode->names_;
  const std::size_t links = is_directory(*inode) ? 2 + names.subdirectories : names.names.size();
  static_cast<void>(table_.set_links(inode, static_cast<std::uint32_t>(links)));  // fails only for more links
}

void Namespace::settle(InodePointer inode) {
  InodeNames& names = inode->names_;
  if (!is_directory(*inode)) {
    update_links(inode);
  } else {
    names.closed = true;
    names.parent = nullptr;  // chains of removed directories end here
    if (table_.quotas().directory(inode->ino())) {
      table_.charge_to(*inode, nullptr);
      table_.quotas().set_directory(inode->ino(), nullptr);
      records_.put_directory_limit(inode->ino(), std::nullopt);
    }
    static_cast<void>(table_.set_links(inode, 0));
  }
  if (names.names.empty()) table_.remove_if_unused(std::move(inode));
}

// ---- limits ----

Status Namespace::limit_directory(std::uint64_t ino, std::optional<std::uint64_t> bytes) {
  const std::unique_lock lock(mutex_);
  const InodePointer directory = table_.find(ino);
  if (!directory || !is_directory(*directory) || directory->is_fixed() || directory->names_.closed) {
    return Status(EINVAL, "only directories on a device, MOUNT/gpu0 and below, can have a limit");
  }
  std::shared_ptr<Account> account = table_.quotas().directory(ino);
  std::vector<InodePointer> members;
  for (InodePointer& inode : table_.all()) {
    const std::shared_ptr<Account> charged = inode->directory_account();
    const bool is_below = contains(*directory, inode.get());
    if (is_below && charged && charged != account) {
      return Status(EBUSY, "a directory above or below it has a limit, and limits cannot be nested");
    }
    if (is_below || (charged && charged == account)) members.push_back(std::move(inode));
  }
  const bool is_new = account == nullptr;
  if (is_new && bytes) account = std::make_shared<Account>("the limited directory");
  if (!bytes) account = nullptr;
  if (account) account->set_limit(*bytes);
  if (is_new || !bytes) {
    for (const InodePointer& inode : members) table_.charge_to(*inode, account);
  }
  table_.quotas().set_directory(ino, std::move(account));
  records_.put_directory_limit(ino, bytes);
  return {};
}

// ---- another process's names ----

// Whether its name was lost, as opposed to removed: that would have set its links to 0.
bool Namespace::lacks_name(const Inode& inode) {
  return inode.names_.names.empty() && inode.ino() != InodeTable::kRootInode && !inode.names_.may_get_first_name &&
         inode.attributes_.nlink != 0;
}

void Namespace::name_again(const InodePointer& inode) {
  const InodePointer root = table_.find(InodeTable::kRootInode);
  if (!root || inode->is_fixed()) return;
  const std::string device = "gpu" + std::to_string(inode->device());
  const std::string name = "lost+" + std::to_string(inode->ino());
  const auto found = root->names_.entries.find(device);
  if (found == root->names_.entries.end()) {
    if (is_directory(*inode)) attach(*root, device, inode);  // it is the device's own
  } else if (!found->second.inode->names_.entries.contains(name)) {
    log_error("inode ", inode->ino(), " has lost its name: it is ", device, "/", name, " now");
    attach(*found->second.inode, name, inode);
  }
}

bool Namespace::restore_name(std::uint64_t id, const NameRecord& record, const InodePointer& directory,
                             const InodePointer& inode) {
  InodeNames& names = directory->names_;
  if (!is_directory(*directory) || !is_possible(record.text)) return false;
  // A directory has one name, and not below itself.
  if (is_directory(*inode) &&
      (inode->ino() == InodeTable::kRootInode || !inode->names_.names.empty() || contains(*inode, directory.get()))) {
    return false;
  }
  const auto [entry, is_new] = names.entries.try_emplace(record.text);
  if (!is_new) return false;
  const std::uint64_t number = names.by_number.contains(record.number) ? names.next_number : record.number;
  entry->second = {inode, number, id, {}};
  entry->second.place = inode->names_.names.insert(inode->names_.names.end(), {directory.get(), &entry->first});
  inode->names_.parent = directory;
  names.by_number.emplace_hint(names.by_number.end(), number, entry);
  names.next_number = std::max(names.next_number, number + 1);
  if (is_directory(*inode)) ++names.subdirectories;
  return true;
}

Status Namespace::restore() {
  {
    const std::unique_lock lock(mutex_);
    std::vector<std::uint64_t> lost;
    InodePointer directory;  // of the last one: mostly of many
    records_.each_name([&](std::uint64_t id, const NameRecord& record) {
      if (!directory || directory->ino() != record.directory) directory = table_.find(record.directory);
      const InodePointer inode = table_.find(record.inode);
      if (!directory || !inode || !restore_name(id, record, directory, inode)) {
        log_error("the name of inode ", record.inode, " in directory ", record.directory, " is lost");
        lost.push_back(id);
      }
    });
    for (const std::uint64_t id : lost) records_.remove_name(id);
    for (const auto& [ino, parent] : records_.unnamed()) {
      const InodePointer inode = table_.find(ino);
      if (!inode || is_directory(*inode)) {
        records_.remove_unnamed(ino);
        continue;
      }
      if (inode->names_.names.empty()) inode->names_.parent = table_.find(parent);
      inode->names_.may_get_first_name = true;
    }
    for (InodePointer& inode : table_.all()) {
      InodeNames& names = inode->names_;
      if (lacks_name(*inode)) name_again(inode);
      const bool is_removed = names.names.empty() && inode->ino() != InodeTable::kRootInode;
      std::size_t links = names.names.size();
      if (is_directory(*inode)) {
        names.closed = is_removed;
        links = is_removed ? 0 : 2 + names.subdirectories;
      }
      table_.restore_links(std::move(inode), static_cast<std::uint32_t>(links));
    }
  }
  for (const auto& [ino, bytes] : records_.directory_limits()) {
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
  const auto found = directory->names_.entries.find(name);
  return found == directory->names_.entries.end() ? nullptr : found->second.inode;
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
  return inode->names_.parent ? inode->names_.parent : table_.find(InodeTable::kRootInode);
}

std::optional<std::string> Namespace::path_of(const Inode& inode) const {
  std::string path;
  const std::shared_lock lock(mutex_);
  for (const Inode* at = &inode; at->ino() != InodeTable::kRootInode; at = at->names_.names.back().directory) {
    if (at->names_.names.empty()) return std::nullopt;
    path.insert(0, "/" + *at->names_.names.back().text);
  }
  if (!path.empty()) path.erase(0, 1);
  return path;
}

std::string_view Namespace::target_of(const Inode& inode) { return inode.names_.target; }

bool Namespace::contains(const Inode& directory, const Inode* inode) {
  while (inode != nullptr && inode != &directory) inode = inode->names_.parent.get();
  return inode != nullptr;
}

}  // namespace gpufs::fuse
