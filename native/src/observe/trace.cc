#include "observe/trace.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#endif

namespace gpufs::observe::trace {
namespace {

constexpr std::size_t kMostOfThread = 8192;                // records of one thread between two reads
constexpr std::size_t kMostUnread = std::size_t{1} << 20;  // records that have been collected
constexpr std::size_t kMostNames = 65536;
constexpr std::size_t kThreadNameBytes = 16;

// The records of one thread since they were last collected. Only collecting contends for the lock.
struct ThreadRecords {
  ThreadRecords();
  ~ThreadRecords();

  const std::uint32_t thread = static_cast<std::uint32_t>(::gettid());
  std::string name;

  std::mutex mutex;  // guards all below; taken after State::mutex
  std::vector<TraceRecord> records;
  std::uint64_t lost = 0;
};

struct State {
  std::mutex mutex;  // guards all below
  std::vector<ThreadRecords*> threads;
  std::unordered_map<std::string, std::uint32_t> names;
  std::uint32_t last_name = 0;  // never reused: a thread may still hold a number of the trace before
  std::vector<TraceRecord> unread;
  std::size_t next_unread = 0;
  std::vector<TraceRecord> spare;  // empty; a thread's records are swapped with it
};

// Never destroyed: threads may record while the process ends.
State& state() {
  static State* const instance = new State();
  return *instance;
}

// Appends a text: a record that says what it is, and the text in the blocks that follow.
void append_text(State& all, TraceKind kind, std::uint32_t number, std::string_view text) {
  TraceRecord record;
  record.kind = kind;
  record.bytes = text.size();
  (kind == TraceKind::kThread ? record.thread : record.name) = number;
  all.unread.push_back(record);
  const std::size_t used = all.unread.size();
  all.unread.resize(used + (text.size() + sizeof(TraceRecord) - 1) / sizeof(TraceRecord));
  void* const blocks = all.unread.data() + used;
  std::memset(blocks, 0, (all.unread.size() - used) * sizeof(TraceRecord));
  std::memcpy(blocks, text.data(), text.size());
}

// Moves the records of a thread to those that read() hands out.
void collect(State& all, ThreadRecords& thread) {
  std::uint64_t lost = 0;
  {
    const std::lock_guard lock(thread.mutex);
    thread.records.swap(all.spare);
    lost = std::exchange(thread.lost, 0);
  }
  if (all.unread.size() < kMostUnread) {
    all.unread.insert(all.unread.end(), all.spare.begin(), all.spare.end());
  } else {
    lost += all.spare.size();
  }
  all.spare.clear();
  if (lost == 0) return;
  TraceRecord record;
  record.kind = TraceKind::kLost;
  record.thread = thread.thread;
  record.bytes = lost;
  all.unread.push_back(record);
}

ThreadRecords::ThreadRecords() {
  std::array<char, kThreadNameBytes> text{};
  if (::pthread_getname_np(::pthread_self(), text.data(), text.size()) == 0) name = text.data();
  State& all = state();
  const std::lock_guard lock(all.mutex);
  all.threads.push_back(this);
  if (on()) append_text(all, TraceKind::kThread, thread, name);
}

ThreadRecords::~ThreadRecords() {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  if (on()) collect(all, *this);
  std::erase(all.threads, this);
}

}  // namespace

std::atomic<bool> g_running{false};

Status start() {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  if (on()) return Status(EBUSY, "a trace is being recorded already");
  for (const ThreadRecords* const thread : all.threads) {
    append_text(all, TraceKind::kThread, thread->thread, thread->name);
  }
  g_running.store(true);
  return {};
}

void stop() {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  g_running.store(false);
  for (ThreadRecords* const thread : all.threads) {
    const std::lock_guard records(thread->mutex);
    thread->records = {};
    thread->lost = 0;
  }
  all.names.clear();
  all.unread = {};
  all.next_unread = 0;
  all.spare = {};
}

std::size_t read(std::span<std::byte> destination) {
  State& all = state();
  const std::lock_guard lock(all.mutex);
  if (!on()) return 0;
  const std::size_t most = destination.size() / sizeof(TraceRecord);
  if (all.unread.size() - all.next_unread < most) {
    all.unread.erase(all.unread.begin(), all.unread.begin() + static_cast<std::ptrdiff_t>(all.next_unread));
    all.next_unread = 0;
    for (ThreadRecords* const thread : all.threads) collect(all, *thread);
  }
  const std::size_t count = std::min(most, all.unread.size() - all.next_unread);
  if (count == 0) return 0;
  std::memcpy(destination.data(), all.unread.data() + all.next_unread, count * sizeof(TraceRecord));
  all.next_unread += count;
  return count * sizeof(TraceRecord);
}

void record(TraceRecord record) {
  if (!on()) return;
  thread_local ThreadRecords own;
  const std::lock_guard lock(own.mutex);
  if (!on()) return;  // stop() has cleared the records
  if (own.records.size() >= kMostOfThread) {
    ++own.lost;
    return;
  }
  record.thread = own.thread;
  own.records.push_back(record);
}

std::uint32_t name(std::string_view text) {
  if (!on()) return 0;
  State& all = state();
  const std::lock_guard lock(all.mutex);
  if (!on()) return 0;
  const auto found = all.names.find(std::string(text));
  if (found != all.names.end()) return found->second;
  if (all.names.size() >= kMostNames) return 0;
  all.names.emplace(text, ++all.last_name);
  append_text(all, TraceKind::kName, all.last_name, text);
  return all.last_name;
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

const char* name_of(TraceKind kind) {
  switch (kind) {
    case TraceKind::kMountRead:
      return "READ";
    case TraceKind::kMountWrite:
      return "WRITE";
    case TraceKind::kBufferCopy:
      return "copy in device memory";
    case TraceKind::kPiece:
      return "piece of a transfer";
    case TraceKind::kFileRead:
      return "file read";
    case TraceKind::kFileWrite:
      return "file write";
    case TraceKind::kFastpath:
      return "fastpath";
    case TraceKind::kDeviceWait:
      return "wait for the device";
    case TraceKind::kSlotWait:
      return "wait for pinned memory";
    case TraceKind::kReply:
      return "reply";
    case TraceKind::kCopyToDevice:
      return "copy to device";
    case TraceKind::kCopyToHost:
      return "copy to host";
    default:
      return "span";
  }
}

void Span::finish() {
  TraceRecord record;
  record.start = start_;
  record.end = now_ns();
  record.id = id_;
  record.offset = offset_;
  record.bytes = bytes_;
  record.name = name_;
  record.kind = kind_;
  record.device = device_;
  record.error = error_;
  trace::record(record);
}

}  // namespace gpufs::observe

#if __has_include(<nvtx3/nvToolsExt.h>)

namespace gpufs::observe::nvtx {
namespace {

// Null without a profiler.
nvtxDomainHandle_t domain() {
  static auto* const handle = nvtxDomainCreateA("gpufs");
  return handle;
}

}  // namespace

bool on() { return domain() != nullptr; }

void push(const char* name, std::uint64_t bytes) {
  nvtxEventAttributes_t range{};
  range.version = NVTX_VERSION;
  range.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  range.payloadType = NVTX_PAYLOAD_TYPE_UNSIGNED_INT64;
  range.payload.ullValue = bytes;
  range.messageType = NVTX_MESSAGE_TYPE_ASCII;
  range.message.ascii = name;
  nvtxDomainRangePushEx(domain(), &range);
}

void pop() { nvtxDomainRangePop(domain()); }

}  // namespace gpufs::observe::nvtx

#else

namespace gpufs::observe::nvtx {

bool on() { return false; }
void push(const char*, std::uint64_t) {}
void pop() {}

}  // namespace gpufs::observe::nvtx

#endif
