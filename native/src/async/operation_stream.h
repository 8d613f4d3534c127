// A stream on which operations are queued: one of the engine's, or the program's own.
// Shared by its handle, its operations and the AsyncEngine, whose own thread is the only one that destroys it.
// Any thread may call any function; reach() and release() also a driver's own threads.
//
// An operation is three things on the stream: a call of the host, which binds it and hands it to the engine's threads;
// a wait until the stream's counter has come to its number, which whoever ends it sees to; and an event, which tells
// that the device looks at the counter no more. Where the device cannot wait for a value, or the stream has as many
// waits as its queue can take (kMostWaits), the call of the host itself waits instead: then the driver's thread, which
// streams may share, is kept for as long as the bytes move. They depend on nothing that such a thread does, so streams
// delay each other but never lock each other up.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>

#include "async/operation.h"
#include "device/device_context.h"

namespace gpufs {

class AsyncEngine;

// What is promised of all operations of a stream.
struct StreamPromises {
  // These numbers are read when an operation is submitted, though a place was given for them.
  bool fixed_target_offset = false;
  bool fixed_file_offset = false;
  bool fixed_bytes = false;
  bool aligned = false;  // all three are multiples of 4096
};

class OperationStream : public std::enable_shared_from_this<OperationStream> {
 public:
  static constexpr std::uint64_t kAlignment = 4096;
  // Operations that the device itself waits for; further ones are held by calls of the host, which take no space in its
  // queues. With a call and an event each, an H200 takes 55 of a stream and blocks the thread that queues more.
  static constexpr std::size_t kMostWaits = 16;
  // The engine's own; the program's; the program's, of which nothing is known but an operation on it.
  enum class Origin { kOwn, kRegistered, kImplied };

  OperationStream(std::shared_ptr<AsyncEngine> engine, std::shared_ptr<DeviceContext> device,
                  std::unique_ptr<Stream> stream, std::shared_ptr<Event> passed,
                  PinnedBlock counter, StreamPromises promises, Origin origin);
  // Not on a driver's thread. What is queued on a stream of the engine's own is waited for.
  ~OperationStream();
  OperationStream(const OperationStream&) = delete;
  OperationStream& operator=(const OperationStream&) = delete;

  [[nodiscard]] const std::shared_ptr<DeviceContext>& device() const { return device_; }
  [[nodiscard]] NativeStream native() const { return stream_->native(); }
  [[nodiscard]] const StreamPromises& promises() const { return promises_; }
  [[nodiscard]] std::size_t outstanding() const;
  // Whether the stream waits for the counter; its calls of the host wait otherwise.
  [[nodiscard]] bool waits_for_values() const { return counter_.data != nullptr; }

  // A function of the program's own, with the rules of Stream::call().
  Status call(HostFunction function, void* argument);
  // Waits until all that is queued now is done, the program's own work too. What failed there is not told.
  Status synchronize();

  // No more operations; those that are queued go on.
  void close();

 private:
  friend class AsyncEngine;

  // Queues it behind all that the stream has: EAGAIN when too many are outstanding for longer than `patience`, EBADF
  // after close(), or what the driver gave; nothing is queued then, or what was never moves anything.
  Status submit(const std::shared_ptr<Operation>& operation, std::size_t depth, std::chrono::milliseconds patience);
  class Submission;
  // The host's call, on a driver's thread: no exception leaves it.
  static void reached(void* operation) noexcept;
  void reach(const Operation* operation) noexcept;
  // The operation is over and the stream has come to it: it goes on.
  void release(const Operation& operation);
  // Counts one more operation, and the stream among the device's blocked ones.
  Status reserve(std::size_t depth, std::chrono::milliseconds patience);
  // Uncounts one. mutex_ is held.
  void unreserve();
  [[nodiscard]] std::atomic_ref<std::uint32_t> word() const {
    return std::atomic_ref<std::uint32_t>(*reinterpret_cast<std::uint32_t*>(counter_.data));
  }
  // Has the stream wait for the operation, which is queued; what cannot wait is ended. submit_mutex_ is held.
  void hold(const std::shared_ptr<Operation>& operation) noexcept;
  // Records passed_ behind what is queued. submit_mutex_ is held.
  void record() noexcept;
  // Those that the stream has not come to yet.
  std::deque<std::shared_ptr<Operation>> queued() const;
  // The failure of the device, if it will come to nothing any more; success otherwise.
  Status failure();
  // Neither the driver nor the device looks at it any more.
  bool idle();
  // For this long nothing was submitted.
  [[nodiscard]] bool unused(std::chrono::milliseconds duration) const;

  const std::shared_ptr<AsyncEngine> engine_;
  const std::shared_ptr<DeviceContext> device_;
  const std::unique_ptr<Stream> stream_;
  const std::shared_ptr<Event> passed_;  // recorded behind the last operation
  const PinnedBlock counter_;  // its first word counts the operations that are over; no memory: calls hold the stream
  const StreamPromises promises_;
  const Origin origin_;

  // Held while something is queued, which makes the numbers' order the stream's; only those who queue there wait for
  // it. Before mutex_.
  std::mutex submit_mutex_;
  std::uint32_t last_ = 0;  // the last number given; guarded by submit_mutex_

  mutable std::mutex mutex_;  // guards all below; nothing is called under it
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Operation>> queued_;
  std::size_t outstanding_ = 0;  // submitted, and not both reached and over
  std::size_t waits_ = 0;        // of those, for whom the counter is waited
  std::size_t calling_ = 0;      // host calls that have not returned
  bool recorded_ = true;         // passed_ stands behind all that waits for the counter
  bool ever_recorded_ = false;
  bool closed_ = false;
  std::chrono::steady_clock::time_point used_{};  // the last submission
};

}  // namespace gpufs
