// A device of the driver and what the engine keeps for it: pools, accounts of memory, counters.
// Ownership: shared by the engine, the buffers and all work in progress; it keeps the driver open.
// Thread-safe.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "base/status.h"
#include "device/pinned_pool.h"
#include "device/pool.h"
#include "drivers/driver.h"
#include "observe/counters.h"

namespace gpufs {

class HostLocks;  // memory/host_locks.h
class SlabPool;   // memory/slab_pool.h

// Who holds memory of a device that nobody uses yet.
class AheadHolder {
 public:
  virtual ~AheadHolder() = default;
  // Gives it back to the device. Any thread; may wait for users of the holder's other memory, up to the deadline.
  virtual void give_back_ahead(std::chrono::steady_clock::time_point deadline) = 0;
};

class DeviceContext : public std::enable_shared_from_this<DeviceContext> {
 public:
  // Bytes of a copy within a GPU between two checks for cancellation. Smaller chunks cost time: 64 MiB at a time
  // took 1.7 times as long as the copy in one call.
  static constexpr std::uint64_t kCopyChunk = std::uint64_t{1} << 30;

  // EINVAL: the driver has no device of this index. copy_chunk_bytes: a smaller chunk, for tests.
  static Result<std::shared_ptr<DeviceContext>> create(std::shared_ptr<Driver> driver, std::size_t index,
                                                       std::uint64_t copy_chunk_bytes = kCopyChunk);
  ~DeviceContext();
  DeviceContext(const DeviceContext&) = delete;
  DeviceContext& operator=(const DeviceContext&) = delete;

  [[nodiscard]] Device& device() const { return device_; }
  [[nodiscard]] const Driver& driver() const { return *driver_; }
  [[nodiscard]] const DeviceInfo& info() const { return device_.info(); }

  [[nodiscard]] DevicePool<Event>& events() { return events_; }
  [[nodiscard]] DevicePool<Stream>& streams() { return streams_; }
  [[nodiscard]] PinnedPool& pinned() { return pinned_; }

  // Bytes of device memory that buffers of this engine hold.
  void account(std::int64_t bytes) { held_bytes_.fetch_add(bytes, std::memory_order_relaxed); }
  [[nodiscard]] std::uint64_t held_bytes() const {
    const std::int64_t held = held_bytes_.load(std::memory_order_relaxed);
    return held < 0 ? 0 : static_cast<std::uint64_t>(held);
  }

  [[nodiscard]] std::uint64_t copy_chunk_bytes() const { return copy_chunk_bytes_; }

  // Memory that is taken ahead of use. hold_ahead() and drop_ahead() list and unlist a holder, account_ahead() counts
  // what they hold. reclaim_ahead() has all of them give it back; false if nothing came of it, nor has any been given
  // back by others since ahead_returns() was `noted`. Its caller holds no lock, pin or other thing that one of them
  // could wait for.
  void hold_ahead(std::weak_ptr<AheadHolder> holder, const AheadHolder* key);
  void drop_ahead(const AheadHolder* key);
  void account_ahead(std::int64_t bytes) {
    ahead_bytes_.fetch_add(static_cast<std::uint64_t>(bytes), std::memory_order_relaxed);
  }
  [[nodiscard]] std::uint64_t ahead_bytes() const { return ahead_bytes_.load(std::memory_order_relaxed); }
  [[nodiscard]] std::uint64_t ahead_returns() const { return ahead_returns_.load(std::memory_order_acquire); }
  bool reclaim_ahead(std::uint64_t noted);

  // What is counted about this device, in memory of its own until it is told otherwise. Set once, before the context is
  // shared.
  void set_counters(observe::DeviceCounters counters);
  [[nodiscard]] const observe::DeviceCounters& counters() const { return counters_; }

  // The pool of small files' memory; null where there is none. Set once, before the context is shared.
  void set_slabs(std::shared_ptr<SlabPool> slabs);
  [[nodiscard]] SlabPool* slabs() const { return slabs_.get(); }

  // The engine's list of locked host memory; null where there is none. Set once, before the context is shared.
  void set_host_locks(std::shared_ptr<HostLocks> locks);
  [[nodiscard]] HostLocks* host_locks() const { return host_locks_.get(); }

 private:
  DeviceContext(std::shared_ptr<Driver> driver, Device& device, std::uint64_t copy_chunk_bytes);

  const std::shared_ptr<Driver> driver_;
  Device& device_;  // driver_'s
  const std::uint64_t copy_chunk_bytes_;
  DevicePool<Event> events_;
  DevicePool<Stream> streams_;
  PinnedPool pinned_;
  std::shared_ptr<SlabPool> slabs_;
  std::shared_ptr<HostLocks> host_locks_;
  observe::DeviceCounters counters_;
  std::atomic<std::int64_t> held_bytes_{0};
  std::atomic<std::uint64_t> ahead_bytes_{0};
  std::atomic<std::uint64_t> ahead_returns_{0};  // how often a holder was unlisted

  std::mutex ahead_mutex_;  // guards ahead_holders_; a leaf
  std::map<const AheadHolder*, std::weak_ptr<AheadHolder>> ahead_holders_;
};

}  // namespace gpufs
