// The driver interface: devices, their memory, streams and events, as the engine sees every vendor's runtime.
// A Driver is owned by the Engine; a Device by its Driver; memory, streams and events by whoever created them,
// and none of them may outlive their Device.
// Threads: any thread may call any function unless the class says otherwise; a GPU's functions make the device current
// for themselves and restore what was current before.
#pragma once

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/unique_fd.h"
#include "drivers/device_waits.h"

namespace gpufs {

// An address in a device's address space. Where DeviceInfo::cpu_addressable, also a valid CPU address.
using DeviceAddress = std::uint64_t;

struct DeviceInfo {
  int index = 0;            // position in the driver's list; the mount's gpuN
  std::string name;         // "NVIDIA H200", "host memory"
  std::string pci_address;  // "0000:3b:00.0"; empty where there is none
  int numa_node = -1;       // -1: unknown or none
  std::uint64_t total_bytes = 0;
  std::uint64_t granule = 0;  // bytes; memory is populated and released in whole granules
  bool cpu_addressable = false;
  // reserve() of a larger range copies what is populated (no virtual memory management): the caller must
  // keep writers out while it runs.
  bool reserve_copies = false;
  // The vendor's calls for files (io/direct_path.h) reach the memory of create_memory().
  bool files_reach_memory = true;
  // Work on one stream may come behind work on another that stands (Device::streams_stand).
  bool streams_share_queues = false;
};

struct MemoryInfo {
  std::uint64_t total_bytes = 0;
  std::uint64_t free_bytes = 0;  // what populate() could still give, the driver's own cap included
};

// A reserved range of addresses that shows a DeviceMemory; given back when destroyed (any thread).
class AddressRange {
 public:
  virtual ~AddressRange() = default;
  [[nodiscard]] virtual DeviceAddress base() const = 0;
  [[nodiscard]] virtual std::uint64_t bytes() const = 0;
};

struct MemorySpan {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

struct ExportedMemory {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  UniqueFd descriptor;
};

// The memory of one buffer: granules that exist or not, at offsets from 0. Not thread safe: one caller at a time
// (the Buffer sees to it). Freed when destroyed; ranges that still show it keep what they show alive.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;

  // Reserves a new range of at least `bytes` that shows every populated granule at its offset; this range becomes
  // the current one, in which later populate() calls appear. Earlier ranges keep showing what they showed.
  // ENOMEM: no address space.
  virtual Result<std::shared_ptr<AddressRange>> reserve(std::uint64_t bytes) = 0;

  // Makes all of the spans exist, zeroed, in the current range. Whole granules, none populated yet, in ascending order.
  // All or nothing: a failure moves no other memory. ENOSPC when the device (or its cap) has no room. Zeroing is
  // complete on return.
  virtual Status populate(std::span<const MemorySpan> spans) = 0;
  Status populate(std::uint64_t offset, std::uint64_t bytes) {
    const MemorySpan one{offset, bytes};
    return populate(std::span(&one, 1));
  }

  // The spans do not exist any more, and their memory is free again, for others once no earlier range shows it. Memory
  // that the device does not take back stays with this object, which uses it when the same granules are populated
  // again: no caller can do better, so nothing is reported. Whole granules, all populated, in ascending order; nobody
  // may be using release_span() of any of them while this runs. Other spans are ignored.
  virtual void release(std::span<const MemorySpan> spans) = 0;
  void release(std::uint64_t offset, std::uint64_t bytes) {
    const MemorySpan one{offset, bytes};
    release(std::span(&one, 1));
  }

  // What must not be in use, in any range, while release(offset, bytes) runs: [offset, offset+bytes), and more where
  // the driver took memory in larger pieces and moves what stays of a piece to fresh memory (at the same addresses of
  // the current range; earlier ranges keep the old memory).
  [[nodiscard]] virtual MemorySpan release_span(std::uint64_t offset, std::uint64_t bytes) { return {offset, bytes}; }

  // From now on nothing that is populated is moved to other memory: somebody outside uses the addresses, or mapped an
  // export. A driver that takes memory in larger pieces then frees a piece only once all of it has been released.
  virtual void fix_in_place() {}

  // Descriptors by which another process can map this memory, in order of their offsets, and fix_in_place().
  // The host driver gives one memfd, whose offsets are the buffer's; others one descriptor for each piece, which shows
  // [offset, offset+bytes) from its start. EOPNOTSUPP where the driver cannot.
  virtual Result<std::vector<ExportedMemory>> export_memory() = 0;
};

// A point in a stream's order. Reused by recording it again once nobody looks at the earlier recording.
class Event {
 public:
  virtual ~Event() = default;
  // True when all work before the last record() is done; a failure of that work is returned as its Status. Any thread.
  virtual Result<bool> query() = 0;
  // Blocks until query() would be true. Any thread.
  virtual Status synchronize() = 0;
};

// What a stream calls when it comes to it.
using HostFunction = void (*)(void*);

// A stream as the vendor's runtime calls it: CUstream, hipStream_t; the host driver has names of its own.
using NativeStream = std::uintptr_t;

// An ordered queue of asynchronous work on one device. Calls return once queued; the memory they name must stay
// valid until an event recorded afterwards is done. Host memory that is not pinned may make a copy synchronous.
// One thread at a time, bound or not.
class Stream {
 public:
  virtual ~Stream() = default;  // waits for the queued work
  virtual Status copy_to_device(DeviceAddress destination, const void* source, std::size_t bytes) = 0;
  virtual Status copy_to_host(void* destination, DeviceAddress source, std::size_t bytes) = 0;
  virtual Status copy_on_device(DeviceAddress destination, DeviceAddress source, std::size_t bytes) = 0;
  virtual Status fill_zero(DeviceAddress destination, std::size_t bytes) = 0;
  virtual Status record(Event& event) = 0;
  virtual Status wait(Event& event) = 0;  // later work in this stream starts after the event
  // Calls function(argument) when all work before is done; later work waits until it has returned. It runs on a thread
  // of the driver's, which may serve other streams too: no call of the driver is allowed there, and it should be short.
  // Not called at all once the device has failed. EBUSY: the stream is being captured into a graph. EOPNOTSUPP.
  virtual Status call(HostFunction function, void* argument) = 0;
  // Later work starts once the 32-bit word at `cell` has come to `value`, that is once their difference, taken as a
  // signed number, is not negative. cell: of Device::address_of_pinned(), written by the CPU, which on the host driver
  // must notify (std::atomic_ref::notify_all). EOPNOTSUPP where the device cannot.
  virtual Status wait_for_value(DeviceAddress cell, std::uint32_t value) = 0;
  [[nodiscard]] virtual NativeStream native() const = 0;
  virtual Status synchronize() = 0;
};

// Host memory that is pinned: [start, end).
struct PinnedHostRange {
  std::uintptr_t start = 0;
  std::uintptr_t end = 0;
};

class Device {
 public:
  virtual ~Device() = default;

  [[nodiscard]] virtual const DeviceInfo& info() const = 0;  // any thread
  virtual Result<MemoryInfo> memory() = 0;                   // any thread

  // Makes the device current on the calling thread until another device is bound there. Cheap when it already is.
  virtual Status bind_thread() = 0;

  // OK while the device works; the first context-fatal failure for ever after (sticky). Any thread.
  virtual Status health() = 0;

  virtual Result<std::unique_ptr<DeviceMemory>> create_memory() = 0;
  virtual Result<std::unique_ptr<Stream>> create_stream() = 0;
  virtual Result<std::unique_ptr<Event>> create_event() = 0;
  // A stream that the program made with the vendor's runtime: queueing here is queueing there, and destroying the
  // object neither waits nor touches the stream, which must live as long as something is still queued by it. certain:
  // the caller knows that it is this device's, which for the runtime's default streams nothing else says but what is
  // current on the calling thread. EXDEV: it is another device's. EINVAL: it is none. Any thread.
  virtual Result<std::unique_ptr<Stream>> adopt_stream(NativeStream native, bool certain) = 0;

  // Where streams share queues: from streams_stand(1) to as many streams_stand(-1), streams may stand until work queued
  // on others, or done by the functions below, is over. That work then goes ways on which nothing stands, but for
  // copies and zeros of a single byte. prepare_to_stand() makes what that needs, once, with so many streams for the
  // functions below; without it, or where it failed, the work may wait for those streams. Streams that are made or
  // destroyed meanwhile, and pinned memory that is given back, wait in any case. Any thread.
  virtual Status prepare_to_stand(std::size_t /*streams*/) { return {}; }
  virtual void streams_stand(int /*change*/) {}
  [[nodiscard]] virtual bool any_stands() { return false; }
  // Who waits for work of the engine's on the device; null where that is not counted. Any thread.
  virtual DeviceWaits* waits() { return nullptr; }

  // Synchronous copies by the calling thread, which this binds itself: any thread. The thread waits for its own copy
  // only, not for work that others queued.
  virtual Status copy_in(DeviceAddress destination, const void* source, std::size_t bytes) = 0;
  virtual Status copy_out(void* destination, DeviceAddress source, std::size_t bytes) = 0;
  virtual Status copy_within(DeviceAddress destination, DeviceAddress source, std::size_t bytes) = 0;
  virtual Status zero(DeviceAddress destination, std::size_t bytes) = 0;
  // To another device of the same driver; EOPNOTSUPP where there is no direct way (the caller stages it).
  virtual Status copy_to_peer(Device& peer, DeviceAddress destination, DeviceAddress source, std::size_t bytes) = 0;

  // Whether an address that a program gave lies in this device's own memory, rather than in memory of the host or of
  // another device that it can reach. False where that cannot be told. Any thread.
  virtual bool holds(DeviceAddress /*address*/) { return true; }

  // Page-locks host memory for fast copies. Any thread. ENOMEM when the limit on locked memory is reached, EEXIST when
  // it is pinned already, whoever did it; unpin: ENOENT when nothing that starts there is.
  virtual Status pin(void* address, std::size_t bytes) = 0;
  virtual Status unpin(void* address) = 0;
  // What is pinned around an address, whoever did it. Any thread. EOPNOTSUPP where the driver cannot tell.
  virtual Result<PinnedHostRange> pinned_range(const void* /*address*/) {
    return Status(EOPNOTSUPP, "this driver does not tell what is pinned");
  }
  // The address at which the device sees host memory that pin() has pinned. Any thread.
  virtual Result<DeviceAddress> address_of_pinned(void* address) = 0;
  // The same for memory that is mapped for reading only, as a source of copies to the device (unpin() undoes it).
  // EOPNOTSUPP where the device cannot.
  virtual Status pin_read_only(const void* /*address*/, std::size_t /*bytes*/) {
    return {EOPNOTSUPP, "this device cannot pin read-only memory"};
  }
};

// How the HIP driver takes memory. kPlain: one hipMalloc for a buffer, which hipAmdFile reaches and which grows by a
// copy. kVirtual: in ranges of addresses, which it does not reach. kAuto: plain where the kernel can move files to the
// device. Where the runtime's ranges do not work it is always plain.
enum class HipMemory : int { kAuto, kVirtual, kPlain };

struct DriverOptions {
  int devices = 0;                 // host: how many to simulate; others: how many to use, 0 for all
  std::uint64_t memory_bytes = 0;  // cap a device; 0: the driver's default (host requires one)
  // GPUs: how long memory that was given back is kept for whoever takes as much next; 0: not at all.
  std::chrono::milliseconds keep_freed{0};
  HipMemory hip_memory = HipMemory::kAuto;
};

class Driver {
 public:
  virtual ~Driver() = default;
  [[nodiscard]] virtual const char* name() const = 0;  // "host", "cuda", "hip"
  [[nodiscard]] virtual const std::vector<std::unique_ptr<Device>>& devices() const = 0;
};

// Opens a driver by name. ENODEV with a message fit for a user ("cuda is not available: libcuda.so.1 was not found")
// when it cannot be used here; EINVAL for an unknown name or bad options. Nothing is started before this call.
Result<std::unique_ptr<Driver>> open_driver(const std::string& name, const DriverOptions& options);

}  // namespace gpufs
