// Values by key in a memfd, which outlive the process: whoever holds the descriptor can restore them, at whatever
// instruction the process was killed. The changes of one transaction are all there afterwards, or none.
// docs/internals/journal.md has the format.
//
// The journal is not a log: its size follows the values, not the changes. A value lies in a block of a power of two of
// bytes. A transaction writes its values into fresh blocks, marks these and the blocks that they replace with its
// number, and stores that number in the header: this one store commits it. Then the marks are removed.
//
// Blocks of one size share segments. The memory of a segment without values goes back to the machine, but for one of
// each size. Where more than a third of the blocks of a size are free, their values move together (see compact()).
//
// Ownership: the Mount's. Thread-safe.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "base/status.h"
#include "base/unique_fd.h"
#include "journal/keys.h"

namespace gpufs::journal {

class Journal {
 public:
  // A journal of another format is refused. It also stands for what the control plane keeps of clients beside it.
  static constexpr std::uint32_t kFormat = 5;
  // The most that one value may have.
  static constexpr std::size_t kMaximumBytes = (std::size_t{16} << 20) - 64;

  static Result<std::unique_ptr<Journal>> create();
  // Takes over the values in a descriptor. EPROTO: it is not a journal, or has another format. ENOTRECOVERABLE: values
  // are missing, see health().
  static Result<std::unique_ptr<Journal>> restore(UniqueFd descriptor);
  ~Journal();

  [[nodiscard]] int fd() const { return file_.get(); }
  // Memory of the values, with what they leave free in their blocks.
  [[nodiscard]] std::uint64_t bytes() const;
  // Memory of the block that a value of this size takes.
  [[nodiscard]] static std::uint64_t block_bytes(std::uint64_t value_bytes);
  // Why values are missing: there was no memory for them, or they are too large. Nothing can be restored until they are
  // written: each call tries that again.
  [[nodiscard]] Status health();

  // Calls visit(id, value) for the values of a kind, in the order of their ids. visit must not call this object.
  template <typename Visit>
  void each(std::uint32_t kind, Visit visit) const {
    const std::lock_guard lock(mutex_);
    for (auto entry = entries_.lower_bound({kind, 0}); entry != entries_.end() && entry->first.kind == kind; ++entry) {
      if (entry->second.block != 0) visit(entry->first.id, value_of(entry->second.block));
    }
  }

 private:
  friend class Transaction;
  struct Header;
  enum class BlockState : std::uint32_t;
  struct Block;

  using Value = std::vector<std::byte>;
  // A value that is written and not committed. block 0: the key is to be removed, or there was no memory for the value.
  struct Change {
    Key key;
    std::uint64_t block = 0;  // offset in the file, as everywhere
    std::uint64_t order = 0;
    std::optional<Value> unwritten;
  };
  // block 0: removed, and kept while transactions under way may have an older value.
  struct Entry {
    std::uint64_t block = 0;
    std::uint64_t order = 0;
  };
  static constexpr std::size_t kSizeClasses = 18;  // 128 bytes to 16 MiB

  // A part of the file with blocks of one size class.
  struct Segment {
    std::size_t size_class = 0;
    std::size_t blocks = 0;
    std::vector<std::uint16_t> free;  // which of them; the last one is used first
  };
  struct SizeClass {
    std::set<std::uint64_t> with_free;  // segments with values and free blocks
    std::size_t blocks = 0;             // of all segments with values
    std::size_t free = 0;               // of them
    std::uint64_t spare = 0;            // a segment without values; 0: none
  };

  Journal() = default;
  Status map(UniqueFd file);
  Status read_blocks();
  // Reads the segment that begins there, and returns the end of it.
  std::uint64_t read_segment(std::uint64_t start, std::uint64_t end, std::uint64_t committed);

  // The order of the changes of one key is that of these calls, not of the commits.
  std::uint64_t next_order() { return last_order_.fetch_add(1, std::memory_order_relaxed) + 1; }
  void begin(std::uint64_t order);
  // The block; 0: see health().
  std::uint64_t write(Key key, std::span<const std::byte> head, std::span<const std::byte> tail);
  void fill(std::uint64_t offset, Key key, std::span<const std::byte> head, std::span<const std::byte> tail);
  void end(std::uint64_t began, std::span<Change> changes);

  // The rest needs the mutex.
  // ENOMEM: the machine has no memory for it.
  Status add_segment(std::size_t size_class);
  // The segment gets values, or has none any more.
  void use(std::uint64_t start);
  void set_aside(std::uint64_t start);
  // The first of so many parts of the file that lie side by side; they are the caller's.
  std::uint64_t take_units(std::size_t count);
  // From a segment that has one, the spare one at last.
  std::uint64_t take_block(std::size_t size_class);
  // One for a value of this size; 0: see reason_.
  std::uint64_t block_for(std::uint64_t value_bytes);
  void write_missing();
  void release(std::uint64_t offset);
  // While more than a third of the blocks of a size are free: moves the values of the emptiest segment into others.
  void compact(std::size_t size_class);
  // False if a transaction under way uses a block of the segment.
  bool evacuate(std::uint64_t start);
  // Makes `fresh` live and `obsolete` free, at once for whoever restores the journal.
  void commit(std::span<const std::uint64_t> fresh, std::span<const std::uint64_t> obsolete);
  [[nodiscard]] Header& header() const;
  [[nodiscard]] Block& block(std::uint64_t offset) const;
  [[nodiscard]] std::span<const std::byte> value_of(std::uint64_t offset) const;

  UniqueFd file_;
  std::byte* base_ = nullptr;  // of a mapping that reaches beyond the file, so that it never moves
  std::atomic<std::uint64_t> last_order_{0};

  mutable std::mutex mutex_;  // guards all below; order 9 of docs/design/requests.md#locks
  std::map<Key, Entry> entries_;
  std::map<std::uint64_t, Key> removed_;    // the removed entries, by order
  std::multiset<std::uint64_t> under_way_;  // when the transactions began
  std::map<std::uint64_t, Segment> segments_;
  std::array<SizeClass, kSizeClasses> classes_;
  std::set<std::uint64_t> free_units_;  // parts of the file without memory, of kSegmentBytes each
  std::uint64_t file_bytes_ = 0;
  std::uint64_t used_bytes_ = 0;
  std::vector<std::uint64_t> fresh_;  // of the commit in progress, as below: they keep their memory
  std::vector<std::uint64_t> obsolete_;
  std::map<Key, Value> unwritten_;  // the last values, of which the file has none
  Status reason_;                   // why
};

// Changes that are committed together. One thread at a time. Destroyed without commit() it has changed nothing.
class Transaction {
 public:
  explicit Transaction(Journal& journal);
  ~Transaction();
  Transaction(const Transaction&) = delete;
  Transaction& operator=(const Transaction&) = delete;

  // Of two transactions that change a key, the one that called this last determines its value. So the caller holds the
  // lock of what it describes.
  // The value is the head with the tail behind it.
  void put(Key key, std::span<const std::byte> head, std::span<const std::byte> tail = {});
  void remove(Key key);
  void commit();

 private:
  Journal& journal_;
  const std::uint64_t began_;
  std::vector<Journal::Change> changes_;
  bool open_ = true;
};

// Numbers that are never given twice, not even by another process that continues from the journal: the kernel may
// still use those that this one gave. A member of the object that gives the numbers.
class Numbers {
 public:
  // From `first` on; where the journal has a record, from the first that no process has given. Null: no other process
  // will continue.
  Numbers(Journal* journal, NumbersOf of, std::uint64_t first);

  std::uint64_t next();

 private:
  void reserve(std::uint64_t number);

  Journal* const journal_;
  const NumbersOf of_;
  std::atomic<std::uint64_t> next_;
  std::mutex mutex_;  // held while the journal gets a record; order 8 of docs/design/requests.md#locks
  std::atomic<std::uint64_t> reserved_;  // the journal's record: a new process begins here
};

}  // namespace gpufs::journal
