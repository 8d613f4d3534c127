// The inodes of a mount, and their open files. Namespace has their names.
// Ownership: the Mount's; inodes and open files are shared with the requests that use them.
// Thread-safe.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "device/device_context.h"
#include "fuse/attributes.h"
#include "fuse/executor.h"
#include "fuse/inode.h"
#include "fuse/open_files.h"
#include "fuse/quotas.h"
#include "fuse/records.h"
#include "gpufs.h"
#include "memory/account.h"
#include "memory/extent_buffer.h"

namespace gpufs::fuse {

struct OpenFile {
  std::shared_ptr<Inode> inode;
  bool writes = false;

  [[nodiscard]] FileRecord record() const { return {inode->ino(), writes ? 1U : 0U}; }
};

class InodeTable {
 public:
  static constexpr std::uint64_t kRootInode = 1;
  static constexpr std::uint64_t kNoMetadataLimit = std::uint64_t{1} << 62;
  // Memory that an inode takes, and each of its names, however long that is: measured, and rounded up. It has their
  // blocks in the journal; those of a target and of extended attributes come on top.
  static constexpr std::uint64_t kInodeBytes = 1536;
  static constexpr std::uint64_t kNameBytes = 640;

  // metadata_limit: bytes of memory that names and attributes may take together, of which a user may take a share;
  // above that is ENOSPC.
  // executor: frees memory, and is stopped before the table goes. user_limit: as Quotas().
  InodeTable(std::vector<std::shared_ptr<DeviceContext>> devices, Executor& executor, Records& records,
             std::uint64_t metadata_limit = kNoMetadataLimit, std::uint64_t user_limit = Account::kNoLimit)
      : devices_(std::move(devices)),
        executor_(executor),
        records_(records),
        metadata_(metadata_limit),
        quotas_(records, user_limit, [this](std::int32_t device) { return directory_of(device); }),
        ino_numbers_(records.journal(), journal::NumbersOf::kInodes, kRootInode + 1),
        files_(records, journal::NumbersOf::kFiles) {}
  ~InodeTable();

  struct Wanted {
    gpufs_attributes attributes{};  // number 0: the next one
    std::string_view target{};      // of a symbolic link
    std::uint64_t references = 0;
    // The directory in which a user creates it, which determines its group (set-gid) and its access control lists; its
    // mode is then what the user asked for before `umask`. Null: as in the attributes.
    const Inode* parent = nullptr;
    std::uint32_t umask = 0;
    std::uint64_t first_directory = 0;  // as InodeRecord
  };
  // A regular file with device >= 0 gets an empty buffer. EEXIST if the number is taken.
  Result<std::shared_ptr<Inode>> add(const Wanted& wanted);
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

  // References keep an inode in the table: the kernel's, one for each reply that gives it the inode, and those between
  // hold() and release_hold(). Both are in the journal. The next process calls hold() for what it keeps, and then
  // release_unclaimed(), which drops the rest of what this one held.
  Status hold(std::uint64_t ino);
  // False if the inode is unknown. It is removed as above.
  bool release_hold(std::uint64_t ino);
  void release_unclaimed();
  // Drops references of the kernel, and removes the inode as above. False if it is unknown.
  bool forget(std::uint64_t ino, std::uint64_t count);

  // Null if unknown.
  [[nodiscard]] std::shared_ptr<Inode> find(std::uint64_t ino) const;
  // Sets the access time according to the mount's options.
  void was_read(Inode& inode) const;
  // The options: for all inodes, and whether directories are exempt.
  void set_access_times(AccessTimes policy, bool not_directories);
  // All or nothing. The change time becomes now, and an access control list follows the mode.
  Status set(Inode& inode, const AttributeChanges& changes, Wait wait, Responder& request);
  // The change time becomes now. ENOSPC: a new name exceeds the limit for metadata.
  Status set_links(std::shared_ptr<Inode> inode, std::uint32_t links);

  // Runs change(Inode::State&), which returns an errno, where so many more names and bytes of an extended attribute fit
  // under the limit for metadata; else ENOSPC. It may not add more.
  template <typename Change>
  int change_metadata(Inode& inode, std::uint64_t names, std::uint64_t attribute_bytes, Change change) {
    const Inode::Writer writer(inode);
    const std::uint64_t most = names * kNameBytes + inode.metadata(*writer, attribute_bytes) - inode.metadata(*writer);
    if (!metadata_.take(writer->charged_to, most)) return metadata_full(writer->record.attributes.uid).error();
    const int error = change(*writer);
    const std::uint64_t before = writer->charged;
    writer->charged = writer->presence == Inode::Presence::kForgotten ? 0 : inode.metadata(*writer);
    metadata_.release(writer->charged_to, most + before - writer->charged);  // modulo 2^64
    return error;
  }
  // ENOSPC, which it logs: a user cannot take more.
  [[nodiscard]] Status metadata_full(std::uint32_t uid) const;
  [[nodiscard]] std::uint64_t metadata_limit() const { return metadata_.limit(); }
  // Bytes of metadata that a user may still take.
  [[nodiscard]] std::uint64_t metadata_available(std::uint32_t uid) { return metadata_.available(uid); }

  // EINVAL: no such device. nullopt: as for users without a limit of their own.
  Status limit_user(std::int32_t device, std::uint32_t uid, std::optional<std::uint64_t> bytes);
  // Charges an inode, and what is created in it later, to the account of a limited directory; null: to none.
  void charge_to(Inode& inode, std::uint64_t directory, std::shared_ptr<Account> account);
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
  Result<std::uint64_t> open(const std::shared_ptr<Inode>& inode, int flags, Responder& request);
  // EBADF if unknown. Requests under way keep the file until they end. After the last writer the executor trims the
  // buffer's preallocated memory.
  Status release(std::uint64_t fh);
  // Null if unknown.
  [[nodiscard]] std::shared_ptr<OpenFile> file(std::uint64_t fh) const { return files_.find(fh); }

  [[nodiscard]] const std::vector<std::shared_ptr<DeviceContext>>& devices() const { return devices_; }

  // The name of a device's directory.
  [[nodiscard]] std::string directory_of(std::int32_t device) const;

  // Moves a file's contents to the host tier: ExtentBuffer::park(). EOPNOTSUPP: the mount has none, EINVAL: the file is
  // not one on a device. The file's owner pays there.
  Result<bool> park(Inode& inode);
  // What these files need together in the host tier, or on the device that all of them are of, and what is free there.
  // Waits for memory that is being freed, if that is too little.
  struct Space {
    std::uint64_t needed = 0;
    std::uint64_t free = 0;
  };
  Result<Space> space_for(std::span<const std::uint64_t> inos, bool parks);
  // From now on a full device parks files that nobody uses, the one first that was used the longest time ago. Not those
  // with the extended attribute user.gpufs-pinned.
  void evict_when_full();
  // What a device can get that way. It looks at all files, so an answer is good for twenty times as long as that took.
  [[nodiscard]] std::uint64_t evictable(std::int32_t device);

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
  class Restore;                               // restore.cc
  static constexpr bool kPreallocates = true;  // see trim_later()

  [[nodiscard]] bool has_device(std::int32_t device) const;
  // Null without one.
  [[nodiscard]] std::shared_ptr<DeviceContext> host_tier() const;
  [[nodiscard]] std::shared_ptr<Account> host_account(std::uint32_t uid);
  // Has a user pay for a file of a device, wherever its contents are.
  void charge_to(std::uint32_t uid, std::int32_t device, ExtentBuffer& buffer);
  // Makes an inode known whose attributes are complete.
  Status insert(const std::shared_ptr<Inode>& inode);
  // Before anybody else has an inode: its record is written whenever its contents move.
  void watch_contents(const std::shared_ptr<Inode>& inode);
  // Frees what the host tier held of a file that is back, on the executor.
  void free_left(std::shared_ptr<Residence> left);
  // Files on a device that nobody uses, by their last use.
  using IdleFiles = std::multimap<std::chrono::steady_clock::time_point, std::shared_ptr<Inode>>;
  [[nodiscard]] IdleFiles idle_files(std::int32_t device) const;
  // How much of them the host tier has space for.
  [[nodiscard]] std::uint64_t parkable_bytes(const IdleFiles& files) const;
  // Parks a file, if all of them together make space for so many bytes.
  bool evict(std::int32_t device, std::uint64_t needed);
  // After a change of links, open files or presence. True if free_later() must follow.
  [[nodiscard]] static bool update_expected(const Inode& inode, Inode::State& state);
  // What has become of an inode, and so must follow when its Writer has ended.
  struct Departure {
    bool is_forgotten = false;
    bool must_be_freed = false;
  };
  bool drop_references(std::uint64_t ino, const std::function<void(Inode::State&)>& drop);
  // Forgets an inode without names and references.
  Departure forget_if_unused(const Inode& inode, Inode::State& state);
  void remove(std::shared_ptr<Inode> inode, Departure departure);
  // Frees the memory: on the executor, if that may take long. One job frees all of a device at a time.
  void free_later(std::shared_ptr<Inode> inode);
  void free_forgotten_files(std::int32_t device);
  void free(std::shared_ptr<Inode> inode);
  void trim_later(const std::shared_ptr<Inode>& inode);

  const std::vector<std::shared_ptr<DeviceContext>> devices_;
  Executor& executor_;
  Records& records_;
  Metadata metadata_;
  Quotas quotas_;
  bool evicts_ = false;  // constant once the mount serves
  std::atomic<AccessTimes> access_times_{AccessTimes::kRelative};
  std::atomic<AccessTimes> directory_access_times_{AccessTimes::kRelative};

  journal::Numbers ino_numbers_;
  // Guards the two below. Order 5 of docs/design/requests.md#locks
  mutable std::shared_mutex inodes_mutex_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Inode>> inodes_;
  std::map<std::int32_t, std::size_t> file_counts_;  // by device

  OpenFiles<OpenFile, kBufferHandle> files_;
  std::vector<std::uint64_t> held_before_;  // what the last process held, until release_unclaimed()

  struct ForgottenFiles {
    std::vector<std::shared_ptr<Inode>> inodes;
    bool has_job = false;  // a job frees them
  };
  struct Evictable {
    std::uint64_t bytes = 0;
    std::chrono::steady_clock::time_point good_until;
  };
  std::mutex evictable_mutex_;                   // guards what is below; the inodes' locks are taken under it
  std::map<std::int32_t, Evictable> evictable_;  // by device
  // Guards what is below; nothing is freed under it. Order 5 of docs/design/requests.md#locks
  std::mutex forgotten_mutex_;
  std::map<std::int32_t, ForgottenFiles> to_be_freed_;  // by device
};

}  // namespace gpufs::fuse
