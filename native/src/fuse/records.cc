#include "fuse/records.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <type_traits>
#include <utility>

#include "fuse/protocol.h"

namespace gpufs::fuse {
namespace {

class Writer {
 public:
  Writer() { value_.reserve(512); }  // most need less
  template <typename T>
  void number(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    append(&value, sizeof value);
  }
  void bytes(const void* data, std::size_t size) {
    number(static_cast<std::uint64_t>(size));
    append(data, size);
  }
  [[nodiscard]] std::span<const std::byte> value() const { return value_; }

 private:
  void append(const void* data, std::size_t size) {
    const auto* const from = static_cast<const std::byte*>(data);
    value_.insert(value_.end(), from, from + size);
  }
  std::vector<std::byte> value_;
};

// What is not there reads as zeros: the journal is this program's own.
class Reader {
 public:
  explicit Reader(std::span<const std::byte> value) : rest_(value) {}
  template <typename T>
  T number() {
    T value{};
    take(&value, sizeof value);
    return value;
  }
  std::span<const std::byte> bytes() {
    const std::size_t size = std::min<std::size_t>(number<std::uint64_t>(), rest_.size());
    const std::span<const std::byte> found = rest_.first(size);
    rest_ = rest_.subspan(size);
    return found;
  }
  [[nodiscard]] bool at_end() const { return rest_.empty(); }
  std::string text() {
    const std::span<const std::byte> found = bytes();
    return {reinterpret_cast<const char*>(found.data()), found.size()};
  }

 private:
  void take(void* to, std::size_t size) {
    if (rest_.size() < size) {
      rest_ = {};
      return;
    }
    std::memcpy(to, rest_.data(), size);
    rest_ = rest_.subspan(size);
  }
  std::span<const std::byte> rest_;
};

template <typename T>
std::span<const std::byte> image(const T& value) {
  static_assert(std::has_unique_object_representations_v<T>);
  return std::as_bytes(std::span(&value, 1));
}

// What the calling thread does. An outcome needs no place of its own in the journal once the thread serves another
// request: by then the reply has been sent.
struct Work {
  std::uint64_t request = 0;
  std::optional<journal::Transaction> change;
  std::vector<std::function<void()>> afterwards;
  std::uint64_t number = 0;  // the thread's own
};

Work& work() {
  static std::atomic<std::uint64_t> last{0};
  thread_local Work mine{0, std::nullopt, {}, last.fetch_add(1, std::memory_order_relaxed)};
  return mine;
}

struct StoredOutcome {
  std::uint64_t request;
  Outcome outcome;
};

template <typename Found, typename Read>
std::vector<Found> all(const journal::Journal* journal, std::uint32_t kind, Read read) {
  std::vector<Found> found;
  if (journal == nullptr) return found;
  journal->each(kind,
                [&](std::uint64_t id, std::span<const std::byte> value) { found.push_back(read(id, Reader(value))); });
  return found;
}

}  // namespace

Records::Records(std::shared_ptr<journal::Journal> journal)
    : journal_(std::move(journal)), name_numbers_(journal_.get(), journal::Numbers::kNames, 1) {
  if (journal_ == nullptr) return;
  // They stay as they are: this process may die, too, before it has answered the requests.
  journal_->each(kOutcome, [&](std::uint64_t id, std::span<const std::byte> value) {
    const auto stored = Reader(value).number<StoredOutcome>();
    before_.insert_or_assign(stored.request & ~kSentAgain, stored.outcome);
    old_outcomes_.push_back(id);
    first_outcome_ = id + 1;
  });
}

Records::~Records() = default;

Records::Change::Change(Records& records) : records_(&records) {
  if (records.journal_ == nullptr || work().change) {
    records_ = nullptr;
  } else {
    work().change.emplace(*records.journal_);
  }
}

Records::Change::~Change() {
  if (records_ == nullptr) return;
  work().change->commit();
  work().change.reset();
  const std::vector<std::function<void()>> afterwards = std::exchange(work().afterwards, {});
  for (const std::function<void()>& each : afterwards) each();
}

void Records::afterwards(std::function<void()> work_to_do) {
  if (!work().change) return work_to_do();
  work().afterwards.push_back(std::move(work_to_do));
}

void Records::put(Kind kind, std::uint64_t id, std::span<const std::byte> value) {
  if (journal_ == nullptr) return;
  const Change change(*this);
  work().change->put({kind, id}, value);
}

void Records::remove(Kind kind, std::uint64_t id) {
  if (journal_ == nullptr) return;
  const Change change(*this);
  work().change->remove({kind, id});
}

void Records::put_inode(const InodeRecord& inode) {
  if (journal_ == nullptr) return;
  Writer writer;
  writer.number(inode.attributes);
  writer.number(inode.birth_seconds);
  writer.number(inode.birth_nanoseconds);
  writer.number(inode.writers_ever);
  writer.number(inode.references);
  writer.number(inode.created_open);
  writer.bytes(inode.target.data(), inode.target.size());
  writer.number(static_cast<std::uint64_t>(inode.extended.size()));
  for (const auto& [name, value] : inode.extended) {
    writer.bytes(name.data(), name.size());
    writer.bytes(value.data(), value.size());
  }
  writer.number(inode.contents.has_value());
  if (inode.contents) {
    writer.number(inode.contents->size);
    writer.number(inode.contents->memory);
    writer.number(inode.contents->slot);
    writer.bytes(inode.contents->extents.data(), inode.contents->extents.size() * sizeof(Extent));
    writer.number(inode.contents->placement);
    writer.number(inode.contents->shift);
  }
  put(kInode, inode.attributes.ino, writer.value());
}

void Records::remove_inode(std::uint64_t ino) {
  const Change change(*this);
  remove(kInode, ino);
  remove(kUnnamed, ino);
}

void Records::put_unnamed(std::uint64_t ino, std::uint64_t directory) { put(kUnnamed, ino, image(directory)); }

void Records::remove_unnamed(std::uint64_t ino) { remove(kUnnamed, ino); }

void Records::put_name(std::uint64_t id, const NameRecord& name) {
  Writer writer;
  writer.number(name.directory);
  writer.number(name.number);
  writer.number(name.inode);
  writer.bytes(name.text.data(), name.text.size());
  put(kName, id, writer.value());
}

void Records::remove_name(std::uint64_t id) { remove(kName, id); }

void Records::put_file(std::uint64_t handle, const FileRecord& file) {
  Writer writer;
  writer.number(file.inode);
  writer.number(file.writes);
  put(kFile, handle, writer.value());
}

void Records::remove_file(std::uint64_t handle) { remove(kFile, handle); }

void Records::put_limit(Kind kind, std::uint64_t id, std::optional<std::uint64_t> bytes) {
  bytes ? put(kind, id, image(*bytes)) : remove(kind, id);
}

void Records::put_user_limit(std::uint64_t user, std::optional<std::uint64_t> bytes) {
  put_limit(kUserLimit, user, bytes);
}

void Records::put_directory_limit(std::uint64_t ino, std::optional<std::uint64_t> bytes) {
  put_limit(kDirectoryLimit, ino, bytes);
}

void Records::put_init(std::uint64_t offered, std::uint64_t granted) {
  const std::uint64_t both[] = {offered, granted};
  put(kInit, 0, std::as_bytes(std::span(both)));
}

// ---- requests ----

Records::Serving::Serving(Records& records, std::uint64_t unique) {
  if (records.journal_ != nullptr) work().request = unique;
}

Records::Serving::~Serving() { work().request = 0; }

void Records::done(const Outcome& outcome) {
  const Work& now = work();
  if (now.request != 0) put(kOutcome, first_outcome_ + now.number, image(StoredOutcome{now.request, outcome}));
}

void Records::forget_outcomes() {
  const Change change(*this);
  for (const std::uint64_t id : std::exchange(old_outcomes_, {})) remove(kOutcome, id);
}

std::optional<Outcome> Records::done_before() const {
  const std::uint64_t request = work().request;
  if ((request & kSentAgain) == 0) return std::nullopt;
  const auto found = before_.find(request & ~kSentAgain);
  return found == before_.end() ? std::nullopt : std::optional(found->second);
}

// ---- what a new process finds ----

std::vector<Records::Stored> Records::stored(Kind kind) const {
  std::vector<Stored> found;
  if (journal_ == nullptr) return found;
  journal_->each(kind, [&](std::uint64_t id, std::span<const std::byte> value) { found.emplace_back(id, value); });
  return found;
}

InodeRecord Records::read_inode(const Stored& stored) {
  Reader reader(stored.second);
  InodeRecord inode;
  inode.attributes = reader.number<gpufs_attributes>();
  inode.attributes.ino = stored.first;
  inode.birth_seconds = reader.number<std::int64_t>();
  inode.birth_nanoseconds = reader.number<std::uint32_t>();
  inode.writers_ever = reader.number<std::uint32_t>();
  inode.references = reader.number<std::uint64_t>();
  inode.created_open = reader.number<bool>();
  inode.target = reader.text();
  for (auto left = reader.number<std::uint64_t>(); left > 0 && !reader.at_end(); --left) {
    std::string name = reader.text();
    const std::span<const std::byte> value = reader.bytes();
    inode.extended.emplace_back(std::move(name), std::vector(value.begin(), value.end()));
  }
  if (reader.number<bool>()) {
    KeptContents& contents = inode.contents.emplace();
    contents.size = reader.number<std::uint64_t>();
    contents.memory = reader.number<std::uint64_t>();
    contents.slot = reader.number<Extent>();
    const std::span<const std::byte> extents = reader.bytes();
    contents.extents.resize(extents.size() / sizeof(Extent));
    std::memcpy(contents.extents.data(), extents.data(), contents.extents.size() * sizeof(Extent));
    contents.placement = reader.number<std::uint64_t>();
    contents.shift = reader.number<Shift>();
  }
  return inode;
}

void Records::each_name(const std::function<void(std::uint64_t, const NameRecord&)>& visit) const {
  NameRecord name;  // whose text keeps its memory
  for (const auto& [id, value] : stored(kName)) {
    Reader reader(value);
    name.directory = reader.number<std::uint64_t>();
    name.number = reader.number<std::uint64_t>();
    name.inode = reader.number<std::uint64_t>();
    name.text = reader.text();
    visit(id, name);
  }
}

std::vector<std::pair<std::uint64_t, FileRecord>> Records::files() const {
  return all<std::pair<std::uint64_t, FileRecord>>(journal_.get(), kFile, [](std::uint64_t handle, Reader reader) {
    FileRecord file;
    file.inode = reader.number<std::uint64_t>();
    file.writes = reader.number<bool>();
    return std::pair(handle, file);
  });
}

std::vector<std::pair<std::uint64_t, std::uint64_t>> Records::numbers(Kind kind) const {
  return all<std::pair<std::uint64_t, std::uint64_t>>(journal_.get(), kind, [](std::uint64_t id, Reader reader) {
    return std::pair(id, reader.number<std::uint64_t>());
  });
}

std::optional<std::pair<std::uint64_t, std::uint64_t>> Records::init() const {
  const auto found =
      all<std::pair<std::uint64_t, std::uint64_t>>(journal_.get(), kInit, [](std::uint64_t, Reader reader) {
        const auto offered = reader.number<std::uint64_t>();
        return std::pair(offered, reader.number<std::uint64_t>());
      });
  return found.empty() ? std::nullopt : std::optional(found.front());
}

}  // namespace gpufs::fuse
