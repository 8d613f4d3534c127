// The driver interface: devices, their memory, streams and events, as the engine sees every vendor's runtime.
// Ownership: the Engine owns the Driver, the Driver its Devices, and the caller what it creates. A GPU stays open until
// the last of its memory, streams and events is gone.
// Threads: any thread may call any function unless the class says otherwise; a GPU's functions make the device current
// for themselves and restore what was current before.
#pragma once

#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/extents.h"
#include "base/math.h"
#include "base/status.h"
#include "base/thread.h"
#include "base/unique_fd.h"
#include "drivers/blocked_streams.h"

namespace gpufs {

// An address in a device's address space. Where DeviceInfo::cpu_addressable, also a valid CPU address.
using DeviceAddress = std::uint64_t;

struct DeviceInfo {
  int index = 0;            // position in the driver's list; the mount's gpuN
  std::string name;         // "NVIDIA H200", "host memory"
  std::string pci_address;  // "0000:3b:00.0"; empty if there is none
  std::string uuid;         // "GPU-4f3e...", as the vendor's tools print it; empty if there is none
  int numa_node = -1;       // -1: unknown or none
  std::uint64_t total_bytes = 0;
  std::uint64_t granule = 0;  // bytes; memory is populated and released in whole granules
  bool cpu_addressable = false;
  // reserve() of a larger range copies populated memory, because there is no virtual memory management: the caller must
  // keep writers out while it runs.
  bool reserve_copies = false;
  // The vendor's calls for files (io/fastpath.h) reach the memory of create_memory().
  bool files_reach_memory = true;
  // Host memory beside the devices, to which files of theirs can be parked: the last one of the driver.
  bool host_tier = false;
};

struct MemoryInfo {
  std::uint64_t total_bytes = 0;
  std::uint64_t free_bytes = 0;  // what populate() could still take, within the driver's cap
};

// A reserved range of addresses that shows a DeviceMemory; released when destroyed (any thread).
class AddressRange {
 public:
  AddressRange(DeviceAddress base, std::uint64_t bytes) : base_(base), bytes_(bytes) {}
  virtual ~AddressRange() = default;
  AddressRange(const AddressRange&) = delete;
  AddressRange& operator=(const AddressRange&) = delete;
  [[nodiscard]] DeviceAddress base() const { return base_; }
  [[nodiscard]] std::uint64_t bytes() const { return bytes_; }

 private:
  const DeviceAddress base_;
  const std::uint64_t bytes_;
};

struct ExportedMemory : Extent {
  UniqueFd descriptor;
};

// Keeps descriptors of memory for the process that takes over when this one dies. Thread-safe.
class MemoryKeeper {
 public:
  // A part of a memory.
  struct KeptPiece : Extent {
    std::uint64_t key = 0;
    UniqueFd descriptor;
  };
  virtual ~MemoryKeeper() = default;
  // A number for the memory of a buffer.
  virtual std::uint64_t new_memory() = 0;
  // Keeps a descriptor until drop(), by the key that this returns.
  virtual std::uint64_t hold(std::uint64_t memory, std::uint64_t offset, std::uint64_t bytes, int descriptor) = 0;
  virtual void drop(std::uint64_t key) = 0;
  // Waits until what was dropped is closed: it is memory that the device still lacks.
  virtual void settle() = 0;
  // Memory that has no descriptor exists until drop(): no other process can take over before. Returns its key.
  virtual std::uint64_t lose(const Status& reason) = 0;
  // What the last process has kept of a memory, in order of the offsets. Once for each.
  virtual std::vector<KeptPiece> take(std::uint64_t memory) = 0;
};

// The memory of one buffer: granules that exist or not, at offsets from 0. One thread at a time (the Buffer ensures
// it). Freed when destroyed, except what ranges still show.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;

  // Reserves a new range of at least `bytes`, enough for every populated granule, which it shows at its offset; this
  // range becomes the current one, in which later populate() calls appear. Earlier ranges keep showing what they
  // showed. populated: all that is, in ascending order. ENOMEM: no address space.
  virtual Result<std::shared_ptr<AddressRange>> reserve(std::uint64_t bytes,
                                                        std::span<const Extent> populated = {}) = 0;

  // Makes all of the spans exist, zeroed, in the current range. Whole granules, none populated yet, in ascending order.
  // All or nothing: a failure moves no other memory. ENOSPC: the device is full, or its cap is reached. Zeroing is
  // complete on return. Without waiting, ENOSPC may be premature: cached memory is not released.
  virtual Status populate_all(std::span<const Extent> spans, Wait wait) = 0;
  Status populate(std::uint64_t offset, std::uint64_t bytes, Wait wait = Wait::kAllowed) {
    const Extent one{offset, bytes};
    return populate_all(std::span(&one, 1), wait);
  }

  // Releases the spans; others can take their memory once no earlier range shows it. Memory that the device does not
  // take back stays with this object, which reuses it when the same granules are populated again. A caller could not do
  // better, so this never fails. Whole granules, all populated, in ascending order. Nothing may use release_span() of
  // any of them while this runs.
  virtual void release_all(std::span<const Extent> spans) = 0;
  void release(std::uint64_t offset, std::uint64_t bytes) {
    const Extent one{offset, bytes};
    release_all(std::span(&one, 1));
  }

  // What must not be in use, in any range, while release(offset, bytes) runs: [offset, offset+bytes), and more if the
  // driver takes memory in larger pieces and moves the rest of a piece to fresh memory (at the same addresses of the
  // current range; earlier ranges keep the old memory).
  [[nodiscard]] virtual Extent release_span(std::uint64_t offset, std::uint64_t bytes) { return {offset, bytes}; }

  // true: from now on populate() need not zero, since the caller overwrites all of it before anybody else sees it.
  // false: it zeroes again.
  virtual void leave_undefined(bool /*undefined*/) {}

  // From now on populated memory is never moved, because something outside uses its addresses or has mapped an export.
  // A driver that takes memory in larger pieces then frees a piece only once all of it has been released.
  virtual void fix_in_place() {}
  // Ends that.
  virtual void allow_moves() {}

  // Descriptors with which other programs can map the memory from `from` to `end`, in order of their offsets, at most
  // `capacity` of them; call fix_in_place() first. `from` is 0 or the end of a piece that was exported before. The host
  // driver returns one memfd, whose offsets are the buffer's and which is open for writing only if `writable`; GPUs one
  // descriptor for each piece, which shows [offset, offset+bytes) from its start and cannot be made read-only. The last
  // piece may reach beyond `end`. EOPNOTSUPP: see Device::check_sharing().
  virtual Result<std::vector<ExportedMemory>> export_memory(std::uint64_t from, std::uint64_t end, std::size_t capacity,
                                                            bool writable) = 0;

  // After Device::restore_memory(): what exists beside the populated memory, because it lies in the same pieces. It is
  // populated as well from then on, but has to be zeroed before it is used.
  [[nodiscard]] virtual Extents surplus() const { return {}; }

  // Descriptors of this process that it has, and how many more it takes at most to populate these spans.
  [[nodiscard]] virtual std::uint64_t descriptors() const { return 0; }
  [[nodiscard]] virtual std::uint64_t descriptors_for(std::span<const Extent> /*spans*/) { return 0; }

  // By which a MemoryKeeper knows it; 0: it is not kept.
  [[nodiscard]] virtual std::uint64_t number() const { return 0; }
};

// Addresses at which this process sees memory that another program has exported. One thread at a time, except base()
// and capacity(). Unmapped when destroyed (any thread), after which only the other users hold the memory. A GPU first
// completes all work that this process has queued on it.
class ImportedRange {
 public:
  ImportedRange(DeviceAddress base, std::uint64_t capacity) : base_(base), capacity_(capacity) {}
  virtual ~ImportedRange() = default;
  ImportedRange(const ImportedRange&) = delete;
  ImportedRange& operator=(const ImportedRange&) = delete;
  [[nodiscard]] DeviceAddress base() const { return base_; }
  [[nodiscard]] std::uint64_t capacity() const { return capacity_; }  // reserved addresses
  [[nodiscard]] std::uint64_t bytes() const { return bytes_; }        // mapped, from the base
  // Maps a piece at the end of what is mapped. EINVAL: its offset is another one. EFBIG: it is beyond the capacity.
  Status add(const ExportedMemory& piece);
  // Unmaps all pieces and keeps the addresses, at which other memory can be mapped. A GPU first completes all work that
  // this process has queued on it. After a failure some of them may still be mapped; call it again.
  Status clear();

 private:
  virtual Status map(const ExportedMemory& piece) = 0;
  virtual Status unmap_all() = 0;
  const DeviceAddress base_;
  const std::uint64_t capacity_;
  std::uint64_t bytes_ = 0;
};

// How another program passed on memory of its own.
enum class ShareKind : int {
  kFile,        // a descriptor of a file in memory: the host driver
  kDescriptor,  // descriptors of physical memory, as export_memory() makes them: GPUs
  kIpc,         // the vendor's handle of an allocation: GPUs
};

// Memory of another program: [offset, offset + bytes) of what the descriptor, the pieces or the handle stand for.
// Nothing in it can be trusted.
struct ForeignMemory {
  static constexpr std::size_t kHandleBytes = 64;

  ShareKind kind = ShareKind::kFile;
  UniqueFd descriptor;                               // for kFile
  std::vector<ExportedMemory> pieces;                // for kDescriptor: all of its physical memory, in order
  std::array<unsigned char, kHandleBytes> handle{};  // for kIpc
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  bool writable = false;

  // The size of the physical memory; the largest number if the sizes of its pieces exceed that.
  [[nodiscard]] std::uint64_t whole_bytes() const {
    std::uint64_t sum = 0;
    for (const ExportedMemory& piece : pieces) {
      if (add_overflows(sum, piece.bytes, &sum)) return std::numeric_limits<std::uint64_t>::max();
    }
    return sum;
  }
};

// How imported memory is mapped. kPrivate: what is written stays in this process. Only the host maps memory so; a GPU
// gets a copy of its own to import, and maps it like kWrite.
enum class ImportAccess { kRead, kWrite, kPrivate };

// Memory of another program that this one has mapped; released when destroyed (any thread). Nothing may use it then.
class ForeignMapping {
 public:
  explicit ForeignMapping(DeviceAddress address) : address_(address) {}
  virtual ~ForeignMapping() = default;
  ForeignMapping(const ForeignMapping&) = delete;
  ForeignMapping& operator=(const ForeignMapping&) = delete;
  [[nodiscard]] DeviceAddress address() const { return address_; }
  // False once its owner has taken some of it away. What is read there is undefined, but no access fails.
  [[nodiscard]] virtual bool intact() { return true; }

  // Files in memory may have holes, to which an access through the address allocates memory. Offsets are from
  // address(). Copies without that. EOPNOTSUPP: this memory has no holes, so use the address. ESTALE: see intact().
  virtual Status copy_out(std::byte* /*destination*/, std::uint64_t /*offset*/, std::size_t /*bytes*/) {
    return Status(EOPNOTSUPP, "this memory has no holes");
  }
  // The first byte at or above `offset` that is data, or in a hole. The end of the memory counts as both, and what
  // they return may be beyond it.
  [[nodiscard]] virtual std::uint64_t next_data(std::uint64_t offset) { return offset; }
  [[nodiscard]] virtual std::uint64_t next_hole(std::uint64_t /*offset*/) { return UINT64_MAX; }

 private:
  const DeviceAddress address_;
};

// A point in a stream's order. Recording it again reuses it.
class Event {
 public:
  virtual ~Event() = default;
  // True when all work before the last record() is done; a failure of that work is returned as its Status.
  virtual Result<bool> query() = 0;
};

// A function that a stream calls in its order.
using HostFunction = void (*)(void*);

// The vendor's handle of a stream: CUstream, hipStream_t. The host driver has handles of its own.
using NativeStream = std::uintptr_t;

// A copy between the device and host memory.
struct HostCopy {
  DeviceAddress device = 0;
  void* host = nullptr;
  std::size_t bytes = 0;
};
enum class CopyDirection { kToDevice, kToHost };

// An ordered queue of asynchronous work on one device. Calls return once the work is queued; its memory must stay valid
// until an event recorded afterwards is done. Host memory that is not pinned may make a copy synchronous.
// One thread at a time.
class Stream {
 public:
  virtual ~Stream() = default;  // waits for the queued work
  // The copies are independent of each other, in any order; a GPU may need less time for them together than one by one.
  // If there are several, each address must be this device's memory, and the host's be pinned: with others CUDA
  // crashes. After a failure some may have been queued.
  virtual Status copy(CopyDirection direction, std::span<const HostCopy> copies) = 0;
  virtual Status fill_zero(DeviceAddress destination, std::size_t bytes) = 0;
  virtual Status record(Event& event) = 0;
  // EBUSY: the stream is being captured into a graph, so what is queued now becomes a part of the graph.
  virtual Status check_capture() { return {}; }
  // Calls function(argument) when all earlier work is done; later work waits until it returns. It runs on a thread of
  // the driver's, which may serve other streams too: it must not call the driver, and should be short. It is not called
  // at all once the device has failed. EBUSY: as check_capture(). EOPNOTSUPP.
  virtual Status call(HostFunction function, void* argument) = 0;
  // Later work starts once the 32-bit word at `cell` has reached `value`, that is once word - value, as a signed
  // number, is not negative. cell: from Device::address_of_pinned(), written by the CPU, which on the host driver must
  // also notify (std::atomic_ref::notify_all). EOPNOTSUPP: the device cannot.
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

  [[nodiscard]] virtual const DeviceInfo& info() const = 0;
  // Without waiting, memory that is being released may be missing.
  virtual Result<MemoryInfo> memory(Wait wait = Wait::kAllowed) = 0;

  // Makes the device current on the calling thread, which is one of ours, until another one is bound there: calls are
  // cheaper then, and the vendors' calls for files need it. Cheap if the device is current already.
  virtual Status bind_thread() = 0;

  // OK while the device works; after a failure that put it out of service, that failure for ever.
  virtual Status health() = 0;

  virtual Result<std::unique_ptr<DeviceMemory>> create_memory() = 0;
  // Keeps the memory that is created from now on for another process; before the first. Null: it dies with this one.
  void set_keeper(std::shared_ptr<MemoryKeeper> keeper) { keeper_ = std::move(keeper); }
  [[nodiscard]] const std::shared_ptr<MemoryKeeper>& keeper() const { return keeper_; }
  // OK if memory of create_memory() can be kept; else the reason for users.
  virtual Status check_keeping() { return {}; }
  // The memory with this number that the last process kept. populated: what exists of it, in ascending order; the rest
  // is released, or becomes DeviceMemory::surplus(). Once for each number. ENOENT, EPROTO: it was not kept like that.
  virtual Result<std::unique_ptr<DeviceMemory>> restore_memory(std::uint64_t /*number*/,
                                                               std::span<const Extent> /*populated*/) {
    return Status(EOPNOTSUPP, "this driver's memory dies with the process");
  }
  // Maps memory of another program. EINVAL: it is not what the caller says, with the reason. EOPNOTSUPP: this driver
  // takes none of that kind. ENOSPC: the host driver counts it as memory of the device, since accesses allocate it.
  virtual Result<std::unique_ptr<ForeignMapping>> map_foreign(const ForeignMemory& /*memory*/) {
    return Status(EOPNOTSUPP, "this driver maps no memory of other programs");
  }
  // EOPNOTSUPP, with the reason for users: memory of create_memory() cannot be exported.
  virtual Status check_sharing() { return {}; }
  // Reserves addresses for pieces of DeviceMemory::export_memory(), of this device and driver.
  virtual Result<std::unique_ptr<ImportedRange>> create_import(std::uint64_t capacity, ImportAccess access) = 0;
  virtual Result<std::unique_ptr<Stream>> create_stream() = 0;
  virtual Result<std::unique_ptr<Event>> create_event() = 0;
  // A stream that the program created with the vendor's runtime. Destroying the object neither waits for the stream nor
  // destroys it; the stream must exist while anything is queued on it here. certain: the caller knows that the stream
  // is this device's; a default stream otherwise belongs to the device that is current on the calling thread. EXDEV: it
  // is another device's. EINVAL: it is not a stream.
  virtual Result<std::unique_ptr<Stream>> adopt_stream(NativeStream native, bool certain) = 0;

  // The program's streams that wait for the engine.
  [[nodiscard]] BlockedStreams& blocked_streams() { return blocked_streams_; }

  // Waits for all work that this process has queued on the device, the program's own too: before its addresses go.
  virtual void synchronize() {}

  // Synchronous copies. The calling thread waits for its own copy only, not for work that others queued.
  virtual Status copy_in(DeviceAddress destination, const void* source, std::size_t bytes) = 0;
  virtual Status copy_out(void* destination, DeviceAddress source, std::size_t bytes) = 0;
  virtual Status copy_within(DeviceAddress destination, DeviceAddress source, std::size_t bytes) = 0;
  virtual Status zero(DeviceAddress destination, std::size_t bytes) = 0;
  // To another device of the same driver. EOPNOTSUPP: there is no direct way, and the caller copies through the host.
  virtual Status copy_to_peer(Device& peer, DeviceAddress destination, DeviceAddress source, std::size_t bytes) = 0;

  // Whether an address from a program is in this device's own memory, rather than in memory of the host or of another
  // device that it can reach. False if that is unknown.
  virtual bool holds(DeviceAddress /*address*/) { return true; }

  // Page-locks host memory for fast copies. ENOMEM: the limit on locked memory is reached. EEXIST: it is pinned
  // already, by this program or a library in it. unpin: ENOENT if nothing pinned starts there.
  virtual Status pin(void* address, std::size_t bytes) = 0;
  virtual Status unpin(void* address) = 0;
  // The pinned range around an address. EOPNOTSUPP: the driver does not know.
  virtual Result<PinnedHostRange> pinned_range(const void* /*address*/) {
    return Status(EOPNOTSUPP, "this driver does not know what is pinned");
  }
  // The address at which the device sees host memory that pin() has pinned.
  virtual Result<DeviceAddress> address_of_pinned(void* address) = 0;
  // pin() for memory that is mapped read-only, as a source of copies to the device. EOPNOTSUPP: the device cannot.
  virtual Status pin_read_only(const void* /*address*/, std::size_t /*bytes*/) {
    return {EOPNOTSUPP, "this device cannot pin read-only memory"};
  }

 private:
  BlockedStreams blocked_streams_;
  std::shared_ptr<MemoryKeeper> keeper_;
};

// The address of a driver's host tier, where devices have their PCI addresses.
inline constexpr const char* kHostTierAddress = "host";

// How the HIP driver takes memory. kPlain: one hipMalloc for a buffer, which hipAmdFile reaches and which grows by a
// copy. kVirtual: mapped into ranges of addresses, which hipAmdFile does not reach. kAuto: plain if the kernel can move
// files to the device. Always plain if the runtime's ranges do not work.
enum class HipMemory : int { kAuto, kVirtual, kPlain };

struct DriverOptions {
  int devices = 0;                 // host: how many to simulate; GPUs: how many to use, 0 for all
  std::uint64_t memory_bytes = 0;  // cap for each device; 0: none (the host driver requires one)
  // GPUs: how long released memory is kept for the next caller that takes as much; 0: not at all.
  std::chrono::milliseconds keep_freed{0};
  HipMemory hip_memory = HipMemory::kAuto;
  // GPUs: which to use, in this order: numbers and beginnings of UUIDs. Empty: by `devices`.
  std::vector<std::string> chosen{};
  // Pinned host memory as one device more: DeviceInfo::host_tier. 0: none.
  std::uint64_t host_memory_bytes = 0;
};

class Driver {
 public:
  Driver(const char* name, std::vector<std::shared_ptr<Device>> devices) : name_(name), devices_(std::move(devices)) {}
  [[nodiscard]] const char* name() const { return name_; }  // "host", "cuda", "hip"
  [[nodiscard]] const std::vector<std::shared_ptr<Device>>& devices() const { return devices_; }

 private:
  const char* const name_;
  const std::vector<std::shared_ptr<Device>> devices_;
};

// Opens a driver by name. ENODEV, with a message for users ("cuda is not available: libcuda.so.1 was not found"), if it
// cannot be used here; ENXIO if it works but has none of the devices asked for; EINVAL for an unknown name or bad
// options.
Result<std::unique_ptr<Driver>> open_driver(const std::string& name, const DriverOptions& options);

// Opens one device, to map what other programs have exported: no other device is touched, and memory is not limited.
// Devices are found by their PCI address, since their numbers differ between programs (CUDA_VISIBLE_DEVICES). The host
// driver has no addresses: pass "". kHostTierAddress is a GPU driver's host tier, without memory of its own. ENODEV,
// with a message for users, if this process does not see the device.
Result<std::shared_ptr<Device>> open_device(const std::string& driver, const std::string& pci_address);

// The same for one vendor, whose library tests replace. cuda: every device that libcuda shows (CUDA_VISIBLE_DEVICES is
// libcuda's own affair). hip: by the first of the candidates that works.
Result<std::unique_ptr<Driver>> open_cuda_driver(const DriverOptions& options,
                                                 const std::string& library = "libcuda.so.1");
Result<std::shared_ptr<Device>> open_cuda_device(const std::string& pci_address,
                                                 const std::string& library = "libcuda.so.1");
Result<std::unique_ptr<Driver>> open_hip_driver(const DriverOptions& options,
                                                const std::vector<std::string>& candidates);
Result<std::shared_ptr<Device>> open_hip_device(const std::string& pci_address,
                                                const std::vector<std::string>& candidates);

}  // namespace gpufs
