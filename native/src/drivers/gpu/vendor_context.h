// The vendor's calls as a Context makes them, for interfaces of the shape that CUDA's has and HIP's has taken over,
// function by function. What the two do differently stands in cuda/cuda_context.* and hip/hip_context.*.
// Owned as every Context is; it holds the vendor's library.
// Any thread.
#pragma once

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "drivers/driver.h"
#include "drivers/gpu/api.h"
#include "drivers/gpu/context.h"
#include "drivers/gpu/gpu_device.h"
#include "drivers/gpu/vendor_library.h"

namespace gpufs::gpu {

// Library: what loads the vendor's functions. It names their table (Functions), the types of addresses and of physical
// memory (Address, Memory), and what texts for users call the vendor's software (kSoftware).
template <typename Library>
class VendorContext : public Context {
 public:
  using Functions = typename Library::Functions;
  using Address = typename Library::Address;
  using Memory = typename Library::Memory;

  // Lets the peers that can reach memory of this device do so. Once, before anything is allocated.
  void open_to(const std::vector<std::shared_ptr<Context>>& peers) {
    if (!virtual_memory_) return;
    for (const auto& peer : peers) {
      if (peer.get() == this) continue;
      // Where this fails there is no direct way, and copy_to_peer() says so.
      Result<bool> reachable = peer->reaches(*this);
      if (reachable.ok() && reachable.value()) let_in(static_cast<VendorContext&>(*peer).device_);
    }
  }

  Status free_memory(std::uint64_t* bytes) override {
    std::size_t free_bytes = 0;
    std::size_t total = 0;
    Status status = call<&Functions::memory_info>(Purpose::kHost, &free_bytes, &total);
    *bytes = free_bytes;
    return status;
  }

  Status create_physical(std::uint64_t bytes, PhysicalHandle* handle) override {
    Memory created{};
    Status status = call<&Functions::memory_create>(Purpose::kMemory, &created, bytes, &allocation_, 0ULL);
    *handle = as<PhysicalHandle>(created);
    return status;
  }
  void release_physical(PhysicalHandle handle) override {
    library_->template call<&Functions::memory_release>(as<Memory>(handle));
  }
  Status export_physical(PhysicalHandle handle, int* fd) override {
    return call<&Functions::memory_export>(Purpose::kMemory, fd, as<Memory>(handle), int{api::kHandleDescriptor}, 0ULL);
  }
  Status reserve_range(std::uint64_t bytes, DeviceAddress* base) override {
    Address reserved{};
    Status status =
        call<&Functions::address_reserve>(Purpose::kHost, &reserved, bytes, std::size_t{0}, Address{}, 0ULL);
    *base = as<DeviceAddress>(reserved);
    return status;
  }
  void free_range(DeviceAddress base, std::uint64_t bytes) override {
    library_->template call<&Functions::address_free>(as<Address>(base), bytes);
  }
  Status map(DeviceAddress address, std::uint64_t bytes, PhysicalHandle handle) override {
    return call<&Functions::memory_map>(Purpose::kMemory, as<Address>(address), bytes, std::size_t{0},
                                        as<Memory>(handle), 0ULL);
  }
  Status unmap(DeviceAddress address, std::uint64_t bytes) override {
    return call<&Functions::memory_unmap>(Purpose::kMemory, as<Address>(address), bytes);
  }
  Status allow(DeviceAddress address, std::uint64_t bytes) override {
    return call<&Functions::memory_set_access>(Purpose::kMemory, as<Address>(address), bytes, access_.data(),
                                               access_.size());
  }

  Status allocate(std::uint64_t bytes, DeviceAddress* base) override {
    Address allocated{};
    Status status = call<&Functions::memory_allocate>(Purpose::kMemory, &allocated, bytes);
    *base = as<DeviceAddress>(allocated);
    return status;
  }
  void free(DeviceAddress base) override { library_->template call<&Functions::memory_free>(as<Address>(base)); }

  Status plain_copy_in(DeviceAddress destination, const void* source, std::size_t bytes, StreamHandle stream) override {
    return call<&Functions::copy_to_device>(Purpose::kHost, as<Address>(destination), source, bytes,
                                            as<api::Stream>(stream));
  }
  Status copy_rows_in(DeviceAddress destination, const void* source, std::size_t width, std::size_t rows,
                      StreamHandle stream) override {
    return plain_copy_in(destination, source, width * rows, stream);
  }
  Status copy_out(void* destination, DeviceAddress source, std::size_t bytes, StreamHandle stream) override {
    return call<&Functions::copy_to_host>(Purpose::kHost, destination, as<Address>(source), bytes,
                                          as<api::Stream>(stream));
  }
  Status plain_copy_within(DeviceAddress destination, DeviceAddress source, std::size_t bytes,
                           StreamHandle stream) override {
    return call<&Functions::copy_on_device>(Purpose::kMemory, as<Address>(destination), as<Address>(source), bytes,
                                            as<api::Stream>(stream));
  }
  Status plain_fill_zero(DeviceAddress destination, std::size_t bytes, StreamHandle stream) override {
    return call<&Functions::fill>(Purpose::kMemory, as<Address>(destination), static_cast<unsigned char>(0), bytes,
                                  as<api::Stream>(stream));
  }

  Status create_stream(StreamHandle* stream) override {
    api::Stream created = nullptr;
    Status status = call<&Functions::stream_create>(Purpose::kHost, &created, unsigned{api::kStreamNonBlocking});
    *stream = created;
    return status;
  }
  void destroy_stream(StreamHandle stream) override {
    library_->template call<&Functions::stream_destroy>(as<api::Stream>(stream));
  }
  Status synchronize_stream(StreamHandle stream) override {
    return call<&Functions::stream_synchronize>(Purpose::kMemory, as<api::Stream>(stream));
  }
  Status wait_for_event(StreamHandle stream, EventHandle event) override {
    return call<&Functions::stream_wait_event>(Purpose::kMemory, as<api::Stream>(stream), as<api::Event>(event), 0U);
  }
  Status call_host(StreamHandle stream, HostFunction function, void* argument) override {
    if (!library_->template has<&Functions::launch_host>()) {
      return lacking("cannot call the host from a stream", kSymbol<&Functions::launch_host>);
    }
    if (library_->template has<&Functions::stream_capturing>()) {
      int capturing = 0;
      const api::Code code = library_->template call<&Functions::stream_capturing>(as<api::Stream>(stream), &capturing);
      if (code == api::kCaptureImplicit || (code == api::kSuccess && capturing != 0)) {
        return {EBUSY, "the stream is being captured into a graph, which could not repeat the operation"};
      }
    }
    return call<&Functions::launch_host>(Purpose::kMemory, as<api::Stream>(stream), function, argument);
  }

  Status create_event(EventHandle* event) override {
    api::Event created = nullptr;
    // Without timing events are cheap. Waiting spins: where the device's interrupts pass through a virtual machine, a
    // thread that sleeps wakes 170-470 us late, and a chunk of 8 MiB takes 160 us.
    Status status = call<&Functions::event_create>(Purpose::kHost, &created, unsigned{api::kEventDisableTiming});
    *event = created;
    return status;
  }
  void destroy_event(EventHandle event) override {
    library_->template call<&Functions::event_destroy>(as<api::Event>(event));
  }
  Status record_event(EventHandle event, StreamHandle stream) override {
    return call<&Functions::event_record>(Purpose::kMemory, as<api::Event>(event), as<api::Stream>(stream));
  }
  Result<bool> query_event(EventHandle event) override {
    const api::Code code = library_->template call<&Functions::event_query>(as<api::Event>(event));
    if (code == api::kNotReady) return false;
    if (Status status = check(code, kSymbol<&Functions::event_query>, Purpose::kMemory); !status.ok()) return status;
    return true;
  }
  Status synchronize_event(EventHandle event) override {
    return call<&Functions::event_synchronize>(Purpose::kMemory, as<api::Event>(event));
  }

  Status pin(void* address, std::size_t bytes) override {
    return call<&Functions::host_register>(Purpose::kHost, address, bytes, unsigned{api::kHostRegisterPortable});
  }
  Status unpin(void* address) override { return call<&Functions::host_unregister>(Purpose::kHost, address); }
  Status address_of_pinned(void* address, DeviceAddress* seen) override {
    *seen = as<DeviceAddress>(address);  // what it is wherever host and device share their addresses
    if (!library_->template has<&Functions::host_address>()) return {};
    Address found{};
    Status status = call<&Functions::host_address>(Purpose::kHost, &found, address, 0U);
    if (status.ok()) *seen = as<DeviceAddress>(found);
    return status;
  }
  Result<PinnedHostRange> pinned_range(const void* address) override {
    if (!library_->template has<&Functions::pointer_attribute>()) {
      return lacking("does not tell what is pinned", kSymbol<&Functions::pointer_attribute>);
    }
    const auto at = as<Address>(as<DeviceAddress>(address));
    Address start{};
    std::size_t bytes = 0;
    Status status = call<&Functions::pointer_attribute>(Purpose::kHost, &start, int{api::kPointerRangeStart}, at);
    if (status.ok()) {
      status = call<&Functions::pointer_attribute>(Purpose::kHost, &bytes, int{api::kPointerRangeBytes}, at);
    }
    if (!status.ok()) return status;
    return PinnedHostRange{as<std::uintptr_t>(start), as<std::uintptr_t>(start) + bytes};
  }

  [[nodiscard]] bool same_vendor(const Context& other) const override {
    return dynamic_cast<const VendorContext*>(&other) != nullptr;
  }
  Result<bool> reaches(Context& peer) override {
    if (!library_->has_peers()) return false;
    int reachable = 0;
    Status status = call<&Functions::device_can_access_peer>(Purpose::kHost, &reachable, device_,
                                                             static_cast<VendorContext&>(peer).device_);
    if (!status.ok()) return status;
    return reachable != 0;
  }

 protected:
  // The driver would give out memory by less; buffers want few and large pieces.
  static constexpr std::uint64_t kSmallestGranule = std::uint64_t{2} << 20;

  VendorContext(std::shared_ptr<const Library> library, int device, std::uint64_t cap)
      : Context(cap), library_(std::move(library)), device_(device) {}

  // What is known of a device before it is current.
  Status describe(int index) {
    info_.index = index;
    std::array<char, 256> text{};
    Status status = call<&Functions::device_name>(Purpose::kHost, text.data(), int{text.size()}, device_);
    if (!status.ok()) return status;
    info_.name = text.data();

    text.fill('\0');
    status = call<&Functions::device_pci_address>(Purpose::kHost, text.data(), int{text.size()}, device_);
    if (!status.ok()) return status;
    info_.pci_address = kernel_pci_address(text.data());
    info_.numa_node = numa_node_of(info_.pci_address);

    std::size_t total = 0;
    status = call<&Functions::device_total_memory>(Purpose::kHost, &total, device_);
    if (!status.ok()) return status;
    info_.total_bytes = cap_ != 0 ? std::min<std::uint64_t>(cap_, total) : total;
    info_.streams_share_queues = true;
    info_.granule = kSmallestGranule;
    return {};
  }
  // False too where the driver does not know the attribute: then it has not got what that stands for either.
  bool attribute(int which) {
    int value = 0;
    return library_->template call<&Functions::device_attribute>(&value, which, device_) == api::kSuccess && value != 0;
  }
  // Decides how memory is taken, once the device can be made current.
  Status choose_memory(bool virtual_memory, bool exports, bool direct_rdma) {
    virtual_memory_ = virtual_memory;
    info_.reserve_copies = !virtual_memory;
    if (!virtual_memory) return {};
    exports_descriptors_ = exports;
    allocation_.type = api::kAllocationPinned;
    allocation_.location = {api::kLocationDevice, device_};
    if (exports) allocation_.handle_types = api::kHandleDescriptor;
    if (direct_rdma) allocation_.flags.direct_rdma = 1;
    let_in(device_);

    const Current current(*this);
    if (!current.status().ok()) return current.status();
    std::size_t granule = 0;
    Status status = call<&Functions::granularity>(Purpose::kHost, &granule, &allocation_,
                                                  typename Library::Granularity{api::kGranularityMinimum});
    if (!status.ok()) return status;
    info_.granule = std::max<std::uint64_t>(granule, kSmallestGranule);
    return {};
  }

  // Calls, and turns the result into a Status: "gpu 0: cuMemCreate: CUDA_ERROR_... (2): out of memory". A fatal code
  // puts the device out of service.
  template <auto Function, typename... Arguments>
  Status call(Purpose purpose, Arguments&&... arguments) {
    return check(library_->template call<Function>(std::forward<Arguments>(arguments)...), kSymbol<Function>, purpose);
  }
  Status check(api::Code code, const char* symbol, Purpose purpose) {
    if (code == api::kSuccess) return {};
    Status status = failure_of(code, purpose, name() + ": " + public_name(symbol) + ": " + library_->describe(code));
    if (Library::is_fatal(code)) fail(status);
    return status;
  }
  // EOPNOTSUPP: "this NVIDIA driver cannot ... (cuLaunchHostFunc)".
  static Status lacking(const std::string& what, const char* symbol) {
    return {EOPNOTSUPP, std::string(Library::kSoftware) + " " + what + " (" + symbol + ")"};
  }

  const std::shared_ptr<const Library> library_;
  const int device_;

 private:
  void let_in(int device) { access_.push_back({{api::kLocationDevice, device}, api::kAccessReadWrite}); }

  // Set before anybody else has the context, and constant then.
  api::AllocationProperties allocation_{};
  std::vector<api::Access> access_;  // who may reach memory of this device
};

// The driver of the first of `found` devices, as many as are wanted. VendorsContext: a VendorContext that can open().
template <typename VendorsContext, typename Library>
Result<std::unique_ptr<Driver>> open_devices(const char* name, const std::shared_ptr<const Library>& library, int found,
                                             const DriverOptions& options) {
  Result<int> count = wanted_devices(name, options, found);
  if (!count.ok()) return count.status();
  std::vector<std::shared_ptr<Context>> contexts;
  for (int index = 0; index < count.value(); ++index) {
    Result<std::shared_ptr<VendorsContext>> context = VendorsContext::open(library, index, options);
    if (!context.ok()) return context.status();
    context.value()->keep_spares(options.keep_freed);
    contexts.push_back(context.take());
  }
  for (const auto& context : contexts) static_cast<VendorsContext&>(*context).open_to(contexts);
  return std::unique_ptr<Driver>(std::make_unique<GpuDriver>(name, std::move(contexts)));
}

}  // namespace gpufs::gpu
