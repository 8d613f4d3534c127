// What all objects of one GPU share, whoever made it: the vendor's calls, the device's health, its account of memory
// taken, what of that was given back a moment ago, and its pool of streams for synchronous work; and the guard that
// makes the device current on a thread. Owned by shared pointers of the device, its memory, its streams and its events.
// Any thread. The vendor's calls need the device current on the calling thread (Current), unless they say otherwise.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "drivers/driver.h"
#include "drivers/gpu/spare_memory.h"

namespace gpufs::gpu {

// The vendor's objects, as numbers and pointers that only its own Context reads.
using StreamHandle = void*;
using EventHandle = void*;

// What a failed call had asked for: device memory, or host memory and address space. It decides what running out means.
enum class Purpose { kMemory, kHost };

// The vendor's calls report failures as a Status with the device's number, the call's name and the vendor's code and
// words; a failure after which the device is of no use has put it out of service by then.
class Context {
 public:
  virtual ~Context() = default;
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  [[nodiscard]] const DeviceInfo& info() const { return info_; }
  // Whether ranges and physical memory are there; otherwise there are plain allocations only.
  [[nodiscard]] bool virtual_memory() const { return virtual_memory_; }
  [[nodiscard]] bool exports_descriptors() const { return exports_descriptors_; }
  // Whether one call of unmap() or allow() may span several pieces that were mapped side by side.
  [[nodiscard]] bool spans_pieces() const { return spans_pieces_; }

  Status health();
  // Puts the device out of service; only the first reason is kept.
  void fail(const Status& reason);

  // The account of memory under the cap: ENOSPC when `bytes` more do not fit.
  Status take(std::uint64_t bytes);
  void give_back(std::uint64_t bytes) { taken_.fetch_sub(bytes, std::memory_order_relaxed); }
  // What others may take: pieces that are only kept for the next to take them included.
  Result<MemoryInfo> memory();

  // How long physical memory is kept after it was given back, 0 for not at all. Before any is taken.
  void keep_spares(std::chrono::milliseconds patience) { spares_.set_patience(patience); }
  // Physical memory, within the cap; its bytes are whatever was there. The device must be current.
  Status acquire_physical(std::uint64_t bytes, PhysicalHandle* handle);
  // kept: it may be used again, for nobody else can reach it.
  void return_physical(PhysicalHandle handle, std::uint64_t bytes, bool kept);

  // Streams for synchronous work, each lent to one thread at a time, so that nobody waits for another's copy.
  Result<StreamHandle> borrow_stream();
  void return_stream(StreamHandle stream);

  // ---- the vendor's calls ----

  // Makes the device current on this thread. True if another one was, which `before` then names for restore().
  virtual Result<bool> make_current(std::uint64_t* before) = 0;
  virtual void restore(std::uint64_t before) = 0;
  // For good: until another device is bound on this thread.
  virtual Status bind_thread() = 0;
  virtual Status free_memory(std::uint64_t* bytes) = 0;

  // Physical memory, and ranges of addresses that show it. Only where virtual_memory().
  virtual Status create_physical(std::uint64_t bytes, PhysicalHandle* handle) = 0;
  virtual void release_physical(PhysicalHandle handle) = 0;
  virtual Status export_physical(PhysicalHandle handle, int* fd) = 0;
  virtual Status reserve_range(std::uint64_t bytes, DeviceAddress* base) = 0;
  virtual void free_range(DeviceAddress base, std::uint64_t bytes) = 0;
  virtual Status map(DeviceAddress address, std::uint64_t bytes, PhysicalHandle handle) = 0;
  virtual Status unmap(DeviceAddress address, std::uint64_t bytes) = 0;
  // Opens mapped addresses to the device and its peers.
  virtual Status allow(DeviceAddress address, std::uint64_t bytes) = 0;

  virtual Status allocate(std::uint64_t bytes, DeviceAddress* base) = 0;
  virtual void free(DeviceAddress base) = 0;

  virtual Status copy_in(DeviceAddress destination, const void* source, std::size_t bytes, StreamHandle stream) = 0;
  virtual Status copy_out(void* destination, DeviceAddress source, std::size_t bytes, StreamHandle stream) = 0;
  virtual Status copy_within(DeviceAddress destination, DeviceAddress source, std::size_t bytes,
                             StreamHandle stream) = 0;
  virtual Status copy_to_peer(Context& peer, DeviceAddress destination, DeviceAddress source, std::size_t bytes,
                              StreamHandle stream) = 0;
  virtual Status fill_zero(DeviceAddress destination, std::size_t bytes, StreamHandle stream) = 0;

  virtual Status create_stream(StreamHandle* stream) = 0;
  virtual void destroy_stream(StreamHandle stream) = 0;
  virtual Status synchronize_stream(StreamHandle stream) = 0;
  virtual Status wait_for_event(StreamHandle stream, EventHandle event) = 0;
  virtual Status call_host(StreamHandle stream, HostFunction function, void* argument) = 0;
  virtual Status wait_for_value(StreamHandle stream, DeviceAddress cell, std::uint32_t value) = 0;
  // Whether a stream of the program's is this device's, with what is current on the thread left as it is: the runtime's
  // default streams are those of the current device. certain: the caller says that it is, where it cannot be told.
  virtual Status check_stream(StreamHandle stream, bool certain) = 0;

  virtual Status create_event(EventHandle* event) = 0;
  virtual void destroy_event(EventHandle event) = 0;
  virtual Status record_event(EventHandle event, StreamHandle stream) = 0;
  virtual Result<bool> query_event(EventHandle event) = 0;
  virtual Status synchronize_event(EventHandle event) = 0;

  // Whether the address lies in this device's own memory; false where the vendor cannot tell.
  virtual bool holds(DeviceAddress address) = 0;

  // Pinned for every device of the process, since the bounce pool is shared by them.
  virtual Status pin(void* address, std::size_t bytes) = 0;
  virtual Status pin_read_only(const void* address, std::size_t bytes) = 0;
  virtual Status unpin(void* address) = 0;
  virtual Status address_of_pinned(void* address, DeviceAddress* seen) = 0;
  virtual Result<PinnedHostRange> pinned_range(const void* address) = 0;

  // peer: of the same vendor. These two need no current device.
  [[nodiscard]] virtual bool same_vendor(const Context& other) const = 0;
  virtual Result<bool> reaches(Context& peer) = 0;
  // Lets this device reach plain allocations of the peer.
  virtual Status enable_peer(Context& peer) = 0;

 protected:
  explicit Context(std::uint64_t cap) : cap_(cap) {}
  // The last thing that a vendor's destructor does while its calls are still there.
  void give_up_pools();
  // "gpu 0".
  [[nodiscard]] std::string name() const { return "gpu " + std::to_string(info_.index); }

  // The most bytes populated at a time, 0 for no cap.
  const std::uint64_t cap_;
  // Set before anybody else has the context, and constant then.
  DeviceInfo info_;
  bool virtual_memory_ = false;
  bool exports_descriptors_ = false;
  bool spans_pieces_ = true;

 private:
  void release(std::span<const PhysicalHandle> handles);

  std::atomic<std::uint64_t> taken_{0};
  SpareMemory spares_{[this](std::span<const PhysicalHandle> handles) { release(handles); }};

  std::atomic<bool> failed_{false};
  std::mutex failure_mutex_;  // guards failure_; a leaf
  Status failure_;

  std::mutex streams_mutex_;                // guards the two below; a leaf
  std::vector<StreamHandle> idle_streams_;  // with room for all, so that one comes back without memory
  std::size_t streams_ = 0;                 // idle, lent, or being made
};

// Makes the device current on this thread while it lives, and then what was current before. Costs one cheap call where
// the device is current already.
class Current {
 public:
  explicit Current(Context& context);
  ~Current();
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  // The device's health, or why it could not be made current.
  [[nodiscard]] const Status& status() const { return status_; }

 private:
  Context& context_;
  Status status_;
  std::uint64_t before_ = 0;
  bool changed_ = false;
};

// A stream of the context's pool on a thread where the device is current: queue on get(), then finish(), which waits
// for what was queued (as the destructor does on the way out of a failure).
class SynchronousWork {
 public:
  explicit SynchronousWork(Context& context);
  ~SynchronousWork();
  SynchronousWork(const SynchronousWork&) = delete;
  SynchronousWork& operator=(const SynchronousWork&) = delete;
  [[nodiscard]] const Status& status() const { return status_; }
  [[nodiscard]] StreamHandle get() const { return stream_; }
  Status finish();

 private:
  Context& context_;
  Current current_;
  Status status_;
  StreamHandle stream_ = nullptr;
  bool finished_ = false;
};

}  // namespace gpufs::gpu
