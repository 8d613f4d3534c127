// One asynchronous read or write: queued (perhaps on a stream), bound when the stream comes to it, moved, and over.
// Shared by its stream, its queue and whoever moves it; once it is over it holds neither file nor memory any more.
// Any thread may call any function; those that a driver's own threads may call say so.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "io/transfer_engine.h"

namespace gpufs {

class AsyncEngine;
class CompletionQueue;
class OperationStream;

// A number that is given, or the place from which it is read when the stream comes to the operation.
struct Parameter {
  std::uint64_t value = 0;
  const std::uint64_t* cell = nullptr;  // not null: late; the caller's, readable until the operation is over

  [[nodiscard]] bool late() const { return cell != nullptr; }
  [[nodiscard]] std::uint64_t read() const;
};

struct OperationRequest {
  TransferRequest transfer;  // all but the three numbers below
  // A late size is the most that may be moved as it is when the operation is submitted (kept in the value); until it is
  // bound it may shrink, never grow.
  Parameter bytes;
  Parameter file_offset;
  Parameter target_offset;
  // Where the outcome is written before the stream goes on (each may be null); the caller's until the operation is
  // over.
  std::int64_t* count = nullptr;  // bytes moved; a negative errno if it failed before any was
  std::int32_t* codes = nullptr;  // two: errno and the device's code, 0 for success
  std::uint64_t cookie = 0;
  std::uint64_t trace_cookie = 0;  // shown in traces: the program's own, where the cookie is its binding's
};

// How an operation ended. bytes: from the start on without a gap, also after a failure or a cancellation.
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

class Operation {
 public:
  Operation(OperationRequest request, std::uint64_t id) : id_(id), request_(std::move(request)) {}
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  [[nodiscard]] std::uint64_t id() const { return id_; }

 private:
  friend class AsyncEngine;
  friend class CompletionQueue;
  friend class OperationStream;
  // kEnding: somebody is telling how it ended.
  enum class Phase { kQueued, kReady, kRunning, kEnding, kDone };

  const std::uint64_t id_;
  // Set before anybody else has it, and constant then.
  std::shared_ptr<OperationStream> stream_;  // null: it has no order
  std::uint32_t sequence_ = 0;               // in its stream
  bool waits_ = false;                       // the stream waits for it by its counter; otherwise the host's call does
  bool may_hang_ = false;                    // in its file
  std::shared_ptr<DeviceContext> device_;    // its memory's
  std::uint64_t submitted_at_ = 0;           // nanoseconds; 0: not traced
  std::uint32_t trace_name_ = 0;             // of its file

  // Guards all below. Nothing is called under it and no other lock taken.
  std::mutex mutex_;
  std::condition_variable changed_;  // phase_ is kDone
  Phase phase_ = Phase::kQueued;
  bool reached_ = false;          // the stream has come to it
  bool let_go_ = false;           // the stream went on before it was over, and its outcome is written nowhere any more
  bool cancelled_ = false;        // somebody asked
  std::uint64_t reached_at_ = 0;  // nanoseconds, for its trace; 0: not yet
  std::uint64_t launched_at_ = 0;
  std::uint64_t transfer_id_ = 0;  // of its transfer, in the trace
  Status unheld_;                  // why the stream's later work does not wait for it: then it must not go on
  std::shared_ptr<CompletionQueue> queue_;
  OperationRequest request_;
  std::shared_ptr<Transfer> transfer_;

  // Of the engine's list of operations to be ended; guarded by its mutex. In here, for the list must grow without
  // memory.
  std::shared_ptr<Operation> next_ending_;
  Status outcome_;
  bool is_over_ = false;  // ended already, but its file and memory are still to be released
};

}  // namespace gpufs
