// One asynchronous read or write: queued (perhaps on a stream), bound when the stream reaches it, moved, and over.
// Shared by its stream, its queue and the thread that moves it. Once it is over it holds neither file nor memory.
// Thread-safe. Only what says so may be called on a driver's own threads, where no call of the driver is allowed:
// ending an operation frees files and memory.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "io/transfer_engine.h"

namespace gpufs {

class AsyncEngine;
class CompletionQueue;
class OperationStream;

// A number that is given, or the place from which it is read when the stream reaches the operation.
struct Parameter {
  std::uint64_t value = 0;
  const std::uint64_t* cell = nullptr;  // not null: late; the caller's, readable until the operation is over

  [[nodiscard]] bool late() const { return cell != nullptr; }
  [[nodiscard]] std::uint64_t read() const;
};

struct OperationRequest {
  TransferRequest transfer;  // all but the three numbers below
  // The value of a late size is the number that its cell has when the operation is submitted: the cell may shrink until
  // it is bound, but not grow.
  Parameter bytes;
  Parameter file_offset;
  Parameter target_offset;
  // Where the outcome is written before the stream goes on; the caller's until the operation is over. May be null.
  std::int64_t* count = nullptr;  // bytes moved; a negative errno if it failed before any was
  std::int32_t* codes = nullptr;  // two: errno and the device's code, 0 for success
  std::uint64_t cookie = 0;
  std::uint64_t trace_cookie = 0;  // shown in traces: the program's own, where the cookie is its binding's
};

// How an operation ended. bytes: from the start without a gap, also after a failure or a cancellation.
struct Completion {
  std::uint64_t cookie = 0;
  std::uint64_t id = 0;
  std::uint64_t bytes = 0;
  Status status;
  std::uint64_t fastpath_bytes = 0;
  std::uint64_t fallback_bytes = 0;
  std::uint64_t hole_bytes = 0;
  RefusalMask refusals = 0;
};

class Operation : public std::enable_shared_from_this<Operation> {
 public:
  // stream: null for one in no order. queue: receives the completion.
  Operation(std::uint64_t id, OperationRequest request, std::shared_ptr<AsyncEngine> engine,
            std::shared_ptr<OperationStream> stream, std::shared_ptr<CompletionQueue> queue);
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

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

  // Publishes the outcome, and has the stream go on. False if it is over already.
  bool end(Completion completion);
  // Asks it to stop: one that moves nothing yet is over at once. why: reported instead of ECANCELED. False if it is
  // over already.
  bool cancel(const Status& why = {});
  // As if it had never been submitted. False if it is over already.
  bool retract();
  // Has the stream go on before the operation is over, with -ETIMEDOUT as its count. False if it does not hold one.
  bool release_stream_early();

 private:
  enum class Phase { kQueued, kReady, kRunning, kEnding, kDone };

  bool end(Completion completion, bool unless_running);
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
  bool released_early_ = false;  // its outcome is written nowhere any more
  bool cancelled_ = false;
  Status cancel_reason_;          // success: ECANCELED
  std::uint64_t reached_at_ = 0;  // nanoseconds, for its trace; 0: not yet
  std::uint64_t started_at_ = 0;
  std::uint64_t transfer_id_ = 0;  // of its transfer, in the trace
  OperationRequest request_;
  std::shared_ptr<Transfer> transfer_;
};

}  // namespace gpufs
