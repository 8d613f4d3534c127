// Streams and events of a GPU.
// Owned by whoever created them (the device's pools); they keep the device's context alive.
// Stream: one thread at a time; Event: any thread may query and wait. Neither needs a bound thread.
#pragma once

#include <memory>

#include "drivers/driver.h"
#include "drivers/gpu/context.h"

namespace gpufs::gpu {

class GpuEvent final : public Event {
 public:
  static Result<std::unique_ptr<Event>> create(std::shared_ptr<Context> context);
  ~GpuEvent() override;
  GpuEvent(const GpuEvent&) = delete;
  GpuEvent& operator=(const GpuEvent&) = delete;
  Result<bool> query() override;
  Status synchronize() override;
  [[nodiscard]] EventHandle handle() const { return event_; }

 private:
  GpuEvent(std::shared_ptr<Context> context, EventHandle event) : context_(std::move(context)), event_(event) {}
  const std::shared_ptr<Context> context_;
  EventHandle event_;  // constant
};

class GpuStream final : public Stream {
 public:
  static Result<std::unique_ptr<Stream>> create(std::shared_ptr<Context> context);
  // Another name for a stream of the program's.
  static Result<std::unique_ptr<Stream>> adopt(std::shared_ptr<Context> context, NativeStream native, bool certain);
  ~GpuStream() override;
  GpuStream(const GpuStream&) = delete;
  GpuStream& operator=(const GpuStream&) = delete;

  Status copy_to_device(DeviceAddress destination, const void* source, std::size_t bytes) override;
  Status copy_to_host(void* destination, DeviceAddress source, std::size_t bytes) override;
  Status copy_on_device(DeviceAddress destination, DeviceAddress source, std::size_t bytes) override;
  Status fill_zero(DeviceAddress destination, std::size_t bytes) override;
  Status record(Event& event) override;
  Status wait(Event& event) override;
  Status call(HostFunction function, void* argument) override;
  Status wait_for_value(DeviceAddress cell, std::uint32_t value) override;
  [[nodiscard]] NativeStream native() const override { return reinterpret_cast<NativeStream>(stream_); }
  Status synchronize() override;

 private:
  GpuStream(std::shared_ptr<Context> context, StreamHandle stream, bool owned)
      : context_(std::move(context)), stream_(stream), owned_(owned) {}

  const std::shared_ptr<Context> context_;
  StreamHandle stream_;  // constant
  const bool owned_;     // destroyed with this
};

}  // namespace gpufs::gpu
