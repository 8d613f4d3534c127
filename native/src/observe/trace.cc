#include "observe/trace.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "observe/tick_clock.h"
#include "observe/timeline.h"

namespace gpufs::observe::trace {
namespace {

constexpr std::size_t kRingRecords = 8192;  // a power of two
constexpr std::size_t kRingBytes = kRingRecords * sizeof(TraceRecord);
constexpr std::size_t kMostNames = 65536;
constexpr std::size_t kThreadNameBytes = 16;

// Written by its thread, read by whoever drains; what one of them writes all the time lies on a cache line that the
// other seldom needs. It lives as long as its thread or the trace; between traces its pages are given back.
struct Ring {
  TraceRecord* records = nullptr;  // a mapping of its own
  std::uint32_t thread = 0;
  std::string thread_name;
  // The trace it belongs to. Set by its thread before it is listed there.
  std::uint32_t trace = 0;

  alignas(64) std::atomic<std::uint64_t> head{0};  // records ever written
  std::uint64_t known_tail = 0;                    // the writer's last look at tail
  std::atomic<std::uint64_t> lost{0};

  alignas(64) std::atomic<std::uint64_t> tail{0};  // records ever read
  bool announced = false;                          // the reader's
  std::atomic<bool> thread_ended{false};

  Ring() = default;
  ~Ring() {
    if (records != nullptr) ::munmap(records, kRingBytes);
  }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
};

struct Text {
  TraceKind kind;
  std::uint32_t number;
  std::string text;
};

struct State {
  // Held by who starts, reads or stops, from beginning to end: a ring that is being drained belongs to the trace that
  // is on, and is made anew for no other. Before the one below; who records never waits for it.
  std::mutex user;

  // Guards all below, but that the user reads the timeline, which is his alone; nothing but memory is touched under it.
  std::mutex mutex;
  std::list<std::shared_ptr<Ring>> rings;
  std::unordered_map<std::string, std::uint32_t> names;
  std::vector<Text> new_names;  // not read yet
  Timeline timeline;
  std::uint32_t last_trace = 0;
};

// Never destroyed: threads may record while the process ends.
State& state() {
  static State* const instance = new State();
  return *instance;
}

struct OwnRing {
  std::shared_ptr<Ring> ring;
  ~OwnRing() {
    if (ring) ring->thread_ended.store(true, std::memory_order_release);
  }
};

thread_local OwnRing own;

// The thread's ring, listed with the trace of this number; null when that has been stopped, or there is no memory.
Ring* enlist(std::uint32_t trace) try {
  if (!own.ring) {
    auto ring = std::make_shared<Ring>();
    void* const memory = ::mmap(nullptr, kRingBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    ring->records = static_cast<TraceRecord*>(memory);
    ring->thread = static_cast<std::uint32_t>(::gettid());
    std::array<char, kThreadNameBytes> name{};
    if (::pthread_getname_np(::pthread_self(), name.data(), name.size()) == 0) ring->thread_name = name.data();
    own.ring = std::move(ring);
  }
  Ring& ring = *own.ring;
  const std::lock_guard lock(state().mutex);
  if (g_running.load() != trace) return nullptr;  // stopped in the meantime: nobody would take it away
  ring.head.store(0, std::memory_order_relaxed);
  ring.known_tail = 0;
  ring.lost.store(0, std::memory_order_relaxed);
  ring.tail.store(0, std::memory_order_relaxed);
  ring.announced = false;
  state().rings.push_back(own.ring);
  ring.trace = trace;
  return &ring;
} catch (const std::bad_alloc&) {
  return nullptr;
}

// Makes the record's cache line the writer's own while it does something else: the reader had it last.
void prepare(const TraceRecord& record) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" ::"m"(record));
#else
  __builtin_prefetch(&record, 1);
#endif
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

enum class Drained { kAll, kNoRoom, kNotYet };

// kNotYet: there are records whose time cannot be told yet.
Drained drain(Ring& ring, Writer& writer, const Timeline& timeline) {
  if (!ring.announced) {
    if (!writer.put(TraceKind::kThread, ring.thread, ring.thread_name)) return Drained::kNoRoom;
    ring.announced = true;
  }
  const std::uint64_t head = ring.head.load(std::memory_order_acquire);
  std::uint64_t tail = ring.tail.load(std::memory_order_relaxed);
  Drained outcome = Drained::kAll;
  for (; tail != head; ++tail) {
    TraceRecord record = ring.records[tail % kRingRecords];
    if (record.in_ticks != 0) {
      if (record.end > timeline.known_until()) {
        outcome = Drained::kNotYet;
        break;
      }
      record.start = timeline.to_ns(record.start);
      record.end = timeline.to_ns(record.end);
      record.in_ticks = 0;
    }
    if (!writer.put(record)) {
      outcome = Drained::kNoRoom;
      break;
    }
  }
  ring.tail.store(tail, std::memory_order_release);
  if (outcome != Drained::kAll) return outcome;
  const std::uint64_t lost = ring.lost.exchange(0, std::memory_order_relaxed);
  if (lost == 0) return Drained::kAll;
  TraceRecord record;
  record.kind = TraceKind::kLost;
  record.thread = ring.thread;
  record.bytes = lost;
  if (writer.put(record)) return Drained::kAll;
  ring.lost.fetch_add(lost, std::memory_order_relaxed);
  return Drained::kNoRoom;
}

}  // namespace

std::atomic<std::uint32_t> g_running{0};

Status start() {
  const std::lock_guard user(state().user);
  const std::lock_guard lock(state().mutex);
  if (on()) return Status(EBUSY, "somebody traces already");
  state().timeline.add(Timeline::now());
  if (++state().last_trace == 0) ++state().last_trace;
  g_running.store(state().last_trace);
  return {};
}

void stop() {
  std::list<std::shared_ptr<Ring>> rings;  // given back without the lock
  const std::lock_guard user(state().user);
  {
    const std::lock_guard lock(state().mutex);
    g_running.store(0);
    rings.swap(state().rings);
    state().names.clear();
    state().new_names.clear();
    state().timeline.clear();
  }
  // A thread that is just recording into one finds zeros there, or makes a page anew: nobody reads it.
  for (const std::shared_ptr<Ring>& ring : rings) (void)::madvise(ring->records, kRingBytes, MADV_DONTNEED);
}

std::size_t read(std::span<std::byte> destination) {
  Writer writer(destination);
  std::vector<std::shared_ptr<Ring>> rings;
  const std::lock_guard user(state().user);
  {
    const std::lock_guard lock(state().mutex);
    if (!on()) return 0;
    state().timeline.add(Timeline::now());
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
    const Drained outcome = drain(*ring, writer, state().timeline);
    if (outcome == Drained::kNoRoom) break;
    if (!ended || outcome != Drained::kAll) continue;
    const std::lock_guard lock(state().mutex);
    state().rings.remove(ring);
  }
  return writer.used();
}

std::uint64_t clock() {
  if (!ticks_are_even()) return now_ns();
  constinit thread_local std::uint64_t last = 0;
  last = std::max(last, read_ticks());
  return last;
}

void record(const TraceRecord& record) {
  const std::uint32_t trace = g_running.load(std::memory_order_relaxed);
  if (trace == 0) return;
  Ring* ring = own.ring.get();
  if (ring == nullptr || ring->trace != trace) {
    ring = enlist(trace);
    if (ring == nullptr) return;
  }
  const std::uint64_t head = ring->head.load(std::memory_order_relaxed);
  if (head - ring->known_tail >= kRingRecords) {
    ring->known_tail = ring->tail.load(std::memory_order_acquire);
    if (head - ring->known_tail >= kRingRecords) {
      ring->lost.fetch_add(1, std::memory_order_relaxed);
      return;
    }
  }
  TraceRecord& place = ring->records[head % kRingRecords];
  place = record;
  place.thread = ring->thread;
  ring->head.store(head + 1, std::memory_order_release);
  prepare(ring->records[(head + 1) % kRingRecords]);
  prepare(ring->records[(head + 2) % kRingRecords]);
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

namespace gpufs::observe {

void Span::finish() {
  TraceRecord record;
  record.start = start_;
  record.end = trace::clock();
  record.id = id_;
  record.offset = offset_;
  record.bytes = bytes_;
  record.name = name_;
  record.kind = kind_;
  record.device = device_;
  record.error = error_;
  record.in_ticks = ticks_are_even() ? 1 : 0;
  trace::record(record);
}

}  // namespace gpufs::observe
