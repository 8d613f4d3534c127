// What the journal holds of a mount: inodes, names, open files, limits, and what requests have done. A new process
// restores the mount from it: InodeTable::restore(), Namespace::restore().
// Ownership: the Mount's. Thread-safe.
//
// A record describes its object as it is when the record is written, with the object's lock held. Whatever changes an
// object writes its record before it releases that lock, and so before the request is answered.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "gpufs.h"
#include "journal/journal.h"
#include "memory/buffer.h"

namespace gpufs::fuse {

struct InodeRecord {
  gpufs_attributes attributes{};
  std::int64_t birth_seconds = 0;
  std::uint32_t birth_nanoseconds = 0;
  std::uint32_t writers_ever = 0;
  std::uint64_t references = 0;
  bool created_open = false;
  std::string target;  // of a symbolic link
  std::vector<std::pair<std::string, std::vector<std::byte>>> extended;
  std::optional<KeptContents> contents;  // of a regular file on a device
};

struct NameRecord {
  std::uint64_t directory = 0;
  std::uint64_t number = 0;
  std::uint64_t inode = 0;
  std::string text;
};

struct FileRecord {
  std::uint64_t inode = 0;
  bool writes = false;
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
  Records(const Records&) = delete;
  Records& operator=(const Records&) = delete;

  [[nodiscard]] journal::Journal* journal() const { return journal_.get(); }

  // What the calling thread records while this lives becomes valid at once when it is destroyed, or when an outer one
  // is. Without one each record is valid on return.
  class Change {
   public:
    explicit Change(Records& records);
    ~Change();
    Change(const Change&) = delete;
    Change& operator=(const Change&) = delete;

   private:
    Records* records_;  // null: not the outermost one, or nothing is kept
  };

  // Calls work() once what the calling thread has recorded is valid: it takes something away that other records need.
  void afterwards(std::function<void()> work);

  void put_inode(const InodeRecord& inode);
  void remove_inode(std::uint64_t ino);
  // A file without a name that may get its first one, and the directory that it was created in.
  void put_unnamed(std::uint64_t ino, std::uint64_t directory);
  void remove_unnamed(std::uint64_t ino);
  // id: new_name().
  void put_name(std::uint64_t id, const NameRecord& name);
  void remove_name(std::uint64_t id);
  [[nodiscard]] std::uint64_t new_name() { return name_numbers_.next(); }
  void put_file(std::uint64_t handle, const FileRecord& file);
  void remove_file(std::uint64_t handle);
  // Bytes of a user (device << 32 | uid) or of a directory's inode; nullopt: no limit of its own.
  void put_user_limit(std::uint64_t user, std::optional<std::uint64_t> bytes);
  void put_directory_limit(std::uint64_t ino, std::optional<std::uint64_t> bytes);
  // The flags of INIT.
  void put_init(std::uint64_t offered, std::uint64_t granted);

  // ---- requests ----

  // The calling thread serves this request until the end of the scope.
  class Serving {
   public:
    Serving(Records& records, std::uint64_t unique);
    ~Serving();
    Serving(const Serving&) = delete;
    Serving& operator=(const Serving&) = delete;
  };
  // Records what the request that the thread serves has done.
  void done(const Outcome& outcome);
  // Drops the records of what the last process did, since the kernel has sent all of it again by now.
  void forget_outcomes();
  // What that request did before the last process ended; nullopt: nothing yet. The kernel has sent it again.
  [[nodiscard]] std::optional<Outcome> done_before() const;

  // ---- what a new process finds ----

  // The records of inodes where they lie in the journal, until something is recorded. Any thread may read them.
  using Stored = std::pair<std::uint64_t, std::span<const std::byte>>;
  [[nodiscard]] std::vector<Stored> stored_inodes() const { return stored(kInode); }
  [[nodiscard]] static InodeRecord read_inode(const Stored& stored);
  // Calls visit(id, record) for each name. visit must not record anything.
  void each_name(const std::function<void(std::uint64_t, const NameRecord&)>& visit) const;
  [[nodiscard]] std::vector<std::pair<std::uint64_t, std::uint64_t>> unnamed() const { return numbers(kUnnamed); }
  [[nodiscard]] std::vector<std::pair<std::uint64_t, FileRecord>> files() const;
  [[nodiscard]] std::vector<std::pair<std::uint64_t, std::uint64_t>> user_limits() const { return numbers(kUserLimit); }
  [[nodiscard]] std::vector<std::pair<std::uint64_t, std::uint64_t>> directory_limits() const {
    return numbers(kDirectoryLimit);
  }
  // Offered and granted; nullopt: INIT has not been answered.
  [[nodiscard]] std::optional<std::pair<std::uint64_t, std::uint64_t>> init() const;

 private:
  enum Kind : std::uint32_t { kInit = 1, kInode, kUnnamed, kName, kFile, kUserLimit, kDirectoryLimit, kOutcome };

  void put(Kind kind, std::uint64_t id, std::span<const std::byte> value);
  void remove(Kind kind, std::uint64_t id);
  [[nodiscard]] std::vector<Stored> stored(Kind kind) const;
  [[nodiscard]] std::vector<std::pair<std::uint64_t, std::uint64_t>> numbers(Kind kind) const;
  void put_limit(Kind kind, std::uint64_t id, std::optional<std::uint64_t> bytes);

  const std::shared_ptr<journal::Journal> journal_;
  journal::Numbers name_numbers_;
  // Of the last process, by request; constant.
  std::unordered_map<std::uint64_t, Outcome> before_;
  std::vector<std::uint64_t> old_outcomes_;  // their records
  std::uint64_t first_outcome_ = 0;          // of this process
};

}  // namespace gpufs::fuse
