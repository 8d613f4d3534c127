// Streams and events of a GPU.
// Ownership: the caller's that created them (the device's pools); they keep the device open.
// Stream: one thread at a time. Event: thread-safe.
#pragma once

#include <memory>
#include <span>
#include <type_traits>
#include <utility>

#include "drivers/driver.h"
#include "drivers/gpu/gpu_device.h"

namespace gpufs::gpu {

class GpuEvent final : public Event {
 public:
  static Result<std::unique_ptr<Event>> create(std::shared_ptr<GpuDevice> device);
  ~GpuEvent() override;
  GpuEvent(const GpuEvent&) = delete;
  GpuEvent& operator=(const GpuEvent&) = delete;
  Result<bool> query() override;
  [[nodiscard]] api::Event handle() const { return event_; }

 private:
  GpuEvent(std::shared_ptr<GpuDevice> device, api::Event event) : device_(std::move(device)), event_(event) {}
  const std::shared_ptr<GpuDevice> device_;
  const api::Event event_;
};

class GpuStream final : public Stream {
 public:
  static Result<std::unique_ptr<Stream>> create(std::shared_ptr<GpuDevice> device);
  // owned: it ends with the object.
  GpuStream(std::shared_ptr<GpuDevice> device, api::Stream stream, bool owned)
      : device_(std::move(device)), stream_(stream), owned_(owned) {}
  ~GpuStream() override;
  GpuStream(const GpuStream&) = delete;
  GpuStream& operator=(const GpuStream&) = delete;

  Status copy(CopyDirection direction, std::span<const HostCopy> copies) override;
  Status fill_zero(DeviceAddress destination, std::size_t bytes) override;
  Status record(Event& event) override;
  Status check_capture() override;
  Status call(HostFunction function, void* argument) override;
  Status wait_for_value(DeviceAddress cell, std::uint32_t value) override;
  [[nodiscard]] NativeStream native() const override { return reinterpret_cast<NativeStream>(stream_); }
  Status synchronize() override;

 private:
  // Calls a function of the vendor's with the device current.
  template <typename... Parameters>
  Status queue(const Function<Parameters...>& function, std::type_identity_t<Parameters>... arguments);

  const std::shared_ptr<GpuDevice> device_;
  const api::Stream stream_;
  const bool owned_;
};

}  // namespace gpufs::gpu
