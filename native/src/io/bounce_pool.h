// Pinned host memory through which bytes pass between files and device memory, in buffers of one size.
// One pool for each engine, shared by all transfers. Thread-safe; buffers in use keep it alive.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/status.h"
#include "device/device_context.h"

namespace gpufs {

class BouncePool;

struct BounceMemory {
  std::byte* data = nullptr;  // page aligned
  std::size_t bytes = 0;
  void* mapping = nullptr;
  std::size_t mapped_bytes = 0;
  int node = -1;
  bool pinned = false;
  std::shared_ptr<DeviceContext> device;  // the one that pinned it
};
struct ReturnToPool {
  std::shared_ptr<BouncePool> pool;
  void operator()(BounceMemory* memory) const;
};
// A pinned buffer, returned to its pool when it is destroyed: no copy from or to it may be under way then.
using BounceBuffer = std::unique_ptr<BounceMemory, ReturnToPool>;

class BouncePool : public std::enable_shared_from_this<BouncePool> {
 public:
  // capacity_bytes: a hard limit on what is pinned, at least one buffer.
  static std::shared_ptr<BouncePool> create(std::size_t buffer_bytes, std::uint64_t capacity_bytes);
  ~BouncePool();

  // A buffer for copies of this device, on its NUMA node if possible. Buffers are pinned when they are needed for the
  // first time and then kept. Waits if all are in use.
  // ECANCELED soon after `cancelled` became true; ESHUTDOWN after close(); the error of pinning if that failed and
  // there is no buffer to wait for.
  Result<BounceBuffer> acquire(const std::shared_ptr<DeviceContext>& device, const std::atomic<bool>& cancelled);

  // One more buffer for a caller that has one, or null: only if more than `reserve` others remain for callers without.
  // Does not wait.
  BounceBuffer try_acquire(const std::shared_ptr<DeviceContext>& device, std::size_t reserve);

  // Ends the pool: waiting callers get ESHUTDOWN. Idle buffers are freed now, those in use when they are returned.
  void close();

  struct Usage {
    std::uint64_t slot_bytes = 0;
    std::uint64_t capacity_bytes = 0;
    std::uint64_t pinned_bytes = 0;
    std::uint64_t used_bytes = 0;
    std::uint64_t waits = 0;  // calls of acquire() that had to wait
    std::uint64_t pin_failures = 0;
  };
  [[nodiscard]] Usage statistics() const;
  [[nodiscard]] std::size_t capacity() const { return capacity_; }  // in buffers

 private:
  friend struct ReturnToPool;

  BouncePool(std::size_t buffer_bytes, std::size_t capacity) : buffer_bytes_(buffer_bytes), capacity_(capacity) {}

  Result<BounceMemory*> pin(const std::shared_ptr<DeviceContext>& device) const;
  static void unpin(BounceMemory* memory);
  Result<BounceMemory*> take_locked(std::unique_lock<std::mutex>& lock, const std::shared_ptr<DeviceContext>& device,
                                    bool may_pin);
  void give_back(BounceMemory* memory);

  const std::size_t buffer_bytes_;
  const std::size_t capacity_;

  // Guards all below; innermost: nothing is pinned, unpinned or mapped under it.
  mutable std::mutex mutex_;
  std::condition_variable changed_;  // a buffer came back, pinning failed, or the end
  std::vector<BounceMemory*> idle_;
  std::size_t existing_ = 0;  // idle, in use, or being pinned
  std::size_t pinning_ = 0;
  std::size_t waiting_ = 0;  // calls of acquire()
  bool closed_ = false;
  std::uint64_t waits_ = 0;
  std::uint64_t pin_failures_ = 0;
};

}  // namespace gpufs
