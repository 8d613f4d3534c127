// Physical memory of another program, mapped by a descriptor that the program has exported.
// Ownership and threads: as ForeignMapping.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "base/status.h"
#include "drivers/driver.h"
#include "drivers/gpu/gpu_device.h"

namespace gpufs::gpu {

class DescriptorMemory : public ForeignMapping {
 public:
  // EINVAL: the descriptor is not of such memory, or of memory of another size.
  static Result<std::unique_ptr<ForeignMapping>> open(GpuDevice& device, const ForeignMemory& memory);

  [[nodiscard]] DeviceAddress address() const override { return range_->base() + offset_; }

 private:
  DescriptorMemory(std::unique_ptr<ImportedRange> range, std::uint64_t offset)
      : range_(std::move(range)), offset_(offset) {}

  const std::unique_ptr<ImportedRange> range_;
  const std::uint64_t offset_;
};

}  // namespace gpufs::gpu
