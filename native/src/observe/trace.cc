#include "observe/trace.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace gpufs::observe::trace {
namespace {

constexpr std::size_t kRingRecords = 8192;  // a power of two
constexpr std::size_t kMostNames = 65536;
constexpr std::size_t kThreadNameBytes = 16;

// Written by its thread, read by whoever drains.
struct Ring {
  std::unique_ptr<TraceRecord[]> records = std::make_unique<TraceRecord[]>(kRingRecords);
  std::atomic<std::uint64_t> head{0};  // records ever written
  std::atomic<std::uint64_t> tail{0};  // records ever read
  std::atomic<std::uint64_t> lost{0};
  std::atomic<bool> thread_ended{false};
  std::uint32_t thread = 0;
  std::string thread_name;
  bool announced = false;  // the reader's
};

struct Text {
  TraceKind kind;
  std::uint32_t number;
  std::string text;
};

struct State {
  // Guards all below; nothing but memory is touched under it.
  std::mutex mutex;
  std::list<std::shared_ptr<Ring>> rings;
  std::unordered_map<std::string, std::uint32_t> names;
  std::vector<Text> new_names;  // not read yet
};

// Never destroyed: threads may record while the process ends.
State& state() {
  static State* const instance = new State();
  return *instance;
}

// A thread's ring belongs to the trace, so that it goes when the trace is stopped.
struct OwnRing {
  std::weak_ptr<Ring> ring;
  ~OwnRing() {
    if (const std::shared_ptr<Ring> alive = ring.lock()) alive->thread_ended.store(true, std::memory_order_release);
  }
};

std::shared_ptr<Ring> own_ring() {
  thread_local OwnRing own;
  std::shared_ptr<Ring> ring = own.ring.lock();
  if (ring) return ring;
  ring = std::make_shared<Ring>();
  ring->thread = static_cast<std::uint32_t>(::gettid());
  std::array<char, kThreadNameBytes> name{};
  if (::pthread_getname_np(::pthread_self(), name.data(), name.size()) == 0) ring->thread_name = name.data();
  const std::lock_guard lock(state().mutex);
  if (!on()) return nullptr;  // stopped in the meantime: nobody would take it away
  state().rings.push_back(ring);
  own.ring = ring;
  return ring;
}

// What is left of the destination.
class Writer {
 public:
  explicit Writer(std::span<std::byte> room) : room_(room) {}

  bool put(const TraceRecord& record) {
    if (room_.size() - used_ < sizeof(record)) return false;
    std::memcpy(room_.data() + used_, &record, sizeof(record));
    used_ += sizeof(record);
    return true;
  }
  bool put(TraceKind kind, std::uint32_t number, std::string_view text) {
    const std::size_t blocks = (text.size() + sizeof(TraceRecord) - 1) / sizeof(TraceRecord);
    if (room_.size() - used_ < (blocks + 1) * sizeof(TraceRecord)) return false;
    TraceRecord record;
    record.kind = kind;
    record.bytes = text.size();
    (kind == TraceKind::kThread ? record.thread : record.name) = number;
    (void)put(record);
    std::memset(room_.data() + used_, 0, blocks * sizeof(TraceRecord));
    std::memcpy(room_.data() + used_, text.data(), text.size());
    used_ += blocks * sizeof(TraceRecord);
    return true;
  }
  [[nodiscard]] std::size_t used() const { return used_; }

 private:
  std::span<std::byte> room_;
  std::size_t used_ = 0;
};

// False when there is no more room.
bool drain(Ring& ring, Writer& writer) {
  if (!ring.announced) {
    if (!writer.put(TraceKind::kThread, ring.thread, ring.thread_name)) return false;
    ring.announced = true;
  }
  const std::uint64_t head = ring.head.load(std::memory_order_acquire);
  std::uint64_t tail = ring.tail.load(std::memory_order_relaxed);
  while (tail != head && writer.put(ring.records[tail % kRingRecords])) ++tail;
  ring.tail.store(tail, std::memory_order_release);
  if (tail != head) return false;
  const std::uint64_t lost = ring.lost.exchange(0, std::memory_order_relaxed);
  if (lost == 0) return true;
  TraceRecord record;
  record.kind = TraceKind::kLost;
  record.thread = ring.thread;
  record.bytes = lost;
  if (writer.put(record)) return true;
  ring.lost.fetch_add(lost, std::memory_order_relaxed);
  return false;
}

}  // namespace

std::atomic<bool> g_on{false};

Status start() {
  const std::lock_guard lock(state().mutex);
  if (on()) return Status(EBUSY, "somebody traces already");
  g_on.store(true);
  return {};
}

void stop() {
  std::list<std::shared_ptr<Ring>> rings;  // destroyed without the lock
  const std::lock_guard lock(state().mutex);
  g_on.store(false);
  rings.swap(state().rings);
  state().names.clear();
  state().new_names.clear();
}

std::size_t read(std::span<std::byte> destination) {
  Writer writer(destination);
  std::vector<std::shared_ptr<Ring>> rings;
  {
    const std::lock_guard lock(state().mutex);
    rings.assign(state().rings.begin(), state().rings.end());
  }
  // A name is there before a record can use it, and so before the records that were written when `rings` were taken.
  {
    const std::lock_guard lock(state().mutex);
    std::vector<Text>& fresh = state().new_names;
    const auto told = std::find_if(fresh.begin(), fresh.end(),
                                   [&](const Text& text) { return !writer.put(text.kind, text.number, text.text); });
    const bool all = told == fresh.end();
    fresh.erase(fresh.begin(), told);
    if (!all) return writer.used();
  }
  for (const std::shared_ptr<Ring>& ring : rings) {
    const bool ended = ring->thread_ended.load(std::memory_order_acquire);
    if (!drain(*ring, writer)) break;
    if (!ended) continue;
    const std::lock_guard lock(state().mutex);
    state().rings.remove(ring);
  }
  return writer.used();
}

void record(TraceRecord record) {
  const std::shared_ptr<Ring> ring = own_ring();
  if (!ring) return;
  const std::uint64_t head = ring->head.load(std::memory_order_relaxed);
  if (head - ring->tail.load(std::memory_order_acquire) >= kRingRecords) {
    ring->lost.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  record.thread = ring->thread;
  ring->records[head % kRingRecords] = record;
  ring->head.store(head + 1, std::memory_order_release);
}

std::uint32_t name(std::string_view text) {
  if (!on()) return 0;
  const std::lock_guard lock(state().mutex);
  if (!on()) return 0;
  const auto found = state().names.find(std::string(text));
  if (found != state().names.end()) return found->second;
  if (state().names.size() >= kMostNames) return 0;
  const auto number = static_cast<std::uint32_t>(state().names.size() + 1);
  state().names.emplace(text, number);
  state().new_names.push_back(Text{TraceKind::kName, number, std::string(text)});
  return number;
}

std::uint32_t name_of_file(int fd) {
  std::array<char, PATH_MAX> target{};
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  const ssize_t length = ::readlink(link.c_str(), target.data(), target.size());
  return length <= 0 ? 0 : name({target.data(), static_cast<std::size_t>(length)});
}

std::uint64_t next_id() {
  static std::atomic<std::uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace gpufs::observe::trace
