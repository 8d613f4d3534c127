// A buffer's memory on devices without virtual memory management: one allocation, copied into a larger one when a
// larger range is reserved. Released granules are reused, but return to the device only with the whole allocation.
// Ownership: the Buffer's. One thread at a time; any thread may release the ranges at any time.
#pragma once

#include <memory>
#include <vector>

#include "drivers/driver.h"
#include "drivers/gpu/gpu_device.h"

namespace gpufs::gpu {

class PlainRange final : public AddressRange {
 public:
  // Takes over an allocation.
  PlainRange(std::shared_ptr<GpuDevice> device, DeviceAddress base, std::uint64_t bytes)
      : AddressRange(base, bytes), device_(std::move(device)) {}
  ~PlainRange() override { device_->return_plain(base(), bytes()); }

 private:
  const std::shared_ptr<GpuDevice> device_;
};

class PlainMemory final : public DeviceMemory {
 public:
  explicit PlainMemory(std::shared_ptr<GpuDevice> device) : device_(std::move(device)) {}

  Result<std::shared_ptr<AddressRange>> reserve(std::uint64_t bytes, std::span<const Extent> populated) override;
  Status populate_all(std::span<const Extent> spans, Wait /*wait*/) override {
    return device_->zero_spans(current_->base(), spans);
  }
  void release_all(std::span<const Extent> /*spans*/) override {}
  Result<std::vector<ExportedMemory>> export_memory(std::uint64_t /*from*/, std::uint64_t /*end*/,
                                                    std::size_t /*capacity*/, bool /*writable*/) override {
    return device_->check_sharing();
  }

 private:
  const std::shared_ptr<GpuDevice> device_;
  std::shared_ptr<PlainRange> current_;
};

}  // namespace gpufs::gpu
