// Pinned host memory through which bytes pass between files and device memory, in buffers of one size.
// One pool for each engine, shared by all transfers. Thread-safe; buffers in use keep it alive.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "base/status.h"
#include "device/device_context.h"

namespace gpufs {

class BouncePool;

// A pinned buffer of the pool, returned to it by the destructor: no copy from or to it may be under way then.
class BounceBuffer {
 public:
  BounceBuffer() = default;
  BounceBuffer(BounceBuffer&& other) noexcept
      : pool_(std::move(other.pool_)), memory_(std::exchange(other.memory_, nullptr)) {}
  BounceBuffer& operator=(BounceBuffer&& other) noexcept {
    if (this != &other) {
      reset();
      pool_ = std::move(other.pool_);
      memory_ = std::exchange(other.memory_, nullptr);
    }
    return *this;
  }
  ~BounceBuffer() { reset(); }

  [[nodiscard]] bool valid() const { return memory_ != nullptr; }
  [[nodiscard]] std::byte* data() const;  // page aligned
  [[nodiscard]] std::size_t bytes() const;
  void reset();

 private:
  friend class BouncePool;
  struct Memory;
  BounceBuffer(std::shared_ptr<BouncePool> pool, Memory* memory) : pool_(std::move(pool)), memory_(memory) {}

  std::shared_ptr<BouncePool> pool_;
  Memory* memory_ = nullptr;  // pool_'s
};

class BouncePool : public std::enable_shared_from_this<BouncePool> {
 public:
  // capacity_bytes: a hard limit on what is pinned, at least one buffer.
  static std::shared_ptr<BouncePool> create(std::size_t buffer_bytes, std::uint64_t capacity_bytes);
  ~BouncePool();
  BouncePool(const BouncePool&) = delete;
  BouncePool& operator=(const BouncePool&) = delete;

  // A buffer for copies of this device, on its NUMA node if possible. Buffers are pinned when they are needed for the
  // first time and then kept. If all are in use, callers are served in the order in which they came.
  // ECANCELED soon after `cancelled` became true; ESHUTDOWN after close(); the error of pinning if that failed and
  // there is no buffer to wait for.
  Result<BounceBuffer> acquire(const std::shared_ptr<DeviceContext>& device, const std::atomic<bool>& cancelled);

  // One more buffer for a caller that has one, if more than `reserve` others remain for callers without. Does not wait.
  BounceBuffer try_acquire(const std::shared_ptr<DeviceContext>& device, std::size_t reserve);

  // Ends the pool: waiting callers get ESHUTDOWN. Idle buffers are freed now, those in use when they are returned.
  void close();

  struct Statistics {
    std::uint64_t slot_bytes = 0;
    std::uint64_t capacity_bytes = 0;
    std::uint64_t pinned_bytes = 0;
    std::uint64_t used_bytes = 0;
    std::uint64_t waits = 0;  // calls of acquire() that had to wait
    std::uint64_t pin_failures = 0;
  };
  [[nodiscard]] Statistics statistics() const;
  [[nodiscard]] std::size_t capacity() const { return capacity_; }  // in buffers

 private:
  friend class BounceBuffer;
  using Memory = BounceBuffer::Memory;

  BouncePool(std::size_t buffer_bytes, std::size_t capacity) : buffer_bytes_(buffer_bytes), capacity_(capacity) {}

  Result<Memory*> pin(const std::shared_ptr<DeviceContext>& device) const;
  static void unpin(Memory* memory);
  Result<Memory*> take_locked(std::unique_lock<std::mutex>& lock, const std::shared_ptr<DeviceContext>& device);
  void give_back(Memory* memory);

  const std::size_t buffer_bytes_;
  const std::size_t capacity_;

  // Guards all below; innermost: nothing is pinned, unpinned or mapped under it.
  mutable std::mutex mutex_;
  std::condition_variable changed_;  // a buffer came back, pinning failed, or the end
  std::vector<Memory*> idle_;
  std::size_t existing_ = 0;  // idle, in use, or being pinned
  std::set<std::uint64_t> waiting_;  // numbers of waiting calls: the smallest is served next
  std::uint64_t last_number_ = 0;
  bool closed_ = false;
  std::uint64_t waits_ = 0;
  std::uint64_t pin_failures_ = 0;
};

}  // namespace gpufs
