#include "fuse/records.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "fuse/protocol.h"

namespace gpufs::fuse {
namespace {

using journal::Kind;

// ---- what the values are ----

struct StoredName {
  std::uint64_t directory = 0;
  std::uint64_t number = 0;
  std::uint64_t inode = 0;  // its text is behind it
};

struct StoredOutcome {
  std::uint64_t request = 0;
  Outcome outcome;
};

struct StoredInit {
  std::uint64_t offered = 0;
  std::uint64_t granted = 0;
};

template <typename T>
std::span<const std::byte> image(const T& value) {
  static_assert(std::has_unique_object_representations_v<T>);
  return std::as_bytes(std::span(&value, 1));
}

std::span<const std::byte> image(std::string_view text) { return std::as_bytes(std::span(text)); }

template <typename T>
T read(std::span<const std::byte> value) {
  static_assert(std::is_trivially_copyable_v<T>);
  T found{};
  if (!value.empty()) std::memcpy(static_cast<void*>(&found), value.data(), std::min(value.size(), sizeof found));
  return found;
}

template <typename T>
std::span<const std::byte> behind(std::span<const std::byte> value) {
  return value.subspan(std::min(value.size(), sizeof(T)));
}

template <typename T>
std::vector<std::pair<std::uint64_t, T>> all(const journal::Journal* journal, Kind kind) {
  std::vector<std::pair<std::uint64_t, T>> found;
  if (journal == nullptr) return found;
  journal->each(kind,
                [&](std::uint64_t id, std::span<const std::byte> value) { found.emplace_back(id, read<T>(value)); });
  return found;
}

// What the calling thread does.
struct Work {
  unsigned depth = 0;  // objects of Records::Change that live
  std::optional<journal::Transaction> change;
  std::vector<std::function<void()>> afterwards;
};

Work& work() {
  thread_local Work mine;
  return mine;
}

}  // namespace

Records::Records(std::shared_ptr<journal::Journal> journal)
    : journal_(std::move(journal)), name_numbers_(journal_.get(), journal::NumbersOf::kNames, 1) {
  // The outcomes of the last process stay as they are: this one may die, too, before it has answered the requests.
  for (const auto& [id, stored] : all<StoredOutcome>(journal_.get(), journal::kOutcome)) {
    before_.insert_or_assign(stored.request & ~kSentAgain, stored.outcome);
    old_outcomes_.push_back(id);
    next_outcome_ = id + 1;
  }
}

Records::~Records() = default;

Records::Change::Change(Records& records) : counts_(records.journal_ != nullptr) {
  if (counts_) ++work().depth;
}

Records::Change::~Change() {
  if (!counts_) return;
  Work& mine = work();
  if (--mine.depth > 0) return;
  if (mine.change) {
    mine.change->commit();
    mine.change.reset();
  }
  if (mine.afterwards.empty()) return;
  const std::vector<std::function<void()>> afterwards = std::exchange(mine.afterwards, {});
  for (const std::function<void()>& each : afterwards) each();
}

void Records::afterwards(std::function<void()> work_to_do) {
  if (work().depth == 0) return work_to_do();
  work().afterwards.push_back(std::move(work_to_do));
}

void Records::put(journal::Key key, std::span<const std::byte> head, std::span<const std::byte> tail) {
  if (journal_ == nullptr) return;
  const Change change(*this);
  if (!work().change) work().change.emplace(*journal_);
  work().change->put(key, head, tail);
}

void Records::remove(journal::Key key) {
  if (journal_ == nullptr) return;
  const Change change(*this);
  if (!work().change) work().change.emplace(*journal_);
  work().change->remove(key);
}

// ---- the writers ----

void Records::put_inode(const InodeRecord& inode) { put({journal::kInode, inode.attributes.ino}, image(inode)); }

void Records::put_target(std::uint64_t ino, std::string_view target) { put({journal::kTarget, ino}, image(target)); }

void Records::put_extended(std::uint64_t ino, std::span<const std::byte> attributes) {
  const journal::Key key{journal::kExtended, ino};
  attributes.empty() ? remove(key) : put(key, attributes);
}

void Records::put_contents(std::uint64_t ino, const KeptContents& contents) {
  put({journal::kContents, ino}, image<KeptMemoryPart>(contents), std::as_bytes(std::span(contents.extents)));
}

void Records::put_name(std::uint64_t id, const NameRecord& name) {
  put({journal::kName, id}, image(StoredName{name.directory, name.number, name.inode}), image(name.text));
}

void Records::put_file(std::uint64_t handle, const FileRecord& file) { put({journal::kOpenFile, handle}, image(file)); }

void Records::put_limit(journal::Key whose, std::optional<std::uint64_t> bytes) {
  bytes ? put(whose, image(*bytes)) : remove(whose);
}

void Records::put_init(std::uint64_t offered, std::uint64_t granted) {
  put({journal::kInit, 0}, image(StoredInit{offered, granted}));
}

// ---- requests ----

std::shared_ptr<std::uint64_t> Records::take_place() {
  const std::lock_guard lock(outcomes_mutex_);
  const std::uint64_t place = free_outcomes_.empty() ? next_outcome_++ : free_outcomes_.back();
  if (!free_outcomes_.empty()) free_outcomes_.pop_back();
  return {new std::uint64_t(place), [this](std::uint64_t* left) {
            const std::lock_guard again(outcomes_mutex_);
            free_outcomes_.push_back(*left);
            delete left;
          }};
}

void Records::done(Responder& request, const Outcome& outcome) {
  if (journal_ == nullptr || !request.pending()) return;
  if (!request.outcome()) request.outcome() = take_place();
  put({journal::kOutcome, *request.outcome()}, image(StoredOutcome{request.unique(), outcome}));
}

void Records::forget_outcomes() {
  const Change change(*this);
  for (const std::uint64_t id : std::exchange(old_outcomes_, {})) remove({journal::kOutcome, id});
}

std::optional<Outcome> Records::outcome_of(std::uint64_t unique) const {
  if ((unique & kSentAgain) == 0) return std::nullopt;
  const auto found = before_.find(unique & ~kSentAgain);
  return found == before_.end() ? std::nullopt : std::optional(found->second);
}

// ---- what a new process finds ----

std::vector<Records::StoredInode> Records::stored_inodes() const {
  std::vector<StoredInode> found;
  if (journal_ == nullptr) return found;
  const auto add = [&](Kind kind, std::span<const std::byte> StoredInode::*part) {
    const std::size_t known = found.size();  // in order, as those that come
    std::size_t next = 0;
    journal_->each(kind, [&](std::uint64_t ino, std::span<const std::byte> value) {
      while (next < known && found[next].ino < ino) ++next;
      const bool is_known = next < known && found[next].ino == ino;
      StoredInode& inode = is_known ? found[next] : found.emplace_back();
      inode.ino = ino;
      inode.*part = value;
    });
    std::ranges::inplace_merge(found, found.begin() + static_cast<std::ptrdiff_t>(known), {}, &StoredInode::ino);
  };
  add(journal::kInode, &StoredInode::record);
  add(journal::kTarget, &StoredInode::target);
  add(journal::kExtended, &StoredInode::extended);
  add(journal::kContents, &StoredInode::contents);
  return found;
}

InodeRecord Records::read_inode(const StoredInode& stored) {
  auto inode = read<InodeRecord>(stored.record);
  inode.attributes.ino = stored.ino;
  return inode;
}

std::optional<KeptContents> Records::read_contents(const StoredInode& stored, const InodeRecord& record) {
  if (stored.contents.empty()) return std::nullopt;
  const std::span<const std::byte> extents = behind<KeptMemoryPart>(stored.contents);
  KeptContents contents{read<KeptMemoryPart>(stored.contents), record.attributes.size,
                        Extents(extents.size() / sizeof(Extent))};
  if (!contents.extents.empty()) {
    std::memcpy(contents.extents.data(), extents.data(), contents.extents.size() * sizeof(Extent));
  }
  return contents;
}

void Records::each_name(const std::function<void(std::uint64_t, const NameRecord&)>& visit) const {
  if (journal_ == nullptr) return;
  std::vector<std::pair<std::uint64_t, std::span<const std::byte>>> stored;
  journal_->each(journal::kName,
                 [&](std::uint64_t id, std::span<const std::byte> value) { stored.emplace_back(id, value); });
  for (const auto& [id, value] : stored) {
    const auto fixed = read<StoredName>(value);
    const std::span<const std::byte> text = behind<StoredName>(value);
    visit(id, {fixed.directory, fixed.number, fixed.inode, {reinterpret_cast<const char*>(text.data()), text.size()}});
  }
}

std::vector<std::pair<std::uint64_t, FileRecord>> Records::files() const {
  return all<FileRecord>(journal_.get(), journal::kOpenFile);
}

std::vector<std::pair<std::uint64_t, std::uint64_t>> Records::limits(Kind kind) const {
  return all<std::uint64_t>(journal_.get(), kind);
}

std::optional<std::pair<std::uint64_t, std::uint64_t>> Records::init() const {
  const auto found = all<StoredInit>(journal_.get(), journal::kInit);
  if (found.empty()) return std::nullopt;
  return std::pair(found.front().second.offered, found.front().second.granted);
}

}  // namespace gpufs::fuse
