#include "journal/journal.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <bit>
#include <bitset>
#include <cerrno>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "base/log.h"

namespace gpufs::journal {
namespace {

constexpr std::array<char, 8> kMagic = {'G', 'P', 'U', 'F', 'S', 'J', 'N', 'L'};
constexpr std::uint64_t kHeaderBytes = 4096;
constexpr std::uint64_t kSmallestBlock = 128;
// A segment has the blocks of one size: as many as fit into this, or one larger block. Parts of the file that have no
// memory read as segments of the smallest blocks, all free.
constexpr std::uint64_t kUnitBytes = std::uint64_t{256} << 10;
// Larger segments are not kept without values.
constexpr std::uint64_t kLargestSpare = std::uint64_t{1} << 20;
// Addresses for all that it may ever hold.
#ifdef __SANITIZE_THREAD__
// The thread sanitizer has 1.5 TiB for all mappings of a process, and fails to allocate what it needs for more. Tests
// have several journals.
constexpr std::uint64_t kMappedBytes = std::uint64_t{1} << 34;
#else
constexpr std::uint64_t kMappedBytes = std::uint64_t{1} << 40;
#endif

constexpr std::uint64_t kBlockHeader = 64;

std::uint64_t bytes_of_class(std::size_t size_class) { return kSmallestBlock << size_class; }
std::uint64_t segment_bytes(std::size_t size_class) { return std::max(kUnitBytes, bytes_of_class(size_class)); }
std::size_t blocks_in_segment(std::size_t size_class) {
  return static_cast<std::size_t>(segment_bytes(size_class) / bytes_of_class(size_class));
}

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
  static_assert(sizeof(Header) <= kHeaderBytes && sizeof(Block) == kBlockHeader);
  std::unique_ptr<Journal> journal(new Journal);
  UniqueFd file(::memfd_create("gpufs-journal", MFD_CLOEXEC));
  if (!file.valid()) return Status::from_errno(errno, "creating the journal");
  if (::ftruncate(file.get(), kHeaderBytes) != 0) return Status::from_errno(errno, "creating the journal");
  TRY(journal->map(std::move(file)));
  Header& header = journal->header();
  header.version = kFormat;
  header.end.store(kHeaderBytes);
  header.magic = kMagic;
  return journal;
}

Result<std::unique_ptr<Journal>> Journal::restore(UniqueFd descriptor) {
  std::unique_ptr<Journal> journal(new Journal);
  TRY(journal->map(std::move(descriptor)));
  TRY(journal->read_blocks());
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
  if (end < kHeaderBytes || (end - kHeaderBytes) % kUnitBytes != 0) {
    return Status(EPROTO, "the journal ends within a segment");
  }
  file_bytes_ = end;  // what is behind it was being added
  for (std::uint64_t start = kHeaderBytes; start < end;) {
    // Reading a part without memory through the mapping would give it some.
    const off_t data = ::lseek(file_.get(), static_cast<off_t>(start), SEEK_DATA);
    if (data < 0 && errno != ENXIO) return Status::from_errno(errno, "reading the journal");
    const std::uint64_t from = data < 0 ? end : static_cast<std::uint64_t>(data);
    if (from >= std::min(end, start + kUnitBytes)) {
      free_units_.insert(start);
      start += kUnitBytes;
    } else {
      start = read_segment(start, end, head.committed.load());
    }
  }
  return {};
}

std::uint64_t Journal::read_segment(std::uint64_t start, std::uint64_t end, std::uint64_t committed) {
  const auto is_damaged = [&](std::uint64_t offset) {
    const std::size_t size_class = block(offset).size_class;
    return size_class >= kSizeClasses || bytes_of_class(size_class) > end - offset ||
           (offset != start && bytes_of_class(size_class) > start + kUnitBytes - offset);
  };
  const std::uint64_t segment_end =
      is_damaged(start) ? std::min(end, start + kUnitBytes) : start + segment_bytes(block(start).size_class);
  std::vector<std::uint64_t> live;
  std::vector<std::uint64_t> free;
  auto next = entries_.end();  // where the last value is: the next one mostly has the next key
  for (std::uint64_t offset = start; offset < segment_end;) {
    if (is_damaged(offset)) {
      log_error("the journal is damaged at ", offset, ": what was there is lost");
      break;
    }
    Block& found = block(offset);
    const BlockState state = found.state.load();
    const bool done = found.transaction.load() == committed;
    bool is_live =
        state == BlockState::kLive || (state == BlockState::kNew && done) || (state == BlockState::kReplaced && !done);
    const auto enter = [&] {
      const std::size_t known = entries_.size();
      next = std::next(entries_.try_emplace(next, found.key, Entry{offset, 0}));
      return entries_.size() > known;
    };
    if (is_live && (found.value_bytes > bytes_of_class(found.size_class) - sizeof(Block) ||
                    (!live.empty() && found.size_class != block(live.front()).size_class) || !enter())) {
      log_error("the journal is damaged at ", offset, ": a value is lost");
      is_live = false;
    }
    // Only where that is a change: the kernel maps pages that are only read many at a time.
    const BlockState settled = is_live ? BlockState::kLive : BlockState::kFree;
    if (state != settled) found.state.store(settled);
    (is_live ? live : free).push_back(offset);
    offset += bytes_of_class(found.size_class);
  }
  if (live.empty()) {  // perhaps it was being divided into blocks
    for (std::uint64_t unit = start; unit < segment_end; unit += kUnitBytes) free_units_.insert(unit);
    static_cast<void>(::fallocate(file_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(start),
                                  static_cast<off_t>(segment_end - start)));
    return segment_end;
  }
  const std::size_t size_class = block(live.front()).size_class;
  Segment segment{size_class, blocks_in_segment(size_class), {}};
  std::ranges::reverse(free);
  for (const std::uint64_t offset : free) {
    if (block(offset).size_class == size_class) {
      segment.free.push_back(static_cast<std::uint16_t>((offset - start) / bytes_of_class(size_class)));
    }
  }
  used_bytes_ += live.size() * bytes_of_class(size_class);
  segments_.emplace(start, std::move(segment));
  use(start);
  return segment_end;
}

std::uint64_t Journal::bytes() const {
  const std::lock_guard lock(mutex_);
  return used_bytes_;
}

std::uint64_t Journal::block_bytes(std::uint64_t value_bytes) {
  return std::bit_ceil(std::max(kBlockHeader + value_bytes, kSmallestBlock));
}

Status Journal::health() {
  const std::lock_guard lock(mutex_);
  if (!unwritten_.empty()) write_missing();
  return unwritten_.empty() ? Status() : reason_;
}

void Journal::write_missing() {
  for (auto next = unwritten_.begin(); next != unwritten_.end();) {
    const auto& [key, value] = *next;
    const std::uint64_t offset = block_for(value.size());
    if (offset == 0 && reason_.error() == ENOMEM) return;
    const auto present = next++;
    if (offset == 0) continue;  // too large
    fill(offset, key, value, {});
    commit({&offset, 1}, {});
    Entry& entry = entries_[key];
    removed_.erase(entry.order);
    entry.block = offset;
    unwritten_.erase(present);
  }
  if (unwritten_.empty()) header().given_up.store(0);
}

Status Journal::add_segment(std::size_t size_class) {
  const std::uint64_t bytes = segment_bytes(size_class);
  const std::uint64_t start = take_units(static_cast<std::size_t>(bytes / kUnitBytes));
  const std::uint64_t end = start + bytes;
  // Allocated now: a machine without memory must not end the process when it stores a value.
  if (end > kMappedBytes || ::fallocate(file_.get(), 0, static_cast<off_t>(start), static_cast<off_t>(bytes)) != 0) {
    for (std::uint64_t unit = start; unit < std::min(end, file_bytes_); unit += kUnitBytes) free_units_.insert(unit);
    return Status(ENOMEM, "no memory for the journal");
  }
  Segment segment{size_class, blocks_in_segment(size_class), {}};
  for (std::size_t index = segment.blocks; index-- > 0;) {
    Block& added = block(start + index * bytes_of_class(size_class));
    added.state.store(BlockState::kFree, std::memory_order_relaxed);
    added.size_class = static_cast<std::uint32_t>(size_class);
    segment.free.push_back(static_cast<std::uint16_t>(index));  // the lowest is used first
  }
  segments_.emplace(start, std::move(segment));
  classes_[size_class].spare = start;
  if (end > file_bytes_) {
    file_bytes_ = end;
    header().end.store(end, std::memory_order_release);
  }
  return {};
}

std::uint64_t Journal::take_units(std::size_t count) {
  std::size_t found = 0;
  std::uint64_t next = 0;
  for (const std::uint64_t unit : free_units_) {
    found = unit == next ? found + 1 : 1;
    next = unit + kUnitBytes;
    if (found < count) continue;
    const std::uint64_t start = next - count * kUnitBytes;
    free_units_.erase(free_units_.find(start), free_units_.lower_bound(next));
    return start;
  }
  return file_bytes_;
}

void Journal::use(std::uint64_t start) {
  const Segment& segment = segments_.at(start);
  SizeClass& of = classes_[segment.size_class];
  of.blocks += segment.blocks;
  of.free += segment.free.size();
  if (!segment.free.empty()) of.with_free.insert(start);
}

void Journal::set_aside(std::uint64_t start) {
  const auto found = segments_.find(start);
  const std::size_t size_class = found->second.size_class;
  SizeClass& of = classes_[size_class];
  of.blocks -= found->second.blocks;
  of.free -= found->second.free.size();
  of.with_free.erase(start);
  const std::uint64_t bytes = segment_bytes(size_class);
  if (of.spare == 0 && bytes <= kLargestSpare) {
    of.spare = start;
    return;
  }
  segments_.erase(found);
  // If this fails, the blocks stay there, free ones, and the next segment at this place has its memory already.
  static_cast<void>(::fallocate(file_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(start),
                                static_cast<off_t>(bytes)));
  for (std::uint64_t unit = start; unit < start + bytes; unit += kUnitBytes) free_units_.insert(unit);
}

std::uint64_t Journal::take_block(std::size_t size_class) {
  SizeClass& of = classes_[size_class];
  if (of.with_free.empty()) use(std::exchange(of.spare, 0));
  const std::uint64_t start = *of.with_free.begin();
  Segment& segment = segments_.at(start);
  const std::uint64_t offset = start + segment.free.back() * bytes_of_class(size_class);
  segment.free.pop_back();
  --of.free;
  if (segment.free.empty()) of.with_free.erase(start);
  used_bytes_ += bytes_of_class(size_class);
  return offset;
}

void Journal::begin(std::uint64_t order) {
  const std::lock_guard lock(mutex_);
  under_way_.insert(order);
}

std::uint64_t Journal::block_for(std::uint64_t value_bytes) {
  const auto size_class = static_cast<std::size_t>(std::countr_zero(block_bytes(value_bytes)) -  //
                                                   std::countr_zero(kSmallestBlock));
  if (size_class >= kSizeClasses) {
    reason_ = Status(EFBIG, "a value of " + std::to_string(value_bytes) + " bytes is too large for the journal");
    return 0;
  }
  if (classes_[size_class].with_free.empty() && classes_[size_class].spare == 0) {
    if (Status added = add_segment(size_class); !added.ok()) {
      reason_ = std::move(added);
      return 0;
    }
  }
  return take_block(size_class);
}

void Journal::fill(std::uint64_t offset, Key key, std::span<const std::byte> head, std::span<const std::byte> tail) {
  Block& fresh = block(offset);  // free for all others until it is committed
  fresh.key = key;
  fresh.value_bytes = head.size() + tail.size();
  std::byte* const value = base_ + offset + sizeof(Block);
  if (!head.empty()) std::memcpy(value, head.data(), head.size());
  if (!tail.empty()) std::memcpy(value + head.size(), tail.data(), tail.size());
}

std::uint64_t Journal::write(Key key, std::span<const std::byte> head, std::span<const std::byte> tail) {
  std::uint64_t offset = 0;
  {
    const std::lock_guard lock(mutex_);
    offset = block_for(head.size() + tail.size());
  }
  if (offset != 0) fill(offset, key, head, tail);
  return offset;
}

void Journal::release(std::uint64_t offset) {
  const auto found = std::prev(segments_.upper_bound(offset));
  const std::uint64_t start = found->first;
  Segment& segment = found->second;
  const std::uint64_t bytes = bytes_of_class(segment.size_class);
  SizeClass& of = classes_[segment.size_class];
  block(offset).state.store(BlockState::kFree, std::memory_order_release);
  segment.free.push_back(static_cast<std::uint16_t>((offset - start) / bytes));
  of.with_free.insert(start);
  ++of.free;
  used_bytes_ -= bytes;
  if (segment.free.size() == segment.blocks) set_aside(start);
}

void Journal::compact(std::size_t size_class) {
  SizeClass& of = classes_[size_class];
  while (of.free > of.blocks / 3 + blocks_in_segment(size_class)) {
    const auto emptiest = std::ranges::max_element(
        of.with_free, {}, [this](std::uint64_t start) { return segments_.at(start).free.size(); });
    if (!evacuate(*emptiest)) return;
  }
}

bool Journal::evacuate(std::uint64_t start) {
  const Segment& segment = segments_.at(start);
  const std::size_t size_class = segment.size_class;
  const std::uint64_t bytes = bytes_of_class(size_class);
  SizeClass& of = classes_[size_class];
  std::vector<bool> is_free(segment.blocks);
  for (const std::uint16_t index : segment.free) is_free[index] = true;
  std::vector<std::uint64_t> obsolete;
  for (std::size_t index = 0; index < segment.blocks; ++index) {
    if (is_free[index]) continue;
    obsolete.push_back(start + index * bytes);
    if (block(obsolete.back()).state.load(std::memory_order_relaxed) != BlockState::kLive) return false;
  }
  if (of.free - segment.free.size() < obsolete.size()) return false;
  of.with_free.erase(start);  // the copies go elsewhere
  std::vector<std::uint64_t> fresh;
  for (const std::uint64_t offset : obsolete) {
    fresh.push_back(take_block(size_class));
    Block& copy = block(fresh.back());
    const Block& original = block(offset);
    copy.key = original.key;
    copy.value_bytes = original.value_bytes;
    const std::span<const std::byte> value = value_of(offset);
    std::memcpy(base_ + fresh.back() + sizeof(Block), value.data(), value.size());
    entries_.at(copy.key).block = fresh.back();
  }
  commit(fresh, obsolete);
  return true;
}

void Journal::commit(std::span<const std::uint64_t> fresh, std::span<const std::uint64_t> obsolete) {
  Header& head = header();
  const std::uint64_t number = head.committed.load(std::memory_order_relaxed) + 1;
  const auto mark = [&](std::uint64_t offset, BlockState state) {
    // The number first: with the one of an earlier transaction it would seem to be committed.
    block(offset).transaction.store(number, std::memory_order_release);
    block(offset).state.store(state, std::memory_order_release);
  };
  for (const std::uint64_t offset : fresh) mark(offset, BlockState::kNew);
  for (const std::uint64_t offset : obsolete) mark(offset, BlockState::kReplaced);
  head.committed.store(number, std::memory_order_release);
  for (const std::uint64_t offset : fresh) block(offset).state.store(BlockState::kLive, std::memory_order_release);
  for (const std::uint64_t offset : obsolete) release(offset);
}

void Journal::end(std::uint64_t began, std::span<Change> changes) {
  const std::lock_guard lock(mutex_);
  std::vector<std::uint64_t>& fresh = fresh_;
  std::vector<std::uint64_t>& obsolete = obsolete_;
  fresh.clear();
  obsolete.clear();
  for (Change& change : changes) {
    Entry& entry = entries_[change.key];
    if (entry.order > change.order) {  // a later change was committed earlier
      if (change.block != 0) release(change.block);
      continue;
    }
    if (entry.block != 0 && block(entry.block).state.load(std::memory_order_relaxed) == BlockState::kFree) {
      std::erase(fresh, entry.block);  // of this transaction, and never visible
      release(entry.block);
    } else if (entry.block != 0) {
      obsolete.push_back(entry.block);
    }
    if (entry.block == 0 && entry.order != 0) removed_.erase(entry.order);
    entry = {change.block, change.order};
    if (!unwritten_.empty()) unwritten_.erase(change.key);
    if (change.unwritten) unwritten_.emplace(change.key, std::move(*change.unwritten));
    if (change.block != 0) {
      fresh.push_back(change.block);
    } else {
      removed_.emplace(change.order, change.key);
    }
  }
  std::bitset<kSizeClasses> smaller;  // the size classes that have fewer values now
  for (const std::uint64_t offset : obsolete) smaller.set(block(offset).size_class);
  if (!unwritten_.empty() && header().given_up.exchange(1) == 0) {
    log_error("this mount does not survive its daemon at the moment: ", reason_.message());
  }
  commit(fresh, obsolete);
  if (unwritten_.empty()) header().given_up.store(0);
  for (std::size_t size_class = 0; size_class < kSizeClasses; ++size_class) {
    if (smaller[size_class]) compact(size_class);
  }

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

void Transaction::put(Key key, std::span<const std::byte> head, std::span<const std::byte> tail) {
  const std::uint64_t order = journal_.next_order();
  const std::uint64_t block = journal_.write(key, head, tail);
  changes_.push_back({key, block, order, {}});
  if (block != 0) return;
  Journal::Value& value = changes_.back().unwritten.emplace(head.begin(), head.end());
  value.insert(value.end(), tail.begin(), tail.end());
}

void Transaction::remove(Key key) { changes_.push_back({key, 0, journal_.next_order(), {}}); }

void Transaction::commit() {
  open_ = false;
  journal_.end(began_, changes_);
}

Numbers::Numbers(Journal* journal, NumbersOf of, std::uint64_t first)
    : journal_(journal), of_(of), next_(first), reserved_(journal == nullptr ? UINT64_MAX : first) {
  if (journal == nullptr) return;
  journal->each(kNumbers, [&](std::uint64_t id, std::span<const std::byte> value) {
    std::uint64_t reserved = 0;
    if (id != static_cast<std::uint64_t>(of) || value.size() != sizeof reserved) return;
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
  change.put({kNumbers, static_cast<std::uint64_t>(of_)}, std::as_bytes(std::span(&reserved, 1)));
  change.commit();
  reserved_.store(reserved, std::memory_order_release);
}

}  // namespace gpufs::journal
