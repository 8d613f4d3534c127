// Asynchronous reads and writes, and the streams on which they are queued.
// Thread-safe. Only what says so may be called on a driver's own threads, where no call of the driver is allowed:
// ending an operation frees files and memory.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "device/device_context.h"
#include "io/transfer_engine.h"

namespace gpufs {

class AsyncEngine;
class CompletionQueue;
class OperationStream;

struct OperationRequest {
  TransferRequest transfer;
  // Late numbers: not null, the number is read there when the stream reaches the operation, instead of `transfer`'s.
  // The caller's, readable until the operation is over. A late size is read when the operation is submitted, too, and
  // may only shrink from then on.
  const std::uint64_t* bytes_cell = nullptr;
  const std::uint64_t* file_offset_cell = nullptr;
  const std::uint64_t* target_offset_cell = nullptr;
  // Where the bytes moved are written before the stream goes on, or a negative errno if it failed before any was; the
  // caller's until the operation is over. May be null.
  std::int64_t* count = nullptr;
  std::uint64_t cookie = 0;
  std::uint64_t trace_cookie = 0;  // shown in traces: the program's own, where the cookie is its binding's
};

// The end of an operation.
struct Completion : TransferProgress {
  std::uint64_t cookie = 0;
  std::uint64_t id = 0;
};

// One read or write: queued (perhaps on a stream), bound when the stream reaches it, moved, and over.
// Shared by its stream, its queue and the thread that moves it. Once it is over it holds neither file nor memory.
class Operation : public std::enable_shared_from_this<Operation> {
 public:
  // stream: null for one in no order. queue: receives the completion.
  Operation(std::uint64_t id, OperationRequest request, std::shared_ptr<AsyncEngine> engine,
            std::shared_ptr<OperationStream> stream, std::shared_ptr<CompletionQueue> queue);

  // Checks a request, and reads the numbers that are known or that `stream` promised to be fixed. EINVAL, EBADF, and
  // others: it cannot be submitted.
  static Status check(OperationRequest& request, const OperationStream* stream);

  [[nodiscard]] std::uint64_t id() const { return id_; }
  [[nodiscard]] const std::shared_ptr<OperationStream>& stream() const { return stream_; }
  [[nodiscard]] const DeviceContext& device() const { return *device_; }
  [[nodiscard]] bool may_hang() const { return may_hang_; }  // its file

  // ---- its life, in this order; also on a driver's thread ----

  // The stream has reached it. False if it is over already, so that the stream goes on.
  bool reach();
  enum class Bound { kReady, kOver, kNothingToMove };
  // Reads the late numbers. A failure is what the operation is to end with.
  Result<Bound> bind();
  // Starts the transfer, which calls `moved` at its end, on a thread of its own. False if the operation was cancelled
  // before, so `moved` is not called. *leftover: references that this thread must not drop.
  Result<bool> start(TransferEngine& transfers, std::function<void(const TransferProgress&)> moved,
                     std::shared_ptr<void>* leftover);
  // Blocks until it is over, or its stream was released before that.
  void wait();

  // ---- its end; not on a driver's thread ----

  // Publishes the outcome, and has the stream go on. False if it is over already, or runs and must not.
  bool end(Completion completion, bool unless_running = false);
  // Asks the operation to stop: one that moves nothing yet is over at once. why: reported instead of ECANCELED. False
  // if it is over already.
  bool cancel(const Status& why = {});
  // Withdraws the operation as if it had never been submitted. False if it is over already.
  bool retract();
  // Has the stream go on before the operation is over, with -ETIMEDOUT as its count. False if it does not hold one.
  bool release_stream_early();

 private:
  enum class Phase { kQueued, kReady, kRunning, kEnding, kDone };

  [[nodiscard]] bool over() const { return phase_ == Phase::kEnding || phase_ == Phase::kDone; }
  void trace_phases(const OperationRequest& request, const Completion& completion) const;

  const std::uint64_t id_;
  const std::shared_ptr<AsyncEngine> engine_;
  const std::shared_ptr<OperationStream> stream_;
  const std::shared_ptr<CompletionQueue> queue_;
  const std::shared_ptr<DeviceContext> device_;  // of its memory
  const bool may_hang_;
  std::uint64_t submitted_at_ = 0;  // nanoseconds; 0: not traced
  std::uint32_t trace_name_ = 0;    // of its file

  std::mutex mutex_;  // guards all below; nothing is called under it
  std::condition_variable changed_;
  Phase phase_ = Phase::kQueued;
  bool reached_ = false;         // by the stream
  bool released_early_ = false;  // the outcome is written nowhere any more
  bool cancelled_ = false;
  Status cancel_reason_;          // success: ECANCELED
  std::uint64_t reached_at_ = 0;  // nanoseconds, for its trace; 0: not yet
  std::uint64_t started_at_ = 0;
  std::uint64_t transfer_id_ = 0;  // of its transfer, in the trace
  OperationRequest request_;
  std::shared_ptr<Transfer> transfer_;
};

// The promises about all operations of a stream.
struct StreamPromises {
  // These numbers are read when an operation is submitted, although a place was given for them.
  bool fixed_target_offset = false;
  bool fixed_file_offset = false;
  bool fixed_bytes = false;
  bool aligned = false;  // all three are multiples of kAlignment
};

// A stream on which operations are queued: one of the engine's, or the program's own.
// Shared by its handle, its operations and the AsyncEngine, whose own thread is the only one that destroys it.
// Thread-safe. release() may be called on a driver's own threads.
//
// An operation is three things on the stream: a call of the host, which binds it and hands it to the engine's threads;
// a wait until the stream's counter has reached its number, which ending it sets; and an event, which shows that the
// device no longer reads the counter. Where the device cannot wait for a value, or the stream has as many waits as its
// queue can take (kMostWaits), the call of the host itself waits instead. The driver's thread, which streams may share,
// is then blocked while the bytes move. Moving them depends on nothing that such a thread does, so streams delay each
// other but do not deadlock.
class OperationStream {
 public:
  static constexpr std::uint64_t kAlignment = 4096;
  // Operations of a stream that the device itself waits for; further ones are held by calls of the host, which take no
  // space in its queues. With a call and an event each, an H200 takes 55 and blocks the thread that queues more.
  static constexpr std::size_t kMostWaits = 16;
  // kImplied: one of the program's that was only named to an operation.
  enum class Origin { kOwn, kRegistered, kImplied };

  // passed: an event of the stream's own. counter: two words, the first of which counts the operations that are over;
  // no memory if calls of the host are to hold the stream.
  OperationStream(std::shared_ptr<AsyncEngine> engine, std::shared_ptr<DeviceContext> device,
                  std::unique_ptr<Stream> stream, std::unique_ptr<Event> passed, PinnedBlock counter,
                  StreamPromises promises, Origin origin);
  // Must not be called on a driver's thread. Waits for what is queued on a stream of the engine's own.
  ~OperationStream();

  [[nodiscard]] const std::shared_ptr<DeviceContext>& device() const { return device_; }
  [[nodiscard]] NativeStream native() const { return stream_->native(); }
  [[nodiscard]] const StreamPromises& promises() const { return promises_; }
  [[nodiscard]] Origin origin() const { return origin_; }
  [[nodiscard]] std::size_t outstanding() const;
  // Whether the device waits for the counter; otherwise calls of the host do.
  [[nodiscard]] bool waits_for_values() const { return counter_.data != nullptr; }

  // A function of the program's own, with the rules of Stream::call().
  Status call(HostFunction function, void* argument);
  // Waits until all that is queued now is done, the program's own work too. Does not report failures of that.
  Status synchronize() { return stream_->synchronize(); }
  // No more operations; those that are queued go on.
  void close();

  // Queues the operation behind all that the stream has. EAGAIN: for longer than `timeout` the stream had `depth`
  // operations outstanding, or other streams of the device had all that may be blocked. EBADF: closed. Others are the
  // driver's. After a failure the operation is not queued.
  Status submit(const std::shared_ptr<Operation>& operation, std::size_t depth, std::chrono::milliseconds timeout);
  // The operation is over and the stream has reached it: it goes on.
  void release(const Operation& operation);

  // Operations that the stream has not reached yet.
  [[nodiscard]] std::deque<std::shared_ptr<Operation>> queued() const;
  // The failure of the device if it will not reach them any more.
  Status failure();
  // Whether the stream can be destroyed: neither the driver nor the device refers to it any more.
  bool idle();
  [[nodiscard]] bool closed() const;
  // Whether nothing was submitted for so long.
  [[nodiscard]] bool unused(std::chrono::milliseconds duration) const;

 private:
  // An operation that was submitted and that the stream has not passed.
  struct Outstanding {
    std::uint32_t number = 0;  // in the stream
    bool waits = false;        // the device waits for the counter; otherwise the host's call waits
  };

  // The host's call, on a driver's thread.
  static void on_reached(void* operation) noexcept;
  void reach(Operation* reached);
  // Counts one more operation, and the stream among the device's blocked ones.
  Status reserve(std::size_t depth, std::chrono::milliseconds timeout);
  // Uncounts an operation. mutex_ is held.
  void forget(const Operation& operation);
  // Has the stream wait for an operation that is queued; what cannot wait is ended. submit_mutex_ is held.
  void wait_for(Operation& operation, std::uint32_t number);
  // Records passed_ behind what is queued. submit_mutex_ is held.
  void record();
  [[nodiscard]] std::atomic_ref<std::uint32_t> counter() const {
    return std::atomic_ref<std::uint32_t>(*reinterpret_cast<std::uint32_t*>(counter_.data));
  }

  const std::shared_ptr<AsyncEngine> engine_;
  const std::shared_ptr<DeviceContext> device_;
  const std::unique_ptr<Stream> stream_;
  const std::unique_ptr<Event> passed_;  // recorded behind the last operation
  const PinnedBlock counter_;
  const StreamPromises promises_;
  const Origin origin_;

  // Held while something is queued, so that the numbers have the order of the stream. Before mutex_.
  std::mutex submit_mutex_;
  std::uint32_t last_number_ = 0;  // guarded by submit_mutex_

  mutable std::mutex mutex_;  // guards all below; nothing is called under it
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Operation>> queued_;
  std::map<std::uint64_t, Outstanding> entries_;  // by the operation's id
  std::size_t outstanding_ = 0;                   // those, and those being submitted
  std::size_t waits_ = 0;                         // of the entries
  std::size_t calling_ = 0;                       // host calls that have not returned
  bool recorded_ = true;                          // passed_ is queued behind all waits
  bool ever_recorded_ = false;
  bool closed_ = false;
  std::chrono::steady_clock::time_point used_;  // the last submission
};

}  // namespace gpufs
