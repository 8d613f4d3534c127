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
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>

#include "async/operation.h"
#include "device/device_context.h"

namespace gpufs {

// What is promised of all operations of a stream.
struct StreamPromises {
  // These numbers are read when an operation is submitted, although a place was given for them.
  bool fixed_target_offset = false;
  bool fixed_file_offset = false;
  bool fixed_bytes = false;
  bool aligned = false;  // all three are multiples of kAlignment
};

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
  // Not on a driver's thread. Waits for what is queued on a stream of the engine's own.
  ~OperationStream();
  OperationStream(const OperationStream&) = delete;
  OperationStream& operator=(const OperationStream&) = delete;

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

  // Queues the operation behind all that the stream has. EAGAIN: for longer than `patience` the stream had `depth`
  // operations outstanding, or other streams of the device had all that may be blocked. EBADF: closed. Others are the
  // driver's. After a failure the operation is not queued.
  Status submit(const std::shared_ptr<Operation>& operation, std::size_t depth, std::chrono::milliseconds patience);
  // The operation is over and the stream has reached it: it goes on.
  void release(const Operation& operation);

  // Operations that the stream has not reached yet.
  [[nodiscard]] std::deque<std::shared_ptr<Operation>> queued() const;
  // The failure of the device if it will not reach them any more.
  Status failure();
  // Whether it can be destroyed: neither the driver nor the device refers to it any more.
  bool idle();
  [[nodiscard]] bool closed() const;
  // Whether nothing was submitted for so long.
  [[nodiscard]] bool unused(std::chrono::milliseconds duration) const;

 private:
  // One that was submitted and that the stream has not passed.
  struct Entry {
    std::uint32_t number = 0;  // in the stream
    bool waits = false;        // the device waits for the counter; otherwise the host's call waits
  };

  // The host's call, on a driver's thread.
  static void on_reached(void* operation) noexcept;
  void reach(Operation* reached);
  // Counts one more operation, and the stream among the device's blocked ones.
  Status reserve(std::size_t depth, std::chrono::milliseconds patience);
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
  std::map<std::uint64_t, Entry> entries_;  // by the operation's id
  std::size_t outstanding_ = 0;             // those, and those being submitted
  std::size_t waits_ = 0;                   // of the entries
  std::size_t calling_ = 0;                 // host calls that have not returned
  bool recorded_ = true;                    // passed_ stands behind all waits
  bool ever_recorded_ = false;
  bool closed_ = false;
  std::chrono::steady_clock::time_point used_;  // the last submission
};

}  // namespace gpufs
