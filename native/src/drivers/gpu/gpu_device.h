// One GPU behind the driver interface: what CUDA and HIP do alike, over the table of the vendor's functions. The
// classes in cuda/ and hip/ add the few calls that differ. Ownership: shared by the driver and by the device's memory,
// streams and events. Thread-safe. Every call makes the device current for itself and restores what was current before
// (Current).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "base/status.h"
#include "drivers/driver.h"
#include "drivers/gpu/api.h"
#include "drivers/gpu/host_tier_pool.h"
#include "drivers/gpu/spare_memory.h"
#include "drivers/gpu/vendor_library.h"
#include "drivers/ledger.h"

namespace gpufs::gpu {

class GpuDevice;
// Opens the device with this ordinal in the vendor's calls, as the index-th of the driver.
using OpenDevice = std::function<Result<std::shared_ptr<GpuDevice>>(int index, int ordinal)>;

class GpuDevice : public Device, public std::enable_shared_from_this<GpuDevice> {
 public:
  [[nodiscard]] const DeviceInfo& info() const override { return info_; }
  // Cached free pieces of memory count as free.
  Result<MemoryInfo> memory(Wait wait) override;
  Status health() override;

  Result<std::unique_ptr<DeviceMemory>> create_memory() override;
  Result<std::unique_ptr<ForeignMapping>> map_foreign(const ForeignMemory& memory) override;
  Status check_sharing() override;
  Status check_keeping() override { return check_sharing(); }
  Result<std::unique_ptr<DeviceMemory>> restore_memory(std::uint64_t number,
                                                       std::span<const Extent> populated) override;
  Result<std::unique_ptr<ImportedRange>> create_import(std::uint64_t capacity, ImportAccess access) override;
  Result<std::unique_ptr<Stream>> create_stream() override;
  Result<std::unique_ptr<Event>> create_event() override;
  Result<std::unique_ptr<Stream>> adopt_stream(NativeStream native, bool certain) override;

  Status bind_thread() override;
  void synchronize() override { static_cast<void>(complete_all()); }
  // The same, with its outcome.
  Status complete_all();
  Status copy_in(DeviceAddress destination, const void* source, std::size_t bytes) override;
  Status copy_out(void* destination, DeviceAddress source, std::size_t bytes) override;
  Status copy_within(DeviceAddress destination, DeviceAddress source, std::size_t bytes) override;
  Status zero(DeviceAddress destination, std::size_t bytes) override;
  Status copy_to_peer(Device& peer, DeviceAddress destination, DeviceAddress source, std::size_t bytes) override;

  Status pin(void* address, std::size_t bytes) override;
  Status unpin(void* address) override;
  Result<DeviceAddress> address_of_pinned(void* address) override;
  Result<PinnedHostRange> pinned_range(const void* address) override;

  // ---- for the device's memory, streams and events, and for Current ----

  [[nodiscard]] const Functions& functions() const { return library_->functions(); }
  // Calls a function of the vendor's, with the device current. A failure is a Status like "gpu 0: cuMemCreate:
  // CUDA_ERROR_OUT_OF_MEMORY (2): out of memory"; one after which nothing works puts the device out of service.
  template <typename... Parameters>
  Status call(const Function<Parameters...>& function, std::type_identity_t<Parameters>... arguments) {
    return check(function.symbol(), function(arguments...));
  }
  // The same where another program may have chosen the arguments: a descriptor, a handle, a size. Drivers answer a
  // wrong one with codes that otherwise mean a broken device (CUDA: UNKNOWN), so no failure puts the device out of
  // service.
  template <typename... Parameters>
  Status call_for_others(const Function<Parameters...>& function, std::type_identity_t<Parameters>... arguments) {
    return described(function.symbol(), function(arguments...));
  }
  Status check(const char* symbol, api::Code code);
  [[nodiscard]] Status described(const char* symbol, api::Code code) const;
  // Puts the device out of service; only the first reason is kept.
  void fail(const Status& reason);
  // EOPNOTSUPP: "this NVIDIA driver cannot ... (cuLaunchHostFunc)".
  [[nodiscard]] Status lacks(const std::string& what, const char* symbol) const;

  // Whether there are address ranges and physical memory; otherwise there are plain allocations only.
  [[nodiscard]] bool virtual_memory() const { return virtual_memory_; }
  // Whether one call may unmap or open several pieces that were mapped side by side.
  [[nodiscard]] bool spans_pieces() const { return spans_pieces_; }

  // How large pieces of physical memory are at most.
  [[nodiscard]] std::uint64_t largest_piece() const;
  // Memory within the cap: ENOSPC if it or the device is full. Its contents are undefined unless it is `zeroed`, which
  // is tried if the caller wants it. address: where the caller is about to map it. The device must be current.
  Result<AcquiredMemory> acquire_physical(std::uint64_t bytes, DeviceAddress address, bool wants_zeros, Wait wait);
  // The physical memory of a descriptor that the last process has kept, within the cap.
  Status adopt_physical(int descriptor, std::uint64_t bytes, PhysicalHandle* handle);
  // reusable: nobody outside can reach the memory, so it may be cached for the next caller. address: where it is still
  // mapped, see pool_of(); 0: nowhere.
  void return_physical(PhysicalHandle handle, std::uint64_t bytes, bool reusable, DeviceAddress address);
  // The pool that takes physical memory of this size, mapped or not. Null: none.
  [[nodiscard]] HostTierPool* pool_of(std::uint64_t bytes) const {
    return bytes == HostTierPool::kPieceBytes ? pinned_.get() : nullptr;
  }
  // The pool that may have left pieces in ranges. Null: none.
  [[nodiscard]] HostTierPool* pool() const { return pinned_.get(); }
  Status acquire_plain(std::uint64_t bytes, DeviceAddress* base);
  void return_plain(DeviceAddress base, std::uint64_t bytes);

  // Zeroes spans of a range, and waits for that.
  Status zero_spans(DeviceAddress base, std::span<const Extent> spans);

  Status map(DeviceAddress address, std::uint64_t bytes, PhysicalHandle handle);
  // Gives the device and its peers access to mapped addresses.
  Status allow(DeviceAddress address, std::uint64_t bytes);
  // Gives this device alone access.
  Status allow_own(DeviceAddress address, std::uint64_t bytes, bool writable);
  // Drops a range that shows memory of another program. Tensors are freed while kernels that read them are still
  // queued, and unmapping does not wait for those, so this waits. Where waiting is impossible, it is left to the next
  // call, or to the end of the process.
  void unmap_when_idle(std::shared_ptr<AddressRange> range);

  // Streams for synchronous work, each lent to one thread at a time, so that no thread waits for another's copy.
  Result<api::Stream> borrow_stream();
  void return_stream(api::Stream stream);

  // ---- what the vendors do differently; the device is current, except where it says otherwise ----

  // Makes the device current on this thread. True if another one was, which `before` then names for restore().
  virtual Result<bool> make_current(std::uint64_t* before) = 0;
  virtual void restore(std::uint64_t before) = 0;
  // Makes the device current for bind_thread(), which has made this thread's capture mode relaxed.
  virtual Status bind() = 0;
  // Whether the vendor reports the device of a stream.
  [[nodiscard]] virtual bool reports_streams() const = 0;
  // Whether a stream of the program's is this device's. A default stream is that of the device that is current. EINVAL:
  // it is not a stream.
  virtual Result<bool> owns(api::Stream stream, bool default_stream) = 0;
  virtual Status wait_for_value(api::Stream stream, DeviceAddress cell, std::uint32_t value) = 0;
  // See Stream::copy(). EOPNOTSUPP: the vendor's library has no batches for this device.
  virtual Status queue_batch(CopyDirection /*direction*/, std::span<const HostCopy> /*copies*/,
                             api::Stream /*stream*/) {
    return {EOPNOTSUPP, "no batches of copies"};
  }
  // peer: a device of the same vendor.
  virtual Status queue_copy_to_peer(GpuDevice& peer, DeviceAddress destination, DeviceAddress source, std::size_t bytes,
                                    api::Stream stream) = 0;
  // Physical memory that a descriptor stands for; the caller releases the handle.
  virtual Status import_physical(int descriptor, PhysicalHandle* handle);
  // Lets this device reach plain allocations of the peer.
  virtual Status enable_peer(GpuDevice& peer) = 0;
  // Pinned memory of the host as the index-th device of the driver. It can do no more than hold files: others copy from
  // and to it. EOPNOTSUPP, with the reason for users.
  virtual Result<std::shared_ptr<GpuDevice>> open_host_tier(int index, std::uint64_t bytes);

 protected:
  // ordinal: the device's number in the vendor's calls.
  GpuDevice(std::shared_ptr<const VendorLibrary> library, int ordinal, const DriverOptions& options);
  // Releases the cached memory and the streams. The vendor's destructor calls it first, while its calls still exist.
  void close();

  // "gpu 0".
  [[nodiscard]] std::string name() const { return info_.host_tier ? info_.name : "gpu " + std::to_string(info_.index); }
  // Reads what is known of a device before it is current.
  Status describe(int index);
  // Whether the device has what the attribute stands for. A driver that does not know the attribute does not have it.
  bool attribute(int which);
  // Decides how memory is taken, once the device can be made current.
  Status choose_memory(bool virtual_memory, bool exports_descriptors, bool direct_rdma);
  // The same for a host tier, whose memory lies at a NUMA node.
  Status choose_host_memory(int node, std::uint64_t bytes);

  const int ordinal_;
  // Set before the device is shared, and constant then.
  DeviceInfo info_;
  bool spans_pieces_ = true;
  std::string access_remedy_;  // what the message adds when access to mapped memory is refused
  // Why there is no virtual memory, for users: by default, because the vendor's software has none.
  std::string plain_reason_;

 private:
  friend Result<std::unique_ptr<Driver>> open_devices(const char* driver, const VendorLibrary& library, int found,
                                                      const DriverOptions& options, const OpenDevice& open);

  // EXDEV, EINVAL.
  Status check_stream(api::Stream stream, bool certain);
  Status zero_piece(PhysicalHandle piece, DeviceAddress address);
  template <typename Queue>
  Status run(Queue queue);
  Result<bool> reaches(GpuDevice& peer);
  void grant_access_to(int ordinal) { access_.push_back({{api::kLocationDevice, ordinal}, api::kAccessReadWrite}); }
  Status take(std::uint64_t bytes);
  void release(const std::vector<PhysicalHandle>& handles);

  const std::shared_ptr<const VendorLibrary> library_;
  bool virtual_memory_ = false;
  bool exports_descriptors_ = false;
  api::AllocationProperties allocation_{};
  std::vector<api::Access> access_;  // the devices that may reach this device's memory

  Ledger taken_;  // bytes in use, and the cap
  SpareMemory spares_{[this](const std::vector<PhysicalHandle>& handles) { release(handles); }};
  std::unique_ptr<HostTierPool> pinned_;  // of a host tier; constant

  std::atomic<bool> failed_{false};
  std::mutex failure_mutex_;  // guards failure_; a leaf
  Status failure_;

  std::mutex streams_mutex_;  // guards idle_streams_; a leaf
  std::vector<api::Stream> idle_streams_;

  std::mutex unmap_mutex_;  // guards unmap_later_; a leaf
  std::vector<std::shared_ptr<AddressRange>> unmap_later_;

  std::mutex peers_mutex_;  // guards enabled_peers_; a leaf
  std::set<int> enabled_peers_;
};

// Makes the device current on this thread while it lives, and restores what was current before. Costs two cheap calls
// if the device is current already.
//
// Meanwhile the thread's capture mode is relaxed. While a program captures a graph in the default mode (as torch does),
// a call by any of its threads that waits, allocates or frees would fail and end the capture otherwise. Those rules
// protect programs from such calls between the kernels that they capture; ours only concern our own streams.
class Current {
 public:
  explicit Current(GpuDevice& device);
  ~Current();
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  // The device's health, or why it could not be made current.
  [[nodiscard]] const Status& status() const { return status_; }

 private:
  GpuDevice& device_;
  Status status_;
  std::uint64_t before_ = 0;
  bool changed_ = false;
  int capture_mode_ = api::kCaptureRelaxed;  // to set next: the thread's own in between
};

// A stream for synchronous work on a thread where the device is current: queue on get(), then finish(), which waits for
// what was queued. The destructor waits too, for an early return after a failure.
class SynchronousWork {
 public:
  explicit SynchronousWork(GpuDevice& device);
  ~SynchronousWork();
  [[nodiscard]] const Status& status() const { return status_; }
  [[nodiscard]] api::Stream get() const { return stream_; }
  Status finish();

 private:
  GpuDevice& device_;
  Current current_;
  Status status_;
  api::Stream stream_ = nullptr;
  bool finished_ = false;
};

// A buffer's memory without virtual memory management: one allocation, copied into a larger one when a larger range is
// reserved. Released granules are reused, but return to the device only with the whole allocation.
std::unique_ptr<DeviceMemory> plain_memory(std::shared_ptr<GpuDevice> device);

// Memory of other programs: exported pieces, by descriptors.
Result<std::unique_ptr<ImportedRange>> import_memory(std::shared_ptr<GpuDevice> device, std::uint64_t capacity,
                                                     bool writable);

// Physical memory, by descriptors that its program has exported. EINVAL: one is not of such memory, or of memory of
// another size.
Result<std::unique_ptr<ForeignMapping>> map_descriptor(const std::shared_ptr<GpuDevice>& device,
                                                       const ForeignMemory& memory);

// An allocation, by the vendor's handle for that (cuIpcOpenMemHandle). The vendor keeps the memory while it is open
// here, also if its program has ended. EINVAL: the handle stands for nothing, or for less than the caller says. EXDEV:
// for memory of another device.
Result<std::unique_ptr<ForeignMapping>> open_ipc_handle(const std::shared_ptr<GpuDevice>& device,
                                                        const ForeignMemory& memory);

// The driver of those of `found` devices that the options choose. EINVAL, ENXIO.
Result<std::unique_ptr<Driver>> open_devices(const char* driver, const VendorLibrary& library, int found,
                                             const DriverOptions& options, const OpenDevice& open);

// The device with a PCI address. ENODEV, with a message that names the variable by which users hide devices from a
// process.
Result<std::shared_ptr<Device>> open_device_at(const VendorLibrary& library, const std::string& pci_address,
                                               const char* hiding_variable, const OpenDevice& open);

}  // namespace gpufs::gpu
