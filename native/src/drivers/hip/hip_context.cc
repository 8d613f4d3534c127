#include "drivers/hip/hip_context.h"

#include <algorithm>
#include <array>
#include <cerrno>

namespace gpufs::hip {
namespace {

// The runtime would give out memory by the page; buffers want few and large pieces.
constexpr std::uint64_t kSmallestGranule = std::uint64_t{2} << 20;

void* pointer(DeviceAddress address) { return reinterpret_cast<void*>(address); }
HipMemoryHandle memory_of(PhysicalHandle handle) { return reinterpret_cast<HipMemoryHandle>(handle); }
HipStream stream_of(StreamHandle stream) { return static_cast<HipStream>(stream); }
HipEvent event_of(EventHandle event) { return static_cast<HipEvent>(event); }

}  // namespace

template <auto Function, typename... Arguments>
Status HipContext::call(const char* name, Purpose purpose, Arguments&&... arguments) {
  return check(library_->call<Function>(std::forward<Arguments>(arguments)...), name, purpose);
}

Status HipContext::check(HipResult code, const char* name, Purpose purpose) {
  if (code == kHipSuccess) return {};
  std::string text = Context::name() + ": " + name + ": " + library_->describe(code);
  const int error = errno_of(code, purpose);
  if (error == ENOSPC) text = "No space left on device (" + text + ")";
  Status status{error, std::move(text), code};
  if (is_fatal(code)) fail(status);
  return status;
}

Result<std::shared_ptr<HipContext>> HipContext::open(std::shared_ptr<const Library> library, int index,
                                                     std::uint64_t cap) {
  std::shared_ptr<HipContext> context(new HipContext(std::move(library), index, cap));
  context->info_.index = index;
  if (Status status = context->describe_device(); !status.ok()) return status;
  return context;
}

Status HipContext::describe_device() {
  std::array<char, 256> text{};
  Status status =
      call<&Functions::device_name>("hipDeviceGetName", Purpose::kHost, text.data(), int{text.size()}, device_);
  if (!status.ok()) return status;
  info_.name = text.data();
  // Chips that the runtime's tables do not know have no name.
  if (info_.name.empty()) info_.name = "AMD GPU";

  text.fill('\0');
  status = call<&Functions::device_pci_address>("hipDeviceGetPCIBusId", Purpose::kHost, text.data(), int{text.size()},
                                                device_);
  if (!status.ok()) return status;
  info_.pci_address = gpu::kernel_pci_address(text.data());
  info_.numa_node = gpu::numa_node_of(info_.pci_address);

  std::size_t total = 0;
  status = call<&Functions::device_total_memory>("hipDeviceTotalMem", Purpose::kHost, &total, device_);
  if (!status.ok()) return status;
  info_.binds_threads = false;  // every call makes the device current for itself
  info_.total_bytes = cap_ != 0 ? std::min<std::uint64_t>(cap_, total) : total;
  info_.granule = kSmallestGranule;

  int managed = 0;
  // A runtime that does not know the attribute has not got what it stands for either.
  virtual_memory_ =
      library_->has_virtual_memory() &&
      library_->call<&Functions::device_attribute>(&managed, int{kHipAttributeVirtualMemory}, device_) == kHipSuccess &&
      managed != 0;
  if (!virtual_memory_) {
    info_.reserve_copies = true;
    return {};
  }
  spans_pieces_ = false;
  exports_descriptors_ = library_->has_export();
  allocation_.type = kHipAllocationPinned;
  allocation_.location = {kHipLocationDevice, device_};
  if (exports_descriptors_) allocation_.handle_type = kHipHandleDescriptor;
  access_ = {{allocation_.location, kHipAccessReadWrite}};

  const gpu::Current current(*this);
  if (!current.status().ok()) return current.status();
  std::size_t granule = 0;
  status = call<&Functions::granularity>("hipMemGetAllocationGranularity", Purpose::kHost, &granule, &allocation_,
                                         int{kHipGranularityMinimum});
  if (!status.ok()) return status;
  info_.granule = std::max<std::uint64_t>(granule, kSmallestGranule);
  return {};
}

HipContext::~HipContext() { give_up_pools(); }

void HipContext::open_to(const std::vector<std::shared_ptr<HipContext>>& peers) {
  if (!virtual_memory_) return;
  for (const auto& peer : peers) {
    if (peer.get() == this) continue;
    // Where this fails there is no direct way, and copy_to_peer() says so.
    Result<bool> reachable = peer->reaches(*this);
    if (reachable.ok() && reachable.value()) {
      access_.push_back({{kHipLocationDevice, peer->device_}, kHipAccessReadWrite});
    }
  }
}

Result<bool> HipContext::make_current(std::uint64_t* before) {
  Status status = check(library_->prepare_thread(), "hipInit", Purpose::kHost);
  if (!status.ok()) return status;
  int current = 0;
  status = call<&Functions::device_current>("hipGetDevice", Purpose::kHost, &current);
  if (!status.ok()) return status;
  if (current == device_) return false;
  status = call<&Functions::device_set>("hipSetDevice", Purpose::kHost, device_);
  if (!status.ok()) return status;
  *before = static_cast<std::uint64_t>(current);
  return true;
}

void HipContext::restore(std::uint64_t before) { library_->call<&Functions::device_set>(static_cast<int>(before)); }

Status HipContext::bind_thread() {
  std::uint64_t before = 0;
  return make_current(&before).status();
}

Status HipContext::free_memory(std::uint64_t* bytes) {
  std::size_t free_bytes = 0;
  std::size_t total = 0;
  Status status = call<&Functions::memory_info>("hipMemGetInfo", Purpose::kHost, &free_bytes, &total);
  *bytes = free_bytes;
  return status;
}

Status HipContext::create_physical(std::uint64_t bytes, PhysicalHandle* handle) {
  HipMemoryHandle created = nullptr;
  Status status =
      call<&Functions::memory_create>("hipMemCreate", Purpose::kMemory, &created, bytes, &allocation_, 0ULL);
  *handle = reinterpret_cast<PhysicalHandle>(created);
  return status;
}

void HipContext::release_physical(PhysicalHandle handle) {
  library_->call<&Functions::memory_release>(memory_of(handle));
}

Status HipContext::export_physical(PhysicalHandle handle, int* fd) {
  return call<&Functions::memory_export>("hipMemExportToShareableHandle", Purpose::kMemory, fd, memory_of(handle),
                                         int{kHipHandleDescriptor}, 0ULL);
}

Status HipContext::reserve_range(std::uint64_t bytes, DeviceAddress* base) {
  void* reserved = nullptr;
  Status status = call<&Functions::address_reserve>("hipMemAddressReserve", Purpose::kHost, &reserved, bytes,
                                                    std::size_t{0}, nullptr, 0ULL);
  *base = reinterpret_cast<DeviceAddress>(reserved);
  return status;
}

void HipContext::free_range(DeviceAddress base, std::uint64_t bytes) {
  library_->call<&Functions::address_free>(pointer(base), bytes);
}

Status HipContext::map(DeviceAddress address, std::uint64_t bytes, PhysicalHandle handle) {
  return call<&Functions::memory_map>("hipMemMap", Purpose::kMemory, pointer(address), bytes, std::size_t{0},
                                      memory_of(handle), 0ULL);
}

Status HipContext::unmap(DeviceAddress address, std::uint64_t bytes) {
  return call<&Functions::memory_unmap>("hipMemUnmap", Purpose::kMemory, pointer(address), bytes);
}

Status HipContext::allow(DeviceAddress address, std::uint64_t bytes) {
  return call<&Functions::memory_set_access>("hipMemSetAccess", Purpose::kMemory, pointer(address), bytes,
                                             access_.data(), access_.size());
}

Status HipContext::allocate(std::uint64_t bytes, DeviceAddress* base) {
  void* allocated = nullptr;
  Status status = call<&Functions::memory_allocate>("hipMalloc", Purpose::kMemory, &allocated, bytes);
  *base = reinterpret_cast<DeviceAddress>(allocated);
  return status;
}

void HipContext::free(DeviceAddress base) { library_->call<&Functions::memory_free>(pointer(base)); }

Status HipContext::copy_in(DeviceAddress destination, const void* source, std::size_t bytes, StreamHandle stream) {
  return call<&Functions::copy_to_device>("hipMemcpyHtoDAsync", Purpose::kHost, pointer(destination), source, bytes,
                                          stream_of(stream));
}

Status HipContext::copy_out(void* destination, DeviceAddress source, std::size_t bytes, StreamHandle stream) {
  return call<&Functions::copy_to_host>("hipMemcpyDtoHAsync", Purpose::kHost, destination, pointer(source), bytes,
                                        stream_of(stream));
}

Status HipContext::copy_within(DeviceAddress destination, DeviceAddress source, std::size_t bytes,
                               StreamHandle stream) {
  return call<&Functions::copy_on_device>("hipMemcpyDtoDAsync", Purpose::kMemory, pointer(destination), pointer(source),
                                          bytes, stream_of(stream));
}

Status HipContext::copy_to_peer(gpu::Context& peer, DeviceAddress destination, DeviceAddress source, std::size_t bytes,
                                StreamHandle stream) {
  return call<&Functions::copy_to_peer>("hipMemcpyPeerAsync", Purpose::kMemory, pointer(destination),
                                        static_cast<HipContext&>(peer).device_, pointer(source), device_, bytes,
                                        stream_of(stream));
}

Status HipContext::fill_zero(DeviceAddress destination, std::size_t bytes, StreamHandle stream) {
  return call<&Functions::fill>("hipMemsetD8Async", Purpose::kMemory, pointer(destination),
                                static_cast<unsigned char>(0), bytes, stream_of(stream));
}

Status HipContext::create_stream(StreamHandle* stream) {
  HipStream created = nullptr;
  Status status = call<&Functions::stream_create>("hipStreamCreateWithFlags", Purpose::kHost, &created,
                                                  unsigned{kHipStreamNonBlocking});
  *stream = created;
  return status;
}

void HipContext::destroy_stream(StreamHandle stream) { library_->call<&Functions::stream_destroy>(stream_of(stream)); }

Status HipContext::synchronize_stream(StreamHandle stream) {
  return call<&Functions::stream_synchronize>("hipStreamSynchronize", Purpose::kMemory, stream_of(stream));
}

Status HipContext::wait_for_event(StreamHandle stream, EventHandle event) {
  return call<&Functions::stream_wait_event>("hipStreamWaitEvent", Purpose::kMemory, stream_of(stream), event_of(event),
                                             0U);
}

Status HipContext::call_host(StreamHandle stream, HostFunction function, void* argument) {
  if (!library_->has<&Functions::launch_host>()) {
    return {EOPNOTSUPP, "this version of ROCm cannot call the host from a stream (hipLaunchHostFunc)"};
  }
  if (library_->has<&Functions::stream_capturing>()) {
    int capturing = 0;
    const HipResult code = library_->call<&Functions::stream_capturing>(stream_of(stream), &capturing);
    if (code == kHipCaptureImplicit || (code == kHipSuccess && capturing != 0)) {
      return {EBUSY, "the stream is being captured into a graph, which could not repeat the operation"};
    }
  }
  return call<&Functions::launch_host>("hipLaunchHostFunc", Purpose::kMemory, stream_of(stream), function, argument);
}

Status HipContext::wait_for_value(StreamHandle stream, DeviceAddress cell, std::uint32_t value) {
  if (!library_->has<&Functions::stream_wait_value>()) {
    return {EOPNOTSUPP, "this version of ROCm has no streams that wait for a value (hipStreamWaitValue32)"};
  }
  return call<&Functions::stream_wait_value>("hipStreamWaitValue32", Purpose::kMemory, stream_of(stream), pointer(cell),
                                             value, unsigned{kHipWaitValueNotLess}, std::uint32_t{kHipWholeValue});
}

Status HipContext::check_stream(StreamHandle stream, bool certain) {
  int owner = -1;
  if (reinterpret_cast<std::uintptr_t>(stream) <= kHipLastDefaultStream) {
    if (certain) return {};
    Status status = check(library_->prepare_thread(), "hipInit", Purpose::kHost);
    if (status.ok()) status = call<&Functions::device_current>("hipGetDevice", Purpose::kHost, &owner);
    if (!status.ok()) return status;
  } else if (library_->has<&Functions::stream_device>()) {
    const gpu::Current current(*this);
    if (!current.status().ok()) return current.status();
    const HipResult code = library_->call<&Functions::stream_device>(stream_of(stream), &owner);
    if (code != kHipSuccess) return {EINVAL, "this is no HIP stream: " + library_->describe(code), code};
  } else if (certain) {
    return {};
  } else {
    return {EINVAL, "this version of ROCm does not tell whose a stream is: say which device it is"};
  }
  return owner == device_ ? Status{} : Status{EXDEV, "the stream is not one of " + name()};
}

Status HipContext::create_event(EventHandle* event) {
  HipEvent created = nullptr;
  Status status = call<&Functions::event_create>("hipEventCreateWithFlags", Purpose::kHost, &created,
                                                 unsigned{kHipEventDisableTiming});
  *event = created;
  return status;
}

void HipContext::destroy_event(EventHandle event) { library_->call<&Functions::event_destroy>(event_of(event)); }

Status HipContext::record_event(EventHandle event, StreamHandle stream) {
  return call<&Functions::event_record>("hipEventRecord", Purpose::kMemory, event_of(event), stream_of(stream));
}

Result<bool> HipContext::query_event(EventHandle event) {
  const HipResult code = library_->call<&Functions::event_query>(event_of(event));
  if (code == kHipNotReady) return false;
  if (Status status = check(code, "hipEventQuery", Purpose::kMemory); !status.ok()) return status;
  return true;
}

Status HipContext::synchronize_event(EventHandle event) {
  return call<&Functions::event_synchronize>("hipEventSynchronize", Purpose::kMemory, event_of(event));
}

bool HipContext::holds(DeviceAddress address) {
  // Before, the kinds of memory had other numbers.
  if (!library_->has<&Functions::pointer_attributes>() || library_->version() < kHipVersion6) return false;
  HipPointerAttributes found{};
  if (library_->call<&Functions::pointer_attributes>(&found, pointer(address)) != kHipSuccess) return false;
  return found.type == kHipMemoryTypeDevice && found.device == device_;
}

Status HipContext::pin(void* address, std::size_t bytes) {
  return call<&Functions::host_register>("hipHostRegister", Purpose::kHost, address, bytes,
                                         unsigned{kHipHostRegisterPortable});
}

Status HipContext::pin_read_only(const void* /*address*/, std::size_t /*bytes*/) {
  return {EOPNOTSUPP, "HIP cannot pin memory that may only be read"};
}

Status HipContext::unpin(void* address) {
  return call<&Functions::host_unregister>("hipHostUnregister", Purpose::kHost, address);
}

Status HipContext::address_of_pinned(void* address, DeviceAddress* seen) {
  *seen = reinterpret_cast<DeviceAddress>(address);  // what it is wherever host and device share their addresses
  if (!library_->has<&Functions::host_address>()) return {};
  void* found = nullptr;
  Status status = call<&Functions::host_address>("hipHostGetDevicePointer", Purpose::kHost, &found, address, 0U);
  if (status.ok()) *seen = reinterpret_cast<DeviceAddress>(found);
  return status;
}

Result<PinnedHostRange> HipContext::pinned_range(const void* address) {
  if (!library_->has<&Functions::pointer_attribute>())
    return Status(EOPNOTSUPP, "this runtime does not tell what is pinned");
  auto* const at = const_cast<void*>(address);
  void* start = nullptr;
  std::size_t bytes = 0;
  Status status = call<&Functions::pointer_attribute>("hipPointerGetAttribute", Purpose::kHost, &start,
                                                      int{kHipPointerRangeStart}, at);
  if (!status.ok()) return status;
  status = call<&Functions::pointer_attribute>("hipPointerGetAttribute", Purpose::kHost, &bytes,
                                               int{kHipPointerRangeBytes}, at);
  if (!status.ok()) return status;
  return PinnedHostRange{reinterpret_cast<std::uintptr_t>(start), reinterpret_cast<std::uintptr_t>(start) + bytes};
}

bool HipContext::same_vendor(const gpu::Context& other) const {
  return dynamic_cast<const HipContext*>(&other) != nullptr;
}

Result<bool> HipContext::reaches(gpu::Context& peer) {
  if (!library_->has_peers()) return false;
  int reachable = 0;
  Status status = call<&Functions::device_can_access_peer>("hipDeviceCanAccessPeer", Purpose::kHost, &reachable,
                                                           device_, static_cast<HipContext&>(peer).device_);
  if (!status.ok()) return status;
  return reachable != 0;
}

Status HipContext::enable_peer(gpu::Context& peer) {
  const HipResult code = library_->call<&Functions::device_enable_peer>(static_cast<HipContext&>(peer).device_, 0U);
  if (code == kHipPeerAccessAlreadyEnabled) return {};
  return check(code, "hipDeviceEnablePeerAccess", Purpose::kMemory);
}

}  // namespace gpufs::hip
