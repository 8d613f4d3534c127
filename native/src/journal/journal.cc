#include "journal/journal.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <new>
#include <span>
#include <string>
#include <utility>

#include "base/log.h"

namespace gpufs::journal {
namespace {

constexpr std::array<char, 8> kMagic = {'G', 'P', 'U', 'F', 'S', 'J', 'N', 'L'};
constexpr std::uint64_t kHeaderBytes = 4096;
constexpr std::uint64_t kSmallestBlock = 128;
// The file grows by a segment of blocks of one size.
constexpr std::uint64_t kSegmentBytes = std::uint64_t{1} << 20;
// Addresses for all that it may ever hold.
constexpr std::uint64_t kMappedBytes = std::uint64_t{1} << 40;

std::uint64_t bytes_of_class(std::size_t size_class) { return kSmallestBlock << size_class; }

constexpr std::uint32_t kKind = 101;          // of the journal's values
constexpr std::uint64_t kReservation = 4096;  // numbers for each record

}  // namespace

struct Journal::Header {
  std::array<char, 8> magic;
  std::uint32_t version;
  std::atomic<std::uint32_t> given_up;   // health() is not ok
  std::atomic<std::uint64_t> committed;  // the number of the last transaction
  std::atomic<std::uint64_t> end;        // of the segments
};

// With a transaction's number, it depends on whether that is committed.
enum class Journal::BlockState : std::uint32_t {
  kFree = 0,
  kLive,
  kNew,       // live if committed, else free
  kReplaced,  // free if committed, else live
};

struct Journal::Block {
  std::atomic<BlockState> state;
  std::uint32_t size_class;  // constant from the segment's creation on
  std::atomic<std::uint64_t> transaction;
  Key key;
  std::uint64_t value_bytes;
  std::array<std::byte, 24> reserved;
};

Result<std::unique_ptr<Journal>> Journal::create() {
  static_assert(sizeof(Header) <= kHeaderBytes && sizeof(Block) == 64);
  std::unique_ptr<Journal> journal(new Journal);
  UniqueFd file(::memfd_create("gpufs-journal", MFD_CLOEXEC));
  if (!file.valid()) return Status::from_errno(errno, "creating the journal");
  if (::ftruncate(file.get(), kHeaderBytes) != 0) return Status::from_errno(errno, "creating the journal");
  if (Status mapped = journal->map(std::move(file)); !mapped.ok()) return mapped;
  Header& header = journal->header();
  header.version = kFormat;
  header.end.store(kHeaderBytes);
  header.magic = kMagic;
  return journal;
}

Result<std::unique_ptr<Journal>> Journal::restore(UniqueFd descriptor) {
  std::unique_ptr<Journal> journal(new Journal);
  if (Status mapped = journal->map(std::move(descriptor)); !mapped.ok()) return mapped;
  if (Status read = journal->read_blocks(); !read.ok()) return read;
  return journal;
}

Journal::~Journal() {
  if (base_ != nullptr) ::munmap(base_, kMappedBytes);
}

Status Journal::map(UniqueFd file) {
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) return Status::from_errno(errno, "the journal");
  if (status.st_size < static_cast<off_t>(kHeaderBytes)) return Status(EPROTO, "the journal is too short");
  void* const base = ::mmap(nullptr, kMappedBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file.get(), 0);
  if (base == MAP_FAILED) return Status::from_errno(errno, "mapping the journal");
  // Only the mount's process may change it, and core files must not contain names.
  ::madvise(base, kMappedBytes, MADV_DONTFORK);
  ::madvise(base, kMappedBytes, MADV_DONTDUMP);
  base_ = static_cast<std::byte*>(base);
  file_ = std::move(file);
  file_bytes_ = static_cast<std::uint64_t>(status.st_size);
  return {};
}

Journal::Header& Journal::header() const { return *std::launder(reinterpret_cast<Header*>(base_)); }

Journal::Block& Journal::block(std::uint64_t offset) const {
  return *std::launder(reinterpret_cast<Block*>(base_ + offset));
}

std::span<const std::byte> Journal::value_of(std::uint64_t offset) const {
  return {base_ + offset + sizeof(Block), static_cast<std::size_t>(block(offset).value_bytes)};
}

Status Journal::read_blocks() {
  const std::lock_guard lock(mutex_);
  const Header& head = header();
  const std::uint64_t end = head.end.load();
  if (head.magic != kMagic) return Status(EPROTO, "this is not a journal of gpufs");
  if (head.version != kFormat) {
    return Status(EPROTO, "the journal has format " + std::to_string(head.version) + ", this gpufs reads format " +
                              std::to_string(kFormat));
  }
  if (head.given_up.load() != 0) return Status(ENOTRECOVERABLE, "the journal is incomplete");
  if (end > file_bytes_) return Status(EPROTO, "the journal ends early");
  file_bytes_ = end;  // what is behind it was being added
  const std::uint64_t committed = head.committed.load();
  for (std::uint64_t offset = kHeaderBytes; offset < end;) {
    Block& found = block(offset);
    const std::size_t size_class = found.size_class;
    if (size_class >= kSizeClasses || bytes_of_class(size_class) > end - offset) {
      return Status(EPROTO, "the journal is damaged at " + std::to_string(offset));
    }
    const BlockState state = found.state.load();
    const bool done = found.transaction.load() == committed;
    const bool live =
        state == BlockState::kLive || (state == BlockState::kNew && done) || (state == BlockState::kReplaced && !done);
    if (live && found.value_bytes > bytes_of_class(size_class) - sizeof(Block)) {
      return Status(EPROTO, "the journal is damaged at " + std::to_string(offset));
    }
    found.state.store(live ? BlockState::kLive : BlockState::kFree);
    if (!live) {
      free_[size_class].push_back(offset);
    } else {
      used_bytes_ += bytes_of_class(size_class);
      if (!entries_.emplace(found.key, Entry{offset, 0}).second) return Status(EPROTO, "the journal has a key twice");
    }
    offset += bytes_of_class(size_class);
  }
  return {};
}

std::uint64_t Journal::bytes() const {
  const std::lock_guard lock(mutex_);
  return used_bytes_;
}

Status Journal::health() const {
  const std::lock_guard lock(mutex_);
  return health_;
}

void Journal::give_up(Status reason) {
  if (!health_.ok()) return;
  log_error("this mount will not survive its daemon: ", reason.message());
  health_ = std::move(reason);
  header().given_up.store(1);
}

Status Journal::add_segment(std::size_t size_class) {
  const std::uint64_t block_bytes = bytes_of_class(size_class);
  const std::uint64_t start = file_bytes_;
  const std::uint64_t end = start + std::max(kSegmentBytes, block_bytes);
  // Allocated now: a machine without memory must not end the process when it stores a value.
  if (end > kMappedBytes ||
      ::fallocate(file_.get(), 0, static_cast<off_t>(start), static_cast<off_t>(end - start)) != 0) {
    return Status(ENOMEM, "no memory for the journal");
  }
  for (std::uint64_t offset = end; offset > start; offset -= block_bytes) {
    Block& added = block(offset - block_bytes);
    added.state.store(BlockState::kFree, std::memory_order_relaxed);
    added.size_class = static_cast<std::uint32_t>(size_class);
    free_[size_class].push_back(offset - block_bytes);  // the lowest is used first
  }
  file_bytes_ = end;
  header().end.store(end, std::memory_order_release);
  return {};
}

void Journal::begin(std::uint64_t order) {
  const std::lock_guard lock(mutex_);
  under_way_.insert(order);
}

std::uint64_t Journal::write(Key key, std::span<const std::byte> value) {
  const std::uint64_t needed = sizeof(Block) + value.size();
  const std::uint64_t rounded = std::bit_ceil(std::max(needed, kSmallestBlock));
  const auto size_class = static_cast<std::size_t>(std::countr_zero(rounded) - std::countr_zero(kSmallestBlock));
  std::uint64_t offset = 0;
  {
    const std::lock_guard lock(mutex_);
    if (size_class >= kSizeClasses) {
      give_up(Status(EFBIG, "a value of " + std::to_string(value.size()) + " bytes is too large for the journal"));
      return 0;
    }
    if (free_[size_class].empty()) {
      if (Status added = add_segment(size_class); !added.ok()) {
        give_up(std::move(added));
        return 0;
      }
    }
    offset = free_[size_class].back();
    free_[size_class].pop_back();
    used_bytes_ += rounded;
  }
  Block& fresh = block(offset);  // free for all others until it is committed
  fresh.key = key;
  fresh.value_bytes = value.size();
  if (!value.empty()) std::memcpy(base_ + offset + sizeof(Block), value.data(), value.size());
  return offset;
}

void Journal::release(std::uint64_t offset) {
  const std::size_t size_class = block(offset).size_class;
  block(offset).state.store(BlockState::kFree, std::memory_order_release);
  free_[size_class].push_back(offset);
  used_bytes_ -= bytes_of_class(size_class);
}

void Journal::end(std::uint64_t began, std::span<const Change> changes) {
  const std::lock_guard lock(mutex_);
  Header& head = header();
  const std::uint64_t number = head.committed.load(std::memory_order_relaxed) + 1;
  std::vector<std::uint64_t> fresh;
  std::vector<std::uint64_t> obsolete;
  const auto mark = [&](std::uint64_t offset, BlockState state) {
    // The number first: with the one of an earlier transaction it would seem to be committed.
    block(offset).transaction.store(number, std::memory_order_release);
    block(offset).state.store(state, std::memory_order_release);
  };
  for (const Change& change : changes) {
    Entry& entry = entries_[change.key];
    if (entry.order > change.order) {  // a later change was committed earlier
      if (change.block != 0) release(change.block);
      continue;
    }
    if (entry.block != 0) obsolete.push_back(entry.block);
    if (entry.block == 0 && entry.order != 0) removed_.erase(entry.order);
    entry = {change.block, change.order};
    if (change.block != 0) {
      fresh.push_back(change.block);
    } else {
      removed_.emplace(change.order, change.key);
    }
  }
  // A value that this transaction wrote and replaced itself was never visible.
  std::erase_if(fresh, [&](std::uint64_t offset) {
    if (std::ranges::find(obsolete, offset) == obsolete.end()) return false;
    std::erase(obsolete, offset);
    release(offset);
    return true;
  });
  for (const std::uint64_t offset : fresh) mark(offset, BlockState::kNew);
  for (const std::uint64_t offset : obsolete) mark(offset, BlockState::kReplaced);
  head.committed.store(number, std::memory_order_release);
  for (const std::uint64_t offset : fresh) block(offset).state.store(BlockState::kLive, std::memory_order_release);
  for (const std::uint64_t offset : obsolete) release(offset);

  under_way_.erase(under_way_.find(began));
  const std::uint64_t oldest = under_way_.empty() ? UINT64_MAX : *under_way_.begin();
  while (!removed_.empty() && removed_.begin()->first < oldest) {
    entries_.erase(removed_.begin()->second);
    removed_.erase(removed_.begin());
  }
}

Transaction::Transaction(Journal& journal) : journal_(journal), began_(journal.next_order()) { journal.begin(began_); }

Transaction::~Transaction() {
  if (!open_) return;
  const std::lock_guard lock(journal_.mutex_);
  for (const Journal::Change& change : changes_) {
    if (change.block != 0) journal_.release(change.block);
  }
  journal_.under_way_.erase(journal_.under_way_.find(began_));
}

void Transaction::put(Key key, std::span<const std::byte> value) {
  const std::uint64_t order = journal_.next_order();
  const std::uint64_t block = journal_.write(key, value);
  if (block != 0) changes_.push_back({key, block, order});
}

void Transaction::remove(Key key) { changes_.push_back({key, 0, journal_.next_order()}); }

void Transaction::commit() {
  open_ = false;
  journal_.end(began_, changes_);
}

Numbers::Numbers(Journal* journal, Of of, std::uint64_t first)
    : journal_(journal), of_(of), next_(first), reserved_(journal == nullptr ? UINT64_MAX : first) {
  if (journal == nullptr) return;
  journal->each(kKind, [&](std::uint64_t id, std::span<const std::byte> value) {
    std::uint64_t reserved = 0;
    if (id != of || value.size() != sizeof reserved) return;
    std::memcpy(&reserved, value.data(), sizeof reserved);
    next_ = reserved_ = std::max(first, reserved);
  });
}

std::uint64_t Numbers::next() {
  const std::uint64_t number = next_.fetch_add(1, std::memory_order_relaxed);
  if (number >= reserved_.load(std::memory_order_acquire)) reserve(number);
  return number;
}

void Numbers::reserve(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  if (number < reserved_.load(std::memory_order_relaxed)) return;
  const std::uint64_t reserved = number + kReservation;
  Transaction change(*journal_);
  change.put({kKind, of_}, std::as_bytes(std::span(&reserved, 1)));
  change.commit();
  reserved_.store(reserved, std::memory_order_release);
}

}  // namespace gpufs::journal
