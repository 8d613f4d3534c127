#include "drivers/gpu/gpu_device.h"

#include <cerrno>

#include "drivers/gpu/plain_memory.h"
#include "drivers/gpu/stream.h"
#include "drivers/gpu/virtual_memory.h"

namespace gpufs::gpu {

Result<std::unique_ptr<DeviceMemory>> GpuDevice::create_memory() {
  if (Status status = health(); !status.ok()) return status;
  if (!context_->virtual_memory()) return std::unique_ptr<DeviceMemory>(std::make_unique<PlainMemory>(context_));
  return std::unique_ptr<DeviceMemory>(std::make_unique<VirtualMemory>(context_));
}

Result<std::unique_ptr<Stream>> GpuDevice::create_stream() { return GpuStream::create(context_); }

Result<std::unique_ptr<Event>> GpuDevice::create_event() { return GpuEvent::create(context_); }

Result<std::unique_ptr<Stream>> GpuDevice::adopt_stream(NativeStream native, bool certain) {
  return GpuStream::adopt(context_, native, certain);
}

template <typename Queue>
Status GpuDevice::run(Queue queue) {
  SynchronousWork work(*context_);
  if (!work.status().ok()) return work.status();
  Status status = queue(work.get());
  return status.ok() ? work.finish() : status;
}

template <typename Call>
Status GpuDevice::with_device(Call call) {
  const Current current(*context_);
  if (!current.status().ok()) return current.status();
  return call();
}

bool GpuDevice::holds(DeviceAddress address) {
  const Current current(*context_);
  return current.status().ok() && context_->holds(address);
}

Status GpuDevice::copy_in(DeviceAddress destination, const void* source, std::size_t bytes) {
  if (bytes == 0) return health();
  return run([&](StreamHandle stream) { return context_->copy_in(destination, source, bytes, stream); });
}

Status GpuDevice::copy_out(void* destination, DeviceAddress source, std::size_t bytes) {
  if (bytes == 0) return health();
  return run([&](StreamHandle stream) { return context_->copy_out(destination, source, bytes, stream); });
}

Status GpuDevice::copy_within(DeviceAddress destination, DeviceAddress source, std::size_t bytes) {
  if (bytes == 0) return health();
  return run([&](StreamHandle stream) { return context_->copy_within(destination, source, bytes, stream); });
}

Status GpuDevice::zero(DeviceAddress destination, std::size_t bytes) {
  if (bytes == 0) return health();
  return run([&](StreamHandle stream) { return context_->fill_zero(destination, bytes, stream); });
}

Status GpuDevice::copy_to_peer(Device& peer, DeviceAddress destination, DeviceAddress source, std::size_t bytes) {
  auto* other = dynamic_cast<GpuDevice*>(&peer);
  if (other == nullptr || !context_->same_vendor(*other->context_)) {
    return {EOPNOTSUPP, "the other device belongs to another driver"};
  }
  if (other->context_ == context_) return copy_within(destination, source, bytes);
  Context& remote = *other->context_;
  if (Status status = other->health(); !status.ok()) return status;
  Result<bool> reachable = context_->reaches(remote);
  if (!reachable.ok()) return reachable.status();
  if (!reachable.value()) {
    return {EOPNOTSUPP,
            "gpu " + std::to_string(info().index) + " has no direct way to gpu " + std::to_string(remote.info().index)};
  }
  // Virtual memory is opened to peers where it is mapped.
  if (!remote.virtual_memory()) {
    if (Status status = enable_peer(remote); !status.ok()) return status;
  }
  if (bytes == 0) return health();
  return run([&](StreamHandle stream) { return context_->copy_to_peer(remote, destination, source, bytes, stream); });
}

Status GpuDevice::enable_peer(Context& peer) {
  {
    const std::scoped_lock lock(peers_mutex_);
    if (enabled_peers_.contains(peer.info().index)) return {};
  }
  Status status = with_device([&] { return context_->enable_peer(peer); });
  if (!status.ok()) return status;
  const std::scoped_lock lock(peers_mutex_);
  enabled_peers_.insert(peer.info().index);
  return {};
}

Status GpuDevice::pin(void* address, std::size_t bytes) {
  return with_device([&] { return context_->pin(address, bytes); });
}

Status GpuDevice::pin_read_only(const void* address, std::size_t bytes) {
  return with_device([&] { return context_->pin_read_only(address, bytes); });
}

Status GpuDevice::unpin(void* address) {
  return with_device([&] { return context_->unpin(address); });
}

Result<DeviceAddress> GpuDevice::address_of_pinned(void* address) {
  DeviceAddress seen = 0;
  Status status = with_device([&] { return context_->address_of_pinned(address, &seen); });
  if (!status.ok()) return status;
  return seen;
}

Result<PinnedHostRange> GpuDevice::pinned_range(const void* address) {
  const Current current(*context_);
  if (!current.status().ok()) return current.status();
  return context_->pinned_range(address);
}

GpuDriver::GpuDriver(std::string name, std::vector<std::shared_ptr<Context>> contexts) : name_(std::move(name)) {
  devices_.reserve(contexts.size());
  for (auto& context : contexts) devices_.push_back(std::make_unique<GpuDevice>(std::move(context)));
}

Result<int> wanted_devices(const std::string& driver, const DriverOptions& options, int found) {
  if (options.devices < 0) return Status{EINVAL, driver + ": the number of devices cannot be negative"};
  if (options.devices > found) {
    return Status{ENODEV, driver + ": " + std::to_string(options.devices) + " devices asked for, but there are " +
                              std::to_string(found)};
  }
  return options.devices != 0 ? options.devices : found;
}

}  // namespace gpufs::gpu
