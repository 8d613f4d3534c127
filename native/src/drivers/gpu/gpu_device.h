// One GPU behind the driver interface, and the driver that has them.
// A device is owned by its driver, the driver by the Engine.
// Any thread may call any function: each makes the device current for itself, and puts back what was current.
#pragma once

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "drivers/driver.h"
#include "drivers/gpu/context.h"

namespace gpufs::gpu {

class GpuDevice final : public Device {
 public:
  explicit GpuDevice(std::shared_ptr<Context> context) : context_(std::move(context)) {}

  [[nodiscard]] const DeviceInfo& info() const override { return context_->info(); }
  Result<MemoryInfo> memory() override { return context_->memory(); }
  Status bind_thread() override { return context_->bind_thread(); }
  Status health() override { return context_->health(); }

  Result<std::unique_ptr<DeviceMemory>> create_memory() override;
  Result<std::unique_ptr<Stream>> create_stream() override;
  Result<std::unique_ptr<Event>> create_event() override;
  Result<std::unique_ptr<Stream>> adopt_stream(NativeStream native, bool certain) override;

  Status copy_in(DeviceAddress destination, const void* source, std::size_t bytes) override;
  Status copy_out(void* destination, DeviceAddress source, std::size_t bytes) override;
  Status copy_within(DeviceAddress destination, DeviceAddress source, std::size_t bytes) override;
  Status zero(DeviceAddress destination, std::size_t bytes) override;
  Status copy_to_peer(Device& peer, DeviceAddress destination, DeviceAddress source, std::size_t bytes) override;

  bool holds(DeviceAddress address) override;

  Status pin(void* address, std::size_t bytes) override;
  Status unpin(void* address) override;
  Result<DeviceAddress> address_of_pinned(void* address) override;
  Result<PinnedHostRange> pinned_range(const void* address) override;
  Status pin_read_only(const void* address, std::size_t bytes) override;

 private:
  // Queues with a stream of the context's pool, and waits for it.
  template <typename Queue>
  Status run(Queue queue);
  template <typename Call>
  Status with_device(Call call);
  Status enable_peer(Context& peer);

  const std::shared_ptr<Context> context_;
  std::mutex peers_mutex_;  // guards enabled_peers_; a leaf
  std::set<int> enabled_peers_;
};

// A driver over the contexts of a vendor's devices.
class GpuDriver final : public Driver {
 public:
  GpuDriver(std::string name, std::vector<std::shared_ptr<Context>> contexts);
  [[nodiscard]] const char* name() const override { return name_.c_str(); }
  [[nodiscard]] const std::vector<std::unique_ptr<Device>>& devices() const override { return devices_; }

 private:
  const std::string name_;
  std::vector<std::unique_ptr<Device>> devices_;
};

// How many of the devices that a library shows a driver is to use. EINVAL, ENODEV.
Result<int> wanted_devices(const std::string& driver, const DriverOptions& options, int found);

}  // namespace gpufs::gpu
