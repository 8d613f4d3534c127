// Pinned host memory through which bytes pass between files and device memory, in slots of one size.
// One pool an engine, shared by the mount and all transfers; slots in use keep it alive.
// Any thread may call any function.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/status.h"
#include "device/device_context.h"

namespace gpufs {

class BouncePool;

// The use of one slot, given back when this goes: nobody may still copy from or to it then.
class BounceLease {
 public:
  BounceLease() = default;
  BounceLease(BounceLease&& other) noexcept
      : pool_(std::move(other.pool_)), slot_(std::exchange(other.slot_, nullptr)) {}
  BounceLease& operator=(BounceLease&& other) noexcept {
    if (this != &other) {
      reset();
      pool_ = std::move(other.pool_);
      slot_ = std::exchange(other.slot_, nullptr);
    }
    return *this;
  }
  ~BounceLease() { reset(); }
  BounceLease(const BounceLease&) = delete;
  BounceLease& operator=(const BounceLease&) = delete;

  [[nodiscard]] bool valid() const { return slot_ != nullptr; }
  [[nodiscard]] std::byte* data() const;  // page aligned
  [[nodiscard]] std::size_t bytes() const;
  void reset();

 private:
  friend class BouncePool;
  struct Slot;
  BounceLease(std::shared_ptr<BouncePool> pool, Slot* slot) : pool_(std::move(pool)), slot_(slot) {}

  std::shared_ptr<BouncePool> pool_;
  Slot* slot_ = nullptr;  // pool_'s
};

class BouncePool : public std::enable_shared_from_this<BouncePool> {
 public:
  // capacity_bytes: a hard cap on what is pinned, at least one slot.
  static std::shared_ptr<BouncePool> create(std::size_t slot_bytes, std::uint64_t capacity_bytes);
  ~BouncePool();
  BouncePool(const BouncePool&) = delete;
  BouncePool& operator=(const BouncePool&) = delete;

  // A slot for copies of this device, on its NUMA node where there is one. Slots are pinned when they are needed for
  // the first time and then kept. When all are in use callers are served in the order in which they came.
  // ETIMEDOUT after `patience`; ECANCELED soon after *cancelled (may be null) became true; ENOMEM (or what pinning
  // gave) when nothing could be pinned and there is no slot to wait for; ESHUTDOWN after close().
  Result<BounceLease> acquire(const std::shared_ptr<DeviceContext>& device, std::chrono::milliseconds patience,
                              const std::atomic<bool>* cancelled = nullptr);

  // One more slot for somebody who has one: only if `reserve` others would still be there for those who have none.
  BounceLease try_acquire(const std::shared_ptr<DeviceContext>& device, std::size_t reserve);

  // Ends the pool: waiting callers get ESHUTDOWN, idle slots are unpinned and freed now and those in use when they
  // come back.
  void close();

  struct Statistics {
    std::uint64_t slot_bytes = 0;
    std::uint64_t capacity_bytes = 0;
    std::uint64_t pinned_bytes = 0;
    std::uint64_t used_bytes = 0;
    std::uint64_t waits = 0;  // acquisitions that had to wait
    std::uint64_t pin_failures = 0;
  };
  [[nodiscard]] Statistics statistics() const;
  [[nodiscard]] std::size_t slot_bytes() const { return slot_bytes_; }
  [[nodiscard]] std::size_t capacity() const { return capacity_; }  // in slots

 private:
  friend class BounceLease;
  using Slot = BounceLease::Slot;
  struct Waiter {
    std::condition_variable changed;
    Slot* slot = nullptr;  // handed over by give_back()
  };

  BouncePool(std::size_t slot_bytes, std::size_t capacity) : slot_bytes_(slot_bytes), capacity_(capacity) {
    idle_.reserve(capacity);  // what comes back must find its place
  }

  Result<Slot*> make_slot(const std::shared_ptr<DeviceContext>& device) const;
  void destroy_slot(Slot* slot) const;
  Slot* take_idle_locked(int node);
  void give_back(Slot* slot);

  const std::size_t slot_bytes_;
  const std::size_t capacity_;

  // Guards all below; innermost: nothing is pinned, unpinned or mapped under it.
  mutable std::mutex mutex_;
  std::vector<Slot*> idle_;
  std::size_t existing_ = 0;  // idle, in use, or being made
  std::list<Waiter*> waiters_;
  bool closed_ = false;
  std::uint64_t waits_ = 0;
  std::uint64_t pin_failures_ = 0;
};

}  // namespace gpufs
