// A device with its worker thread and its pools: what the engine holds for each device.
// Shared by the engine, the buffers and whoever has work under way; it keeps the driver open.
// Any thread may call any function.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "base/status.h"
#include "device/pinned_pool.h"
#include "drivers/driver.h"
#include "observe/counters.h"

namespace gpufs {

class EventPool;
class HostLocks;  // memory/host_locks.h
class SlabPool;   // memory/slab_pool.h
class StreamPool;

struct DeviceContextOptions {
  std::size_t event_batch = 64;    // events created at a time
  std::size_t event_limit = 4096;  // events that exist at most
  std::size_t stream_batch = 4;
  std::size_t stream_limit = 64;
  // Of a copy within a GPU, between two looks at a cancellation. Starting and awaiting smaller ones shows: 64 MiB at a
  // time took 1.7 times as long as in one go.
  std::uint64_t copy_chunk_bytes = std::uint64_t{1} << 30;
};

// Who holds memory of a device that nobody uses yet.
class AheadHolder {
 public:
  virtual ~AheadHolder() = default;
  // Gives it back to the device. Any thread; may wait for users of the holder's other memory, up to the deadline.
  virtual void give_back_ahead(std::chrono::steady_clock::time_point deadline) = 0;
};

class DeviceContext : public std::enable_shared_from_this<DeviceContext> {
 public:
  using Work = std::function<Status(Device&)>;
  using Callback = std::function<void(const Status&)>;

  // Starts the worker, which binds the device for life. Fails with what the thread's start or the binding gave.
  static Result<std::shared_ptr<DeviceContext>> create(std::shared_ptr<Driver> driver, std::size_t index,
                                                       const DeviceContextOptions& options = {});
  // Runs what is queued, then ends the worker and the pools.
  ~DeviceContext();
  DeviceContext(const DeviceContext&) = delete;
  DeviceContext& operator=(const DeviceContext&) = delete;

  [[nodiscard]] Device& device() const { return *device_; }
  [[nodiscard]] const Driver& driver() const { return *driver_; }
  [[nodiscard]] const DeviceInfo& info() const { return device_->info(); }

  // Queues work for the worker thread, which does it in order. `done` runs exactly once, there, with the work's outcome
  // (ESHUTDOWN, on the calling thread, after shutdown()); it may be null. Neither may throw or wait for later work.
  void submit(Work work, Callback done);

  // Does the work with the device current and waits for its end. On the calling thread itself where that is possible
  // (it is the worker, or the driver binds nothing to threads: DeviceInfo::binds_threads), so that growing a buffer
  // there costs no handover. Also possible after shutdown(), on the calling thread, for the last destructors.
  Status run(const Work& work);

  // Refuses new submissions, runs what is queued and ends the worker. Called by the destructor; may be called twice.
  void shutdown();

  [[nodiscard]] PinnedPool& pinned() { return pinned_; }
  [[nodiscard]] EventPool& events() const { return *events_; }
  [[nodiscard]] StreamPool& streams() const { return *streams_; }

  // Device memory that buffers of this engine hold. Negative changes give back.
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
  struct Worker;

  DeviceContext(std::shared_ptr<Driver> driver, Device* device, std::uint64_t copy_chunk_bytes);

  std::shared_ptr<Driver> driver_;
  Device* const device_;  // driver_'s
  const std::uint64_t copy_chunk_bytes_;
  PinnedPool pinned_;
  std::shared_ptr<Worker> worker_;
  std::unique_ptr<EventPool> events_;
  std::unique_ptr<StreamPool> streams_;
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
