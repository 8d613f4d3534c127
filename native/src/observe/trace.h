// Records what each thread does and when, while a trace is on. docs/internals/trace-records.md has the format of the
// records.
// Thread-safe: any thread may call any function. There is one trace for the process, since its threads serve all
// engines.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/status.h"
#include "observe/counters.h"

namespace gpufs::observe {

// The values are those of the recorded stream.
enum class TraceKind : std::uint8_t {
  kThread = 1,  // the name of `thread`: `bytes` long, in the blocks that follow
  kName = 2,    // the text of `name`, in the same form
  kLost = 3,    // `bytes` records of `thread` were dropped

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

  // Device copies, on a track of their own beside their thread's, or within it (lane 0).
  kCopyToDevice = 30,
  kCopyToHost = 31,

  // Phases of the transfer `id`, whichever threads take part in it.
  kTransfer = 40,
  kQueued = 41,
  kBind = 42,

  // Phases of the asynchronous operation `id`.
  kOperation = 43,   // from its submission to its end; `offset` is the program's cookie
  kStreamWait = 44,  // until its stream has come to it; `offset` is the cookie too
  kMove = 45,        // while it is a transfer, whose number is `offset`
};

// Returns the name of a thread's span in profilers, a literal.
[[nodiscard]] const char* name_of(TraceKind kind);

// One span, or one of the first three kinds. Times are nanoseconds of the monotonic clock.
struct TraceRecord {
  std::uint64_t start = 0;
  std::uint64_t end = 0;
  std::uint64_t id = 0;  // of the transfer or operation; the inode for the mount's reads and writes
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

extern std::atomic<bool> g_running;

// Whether a trace is being recorded. This check is all that tracing costs while it is off.
[[nodiscard]] inline bool on() { return g_running.load(std::memory_order_relaxed); }

// EBUSY if a trace is being recorded already.
Status start();
// Drops what has not been read.
void stop();

// Moves records out, those of each thread in order, and each text before the first record that uses it. Returns the
// bytes written, a multiple of a record's size; 0 if there are none now.
std::size_t read(std::span<std::byte> destination);

// Fills in the calling thread. A record that finds no space is dropped and counted.
void record(TraceRecord record);

// A number for a text, the same for the same text; 0 if there are too many, and while tracing is off.
std::uint32_t name(std::string_view text);
// Does what name() does, for the path behind a descriptor.
std::uint32_t name_of_file(int fd);

// Numbers transfers and operations, from 1 on.
std::uint64_t next_id();

}  // namespace trace

// NVIDIA's profilers (Nsight Systems, CUPTI) show spans as NVTX ranges of the domain "gpufs". Costs one check where no
// profiler has loaded itself into the process, and nothing exists without NVTX's headers at build time.
namespace nvtx {

// Whether a profiler receives ranges. Asked once: a profiler is there from the start of the process or never.
[[nodiscard]] bool on();

// Opens a range of the calling thread, whose payload is a number of bytes; pop() closes the one opened last.
void push(const char* name, std::uint64_t bytes);
void pop();

}  // namespace nvtx

// A span of the calling thread: lasts as long as the object. A profiler of NVIDIA's that watches the process sees it
// too.
class Span {
 public:
  Span(TraceKind kind, std::int32_t device, std::uint64_t offset, std::uint64_t bytes, std::uint64_t id = 0,
       std::uint32_t name = 0)
      : start_(trace::on() ? now_ns() : 0),
        id_(id),
        offset_(offset),
        bytes_(bytes),
        name_(name),
        device_(device),
        kind_(kind),
        profiled_(nvtx::on()) {
    if (profiled_) nvtx::push(name_of(kind), bytes);
  }
  ~Span() {
    if (profiled_) nvtx::pop();
    if (start_ != 0) finish();
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

  void set_bytes(std::uint64_t bytes) { bytes_ = bytes; }
  void set_error(int error) { error_ = error; }

 private:
  // Not inline, so that the calling code stays small.
  void finish();

  const std::uint64_t start_;  // 0: tracing was off
  const std::uint64_t id_;
  const std::uint64_t offset_;
  std::uint64_t bytes_;
  const std::uint32_t name_;
  const std::int32_t device_;
  const TraceKind kind_;
  const bool profiled_;
  std::int32_t error_ = 0;
};

}  // namespace gpufs::observe
