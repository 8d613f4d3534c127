// One CUDA device behind the driver interface.
// Owned by the CUDA driver object.
// Any thread may call any function: each makes the device current for itself, and puts back what was current.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <set>

#include "drivers/cuda/cuda_context.h"
#include "drivers/driver.h"

namespace gpufs::cuda {

class CudaDevice final : public Device {
 public:
  explicit CudaDevice(std::shared_ptr<Context> context) : context_(std::move(context)) {}

  [[nodiscard]] const DeviceInfo& info() const override { return context_->info(); }
  Result<MemoryInfo> memory() override { return context_->memory(); }
  Status bind_thread() override;
  Status health() override { return context_->health(); }

  Result<std::unique_ptr<DeviceMemory>> create_memory() override;
  Result<std::unique_ptr<Stream>> create_stream() override;
  Result<std::unique_ptr<Event>> create_event() override;

  Status copy_in(DeviceAddress destination, const void* source, std::size_t bytes) override;
  Status copy_out(void* destination, DeviceAddress source, std::size_t bytes) override;
  Status copy_within(DeviceAddress destination, DeviceAddress source, std::size_t bytes) override;
  Status zero(DeviceAddress destination, std::size_t bytes) override;
  Status copy_to_peer(Device& peer, DeviceAddress destination, DeviceAddress source, std::size_t bytes) override;

  Status pin(void* address, std::size_t bytes) override;
  Status unpin(void* address) override;
  Status pin_read_only(const void* address, std::size_t bytes) override;

  [[nodiscard]] const std::shared_ptr<Context>& context() const { return context_; }

 private:
  template <auto Function, typename... Arguments>
  Status run(const char* name, Arguments... arguments);
  Status host_register(void* address, std::size_t bytes, unsigned flags);
  // Lets this device reach plain allocations of the peer (virtual memory is opened to peers where it is mapped).
  Status enable_peer(const Context& peer);

  const std::shared_ptr<Context> context_;
  std::mutex peers_mutex_;  // guards enabled_peers_; a leaf
  std::set<CuDevice> enabled_peers_;
};

}  // namespace gpufs::cuda
