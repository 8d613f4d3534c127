#include "drivers/cuda/cuda_context.h"

#include <cerrno>

namespace gpufs::cuda {

using gpu::Purpose;
using gpu::StreamHandle;

Result<std::shared_ptr<CudaContext>> CudaContext::open(const std::shared_ptr<const Library>& library, int index,
                                                       const DriverOptions& options) {
  CuDevice device = 0;
  const api::Code code = library->call<&Functions::device_get>(&device, index);
  if (code != api::kSuccess) {
    return Status{ENODEV, "gpu " + std::to_string(index) + ": cuDeviceGet: " + library->describe(code), code};
  }
  std::shared_ptr<CudaContext> context(new CudaContext(library, device, options.memory_bytes));
  if (Status status = context->retain(index); !status.ok()) return status;
  return context;
}

Status CudaContext::retain(int index) {
  Status status = describe(index);
  if (!status.ok()) return status;
  read_only_pinning_ = attribute(kCuAttributeReadOnlyHostRegister);
  status = call<&Functions::primary_context_retain>(Purpose::kHost, &context_, device_);
  if (!status.ok()) {
    context_ = nullptr;
    return status;
  }
  return choose_memory(library_->has_virtual_memory() && attribute(kCuAttributeVirtualMemory),
                       attribute(kCuAttributeExportDescriptor), attribute(kCuAttributeDirectRdmaWithVirtualMemory));
}

CudaContext::~CudaContext() {
  if (context_ == nullptr) return;
  give_up_pools();
  library_->call<&Functions::primary_context_release>(device_);
}

Result<bool> CudaContext::make_current(std::uint64_t* /*before*/) {
  CuContext current = nullptr;
  Status status = call<&Functions::context_get>(Purpose::kHost, &current);
  if (!status.ok()) return status;
  if (current == context_) return false;
  status = call<&Functions::context_push>(Purpose::kHost, context_);
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
  Status status = call<&Functions::context_get>(Purpose::kHost, &current);
  if (!status.ok() || current == context_) return status;
  return call<&Functions::context_set>(Purpose::kHost, context_);
}

Status CudaContext::copy_to_peer(gpu::Context& peer, DeviceAddress destination, DeviceAddress source, std::size_t bytes,
                                 StreamHandle stream) {
  return call<&Functions::copy_to_peer>(Purpose::kMemory, destination, static_cast<CudaContext&>(peer).context_, source,
                                        context_, bytes, gpu::as<api::Stream>(stream));
}

Status CudaContext::wait_for_value(StreamHandle stream, DeviceAddress cell, std::uint32_t value) {
  if (!library_->has<&Functions::stream_wait_value>()) {
    return lacking("has no streams that wait for a value", gpu::kSymbol<&Functions::stream_wait_value>);
  }
  return call<&Functions::stream_wait_value>(Purpose::kMemory, gpu::as<api::Stream>(stream), cell, value,
                                             unsigned{api::kWaitValueNotLess});
}

Status CudaContext::check_stream(StreamHandle stream, bool certain) {
  CuContext owner = nullptr;
  if (reinterpret_cast<std::uintptr_t>(stream) <= api::kLastDefaultStream) {
    if (certain) return {};
    // Any other call would tell the device that it was made with.
    Status status = call<&Functions::context_get>(Purpose::kHost, &owner);
    if (!status.ok()) return status;
    if (owner == nullptr) return {EINVAL, "a default stream, and no CUDA device is current: say which device it is"};
  } else if (library_->has<&Functions::stream_context>()) {
    const gpu::Current current(*this);
    if (!current.status().ok()) return current.status();
    const api::Code code = library_->call<&Functions::stream_context>(gpu::as<api::Stream>(stream), &owner);
    if (code != api::kSuccess) return {EINVAL, "this is no CUDA stream: " + library_->describe(code), code};
  } else if (certain) {
    return {};
  } else {
    return {EINVAL, "this NVIDIA driver does not tell whose a stream is: say which device it is"};
  }
  return owner == context_ ? Status{} : Status{EXDEV, "the stream is not one of " + name()};
}

bool CudaContext::holds(DeviceAddress address) {
  if (!library_->has<&Functions::pointer_attribute>()) return false;
  unsigned kind = 0;
  unsigned managed = 0;  // a byte of it is written
  int ordinal = -1;
  const auto ask = [&](void* answer, int attribute) {
    return library_->call<&Functions::pointer_attribute>(answer, attribute, address) == api::kSuccess;
  };
  return ask(&kind, kCuPointerMemoryType) && kind == api::kMemoryTypeDevice && ask(&managed, kCuPointerIsManaged) &&
         managed == 0 && ask(&ordinal, kCuPointerDeviceOrdinal) && ordinal == info_.index;
}

Status CudaContext::pin_read_only(const void* address, std::size_t bytes) {
  if (!read_only_pinning_) return {EOPNOTSUPP, "this device cannot pin read-only memory"};
  return call<&Functions::host_register>(Purpose::kHost, const_cast<void*>(address), bytes,
                                         unsigned{api::kHostRegisterPortable} | kCuHostRegisterReadOnly);
}

Status CudaContext::enable_peer(gpu::Context& peer) {
  const api::Code code = library_->call<&Functions::context_enable_peer>(static_cast<CudaContext&>(peer).context_, 0U);
  if (code == api::kPeerAccessAlreadyEnabled) return {};
  return check(code, gpu::kSymbol<&Functions::context_enable_peer>, Purpose::kMemory);
}

}  // namespace gpufs::cuda
