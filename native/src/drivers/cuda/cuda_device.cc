#include "drivers/cuda/cuda_device.h"

#include <cerrno>
#include <string>

#include "drivers/cuda/cuda_plain_memory.h"
#include "drivers/cuda/cuda_stream.h"
#include "drivers/cuda/cuda_virtual_memory.h"

namespace gpufs::cuda {

Status CudaDevice::bind_thread() {
  const Library& library = context_->library();
  CuContext current = nullptr;
  Status status = context_->check(library.call<&Functions::context_get>(&current), "cuCtxGetCurrent");
  if (!status.ok() || current == context_->handle()) return status;
  return context_->check(library.call<&Functions::context_set>(context_->handle()), "cuCtxSetCurrent");
}

Result<std::unique_ptr<DeviceMemory>> CudaDevice::create_memory() {
  if (Status status = health(); !status.ok()) return status;
  if (!context_->virtual_memory()) return std::unique_ptr<DeviceMemory>(std::make_unique<PlainMemory>(context_));
  return std::unique_ptr<DeviceMemory>(std::make_unique<VirtualMemory>(context_));
}

Result<std::unique_ptr<Stream>> CudaDevice::create_stream() { return CudaStream::create(context_); }

Result<std::unique_ptr<Event>> CudaDevice::create_event() { return CudaEvent::create(context_); }

template <auto Function, typename... Arguments>
Status CudaDevice::run(const char* name, Arguments... arguments) {
  SynchronousWork work(*context_);
  if (!work.status().ok()) return work.status();
  Status status = context_->check(context_->library().call<Function>(arguments..., work.get()), name);
  return status.ok() ? work.finish() : status;
}

Status CudaDevice::copy_in(DeviceAddress destination, const void* source, std::size_t bytes) {
  if (bytes == 0) return health();
  return run<&Functions::copy_to_device>("cuMemcpyHtoDAsync", destination, source, bytes);
}

Status CudaDevice::copy_out(void* destination, DeviceAddress source, std::size_t bytes) {
  if (bytes == 0) return health();
  return run<&Functions::copy_to_host>("cuMemcpyDtoHAsync", destination, source, bytes);
}

Status CudaDevice::copy_within(DeviceAddress destination, DeviceAddress source, std::size_t bytes) {
  if (bytes == 0) return health();
  return run<&Functions::copy_on_device>("cuMemcpyDtoDAsync", destination, source, bytes);
}

Status CudaDevice::zero(DeviceAddress destination, std::size_t bytes) {
  if (bytes == 0) return health();
  return run<&Functions::fill>("cuMemsetD8Async", destination, static_cast<unsigned char>(0), bytes);
}

Status CudaDevice::copy_to_peer(Device& peer, DeviceAddress destination, DeviceAddress source, std::size_t bytes) {
  auto* other = dynamic_cast<CudaDevice*>(&peer);
  if (other == nullptr) return {EOPNOTSUPP, "the other device belongs to another driver"};
  if (other->context_ == context_) return copy_within(destination, source, bytes);
  const Context& remote = *other->context_;
  if (Status status = other->health(); !status.ok()) return status;
  int reachable = 0;
  Status status = context_->check(
      context_->library().call<&Functions::device_can_access_peer>(&reachable, context_->device(), remote.device()),
      "cuDeviceCanAccessPeer");
  if (!status.ok()) return status;
  if (reachable == 0) {
    return {EOPNOTSUPP,
            "gpu " + std::to_string(info().index) + " has no direct way to gpu " + std::to_string(remote.info().index)};
  }
  if (!remote.virtual_memory()) {
    if (status = enable_peer(remote); !status.ok()) return status;
  }
  if (bytes == 0) return health();
  return run<&Functions::copy_to_peer>("cuMemcpyPeerAsync", destination, remote.handle(), source, context_->handle(),
                                       bytes);
}

Status CudaDevice::enable_peer(const Context& peer) {
  {
    const std::scoped_lock lock(peers_mutex_);
    if (enabled_peers_.contains(peer.device())) return {};
  }
  const Current current(*context_);
  if (!current.status().ok()) return current.status();
  const CuResult code = context_->library().call<&Functions::context_enable_peer>(peer.handle(), 0U);
  if (code != kCuPeerAccessAlreadyEnabled) {
    if (Status status = context_->check(code, "cuCtxEnablePeerAccess"); !status.ok()) return status;
  }
  const std::scoped_lock lock(peers_mutex_);
  enabled_peers_.insert(peer.device());
  return {};
}

Status CudaDevice::host_register(void* address, std::size_t bytes, unsigned flags) {
  const Current current(*context_);
  if (!current.status().ok()) return current.status();
  return context_->check(context_->library().call<&Functions::host_register>(address, bytes, flags),
                         "cuMemHostRegister", Purpose::kHost);
}

Status CudaDevice::pin(void* address, std::size_t bytes) {
  // Portable: pinned for every device of the process, since the bounce pool is shared by them.
  return host_register(address, bytes, kCuHostRegisterPortable);
}

Status CudaDevice::pin_read_only(const void* address, std::size_t bytes) {
  if (!context_->read_only_pinning()) return Device::pin_read_only(address, bytes);
  return host_register(const_cast<void*>(address), bytes, kCuHostRegisterPortable | kCuHostRegisterReadOnly);
}

Status CudaDevice::unpin(void* address) {
  const Current current(*context_);
  if (!current.status().ok()) return current.status();
  return context_->check(context_->library().call<&Functions::host_unregister>(address), "cuMemHostUnregister",
                         Purpose::kHost);
}

}  // namespace gpufs::cuda
