#include "drivers/cuda/cuda_stream.h"

namespace gpufs::cuda {

Result<std::unique_ptr<Event>> CudaEvent::create(std::shared_ptr<Context> context) {
  const Current current(*context);
  if (!current.status().ok()) return current.status();
  CuEvent event = nullptr;
  // Without timing events are cheap. Waiting spins: where the device's interrupts pass through a virtual machine, a
  // thread that sleeps wakes 170-470 us late, and a chunk of 8 MiB takes 160 us.
  Status status = context->check(
      context->library().call<&Functions::event_create>(&event, unsigned{kCuEventDisableTiming}), "cuEventCreate");
  if (!status.ok()) return status;
  return std::unique_ptr<Event>(new CudaEvent(std::move(context), event));
}

CudaEvent::~CudaEvent() {
  const Current current(*context_);
  context_->library().call<&Functions::event_destroy>(event_);
}

Result<bool> CudaEvent::query() {
  const Current current(*context_);
  if (!current.status().ok()) return current.status();
  const CuResult code = context_->library().call<&Functions::event_query>(event_);
  if (code == kCuNotReady) return false;
  if (Status status = context_->check(code, "cuEventQuery"); !status.ok()) return status;
  return true;
}

Status CudaEvent::synchronize() {
  const Current current(*context_);
  if (!current.status().ok()) return current.status();
  return context_->check(context_->library().call<&Functions::event_synchronize>(event_), "cuEventSynchronize");
}

Result<std::unique_ptr<Stream>> CudaStream::create(std::shared_ptr<Context> context) {
  const Current current(*context);
  if (!current.status().ok()) return current.status();
  CuStream stream = nullptr;
  Status status = context->check(
      context->library().call<&Functions::stream_create>(&stream, unsigned{kCuStreamNonBlocking}), "cuStreamCreate");
  if (!status.ok()) return status;
  return std::unique_ptr<Stream>(new CudaStream(std::move(context), stream));
}

CudaStream::~CudaStream() {
  const Current current(*context_);
  // A failure of the work was reported by its event; here only its end matters.
  context_->library().call<&Functions::stream_synchronize>(stream_);
  context_->library().call<&Functions::stream_destroy>(stream_);
}

template <auto Function, typename... Arguments>
Status CudaStream::queue(const char* name, Arguments... arguments) {
  const Current current(*context_);
  if (!current.status().ok()) return current.status();
  return context_->check(context_->library().call<Function>(arguments...), name);
}

Status CudaStream::copy_to_device(DeviceAddress destination, const void* source, std::size_t bytes) {
  if (bytes == 0) return {};
  return queue<&Functions::copy_to_device>("cuMemcpyHtoDAsync", destination, source, bytes, stream_);
}

Status CudaStream::copy_to_host(void* destination, DeviceAddress source, std::size_t bytes) {
  if (bytes == 0) return {};
  return queue<&Functions::copy_to_host>("cuMemcpyDtoHAsync", destination, source, bytes, stream_);
}

Status CudaStream::copy_on_device(DeviceAddress destination, DeviceAddress source, std::size_t bytes) {
  if (bytes == 0) return {};
  return queue<&Functions::copy_on_device>("cuMemcpyDtoDAsync", destination, source, bytes, stream_);
}

Status CudaStream::fill_zero(DeviceAddress destination, std::size_t bytes) {
  if (bytes == 0) return {};
  return queue<&Functions::fill>("cuMemsetD8Async", destination, static_cast<unsigned char>(0), bytes, stream_);
}

Status CudaStream::record(Event& event) {
  return queue<&Functions::event_record>("cuEventRecord", static_cast<CudaEvent&>(event).handle(), stream_);
}

Status CudaStream::wait(Event& event) {
  return queue<&Functions::stream_wait_event>("cuStreamWaitEvent", stream_, static_cast<CudaEvent&>(event).handle(),
                                              0U);
}

Status CudaStream::synchronize() { return queue<&Functions::stream_synchronize>("cuStreamSynchronize", stream_); }

}  // namespace gpufs::cuda
