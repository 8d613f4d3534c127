// A device of the driver and what the engine keeps for it: pools, accounts of memory, counters.
// Ownership: shared by the engine, the buffers and all work in progress; it keeps the driver open.
// Thread-safe.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "base/status.h"
#include "device/pools.h"
#include "device/releases.h"
#include "drivers/driver.h"
#include "observe/counters.h"

namespace gpufs {

class HostLocks;  // memory/host_locks.h
class SlabPool;   // memory/slab_pool.h

class DeviceContext : public std::enable_shared_from_this<DeviceContext> {
 public:
  // Bytes of a copy within a GPU between two checks for cancellation: 8 ms on an H200. Waiting for a chunk costs 0.3 ms
  // in a virtual machine: 8 GiB went at 2136 GB/s in one chunk, at 1830 to 1940 in two.
  static constexpr std::uint64_t kCopyChunk = std::uint64_t{16} << 30;

  // EINVAL: the driver has no device of this index. copy_chunk_bytes: a smaller chunk, for tests.
  static Result<std::shared_ptr<DeviceContext>> create(std::shared_ptr<Driver> driver, std::size_t index,
                                                       std::uint64_t copy_chunk_bytes = kCopyChunk);
  ~DeviceContext();

  [[nodiscard]] Device& device() const { return device_; }
  [[nodiscard]] const Driver& driver() const { return *driver_; }
  [[nodiscard]] const DeviceInfo& info() const { return device_.info(); }

  [[nodiscard]] DevicePool<Event>& events() { return events_; }
  [[nodiscard]] DevicePool<Stream>& streams() { return streams_; }
  [[nodiscard]] PinnedPool& pinned() { return pinned_; }

  // The device's memory. What small files can free by moving together counts as free.
  [[nodiscard]] Result<MemoryInfo> memory() const;
  void set_reclaimable(std::uint64_t bytes) { reclaimable_.store(bytes, std::memory_order_relaxed); }

  // Bytes of device memory that buffers of this engine hold.
  void took(std::uint64_t bytes) { held_bytes_.fetch_add(static_cast<std::int64_t>(bytes), std::memory_order_relaxed); }
  // So many bytes less; call it once the memory is free and no account is charged for it any more. Wakes all that wait
  // because the device is full: nothing else does. bytes: 0 for memory that buffers do not hold.
  void released(std::uint64_t bytes) {
    held_bytes_.fetch_sub(static_cast<std::int64_t>(bytes), std::memory_order_relaxed);
    releases_.released();
  }
  [[nodiscard]] std::uint64_t held_bytes() const {
    const std::int64_t held = held_bytes_.load(std::memory_order_relaxed);
    return held < 0 ? 0 : static_cast<std::uint64_t>(held);
  }

  [[nodiscard]] std::uint64_t copy_chunk_bytes() const { return copy_chunk_bytes_; }

  // What a call asks that finds the device full, and what reports each release of memory.
  [[nodiscard]] Releases& releases() { return releases_; }

  // The counters of this device, in private memory until set_counters(). Set once, before the context is shared.
  void set_counters(observe::DeviceCounters counters) { counters_ = std::move(counters); }
  [[nodiscard]] const observe::DeviceCounters& counters() const { return counters_; }

  // The pool of small files' memory; null where there is none. Set once, before the context is shared.
  void set_slabs(std::shared_ptr<SlabPool> slabs) { slabs_ = std::move(slabs); }
  [[nodiscard]] SlabPool* slabs() const { return slabs_.get(); }

  // The engine's list of locked host memory; null where there is none. Set once, before the context is shared.
  void set_host_locks(std::shared_ptr<HostLocks> locks) { host_locks_ = std::move(locks); }
  [[nodiscard]] HostLocks* host_locks() const { return host_locks_.get(); }

 private:
  DeviceContext(std::shared_ptr<Driver> driver, Device& device, std::uint64_t copy_chunk_bytes,
                observe::DeviceCounters counters);

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
  std::atomic<std::uint64_t> reclaimable_{0};  // by moving small files
  Releases releases_;
};

}  // namespace gpufs
