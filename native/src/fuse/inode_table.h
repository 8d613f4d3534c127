// The inodes of a mount: their attributes, buffers, references and open files. Namespace has their names.
// Ownership: the Mount's; inodes and open files are shared with the requests that use them.
// Thread-safe.
#pragma once

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/status.h"
#include "device/device_context.h"
#include "device/reclaim.h"
#include "fuse/attributes.h"
#include "fuse/caller.h"
#include "fuse/executor.h"
#include "fuse/extended_attributes.h"
#include "fuse/open_files.h"
#include "fuse/quotas.h"
#include "fuse/records.h"
#include "gpufs.h"
#include "memory/account.h"
#include "memory/buffer.h"

namespace gpufs::fuse {

class Inode;

// An inode's names, and for a directory the names in it. Namespace guards and changes it.
struct InodeNames {
  struct Name {
    Inode* directory;
    const std::string* text;  // the key of the directory's entry
  };
  struct Entry {
    std::shared_ptr<Inode> inode;
    std::uint64_t number;             // in the order of listings; a name that is replaced keeps it
    std::uint64_t record;             // of Records
    std::list<Name>::iterator place;  // in the inode's `names`
  };
  using Entries = std::map<std::string, Entry, std::less<>>;

  std::list<Name> names;  // the latest one last
  std::shared_ptr<Inode>
      parent;  // the directory of the latest name, kept when that is removed; null: root, or none yet
  bool may_get_first_name = false;  // created by O_TMPFILE, and not linked since
  std::string target;               // of a symbolic link; set before others see the inode, and constant from then on

  Entries entries;
  std::map<std::uint64_t, Entries::iterator> by_number;
  std::uint64_t next_number = 0;
  std::uint32_t subdirectories = 0;
  bool closed = false;  // removed: takes no new names
};

class Inode : public std::enable_shared_from_this<Inode> {
 public:
  Inode(const gpufs_attributes& attributes, std::shared_ptr<Buffer> buffer, std::uint64_t references, Timestamp birth,
        Records& records);

  [[nodiscard]] std::uint64_t ino() const { return ino_; }
  [[nodiscard]] std::int32_t device() const { return device_; }
  // Null without a buffer. Both the first one and the one that InodeTable::replace_buffer() sets live as long as the
  // inode.
  [[nodiscard]] const std::shared_ptr<Buffer>& buffer() const {
    return replaced_.load(std::memory_order_acquire) ? replacement_ : buffer_;
  }

  // Whether the CPU can read the buffer's memory in place.
  [[nodiscard]] bool in_host_memory() const { return in_host_memory_ && !replaced_.load(std::memory_order_acquire); }

  // Of the limited directory that it is in; null: none.
  [[nodiscard]] std::shared_ptr<Account> directory_account() const;

  // As they are now; size and blocks of a regular file are the buffer's.
  [[nodiscard]] gpufs_attributes attributes() const;
  [[nodiscard]] std::uint32_t kind() const { return kind_; }  // S_IF of its mode
  // The mount's own, which keep their names: all but what is below the directories of devices.
  [[nodiscard]] bool is_fixed() const { return device_ < 0; }
  [[nodiscard]] Timestamp birth() const { return birth_; }
  // Access time.
  void was_read(AccessTimes policy);
  // Modification and change time, set-id bits, the capability.
  void was_written(SetIdLoss loss);
  // For a request with FUSE_WRITE_KILL_SUIDGID: the kernel says that the caller may not keep set-id bits.
  [[nodiscard]] SetIdLoss set_id_bits_to_clear(const Caller& caller) const;
  // For other changes of contents: the kernel has cleared the rest, and set-gid without execution for the group is
  // left.
  [[nodiscard]] SetIdLoss bare_set_gid_to_clear(const Caller& caller) const;

  // Adds a reference; false if the kernel has forgotten the inode, and the table no longer has it.
  [[nodiscard]] bool hold();

  [[nodiscard]] bool has_writers() const;
  // Whether this is the first call: what a mapping stored is lost.
  [[nodiscard]] bool first_loss() { return !lost_stores_.exchange(true); }

  // Runs look(attributes, extended attributes) with the inode locked.
  template <typename Look>
  auto with_extended(Look look) {
    const std::lock_guard lock(mutex_);
    return look(attributes_, extended_);
  }

 private:
  friend class InodeTable;
  friend class Namespace;

  // The memory that names and attributes take, at most, with so many more bytes of an extended attribute. With the
  // mutex held.
  [[nodiscard]] std::uint64_t metadata_locked(std::uint64_t more = 0) const;
  // Writes the inode's record after a change, with the mutex held.
  void record_locked() const;

  // Set-gid without execution for the group, and the caller is outside that group. Reads /proc only then.
  [[nodiscard]] bool has_bare_set_gid_foreign_to(const Caller& caller) const;
  // Applies what a directory passes on to a new entry; before the inode is visible.
  void inherit(Inode& directory, std::uint32_t umask);

  const std::uint64_t ino_;
  const std::int32_t device_;
  const std::uint32_t kind_;
  const std::shared_ptr<Buffer> buffer_;
  const bool in_host_memory_;
  const Timestamp birth_;
  Records& records_;
  std::shared_ptr<Buffer> replacement_;  // set once, before replaced_
  std::atomic<bool> replaced_{false};
  std::atomic<bool> lost_stores_{false};

  // Guards all below. Under it may be taken: InodeTable::inodes_mutex_, ExtentBuffer::state_mutex_, the mutexes of a
  // Charge, Metadata, the journal and a Reclaim, and, through the Reclaim's listener, the executor's. Never
  // ExtentBuffer::mutation_mutex_: a buffer holds that when it reports that its contents have moved.
  mutable std::mutex mutex_;
  gpufs_attributes attributes_;
  std::unique_ptr<ExtendedAttributes> extended_;  // null until the first one
  std::uint64_t references_;                      // the kernel's, and what hold() adds
  bool restored_ = false;                         // perhaps there are fewer references
  std::shared_ptr<Account> directory_account_;
  std::uint64_t charged_ = 0;              // of the table's metadata
  Metadata::Share* charged_to_ = nullptr;  // the share of its owner
  std::uint32_t open_files_ = 0;
  std::uint32_t open_writers_ = 0;               // of them, those open for writing
  std::uint32_t writers_ever_ = 0;               // how often it was opened for writing
  bool created_open_ = false;                    // by O_CREAT | O_EXCL, which was the first time
  bool forgotten_ = false;                       // by the kernel, and gone from the table
  std::unique_ptr<Reclaim::Expected> expected_;  // while it has neither names nor open files; its memory is coming back

  InodeNames names_;  // guarded by Namespace::mutex_, except `target`
};

struct OpenFile {
  std::shared_ptr<Inode> inode;
  bool writes = false;
};

class InodeTable {
 public:
  static constexpr std::uint64_t kRootInode = 1;
  static constexpr std::uint64_t kNoMetadataLimit = std::uint64_t{1} << 62;
  // Memory that an inode takes, and each of its names, however long that is: measured, and rounded up. It has their
  // blocks in the journal; what a target or extended attributes need there beyond kRecordBytes comes on top.
  static constexpr std::uint64_t kInodeBytes = 1536;
  static constexpr std::uint64_t kNameBytes = 640;
  static constexpr std::uint64_t kRecordBytes = 320;

  // metadata_limit: bytes of memory that names and attributes may take together, of which a user may take a share;
  // above that is ENOSPC.
  // executor: frees memory, and is stopped before the table goes. user_limit: as Quotas().
  InodeTable(std::vector<std::shared_ptr<DeviceContext>> devices, Executor& executor, Records& records,
             std::uint64_t metadata_limit = kNoMetadataLimit, std::uint64_t user_limit = Account::kNoLimit)
      : devices_(std::move(devices)),
        executor_(executor),
        records_(records),
        metadata_(metadata_limit),
        quotas_(user_limit),
        ino_numbers_(records.journal(), journal::Numbers::kInodes, kRootInode + 1),
        files_(records.journal(), journal::Numbers::kFiles) {}
  InodeTable(const InodeTable&) = delete;
  InodeTable& operator=(const InodeTable&) = delete;

  // A new inode, with the number in the attributes or the next one (0). A regular file with device >= 0 gets an empty
  // buffer. EEXIST if the number is taken.
  // parent: the directory in which a user creates it, which determines its group (set-gid) and its access control
  // lists; its mode is then what the user asked for before `umask`. Null: as in the attributes.
  Result<std::shared_ptr<Inode>> add(const gpufs_attributes& attributes, Inode* parent = nullptr,
                                     std::uint32_t umask = 0, std::uint64_t references = 0);
  // Adds the inodes and open files that the records have. Before anything else; Namespace::restore() comes next. A
  // record that nothing can be restored from is logged and removed: it does not keep the others from being restored.
  Status restore();
  // The link count that follows from an inode's names; without any, it is removed unless something uses it.
  void restore_links(std::shared_ptr<Inode> inode, std::uint32_t links);
  // Restored files without names that nothing has open, and that the kernel has not forgotten for a while. Perhaps it
  // has: FORGETs that the last process had read are lost.
  [[nodiscard]] std::vector<std::uint64_t> doubtful() const;
  // Removes an inode without names and references. The executor frees the memory once nothing uses it, so the caller
  // should keep no pointer.
  void remove_if_unused(std::shared_ptr<Inode> inode);

  // References keep an inode in the table: the kernel's, one for each reply that gives it the inode, and others.
  Status hold(std::uint64_t ino);
  // Drops references, and removes the inode as above. False if it is unknown.
  bool forget(std::uint64_t ino, std::uint64_t count);

  // Null if unknown.
  [[nodiscard]] std::shared_ptr<Inode> find(std::uint64_t ino) const;
  // Sets the access time according to the mount's options.
  void was_read(Inode& inode) const;
  // The options: for all inodes, and whether directories are exempt.
  void set_access_times(AccessTimes policy, bool not_directories);
  // All or nothing. The change time becomes now, and an access control list follows the mode.
  Status set(Inode& inode, const AttributeChanges& changes, Wait wait);
  // The change time becomes now. ENOSPC: a new name exceeds the limit for metadata.
  Status set_links(std::shared_ptr<Inode> inode, std::uint32_t links);

  // Runs change(attributes, extended attributes), which returns an errno, with the inode locked, where so many more
  // names and bytes of an extended attribute fit under the limit for metadata; else ENOSPC. It may not add more.
  template <typename Change>
  int change_metadata(Inode& inode, std::uint64_t names, std::uint64_t attribute_bytes, Change change) {
    const std::lock_guard lock(inode.mutex_);
    const std::uint64_t most = names * kNameBytes + inode.metadata_locked(attribute_bytes) - inode.metadata_locked();
    if (!metadata_.take(inode.charged_to_, most)) return metadata_full(inode.attributes_.uid).error();
    const int error = change(inode.attributes_, inode.extended_);
    if (error == 0) inode.record_locked();
    const std::uint64_t before = inode.charged_;
    inode.charged_ = inode.forgotten_ ? 0 : inode.metadata_locked();
    metadata_.release(inode.charged_to_, most + before - inode.charged_);  // modulo 2^64
    return error;
  }
  // ENOSPC, which it logs: a user cannot take more.
  [[nodiscard]] Status metadata_full(std::uint32_t uid) const;
  [[nodiscard]] std::uint64_t metadata_limit() const { return metadata_.limit(); }
  // Bytes of metadata that a user may still take.
  [[nodiscard]] std::uint64_t metadata_available(std::uint32_t uid) { return metadata_.available(uid); }

  // EINVAL: no such device. nullopt: as for users without a limit of their own.
  Status limit_user(std::int32_t device, std::uint32_t uid, std::optional<std::uint64_t> bytes);
  // Charges an inode, and what is created in it later, to a limited directory's account; null: to none.
  void charge_to(Inode& inode, std::shared_ptr<Account> account);
  // Charges a buffer that belongs to no inode to a user, whatever the limit.
  void charge_to_user(Buffer& buffer, std::uint32_t uid);
  // Whether the kernel should ask for fsync(2), which has nothing to do for memory. It returns 0 for all of the mount
  // and asks no more once it got ENOSYS; a mount that shows directories of the host, which has no journal, needs it.
  [[nodiscard]] bool asks_for_fsync() const { return records_.journal() == nullptr; }
  [[nodiscard]] Quotas& quotas() { return quotas_; }
  [[nodiscard]] Records& records() const { return records_; }

  // Gives a new and empty file another buffer, for good, as if it were changed now. Only for a file that was created by
  // opening it for writing, and that nobody else has opened for writing since: whoever has that descriptor has created
  // the file. EBUSY otherwise, ENOENT and EINVAL as ever. again: the file had such a buffer in the last process, so it
  // need not be new, and its times stay.
  Status replace_buffer(std::uint64_t ino, std::shared_ptr<Buffer> buffer, bool again);

  // EISDIR and EINVAL without a buffer. flags: as open(2), without effect on the contents.
  Result<std::uint64_t> open(const std::shared_ptr<Inode>& inode, int flags);
  // EBADF if unknown. Requests under way keep the file until they end. After the last writer the executor trims the
  // buffer's preallocated memory.
  Status release(std::uint64_t fh);
  // Null if unknown.
  [[nodiscard]] std::shared_ptr<OpenFile> file(std::uint64_t fh) const { return files_.find(fh); }

  [[nodiscard]] const std::vector<std::shared_ptr<DeviceContext>>& devices() const { return devices_; }

  struct Counts {
    std::size_t inodes = 0;
    std::size_t files = 0;
    std::size_t orphans = 0;  // removed files that are not freed yet, and have no open file
    std::uint64_t orphan_bytes = 0;
    std::uint64_t metadata_bytes = 0;
  };
  [[nodiscard]] Counts counts() const;
  // Regular files on a device.
  [[nodiscard]] std::size_t file_count(std::int32_t device) const;
  [[nodiscard]] std::vector<std::shared_ptr<Inode>> all() const;

  // At most `most` files whose bytes have been moved, those with the most bytes since the last call first.
  [[nodiscard]] std::vector<std::shared_ptr<Inode>> busiest(std::size_t most) const;

 private:
  [[nodiscard]] bool has_device(std::int32_t device) const;
  // Makes an inode known whose attributes are complete.
  Status insert(const std::shared_ptr<Inode>& inode);
  // Before anybody else has an inode: its record is written whenever its contents move.
  static void watch_contents(const std::shared_ptr<Inode>& inode);
  // What restore() knows of the other records when it reads one.
  struct Restoring {
    std::map<std::int32_t, std::size_t> devices;    // how many inodes each has
    std::unordered_set<std::uint64_t> directories;  // that have names
    std::map<std::uint64_t, Status> lost;           // inodes, and why
  };
  // Restores the slabs of all devices.
  Status restore_slabs(const std::vector<Records::Stored>& stored, Restoring& known);
  // Makes the inode of a record, and charges it whatever the limits are. Any thread may call them.
  Result<std::shared_ptr<Inode>> restore_inode(InodeRecord& record, const Restoring& known);
  void charge_restored(const std::shared_ptr<Inode>& inode);
  // Adds the directories that have names and no record.
  void restore_directories();
  // After a change of links, open files or presence, with the inode's mutex held. True if free_later() must follow.
  [[nodiscard]] bool update_expected_locked(Inode& inode);
  // Frees the memory on the executor, since freeing gigabytes takes long. One job frees all of a device at a time.
  void free_later(std::shared_ptr<Inode> inode);
  void free_forgotten_files(std::int32_t device);
  void free(std::shared_ptr<Inode> inode);
  void trim_later(const std::shared_ptr<Inode>& inode);

  const std::vector<std::shared_ptr<DeviceContext>> devices_;
  Executor& executor_;
  Records& records_;
  Metadata metadata_;
  Quotas quotas_;
  std::atomic<AccessTimes> access_times_{AccessTimes::kRelative};
  std::atomic<AccessTimes> directory_access_times_{AccessTimes::kRelative};

  journal::Numbers ino_numbers_;
  // Guards the two below; an inode's mutex is never taken under it.
  mutable std::shared_mutex inodes_mutex_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Inode>> inodes_;
  std::map<std::int32_t, std::size_t> file_counts_;  // by device

  OpenFiles<OpenFile, kBufferHandle> files_;

  struct ForgottenFiles {
    std::vector<std::shared_ptr<Inode>> inodes;
    bool has_job = false;  // that frees them
  };
  std::mutex forgotten_mutex_;                          // guards what is below; nothing is freed under it
  std::map<std::int32_t, ForgottenFiles> to_be_freed_;  // by device
};

}  // namespace gpufs::fuse
