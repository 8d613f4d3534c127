// Asynchronous operations of an engine: streams, the operations on them and those in no order, and who moves which
// when. Shared by its handle's Engine, the queues and the operations under way; shutdown() ends it. Any thread may call
// any function.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "async/completion_queue.h"
#include "async/operation.h"
#include "async/operation_stream.h"
#include "io/transfer_engine.h"

namespace gpufs {

struct AsyncOptions {
  std::size_t operations = std::size_t{1} << 16;  // under way at most, in all queues together
  // Outstanding on one stream at most: drivers have room for some thousand entries of a stream and make those who queue
  // more wait for ever if the stream does.
  std::size_t stream_depth = 256;
  std::chrono::milliseconds patience{10000};  // of a submission on a stream that is full
  Switch stream_waits = Switch::kAuto;        // whether streams wait for values, where the device can
};

class AsyncEngine : public std::enable_shared_from_this<AsyncEngine> {
 public:
  static std::shared_ptr<AsyncEngine> create(const AsyncOptions& options, std::shared_ptr<TransferEngine> transfers,
                                             std::vector<std::shared_ptr<DeviceContext>> devices);
  ~AsyncEngine() = default;
  AsyncEngine(const AsyncEngine&) = delete;
  AsyncEngine& operator=(const AsyncEngine&) = delete;

  // capacity: 0 for as many as the engine has.
  std::shared_ptr<CompletionQueue> open_queue(std::size_t capacity);

  // A stream of the engine's own on a device.
  Result<std::shared_ptr<OperationStream>> create_stream(std::size_t device, const StreamPromises& promises);
  // The program's own. device: negative where the runtime is to tell. It must live until what is queued on it is over.
  // EINVAL: no such stream on that device, or on any.
  Result<std::shared_ptr<OperationStream>> register_stream(NativeStream native, int device,
                                                           const StreamPromises& promises);
  // One that nobody registered, as it is now: found again for as long as it is in use.
  Result<std::shared_ptr<OperationStream>> imply_stream(NativeStream native, int device);

  // Cancels everything and waits for it: for what runs at most a little longer than the transfers' own grace, for
  // streams that do not come to their operations a second. What such streams still refer to is left behind. Operations
  // that a device does not get done let their streams go on before that, since it may be those that it waits for. May
  // be called twice.
  void shutdown();

  [[nodiscard]] const AsyncOptions& options() const { return options_; }
  // How long to wait for what was cancelled.
  [[nodiscard]] std::chrono::milliseconds stall_timeout() const {
    return devices_.front()->context->device().blocked_streams().stall_timeout();
  }
  [[nodiscard]] std::size_t outstanding() const { return outstanding_.load(); }
  // Operations whose streams shutdown() had go on before they were over.
  [[nodiscard]] std::size_t let_go() const { return let_go_; }
  // On which device, of several one of them.
  [[nodiscard]] std::string let_go_on() const;

 private:
  friend class CompletionQueue;
  friend class OperationStream;

  // Files that may hang do not keep the others from running.
  struct Lane {
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

  AsyncEngine(const AsyncOptions& options, std::shared_ptr<TransferEngine> transfers,
              std::vector<std::shared_ptr<DeviceContext>> devices);

  // Checks and completes a request as far as it is known: what cannot be fails here.
  Status check(OperationRequest& request, const OperationStream* stream) const;
  Status reserve(std::size_t count);
  Status submit(const std::shared_ptr<Operation>& operation);
  Result<std::shared_ptr<OperationStream>> add_stream(std::size_t device, std::unique_ptr<Stream> stream,
                                                      const StreamPromises& promises, OperationStream::Origin origin);
  // The device that a stream of the program's belongs to, and the stream.
  Result<std::pair<std::size_t, std::unique_ptr<Stream>>> adopt(NativeStream native, int device) const;
  static bool probe(DeviceState& device);

  // Reads the late numbers and starts the transfer. Also called on drivers' threads, so no exception leaves it (the
  // operation fails with ENOMEM), and what is over by this is ended by the engine's own thread.
  void bind(const std::shared_ptr<Operation>& operation) noexcept;
  void pump(Lane& lane) noexcept;
  Lane& lane_of(const Operation& operation) { return lanes_[operation.may_hang_ ? 1 : 0]; }
  void launch(const std::shared_ptr<Operation>& operation) noexcept;
  void moved(const std::shared_ptr<Operation>& operation, const TransferProgress& progress) noexcept;
  // For the keeper to end; needs no memory.
  void end_later(const std::shared_ptr<Operation>& operation, Status status) noexcept;
  // For the keeper to release what an operation that is over has been given since.
  void release_later(const std::shared_ptr<Operation>& operation) noexcept;
  void append_ending(const std::shared_ptr<Operation>& operation);  // mutex_ is held
  // Tells everybody, once. Not on a driver's thread, since files and memory are let go here. False if it is over
  // already, and, with waiting_only, if it is running.
  bool end(const std::shared_ptr<Operation>& operation, Completion completion, bool waiting_only = false);
  // Nobody will be told of it. False if somebody is, or was.
  static bool retract(Operation& operation);
  // False if it is over already.
  bool cancel(const std::shared_ptr<Operation>& operation);
  static void wait(Operation& operation);
  // Records the phases of an operation that ends, where it was submitted while a trace was recorded.
  static void trace_phases(const Operation& operation, std::uint64_t reached_at, const OperationRequest& request,
                           const Completion& completion);

  Status start_keeper();
  void keeper_main();
  void keep_streams();
  std::vector<std::shared_ptr<CompletionQueue>> queues();
  // Has the stream of an operation that runs go on, if its device does not get it done.
  void let_go(const std::shared_ptr<Operation>& operation);
  void unreserve(std::size_t count) { outstanding_ -= count; }

  const AsyncOptions options_;
  std::vector<std::unique_ptr<DeviceState>> devices_;
  std::atomic<std::uint64_t> last_id_{0};
  std::atomic<std::size_t> outstanding_{0};
  std::atomic<std::size_t> let_go_{0};
  std::array<Lane, 2> lanes_;

  // Guards all below; nothing is called under it. Before a stream's.
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::string let_go_on_;
  std::shared_ptr<TransferEngine> transfers_;  // null after shutdown()
  std::vector<std::shared_ptr<OperationStream>> streams_;
  std::vector<std::weak_ptr<CompletionQueue>> queues_;
  std::shared_ptr<Operation> ending_;  // the first of those for the keeper, linked by next_ending_
  Operation* last_ending_ = nullptr;
  std::thread keeper_;
  bool closed_ = false;
  bool keeper_ending_ = false;
};

}  // namespace gpufs
