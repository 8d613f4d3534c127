#include "drivers/gpu/stream.h"

#include <cerrno>

namespace gpufs::gpu {

Result<std::unique_ptr<Event>> GpuEvent::create(std::shared_ptr<GpuDevice> device) {
  const Current current(*device);
  TRY(current.status());
  api::Event event = nullptr;
  // Events without timing are cheap.
  TRY(device->call(device->functions().event_create, &event, api::kEventDisableTiming));
  return std::unique_ptr<Event>(new GpuEvent(std::move(device), event));
}

GpuEvent::~GpuEvent() {
  const Current current(*device_);
  device_->functions().event_destroy(event_);
}

Result<bool> GpuEvent::query() {
  const Current current(*device_);
  TRY(current.status());
  const auto& query_event = device_->functions().event_query;
  const api::Code code = query_event(event_);
  if (code == api::kNotReady) return false;
  TRY(device_->check(query_event.symbol(), code));
  return true;
}

Result<std::unique_ptr<Stream>> GpuStream::create(std::shared_ptr<GpuDevice> device) {
  const Current current(*device);
  TRY(current.status());
  api::Stream stream = nullptr;
  TRY(device->call(device->functions().stream_create, &stream, api::kStreamNonBlocking));
  return std::unique_ptr<Stream>(new GpuStream(std::move(device), stream, /*owned=*/true));
}

GpuStream::~GpuStream() {
  if (!owned_) return;
  const Current current(*device_);
  // A failure of the work was reported by its event; here only its end matters.
  static_cast<void>(device_->call(device_->functions().stream_synchronize, stream_));
  device_->functions().stream_destroy(stream_);
}

template <typename... Parameters>
Status GpuStream::queue(const Function<Parameters...>& function, std::type_identity_t<Parameters>... arguments) {
  const Current current(*device_);
  TRY(current.status());
  return device_->call(function, arguments...);
}

Status GpuStream::copy(CopyDirection direction, std::span<const HostCopy> copies) {
  const Current current(*device_);
  TRY(current.status());
  if (copies.size() > 1 && device_->queue_batch(direction, copies, stream_).ok()) return {};
  // Where the batch was refused, these say what is wrong, or do it. Those that were queued are only repeated.
  for (const HostCopy& copy : copies) {
    if (copy.bytes == 0) continue;
    TRY(direction == CopyDirection::kToDevice
            ? device_->call(device_->functions().copy_to_device, copy.device, copy.host, copy.bytes, stream_)
            : device_->call(device_->functions().copy_to_host, copy.host, copy.device, copy.bytes, stream_));
  }
  return {};
}

Status GpuStream::fill_zero(DeviceAddress destination, std::size_t bytes) {
  if (bytes == 0) return {};
  return queue(device_->functions().fill, destination, 0, bytes, stream_);
}

Status GpuStream::record(Event& event) {
  return queue(device_->functions().event_record, static_cast<GpuEvent&>(event).handle(), stream_);
}

Status GpuStream::check_capture() {
  const Functions& functions = device_->functions();
  if (!functions.stream_capturing) return {};
  const Current current(*device_);
  TRY(current.status());
  int capturing = 0;
  const api::Code code = functions.stream_capturing(stream_, &capturing);
  if (code == api::kCaptureImplicit || (code == api::kSuccess && capturing != 0)) {
    return {EBUSY, "the stream is being captured into a graph, which could not repeat the operation"};
  }
  return {};
}

Status GpuStream::call(HostFunction function, void* argument) {
  const Functions& functions = device_->functions();
  if (!functions.launch_host) {
    return device_->lacks("cannot call the host from a stream", functions.launch_host.symbol());
  }
  TRY(check_capture());
  return queue(functions.launch_host, stream_, function, argument);
}

Status GpuStream::wait_for_value(DeviceAddress cell, std::uint32_t value) {
  const Current current(*device_);
  TRY(current.status());
  return device_->wait_for_value(stream_, cell, value);
}

// Also on a device out of service: work that was queued before may still be in progress, and the caller is about to
// release the memory that it uses.
Status GpuStream::synchronize() {
  const Current current(*device_);
  Status ended = device_->call(device_->functions().stream_synchronize, stream_);
  return current.status().ok() ? ended : current.status();
}

}  // namespace gpufs::gpu
