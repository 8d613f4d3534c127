// Streams and events of a CUDA device.
// Owned by whoever created them (the device's pools); they keep the device's context alive.
// Stream: one thread at a time; Event: any thread may query and wait. Neither needs a bound thread.
#pragma once

#include <memory>

#include "drivers/cuda/cuda_context.h"
#include "drivers/driver.h"

namespace gpufs::cuda {

class CudaEvent final : public Event {
 public:
  static Result<std::unique_ptr<Event>> create(std::shared_ptr<Context> context);
  ~CudaEvent() override;
  CudaEvent(const CudaEvent&) = delete;
  CudaEvent& operator=(const CudaEvent&) = delete;
  Result<bool> query() override;
  Status synchronize() override;
  [[nodiscard]] CuEvent handle() const { return event_; }

 private:
  CudaEvent(std::shared_ptr<Context> context, CuEvent event) : context_(std::move(context)), event_(event) {}
  const std::shared_ptr<Context> context_;
  const CuEvent event_;
};

class CudaStream final : public Stream {
 public:
  static Result<std::unique_ptr<Stream>> create(std::shared_ptr<Context> context);
  ~CudaStream() override;
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  Status copy_to_device(DeviceAddress destination, const void* source, std::size_t bytes) override;
  Status copy_to_host(void* destination, DeviceAddress source, std::size_t bytes) override;
  Status copy_on_device(DeviceAddress destination, DeviceAddress source, std::size_t bytes) override;
  Status fill_zero(DeviceAddress destination, std::size_t bytes) override;
  Status record(Event& event) override;
  Status wait(Event& event) override;
  Status synchronize() override;

 private:
  CudaStream(std::shared_ptr<Context> context, CuStream stream) : context_(std::move(context)), stream_(stream) {}
  template <auto Function, typename... Arguments>
  Status queue(const char* name, Arguments... arguments);

  const std::shared_ptr<Context> context_;
  const CuStream stream_;
};

}  // namespace gpufs::cuda
