// The names of a mount, and the rules by which they come and go: requests and the control plane change them here alone.
// Ownership: the Mount's; directories share ownership of the inodes that their names lead to.
// Thread-safe. A call that fails has changed nothing.
//
// The root, .gpufs and what else has no device belong to the mount. Nothing can be created, renamed or removed there,
// not even by root (EPERM; for other users the mode 0555 forbids it). Below gpuN everything is as on tmpfs; names do
// not move or link between devices, nor into a directory with a limit of its own or out of one (EXDEV).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "fuse/inode_table.h"
#include "fuse/names_writer.h"

namespace gpufs::fuse {

// A name that a user wants to create, and its attributes.
struct NewInode {
  std::uint32_t mode = 0;  // type and permissions, before the umask
  std::uint32_t umask = 0;
  std::uint32_t uid = 0;
  std::uint32_t gid = 0;
  std::uint32_t rdev = 0;
  std::string_view target{};  // of a symbolic link
};

class Namespace {
 public:
  using InodePointer = std::shared_ptr<Inode>;

  explicit Namespace(InodeTable& table) : table_(table), records_(table.records()) {}
  ~Namespace();

  // Gives the inodes that InodeTable::restore() has added their names, as the records have them.
  Status restore();

  // Creates an inode of the mount's own, with these attributes; links and times are counted and set here. Directory 0:
  // the root. What the last process created there keeps its number.
  Result<InodePointer> place(std::uint64_t directory, std::string_view name, gpufs_attributes attributes,
                             std::string_view target);

  // ---- changes by users; the kernel has checked the caller's rights ----

  // A new inode, with one reference for the reply.
  Result<InodePointer> create(Inode& directory, std::string_view name, const NewInode& wanted, Responder& request);
  // A new file that is open with these flags. nullopt: it has no name, and link() may give it one (O_TMPFILE).
  struct Opened {
    InodePointer inode;
    std::uint64_t handle = 0;
  };
  Result<Opened> create_open(Inode& directory, std::optional<std::string_view> name, const NewInode& wanted, int flags,
                             Responder& request);
  Status link(const InodePointer& inode, Inode& directory, std::string_view name, Responder& request);
  // As unlink(2), or rmdir(2) if it is to remove a directory.
  Status remove(Inode& directory, std::string_view name, bool removes_directory, Responder& request);
  // Moves a name, over what is there. flags: RENAME_NOREPLACE, RENAME_WHITEOUT (the old name becomes a device node 0:0
  // of the caller, by which overlays mark removed names), or RENAME_EXCHANGE alone. The replaced name keeps its place
  // in listings, so a program that lists the directory at the same time sees it exactly once.
  Status rename(Inode& from, std::string_view old_name, Inode& to, std::string_view new_name, std::uint32_t flags,
                std::uint32_t uid, std::uint32_t gid, Responder& request);

  // ---- changes by the control plane ----

  // Removes all names of a registered file, which the kernel does not cache.
  void remove_names(Inode& inode);
  // Limits the memory of all that is and will be below a directory; nullopt: no longer. EINVAL for another inode than a
  // directory on a device, EBUSY if a directory above or below has a limit.
  Status limit_directory(std::uint64_t ino, std::optional<std::uint64_t> bytes);

  // ---- questions ----

  // The inode of a name, also of "." and ".."; null if the name does not exist.
  [[nodiscard]] InodePointer look_up(const InodePointer& directory, std::string_view name) const;
  // The inode at a path below the root, without following symbolic links; null if it does not exist.
  [[nodiscard]] InodePointer find(std::string_view path) const;
  // The directory above an inode; the root is above itself.
  [[nodiscard]] InodePointer parent_of(const InodePointer& inode) const;
  // The path below the root; nullopt for an inode without a name.
  [[nodiscard]] std::optional<std::string> path_of(const Inode& inode) const;

  // The number that the next new name of a directory gets.
  [[nodiscard]] std::uint64_t next_number(const Inode& directory) const {
    const std::shared_lock lock(mutex_);
    return directory.names_.next_number();
  }
  // Calls visit(number, name, inode) for the names with numbers from start to end, which is left out, until it returns
  // false. visit must not call this object.
  template <typename Visit>
  void list(const Inode& directory, std::uint64_t start, std::uint64_t end, Visit visit) const {
    const std::shared_lock lock(mutex_);
    const auto& names = directory.names_.by_number();
    for (auto next = names.lower_bound(start); next != names.end() && next->first < end; ++next) {
      if (!visit(next->first, next->second->first, *next->second->second.inode)) return;
    }
  }

 private:
  // All below are called with the mutex held.
  // Adds an inode that a user creates in a directory, without a name. is_unnamed: link() may give it the first one.
  Result<InodePointer> add(Inode& directory, const NewInode& wanted, std::uint32_t links, std::uint64_t references,
                           bool is_unnamed = false);
  // As create(), without recording the outcome.
  Result<InodePointer> make(NamesWriter& writer, Inode& directory, std::optional<std::string_view> name,
                            const NewInode& wanted);
  [[nodiscard]] static bool lacks_name(const Inode& inode);
  // In the directory of its device, for users to find.
  void name_again(NamesWriter& writer, const InodePointer& inode);

  InodeTable& table_;
  Records& records_;
  // Guards Inode::names_ of all inodes. Order 3 of docs/design/requests.md#locks
  mutable std::shared_mutex mutex_;
};

}  // namespace gpufs::fuse
