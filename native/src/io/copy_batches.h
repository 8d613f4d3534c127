// Queues the copies between bounce buffers and the device for all threads that serve a transfer: two batches at most,
// and what comes in between becomes the next one. Beside its bytes each call costs the device 3 us, 7 % of a chunk of
// 2 MiB, and a batch is one call (docs/internals/measurements.md).
// Thread-safe. Ownership: shared by the transfer's Pipelines.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/status.h"
#include "device/device_context.h"
#include "drivers/driver.h"

namespace gpufs {

class CopyBatches {
 public:
  class Batch {
   public:
    [[nodiscard]] bool done() const { return done_; }
    // Once done.
    [[nodiscard]] const Status& status() const { return status_; }

   private:
    friend class CopyBatches;
    std::vector<HostCopy> copies_;
    bool known_ = true;
    std::atomic<bool> done_{false};
    Status status_;
  };

  static Result<std::shared_ptr<CopyBatches>> create(DeviceContext& device, CopyDirection direction);
  // All batches must be done.
  ~CopyBatches() = default;

  // Adds the copies of one chunk. Their memory is in use until the batch is done. known: the addresses are the
  // device's. Other chunks are batches of their own, and their copies go one by one: if one fails, no other chunk does.
  std::shared_ptr<const Batch> add(std::span<const HostCopy> copies, bool known);
  // Asks the device, and queues what waits for it, unless another thread does. Only this and add() do so: call it while
  // waiting for a batch.
  void advance();

 private:
  // Bytes, if that is more than one chunk: a batch ends for all of its chunks at once, and copies of others come
  // behind.
  static constexpr std::size_t kLargestBatch = std::size_t{16} << 20;
  // One batch is under way, and one follows without a pause: with one alone it was slower than without batches. Each on
  // a stream of its own, because a GPU goes to another stream when one has nothing left: behind a stream that always
  // had work a write of 1 MiB waited 60 ms.
  static constexpr std::size_t kLanes = 2;
  struct Lane {
    std::shared_ptr<Stream> stream;
    std::shared_ptr<Event> event;
    std::shared_ptr<Batch> batch;  // the one on the device
  };

  explicit CopyBatches(CopyDirection direction) : direction_(direction) {}
  void advance_locked();
  Status submit(Lane& lane);
  static void end(Lane& lane, const Status& status);

  const CopyDirection direction_;

  std::mutex mutex_;  // guards all below
  std::array<Lane, kLanes> lanes_;
  std::deque<std::shared_ptr<Batch>> waiting_;
};

}  // namespace gpufs
