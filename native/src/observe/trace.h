// Traces: what each thread did when, recorded into bounded rings of its own while somebody asks for it.
// Nobody owns it: one trace for the process, since threads serve all engines; the rings go when it is stopped.
// Any thread may call any function; who starts, reads or stops waits for others who do.
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

  // Phases of an asynchronous operation; `id` says which.
  kOperation = 43,   // from its submission to its end; `offset` is the program's cookie
  kStreamWait = 44,  // until its stream has come to it; `offset` likewise
  kMove = 45,        // while it is a transfer, whose number is `offset`
};

// One span, or one of the first three kinds. Times are nanoseconds of the monotonic clock; while it is recorded they
// may be ticks (see Span), which read() translates.
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
  std::uint32_t in_ticks = 0;  // 0 in what read() gives
};
static_assert(sizeof(TraceRecord) == 64);

namespace trace {

// The number of the trace that is recorded; 0: none is.
extern std::atomic<std::uint32_t> g_running;

// The one look that tracing costs while it is off.
[[nodiscard]] inline bool on() { return g_running.load(std::memory_order_relaxed) != 0; }

// The cheapest clock that there is: ticks where they are even, else nanoseconds. Never less than in an earlier call of
// the same thread.
[[nodiscard]] std::uint64_t clock();

// EBUSY if it is on.
Status start();
void stop();

// Moves records out, oldest first within each thread; whole ones, with the texts that belong to them before their first
// use. Returns the bytes written, 0 when there are none now: what has ended after the call began waits for the next.
std::size_t read(std::span<std::byte> destination);

// Fills in the calling thread. Dropped, and counted, when its ring is full.
void record(const TraceRecord& record);

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
       std::uint32_t name = 0)
      : start_(trace::on() ? trace::clock() : 0),
        id_(id),
        offset_(offset),
        bytes_(bytes),
        name_(name),
        device_(device),
        kind_(kind) {}
  ~Span() {
    if (start_ != 0) finish();
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

  void set_bytes(std::uint64_t bytes) { bytes_ = bytes; }
  void set_error(int error) { error_ = error; }

 private:
  // Out of line, so that what is off costs no more than the look.
  void finish();

  const std::uint64_t start_;  // 0: off when it began
  const std::uint64_t id_;
  const std::uint64_t offset_;
  std::uint64_t bytes_;
  const std::uint32_t name_;
  const std::int32_t device_;
  const TraceKind kind_;
  std::int32_t error_ = 0;
};

}  // namespace gpufs::observe
