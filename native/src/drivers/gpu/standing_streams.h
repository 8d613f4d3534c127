// What a device does for those who wait while streams stand, held until an operation's bytes have been moved. A device
// has few hardware queues, which all streams share whatever their priority, so work of another stream may come behind
// what stands: then the bytes would wait for the stream that waits for them. The engines that copy over the bus have
// queues of their own, and all that is needed meanwhile is brought into a form that goes by those.
//
// On an H200 (CUDA 13.0, 8 queues) such are copies to the host, copies to the device of more than 24 KiB, and smaller
// ones of two rows or more. Filling, copying within the device, small copies in one row, streams that are made or
// destroyed, and host memory that is given back or unpinned wait for all that stands.
// Owned by the device's Context.
// Any thread, with the device current.
#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>

#include "base/status.h"
#include "drivers/driver.h"

namespace gpufs::gpu {

class Context;

class StandingStreams {
 public:
  explicit StandingStreams(Context& context) : context_(context) {}
  // give_up() must have been called.
  ~StandingStreams() = default;
  StandingStreams(const StandingStreams&) = delete;
  StandingStreams& operator=(const StandingStreams&) = delete;

  // Makes what is needed meanwhile, once: the memory below, and so many streams for synchronous work. What making or
  // pinning gave. Waits for streams that stand already.
  Status prepare(std::size_t streams);
  void give_up();

  void change(int by) { standing_.fetch_add(by); }
  [[nodiscard]] bool stand() const { return standing_.load(std::memory_order_relaxed) > 0; }
  // Whether another way than the plain one is needed, and there is one.
  [[nodiscard]] bool any() const { return stand() && prepared_.load(std::memory_order_acquire); }

  // In the order of the stream. A single byte has no second row, and goes the plain way.
  Status copy_in(DeviceAddress destination, const void* source, std::size_t bytes, void* stream);
  Status fill_zero(DeviceAddress destination, std::size_t bytes, void* stream);
  // Done when it returns. The ranges do not overlap.
  Status copy_within(DeviceAddress destination, DeviceAddress source, std::size_t bytes, void* stream);

 private:
  Context& context_;
  std::atomic<int> standing_{0};
  std::atomic<bool> prepared_{false};

  std::mutex mutex_;             // held while prepared, and while the way back in is in use; before the context's own
  std::byte* memory_ = nullptr;  // pinned: zeros, which nobody writes, and then the same again for copies within
};

}  // namespace gpufs::gpu
