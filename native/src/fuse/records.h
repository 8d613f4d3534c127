// What the journal holds of a mount: inodes, names, open files, limits, and what requests have done. A new process
// restores the mount from it: InodeTable::restore(), Namespace::restore().
// Ownership: the Mount's. Thread-safe.
//
// A record describes its object as it is when the record is written, with the object's lock held. Each kind of record
// has one writer, without which its object does not change: Inode::Writer, NamesWriter, OpenFiles, Quotas, Relay.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "fuse/request.h"
#include "gpufs.h"
#include "journal/journal.h"
#include "memory/extent_buffer.h"

namespace gpufs::fuse {

// The part of an inode that changes often, as it is in the journal.
struct InodeRecord {
  gpufs_attributes attributes{};  // of a file with contents the size is that of the last record
  std::int64_t birth_seconds = 0;
  std::uint64_t references = 0;       // the kernel's, and those of InodeTable::hold()
  std::uint64_t first_directory = 0;  // where O_TMPFILE created it; 0: it may not get its first name any more
  std::uint32_t birth_nanoseconds = 0;
  std::uint32_t writers_ever = 0;  // how often it was opened for writing
  std::uint32_t created_open = 0;  // 1: by O_CREAT | O_EXCL, which was the first time
  std::uint32_t changes = 0;       // how often its contents were changed
  std::uint32_t held = 0;          // of the references, those of InodeTable::hold()
  std::uint32_t unused = 0;
  std::uint64_t limited_directory = 0;  // whose account pays, also for a file without a name; 0: none
};

struct NameRecord {
  std::uint64_t directory = 0;
  std::uint64_t number = 0;  // in the order of listings
  std::uint64_t inode = 0;
  std::string_view text;
};

struct FileRecord {
  std::uint64_t inode = 0;
  std::uint64_t writes = 0;
};

// What a request has done that must not be done twice: the inode to which its reply gives the kernel a reference, and
// the handle of the file that it has opened. 0: none.
struct Outcome {
  std::uint64_t inode = 0;
  std::uint64_t handle = 0;
};

class Records {
 public:
  // journal: null where nothing is kept. The functions do nothing then.
  explicit Records(std::shared_ptr<journal::Journal> journal);
  ~Records();

  [[nodiscard]] journal::Journal* journal() const { return journal_.get(); }

  // What the calling thread records while this lives becomes valid at once when it is destroyed, or when an outer one
  // is. Without one each record is valid on return. It costs nothing where nothing is recorded.
  class Change {
   public:
    explicit Change(Records& records);
    ~Change();
    Change(const Change&) = delete;
    Change& operator=(const Change&) = delete;

   private:
    const bool counts_;  // something is kept
  };

  // Calls work() once what the calling thread has recorded is valid: it takes something away that other records need.
  void afterwards(std::function<void()> work);

  // ---- the writers ----

  void put_inode(const InodeRecord& inode);
  void put_target(std::uint64_t ino, std::string_view target);
  // As ExtendedAttributes has them; empty: none.
  void put_extended(std::uint64_t ino, std::span<const std::byte> attributes);
  // Without the size.
  void put_contents(std::uint64_t ino, const KeptContents& contents);
  // id: new_name().
  void put_name(std::uint64_t id, const NameRecord& name);
  [[nodiscard]] std::uint64_t new_name() { return name_numbers_.next(); }
  void put_file(std::uint64_t handle, const FileRecord& file);
  // Bytes of a user (journal::user_key()) or of a directory's inode; nullopt: no limit of its own.
  void put_limit(journal::Key whose, std::optional<std::uint64_t> bytes);
  // The flags of INIT.
  void put_init(std::uint64_t offered, std::uint64_t granted);
  void remove(journal::Key key);

  // ---- requests ----

  // Records what a request has done. Its outcome has a place in the journal as long as the responder lives, so there
  // are as many as requests that are carried out and not yet answered.
  void done(Responder& request, const Outcome& outcome);
  // Drops the records of what the last process did, since the kernel has sent all of it again by now.
  void forget_outcomes();
  // What a request did before the last process ended; nullopt: nothing yet, or the kernel sends it for the first time.
  [[nodiscard]] std::optional<Outcome> outcome_of(std::uint64_t unique) const;

  // ---- what a new process finds ----

  // The parts of an inode where they lie in the journal, until something is recorded. Empty: there is none.
  struct StoredInode {
    std::uint64_t ino = 0;
    std::span<const std::byte> record;
    std::span<const std::byte> target;
    std::span<const std::byte> extended;
    std::span<const std::byte> contents;
  };
  // By their numbers. Any thread may read them.
  [[nodiscard]] std::vector<StoredInode> stored_inodes() const;
  // Missing bytes read as zeros, since the journal is this program's own.
  [[nodiscard]] static InodeRecord read_inode(const StoredInode& stored);
  // The contents have the size that the record says; nullopt: none are kept.
  [[nodiscard]] static std::optional<KeptContents> read_contents(const StoredInode& stored, const InodeRecord& record);
  // Calls visit(id, record) for each name. visit must not record anything.
  void each_name(const std::function<void(std::uint64_t, const NameRecord&)>& visit) const;
  [[nodiscard]] std::vector<std::pair<std::uint64_t, FileRecord>> files() const;
  // kUserLimit or kDirectoryLimit.
  [[nodiscard]] std::vector<std::pair<std::uint64_t, std::uint64_t>> limits(journal::Kind kind) const;
  // Offered and granted; nullopt: INIT has not been answered.
  [[nodiscard]] std::optional<std::pair<std::uint64_t, std::uint64_t>> init() const;

 private:
  void put(journal::Key key, std::span<const std::byte> head, std::span<const std::byte> tail = {});
  // Of an outcome, until the last copy is gone.
  std::shared_ptr<std::uint64_t> take_place();

  const std::shared_ptr<journal::Journal> journal_;
  journal::Numbers name_numbers_;
  // Outcomes of the last process, by request; constant.
  std::unordered_map<std::uint64_t, Outcome> before_;
  std::vector<std::uint64_t> old_outcomes_;  // their records

  std::mutex outcomes_mutex_;                 // guards all below
  std::vector<std::uint64_t> free_outcomes_;  // records that another request may overwrite
  std::uint64_t next_outcome_ = 0;            // all from here on are free, too
};

}  // namespace gpufs::fuse
