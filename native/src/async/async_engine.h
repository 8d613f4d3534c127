// The asynchronous operations of an engine: admits them, starts their transfers, and looks after the streams.
// Shared by the Engine, its streams and its operations; shutdown() ends it. Thread-safe.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "async/completion_queue.h"
#include "async/operation.h"
#include "base/worker.h"
#include "io/transfer_engine.h"

namespace gpufs {

struct AsyncOptions {
  std::size_t operations = std::size_t{1} << 16;  // under way at most, in all queues together
  // Outstanding on one stream at most: a driver takes some thousand calls of a stream, and blocks the thread that
  // queues more.
  std::size_t stream_depth = 256;
  std::chrono::milliseconds timeout{10000};  // of a submission that finds its stream full, or too many blocked
  Switch stream_waits = Switch::kAuto;       // whether streams wait for values, where the device can
};

// "gpu 0 (NVIDIA H200)"
std::string name_of(const DeviceContext& device);

class AsyncEngine : public std::enable_shared_from_this<AsyncEngine> {
 public:
  AsyncEngine(const AsyncOptions& options, std::shared_ptr<TransferEngine> transfers,
              std::vector<std::shared_ptr<DeviceContext>> devices);

  // capacity: 0 for as many operations as the engine may have.
  std::shared_ptr<CompletionQueue> open_queue(std::size_t capacity);

  // A stream of the engine's own on a device.
  Result<std::shared_ptr<OperationStream>> create_stream(int device, const StreamPromises& promises);
  // The program's own, which must live until what is queued on it is over. device: negative to ask the runtime.
  // EINVAL: there is no such stream on that device, or on any.
  Result<std::shared_ptr<OperationStream>> register_stream(NativeStream native, int device,
                                                           const StreamPromises& promises);
  // A stream that was not registered: found again for as long as it is in use.
  Result<std::shared_ptr<OperationStream>> imply_stream(NativeStream native, int device);

  struct Submission {
    OperationRequest request;
    std::shared_ptr<OperationStream> stream;  // null: starts at once, in no order with others
  };
  // All of them or none: EINVAL, EBADF and others name the first entry that cannot be submitted (*bad), EAGAIN means
  // that the engine or the queue has no space for all. An entry that its stream refuses after others have been queued
  // ends with the stream's failure. *ids: of the operations, in the entries' order.
  Status submit(const std::shared_ptr<CompletionQueue>& queue, std::vector<Submission> entries,
                std::vector<std::uint64_t>* ids, std::size_t* bad);

  // Cancels everything and waits for it: a little longer than the transfers' own grace for what runs, a second for
  // streams that do not reach their operations. What such streams still refer to is abandoned. Streams go on before
  // that if their operations do not end: the device may wait for those very streams. May be called twice.
  void shutdown();

  [[nodiscard]] const AsyncOptions& options() const { return options_; }
  [[nodiscard]] std::size_t outstanding() const { return outstanding_.load(); }
  // How long to wait for what was cancelled before ETIMEDOUT.
  [[nodiscard]] std::chrono::milliseconds stall_timeout() const;
  // The error for closing the engine: ETIMEDOUT if shutdown() had streams go on before their operations were over.
  [[nodiscard]] Status released_early() const;

  // ---- for the streams and operations ----

  // Its stream has reached it, or it has none: binds it and starts its transfer. Also on a driver's thread.
  void start(const std::shared_ptr<Operation>& operation);
  void unreserve(std::size_t count) { outstanding_ -= count; }
  // Drops references, in this order, without waiting for their destructors. may_hang: a file among them may.
  template <typename... Types>
  void drop(bool may_hang, std::shared_ptr<Types>&&... references) {
    reapers_[may_hang ? 1 : 0].post([... held = std::move(references)]() mutable { (held.reset(), ...); });
  }

 private:
  // Operations that wait for their transfer to start. Files that may hang have their own.
  struct Backlog {
    std::mutex mutex;  // guards the two below; nothing is called under it
    std::deque<std::shared_ptr<Operation>> ready;
    std::size_t running = 0;
  };
  struct DeviceState {
    std::shared_ptr<DeviceContext> context;
    std::mutex mutex;  // guards the two below, also while they are found out
    bool probed = false;
    bool waits_for_values = false;
  };

  Status reserve(std::size_t count);
  Result<std::shared_ptr<OperationStream>> add_stream(std::size_t device, std::unique_ptr<Stream> stream,
                                                      const StreamPromises& promises, OperationStream::Origin origin);
  // The device that a stream of the program's belongs to, and the stream.
  Result<std::pair<std::size_t, std::unique_ptr<Stream>>> adopt(NativeStream native, int device) const;
  static bool probe(DeviceState& device);

  Backlog& backlog_of(const Operation& operation) { return backlogs_[operation.may_hang() ? 1 : 0]; }
  // Starts as many transfers as there may be.
  void start_ready(Backlog& backlog);
  void moved(const std::shared_ptr<Operation>& operation, const TransferProgress& progress);

  // Also returns when to check them again.
  Worker::Clock::time_point check_streams();
  void drop_idle(std::vector<std::shared_ptr<OperationStream>>& streams);
  std::vector<std::shared_ptr<Operation>> all_under_way();
  void cancel_until(std::chrono::steady_clock::time_point end);

  const AsyncOptions options_;
  std::vector<std::unique_ptr<DeviceState>> devices_;
  std::atomic<std::uint64_t> last_id_{0};
  std::atomic<std::size_t> outstanding_{0};
  std::array<Backlog, 2> backlogs_;
  // Does what must not be done on a driver's thread, and checks the streams. Must not wait for a device.
  Worker worker_{"gpufs-async", [this] { return check_streams(); }};
  // Drop references: freeing memory of a device may wait for all of its streams, and closing a file for a server. So no
  // thread that streams depend on waits for either. What operations with files that may hang held has its own.
  std::array<Worker, 2> reapers_{Worker("gpufs-reaper"), Worker("gpufs-reaper")};

  // Guards all below; nothing is called under it. Before a stream's.
  mutable std::mutex mutex_;
  std::shared_ptr<TransferEngine> transfers_;  // null after shutdown()
  std::vector<std::shared_ptr<OperationStream>> streams_;
  std::vector<std::weak_ptr<CompletionQueue>> queues_;
  bool closed_ = false;
  std::size_t released_early_ = 0;  // operations
  std::string released_on_;         // the device of one of them
};

}  // namespace gpufs
