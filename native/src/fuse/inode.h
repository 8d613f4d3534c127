// One inode: its attributes, buffer, references and open files. Namespace has its names.
// Ownership: shared by the InodeTable, directories, open files and requests.
// Thread-safe.
#pragma once

#include <sys/stat.h>

#include <atomic>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "device/releases.h"
#include "fuse/attributes.h"
#include "fuse/caller.h"
#include "fuse/extended_attributes.h"
#include "fuse/quotas.h"
#include "fuse/records.h"
#include "gpufs.h"
#include "memory/account.h"
#include "memory/extent_buffer.h"

namespace gpufs::fuse {

class Inode;

// An inode's names, and for a directory the names in it. Only a NamesWriter changes them; Namespace::mutex_ guards
// them.
class InodeNames {
 public:
  struct Name {
    Inode* directory;
    const std::string* text;  // the key of the directory's entry
  };
  struct Entry {
    std::shared_ptr<Inode> inode;
    std::uint64_t number;             // in the order of listings; a name that is replaced keeps it
    std::uint64_t record;             // of Records
    std::list<Name>::iterator place;  // in the inode's names
  };
  using Entries = std::map<std::string, Entry, std::less<>>;
  using ByNumber = std::map<std::uint64_t, Entries::iterator>;

  // The latest one last.
  [[nodiscard]] const std::list<Name>& names() const { return names_; }
  // The directory of the latest name, kept when that is removed; null: root, or none yet.
  [[nodiscard]] const std::shared_ptr<Inode>& parent() const { return parent_; }
  [[nodiscard]] const Entries& entries() const { return entries_; }
  [[nodiscard]] const ByNumber& by_number() const { return by_number_; }
  [[nodiscard]] std::uint64_t next_number() const { return next_number_; }
  [[nodiscard]] std::uint32_t subdirectories() const { return subdirectories_; }
  // Removed: takes no new names.
  [[nodiscard]] bool closed() const { return closed_; }

 private:
  friend class NamesWriter;

  std::list<Name> names_;
  std::shared_ptr<Inode> parent_;
  Entries entries_;
  ByNumber by_number_;
  std::uint64_t next_number_ = 0;
  std::uint32_t subdirectories_ = 0;
  bool closed_ = false;
};

class Inode : public std::enable_shared_from_this<Inode> {
 public:
  enum class Presence : std::uint8_t {
    kNew,        // the table does not have it yet
    kKnown,      // it has records
    kForgotten,  // by the kernel, and gone from the table
  };

  // The state that changes. A Reader shows it, and only a Writer changes it.
  struct State {
    Presence presence = Presence::kNew;
    // In the journal, as is where the buffer's memory is. The size is the buffer's, as it was when a Writer ended.
    InodeRecord record;
    std::unique_ptr<ExtendedAttributes> extended;  // null until the first one

    // The rest follows from other records, or is of this process.
    bool restored = false;        // perhaps there are fewer references
    std::uint32_t unclaimed = 0;  // of the references that the last process held, those that this one has not claimed
    std::shared_ptr<Account> directory_account;
    std::uint64_t charged = 0;              // of the table's metadata
    Metadata::Share* charged_to = nullptr;  // the share of its owner
    std::uint32_t open_files = 0;
    std::uint32_t open_writers = 0;  // of them, those open for writing
    // While the inode has neither names nor open files: its memory is coming back, unless a program keeps it.
    std::unique_ptr<Releases::Expected> expected;
  };
  class Reader;
  class Writer;

  // state: with the attributes. target: of a symbolic link.
  Inode(State state, std::shared_ptr<Buffer> buffer, std::string target, Records& records);

  [[nodiscard]] std::uint64_t ino() const { return ino_; }
  [[nodiscard]] std::int32_t device() const { return device_; }
  // Null without a buffer. Both the first one and the one that InodeTable::replace_buffer() sets live as long as the
  // inode.
  [[nodiscard]] const std::shared_ptr<Buffer>& buffer() const { return is_registered() ? replacement_ : buffer_; }

  // Whether the file shows memory of a program: see InodeTable::replace_buffer().
  [[nodiscard]] bool is_registered() const { return replaced_.load(std::memory_order_acquire); }
  // Whether the CPU can read the buffer's memory in place.
  [[nodiscard]] bool in_host_memory() const { return in_host_memory_ && !is_registered(); }

  // The account of the limited directory that the inode is in; null: there is none.
  [[nodiscard]] std::shared_ptr<Account> directory_account() const;

  // As they are now; size and blocks of a regular file are the buffer's.
  [[nodiscard]] gpufs_attributes attributes() const;
  [[nodiscard]] std::uint32_t kind() const { return kind_; }  // S_IF of its mode
  [[nodiscard]] bool is_directory() const { return S_ISDIR(kind_); }
  // The mount's own, which keep their names: all but what is below the directories of devices.
  [[nodiscard]] bool is_fixed() const { return device_ < 0; }
  [[nodiscard]] Timestamp birth() const;
  // Where a symbolic link leads.
  [[nodiscard]] std::string_view target() const { return target_; }
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

 private:
  friend class InodeTable;
  friend class Namespace;
  friend class NamesWriter;

  // Only a Reader or a Writer reaches what is here.
  class Guarded {
   public:
    explicit Guarded(State first) : state(std::move(first)) {}

   private:
    friend class Reader;
    friend class Writer;
    // Guards the state. ExtentBuffer::mutation_mutex_ is never taken under it: a buffer holds that when it reports that
    // its contents have moved. Order 4 of docs/design/requests.md#locks
    mutable std::mutex mutex;
    State state;
  };

  // What replace_buffer() leaves as it was. The inode has a buffer.
  [[nodiscard]] ExtentBuffer& own_buffer() const { return *buffer_->growing(); }
  // Set-gid without execution for the group, and the caller is outside that group. Reads /proc only then.
  [[nodiscard]] bool has_bare_set_gid_foreign_to(const Caller& caller) const;
  // Applies what a directory passes on to a new entry; before the inode is visible.
  void inherit(const Inode& directory, std::uint32_t umask);
  // The memory that names and attributes take, at most, with so many more bytes of an extended attribute.
  [[nodiscard]] std::uint64_t metadata(const State& state, std::uint64_t more = 0) const;

  const std::uint64_t ino_;
  const std::int32_t device_;
  const std::uint32_t kind_;
  const std::shared_ptr<Buffer> buffer_;
  const bool in_host_memory_;
  const std::string target_;
  Records& records_;
  std::shared_ptr<Buffer> replacement_;  // set once, before replaced_
  std::atomic<bool> replaced_{false};
  std::atomic<bool> lost_stores_{false};
  Guarded guarded_;
  InodeNames names_;
};

// Keeps the state of an inode as it is.
class Inode::Reader {
 public:
  explicit Reader(const Inode& inode) : state_(inode.guarded_.state), lock_(inode.guarded_.mutex) {}
  const State* operator->() const { return &state_; }

 private:
  const State& state_;
  const std::lock_guard<std::mutex> lock_;
};

// Alone changes the state of an inode. When it ends, it records what differs from before, all of it at once, and then
// lets others see it.
class Inode::Writer {
 public:
  explicit Writer(Inode& inode);
  ~Writer();

  State* operator->() const { return &state_; }
  State& operator*() const { return state_; }
  // The memory of the buffer is elsewhere now.
  void contents_moved() { contents_moved_ = true; }

 private:
  [[nodiscard]] std::uint64_t extended_changes() const { return state_.extended ? state_.extended->changes() : 0; }
  void record() const;
  void remove_record() const;

  Inode& inode_;
  State& state_;
  const std::lock_guard<std::mutex> lock_;
  const Records::Change together_;  // committed with the lock held
  const Presence presence_;         // as all below: before
  const InodeRecord record_;
  const std::uint64_t extended_changes_;
  bool contents_moved_ = false;
};

}  // namespace gpufs::fuse
