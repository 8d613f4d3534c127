#include "drivers/cuda/cuda_context.h"

#include <algorithm>
#include <array>
#include <cerrno>

#include "drivers/gpu/vendor_library.h"

namespace gpufs::cuda {
namespace {

constexpr std::uint64_t kPlainGranule = std::uint64_t{2} << 20;

CuStream stream_of(StreamHandle stream) { return static_cast<CuStream>(stream); }
CuEvent event_of(EventHandle event) { return static_cast<CuEvent>(event); }

}  // namespace

template <auto Function, typename... Arguments>
Status CudaContext::call(const char* name, Purpose purpose, Arguments&&... arguments) {
  return check(library_->call<Function>(std::forward<Arguments>(arguments)...), name, purpose);
}

Status CudaContext::check(CuResult code, const char* name, Purpose purpose) {
  if (code == kCuSuccess) return {};
  std::string text = Context::name() + ": " + name + ": " + library_->describe(code);
  const int error = errno_of(code, purpose);
  if (error == ENOSPC) text = "No space left on device (" + text + ")";
  Status status{error, std::move(text), code};
  if (is_fatal(code)) fail(status);
  return status;
}

Result<std::shared_ptr<CudaContext>> CudaContext::open(std::shared_ptr<const Library> library, int index,
                                                       std::uint64_t cap) {
  CuDevice device = 0;
  const CuResult code = library->call<&Functions::device_get>(&device, index);
  if (code != kCuSuccess) {
    return Status{ENODEV, "gpu " + std::to_string(index) + ": cuDeviceGet: " + library->describe(code), code};
  }
  std::shared_ptr<CudaContext> context(new CudaContext(std::move(library), device, cap));
  context->info_.index = index;
  if (Status status = context->describe_device(); !status.ok()) return status;
  return context;
}

Status CudaContext::describe_device() {
  std::array<char, 128> text{};
  Status status =
      call<&Functions::device_name>("cuDeviceGetName", Purpose::kHost, text.data(), int{text.size()}, device_);
  if (!status.ok()) return status;
  info_.name = text.data();

  text.fill('\0');
  status = call<&Functions::device_pci_address>("cuDeviceGetPCIBusId", Purpose::kHost, text.data(), int{text.size()},
                                                device_);
  if (!status.ok()) return status;
  info_.pci_address = gpu::kernel_pci_address(text.data());
  info_.numa_node = gpu::numa_node_of(info_.pci_address);

  std::size_t total = 0;
  status = call<&Functions::device_total_memory>("cuDeviceTotalMem", Purpose::kHost, &total, device_);
  if (!status.ok()) return status;
  // Every call makes the context current for itself, which is far cheaper than waking another thread: growing a file by
  // a granule costs 50 us here.
  info_.binds_threads = false;
  info_.total_bytes = cap_ != 0 ? std::min<std::uint64_t>(cap_, total) : total;

  const auto attribute = [this](int which) {
    int value = 0;
    // A driver that does not know an attribute has not got what it stands for either.
    return library_->call<&Functions::device_attribute>(&value, which, device_) == kCuSuccess && value != 0;
  };
  virtual_memory_ = library_->has_virtual_memory() && attribute(kCuAttributeVirtualMemory);
  read_only_pinning_ = attribute(kCuAttributeReadOnlyHostRegister);

  status = call<&Functions::primary_context_retain>("cuDevicePrimaryCtxRetain", Purpose::kHost, &context_, device_);
  if (!status.ok()) {
    context_ = nullptr;
    return status;
  }
  if (!virtual_memory_) {
    info_.granule = kPlainGranule;
    info_.reserve_copies = true;
    return {};
  }
  allocation_.type = kCuAllocationPinned;
  allocation_.location = {kCuLocationDevice, device_};
  exports_descriptors_ = attribute(kCuAttributeExportDescriptor);
  if (exports_descriptors_) allocation_.handle_types = kCuHandleDescriptor;
  if (attribute(kCuAttributeDirectRdmaWithVirtualMemory)) allocation_.flags.direct_rdma = 1;
  access_ = {{allocation_.location, kCuAccessReadWrite}};

  const gpu::Current current(*this);
  if (!current.status().ok()) return current.status();
  std::size_t granule = 0;
  status = call<&Functions::granularity>("cuMemGetAllocationGranularity", Purpose::kHost, &granule, &allocation_,
                                         unsigned{kCuGranularityMinimum});
  if (!status.ok()) return status;
  info_.granule = granule;
  return {};
}

CudaContext::~CudaContext() {
  if (context_ == nullptr) return;
  give_up_pools();
  library_->call<&Functions::primary_context_release>(device_);
}

void CudaContext::open_to(const std::vector<std::shared_ptr<CudaContext>>& peers) {
  if (!virtual_memory_) return;
  for (const auto& peer : peers) {
    int reachable = 0;
    if (peer.get() == this) continue;
    // Where this fails there is no direct way, and copy_to_peer() says so.
    if (library_->call<&Functions::device_can_access_peer>(&reachable, peer->device_, device_) == kCuSuccess &&
        reachable != 0) {
      access_.push_back({{kCuLocationDevice, peer->device_}, kCuAccessReadWrite});
    }
  }
}

Result<bool> CudaContext::make_current(std::uint64_t* /*before*/) {
  CuContext current = nullptr;
  Status status = call<&Functions::context_get>("cuCtxGetCurrent", Purpose::kHost, &current);
  if (!status.ok()) return status;
  if (current == context_) return false;
  status = call<&Functions::context_push>("cuCtxPushCurrent", Purpose::kHost, context_);
  if (!status.ok()) return status;
  return true;
}

// The thread's stack of contexts knows what was current.
void CudaContext::restore(std::uint64_t /*before*/) {
  CuContext popped = nullptr;
  library_->call<&Functions::context_pop>(&popped);
}

Status CudaContext::bind_thread() {
  CuContext current = nullptr;
  Status status = call<&Functions::context_get>("cuCtxGetCurrent", Purpose::kHost, &current);
  if (!status.ok() || current == context_) return status;
  return call<&Functions::context_set>("cuCtxSetCurrent", Purpose::kHost, context_);
}

Status CudaContext::free_memory(std::uint64_t* bytes) {
  std::size_t free_bytes = 0;
  std::size_t total = 0;
  Status status = call<&Functions::memory_info>("cuMemGetInfo", Purpose::kHost, &free_bytes, &total);
  *bytes = free_bytes;
  return status;
}

Status CudaContext::create_physical(std::uint64_t bytes, PhysicalHandle* handle) {
  CuMemoryHandle created = 0;
  Status status = call<&Functions::memory_create>("cuMemCreate", Purpose::kMemory, &created, bytes, &allocation_, 0ULL);
  *handle = created;
  return status;
}

void CudaContext::release_physical(PhysicalHandle handle) { library_->call<&Functions::memory_release>(handle); }

Status CudaContext::export_physical(PhysicalHandle handle, int* fd) {
  return call<&Functions::memory_export>("cuMemExportToShareableHandle", Purpose::kMemory, fd, handle,
                                         int{kCuHandleDescriptor}, 0ULL);
}

Status CudaContext::reserve_range(std::uint64_t bytes, DeviceAddress* base) {
  CuAddress reserved = 0;
  Status status = call<&Functions::address_reserve>("cuMemAddressReserve", Purpose::kHost, &reserved, bytes,
                                                    std::size_t{0}, CuAddress{0}, 0ULL);
  *base = reserved;
  return status;
}

void CudaContext::free_range(DeviceAddress base, std::uint64_t bytes) {
  library_->call<&Functions::address_free>(base, bytes);
}

Status CudaContext::map(DeviceAddress address, std::uint64_t bytes, PhysicalHandle handle) {
  return call<&Functions::memory_map>("cuMemMap", Purpose::kMemory, address, bytes, std::size_t{0}, handle, 0ULL);
}

Status CudaContext::unmap(DeviceAddress address, std::uint64_t bytes) {
  return call<&Functions::memory_unmap>("cuMemUnmap", Purpose::kMemory, address, bytes);
}

Status CudaContext::allow(DeviceAddress address, std::uint64_t bytes) {
  return call<&Functions::memory_set_access>("cuMemSetAccess", Purpose::kMemory, address, bytes, access_.data(),
                                             access_.size());
}

Status CudaContext::allocate(std::uint64_t bytes, DeviceAddress* base) {
  CuAddress allocated = 0;
  Status status = call<&Functions::memory_allocate>("cuMemAlloc", Purpose::kMemory, &allocated, bytes);
  *base = allocated;
  return status;
}

void CudaContext::free(DeviceAddress base) { library_->call<&Functions::memory_free>(base); }

Status CudaContext::copy_in(DeviceAddress destination, const void* source, std::size_t bytes, StreamHandle stream) {
  return call<&Functions::copy_to_device>("cuMemcpyHtoDAsync", Purpose::kHost, destination, source, bytes,
                                          stream_of(stream));
}

Status CudaContext::copy_out(void* destination, DeviceAddress source, std::size_t bytes, StreamHandle stream) {
  return call<&Functions::copy_to_host>("cuMemcpyDtoHAsync", Purpose::kHost, destination, source, bytes,
                                        stream_of(stream));
}

Status CudaContext::copy_within(DeviceAddress destination, DeviceAddress source, std::size_t bytes,
                                StreamHandle stream) {
  return call<&Functions::copy_on_device>("cuMemcpyDtoDAsync", Purpose::kMemory, destination, source, bytes,
                                          stream_of(stream));
}

Status CudaContext::copy_to_peer(gpu::Context& peer, DeviceAddress destination, DeviceAddress source, std::size_t bytes,
                                 StreamHandle stream) {
  return call<&Functions::copy_to_peer>("cuMemcpyPeerAsync", Purpose::kMemory, destination,
                                        static_cast<CudaContext&>(peer).context_, source, context_, bytes,
                                        stream_of(stream));
}

Status CudaContext::fill_zero(DeviceAddress destination, std::size_t bytes, StreamHandle stream) {
  return call<&Functions::fill>("cuMemsetD8Async", Purpose::kMemory, destination, static_cast<unsigned char>(0), bytes,
                                stream_of(stream));
}

Status CudaContext::create_stream(StreamHandle* stream) {
  CuStream created = nullptr;
  Status status =
      call<&Functions::stream_create>("cuStreamCreate", Purpose::kHost, &created, unsigned{kCuStreamNonBlocking});
  *stream = created;
  return status;
}

void CudaContext::destroy_stream(StreamHandle stream) { library_->call<&Functions::stream_destroy>(stream_of(stream)); }

Status CudaContext::synchronize_stream(StreamHandle stream) {
  return call<&Functions::stream_synchronize>("cuStreamSynchronize", Purpose::kMemory, stream_of(stream));
}

Status CudaContext::wait_for_event(StreamHandle stream, EventHandle event) {
  return call<&Functions::stream_wait_event>("cuStreamWaitEvent", Purpose::kMemory, stream_of(stream), event_of(event),
                                             0U);
}

Status CudaContext::call_host(StreamHandle stream, HostFunction function, void* argument) {
  if (!library_->has<&Functions::launch_host>()) {
    return {EOPNOTSUPP, "this NVIDIA driver cannot call the host from a stream (cuLaunchHostFunc)"};
  }
  if (library_->has<&Functions::stream_capturing>()) {
    int capturing = 0;
    const CuResult code = library_->call<&Functions::stream_capturing>(stream_of(stream), &capturing);
    if (code == kCuCaptureImplicit || (code == kCuSuccess && capturing != 0)) {
      return {EBUSY, "the stream is being captured into a graph, which could not repeat the operation"};
    }
  }
  return call<&Functions::launch_host>("cuLaunchHostFunc", Purpose::kMemory, stream_of(stream), function, argument);
}

Status CudaContext::wait_for_value(StreamHandle stream, DeviceAddress cell, std::uint32_t value) {
  if (!library_->has<&Functions::stream_wait_value>()) {
    return {EOPNOTSUPP, "this NVIDIA driver has no streams that wait for a value (cuStreamWaitValue32_v2)"};
  }
  return call<&Functions::stream_wait_value>("cuStreamWaitValue32", Purpose::kMemory, stream_of(stream), cell, value,
                                             unsigned{kCuWaitValueNotLess});
}

Status CudaContext::check_stream(StreamHandle stream, bool certain) {
  CuContext owner = nullptr;
  if (reinterpret_cast<std::uintptr_t>(stream) <= kCuLastDefaultStream) {
    if (certain) return {};
    // Any other call would tell the device that it was made with.
    Status status = call<&Functions::context_get>("cuCtxGetCurrent", Purpose::kHost, &owner);
    if (!status.ok()) return status;
    if (owner == nullptr) return {EINVAL, "a default stream, and no CUDA device is current: say which device it is"};
  } else if (library_->has<&Functions::stream_context>()) {
    const gpu::Current current(*this);
    if (!current.status().ok()) return current.status();
    const CuResult code = library_->call<&Functions::stream_context>(stream_of(stream), &owner);
    if (code != kCuSuccess) return {EINVAL, "this is no CUDA stream: " + library_->describe(code), code};
  } else if (certain) {
    return {};
  } else {
    return {EINVAL, "this NVIDIA driver does not tell whose a stream is: say which device it is"};
  }
  return owner == context_ ? Status{} : Status{EXDEV, "the stream is not one of " + name()};
}

Status CudaContext::create_event(EventHandle* event) {
  CuEvent created = nullptr;
  // Without timing events are cheap. Waiting spins: where the device's interrupts pass through a virtual machine, a
  // thread that sleeps wakes 170-470 us late, and a chunk of 8 MiB takes 160 us.
  Status status =
      call<&Functions::event_create>("cuEventCreate", Purpose::kHost, &created, unsigned{kCuEventDisableTiming});
  *event = created;
  return status;
}

void CudaContext::destroy_event(EventHandle event) { library_->call<&Functions::event_destroy>(event_of(event)); }

Status CudaContext::record_event(EventHandle event, StreamHandle stream) {
  return call<&Functions::event_record>("cuEventRecord", Purpose::kMemory, event_of(event), stream_of(stream));
}

Result<bool> CudaContext::query_event(EventHandle event) {
  const CuResult code = library_->call<&Functions::event_query>(event_of(event));
  if (code == kCuNotReady) return false;
  if (Status status = check(code, "cuEventQuery", Purpose::kMemory); !status.ok()) return status;
  return true;
}

Status CudaContext::synchronize_event(EventHandle event) {
  return call<&Functions::event_synchronize>("cuEventSynchronize", Purpose::kMemory, event_of(event));
}

bool CudaContext::holds(DeviceAddress address) {
  if (!library_->has<&Functions::pointer_attribute>()) return false;
  unsigned kind = 0;
  unsigned managed = 0;  // a byte of it is written
  int ordinal = -1;
  const auto ask = [&](void* answer, int attribute) {
    return library_->call<&Functions::pointer_attribute>(answer, attribute, address) == kCuSuccess;
  };
  return ask(&kind, kCuPointerMemoryType) && kind == kCuMemoryTypeDevice && ask(&managed, kCuPointerIsManaged) &&
         managed == 0 && ask(&ordinal, kCuPointerDeviceOrdinal) && ordinal == info_.index;
}

Status CudaContext::pin(void* address, std::size_t bytes) {
  return call<&Functions::host_register>("cuMemHostRegister", Purpose::kHost, address, bytes,
                                         unsigned{kCuHostRegisterPortable});
}

Status CudaContext::pin_read_only(const void* address, std::size_t bytes) {
  if (!read_only_pinning_) return {EOPNOTSUPP, "this device cannot pin read-only memory"};
  return call<&Functions::host_register>("cuMemHostRegister", Purpose::kHost, const_cast<void*>(address), bytes,
                                         kCuHostRegisterPortable | kCuHostRegisterReadOnly);
}

Status CudaContext::unpin(void* address) {
  return call<&Functions::host_unregister>("cuMemHostUnregister", Purpose::kHost, address);
}

Status CudaContext::address_of_pinned(void* address, DeviceAddress* seen) {
  *seen = reinterpret_cast<DeviceAddress>(address);  // what it is wherever host and device share their addresses
  if (!library_->has<&Functions::host_address>()) return {};
  CuAddress found = 0;
  Status status = call<&Functions::host_address>("cuMemHostGetDevicePointer", Purpose::kHost, &found, address, 0U);
  if (status.ok()) *seen = found;
  return status;
}

Result<PinnedHostRange> CudaContext::pinned_range(const void* address) {
  if (!library_->has<&Functions::pointer_attribute>())
    return Status(EOPNOTSUPP, "this driver does not tell what is pinned");
  const auto at = reinterpret_cast<CuAddress>(address);
  CuAddress start = 0;
  std::size_t bytes = 0;
  Status status = call<&Functions::pointer_attribute>("cuPointerGetAttribute", Purpose::kHost, &start,
                                                      int{kCuPointerRangeStart}, at);
  if (!status.ok()) return status;
  status = call<&Functions::pointer_attribute>("cuPointerGetAttribute", Purpose::kHost, &bytes,
                                               int{kCuPointerRangeBytes}, at);
  if (!status.ok()) return status;
  return PinnedHostRange{static_cast<std::uintptr_t>(start), static_cast<std::uintptr_t>(start) + bytes};
}

bool CudaContext::same_vendor(const gpu::Context& other) const {
  return dynamic_cast<const CudaContext*>(&other) != nullptr;
}

Result<bool> CudaContext::reaches(gpu::Context& peer) {
  int reachable = 0;
  Status status = call<&Functions::device_can_access_peer>("cuDeviceCanAccessPeer", Purpose::kHost, &reachable, device_,
                                                           static_cast<CudaContext&>(peer).device_);
  if (!status.ok()) return status;
  return reachable != 0;
}

Status CudaContext::enable_peer(gpu::Context& peer) {
  const CuResult code = library_->call<&Functions::context_enable_peer>(static_cast<CudaContext&>(peer).context_, 0U);
  if (code == kCuPeerAccessAlreadyEnabled) return {};
  return check(code, "cuCtxEnablePeerAccess", Purpose::kMemory);
}

}  // namespace gpufs::cuda
