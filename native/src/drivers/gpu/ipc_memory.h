// An allocation of another program, opened by the vendor's handle for that (cuIpcOpenMemHandle). The vendor keeps the
// memory while it is open here, also if its program has ended.
// Ownership and threads: as ForeignMapping.
#pragma once

#include <cstdint>
#include <memory>

#include "base/status.h"
#include "drivers/driver.h"
#include "drivers/gpu/gpu_device.h"

namespace gpufs::gpu {

class IpcMemory : public ForeignMapping {
 public:
  // EINVAL: the handle stands for nothing, or for less than the caller says. EXDEV: for memory of another device.
  static Result<std::unique_ptr<ForeignMapping>> open(const std::shared_ptr<GpuDevice>& device,
                                                      const ForeignMemory& memory);
  ~IpcMemory() override;
  IpcMemory(const IpcMemory&) = delete;
  IpcMemory& operator=(const IpcMemory&) = delete;

  [[nodiscard]] DeviceAddress address() const override { return base_ + offset_; }

 private:
  IpcMemory(std::shared_ptr<GpuDevice> device, DeviceAddress base, std::uint64_t offset)
      : device_(std::move(device)), base_(base), offset_(offset) {}

  const std::shared_ptr<GpuDevice> device_;
  const DeviceAddress base_;
  const std::uint64_t offset_;
};

}  // namespace gpufs::gpu
