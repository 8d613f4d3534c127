#include "drivers/gpu/stream.h"

#include <utility>

namespace gpufs::gpu {
namespace {

// Calls with the device current; its health or why it could not be made current otherwise.
template <typename Call>
Status with_device(Context& context, Call call) {
  const Current current(context);
  if (!current.status().ok()) return current.status();
  return call();
}

}  // namespace

Result<std::unique_ptr<Event>> GpuEvent::create(std::shared_ptr<Context> context) {
  EventHandle event = nullptr;
  Status status = with_device(*context, [&] { return context->create_event(&event); });
  if (!status.ok()) return status;
  return std::unique_ptr<Event>(new GpuEvent(std::move(context), event));
}

GpuEvent::~GpuEvent() {
  const Current current(*context_);
  context_->destroy_event(event_);
}

Result<bool> GpuEvent::query() {
  const Current current(*context_);
  if (!current.status().ok()) return current.status();
  return context_->query_event(event_);
}

Status GpuEvent::synchronize() {
  return with_device(*context_, [&] { return context_->synchronize_event(event_); });
}

Result<std::unique_ptr<Stream>> GpuStream::create(std::shared_ptr<Context> context) {
  StreamHandle stream = nullptr;
  Status status = with_device(*context, [&] { return context->create_stream(&stream); });
  if (!status.ok()) return status;
  return std::unique_ptr<Stream>(new GpuStream(std::move(context), stream, /*owned=*/true));
}

Result<std::unique_ptr<Stream>> GpuStream::adopt(std::shared_ptr<Context> context, NativeStream native, bool certain) {
  const auto stream = reinterpret_cast<StreamHandle>(native);
  if (Status status = context->health(); !status.ok()) return status;
  if (Status status = context->check_stream(stream, certain); !status.ok()) return status;
  return std::unique_ptr<Stream>(new GpuStream(std::move(context), stream, /*owned=*/false));
}

GpuStream::~GpuStream() {
  if (!owned_) return;
  const Current current(*context_);
  // A failure of the work was reported by its event; here only its end matters.
  static_cast<void>(context_->synchronize_stream(stream_));
  context_->destroy_stream(stream_);
}

Status GpuStream::copy_to_device(DeviceAddress destination, const void* source, std::size_t bytes) {
  if (bytes == 0) return {};
  return with_device(*context_, [&] { return context_->copy_in(destination, source, bytes, stream_); });
}

Status GpuStream::copy_to_host(void* destination, DeviceAddress source, std::size_t bytes) {
  if (bytes == 0) return {};
  return with_device(*context_, [&] { return context_->copy_out(destination, source, bytes, stream_); });
}

Status GpuStream::copy_on_device(DeviceAddress destination, DeviceAddress source, std::size_t bytes) {
  if (bytes == 0) return {};
  return with_device(*context_, [&] { return context_->copy_within(destination, source, bytes, stream_); });
}

Status GpuStream::fill_zero(DeviceAddress destination, std::size_t bytes) {
  if (bytes == 0) return {};
  return with_device(*context_, [&] { return context_->fill_zero(destination, bytes, stream_); });
}

Status GpuStream::record(Event& event) {
  return with_device(*context_,
                     [&] { return context_->record_event(static_cast<GpuEvent&>(event).handle(), stream_); });
}

Status GpuStream::wait(Event& event) {
  return with_device(*context_,
                     [&] { return context_->wait_for_event(stream_, static_cast<GpuEvent&>(event).handle()); });
}

Status GpuStream::call(HostFunction function, void* argument) {
  return with_device(*context_, [&] { return context_->call_host(stream_, function, argument); });
}

Status GpuStream::wait_for_value(DeviceAddress cell, std::uint32_t value) {
  return with_device(*context_, [&] { return context_->wait_for_value(stream_, cell, value); });
}

// On a device out of service as well: what was queued before may still be under way, and whoever waits for its end is
// about to give the memory away.
Status GpuStream::synchronize() {
  const Current current(*context_);
  const Status ended = context_->synchronize_stream(stream_);
  return current.status().ok() ? ended : current.status();
}

}  // namespace gpufs::gpu
