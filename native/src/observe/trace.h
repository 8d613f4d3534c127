// Traces: what each thread did when, recorded into bounded rings of its own while somebody asks for it.
// Nobody owns it: one trace for the process, since threads serve all engines; the rings go when it is stopped.
// Any thread may record. One caller at a time starts, reads and stops.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/status.h"
#include "observe/counters.h"

namespace gpufs::observe {

// The numbers are those of the stream that trace_read() gives, see TraceRecord.
enum class TraceKind : std::uint8_t {
  kThread = 1,  // the name of `thread`, `bytes` long, in the following records
  kName = 2,    // the text of `name`, likewise
  kLost = 3,    // `bytes` records of `thread` found no room

  // Spans of a thread: they nest.
  kMountRead = 10,
  kMountWrite = 11,
  kBufferCopy = 12,
  kPiece = 13,  // of a transfer
  kFileRead = 14,
  kFileWrite = 15,
  kFastpath = 16,
  kDeviceWait = 17,
  kSlotWait = 18,
  kReply = 19,

  // Device copies: with a lane of their own beside their thread, or within it (lane 0).
  kCopyToDevice = 30,
  kCopyToHost = 31,

  // Phases of a transfer, whichever threads had part in it; `id` says which.
  kTransfer = 40,
  kQueued = 41,
  kBind = 42,
};

// One span, or one of the first three kinds. Times are nanoseconds of the monotonic clock.
struct TraceRecord {
  std::uint64_t start = 0;
  std::uint64_t end = 0;
  std::uint64_t id = 0;  // of the transfer; of the inode for the mount's operations
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::uint32_t thread = 0;
  std::uint32_t name = 0;  // of the file; 0: none
  TraceKind kind = TraceKind::kPiece;
  std::uint8_t backend = 0;
  std::uint8_t flow = 0;
  std::uint8_t lane = 0;
  std::int32_t device = -1;
  std::int32_t error = 0;
  std::uint32_t reserved = 0;
};
static_assert(sizeof(TraceRecord) == 64);

namespace trace {

extern std::atomic<bool> g_on;

// The one look that tracing costs while it is off.
[[nodiscard]] inline bool on() { return g_on.load(std::memory_order_relaxed); }

// EBUSY if it is on.
Status start();
void stop();

// Moves records out, oldest first within each thread; whole ones, with the texts that belong to them before their first
// use. Returns the bytes written, 0 when there are none now.
std::size_t read(std::span<std::byte> destination);

// Fills in the calling thread. Dropped, and counted, when its ring is full.
void record(TraceRecord record);

// A number for a text, the same for the same text; 0 when there are too many, and while tracing is off.
std::uint32_t name(std::string_view text);
// The file behind a descriptor.
std::uint32_t name_of_file(int fd);

// For transfers, from 1 on.
std::uint64_t next_id();

}  // namespace trace

// A span of the calling thread, from here to the end of the scope.
class Span {
 public:
  Span(TraceKind kind, std::int32_t device, std::uint64_t offset, std::uint64_t bytes, std::uint64_t id = 0,
       std::uint32_t name = 0) {
    if (!trace::on()) return;
    record_.kind = kind;
    record_.device = device;
    record_.offset = offset;
    record_.bytes = bytes;
    record_.id = id;
    record_.name = name;
    record_.start = now_ns();
  }
  ~Span() {
    if (record_.start == 0) return;
    record_.end = now_ns();
    trace::record(record_);
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

  void set_bytes(std::uint64_t bytes) { record_.bytes = bytes; }
  void set_error(int error) { record_.error = error; }

 private:
  TraceRecord record_;  // start 0: off when it began
};

}  // namespace gpufs::observe
