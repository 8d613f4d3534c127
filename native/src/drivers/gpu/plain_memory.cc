// See plain_memory().
// Ownership: the Buffer's. One thread at a time; any thread may release the ranges at any time.

#include <memory>
#include <vector>

#include "base/math.h"
#include "drivers/gpu/gpu_device.h"

namespace gpufs::gpu {
namespace {

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

Result<std::shared_ptr<AddressRange>> PlainMemory::reserve(std::uint64_t bytes, std::span<const Extent> populated) {
  SynchronousWork work(*device_);
  TRY(work.status());
  bytes = round_up(bytes, device_->info().granule);
  DeviceAddress base = 0;
  TRY(device_->acquire_plain(bytes, &base));
  const auto range = std::make_shared<PlainRange>(device_, base, bytes);
  for (const Extent& span : populated) {
    TRY(device_->call(device_->functions().copy_on_device, range->base() + span.offset, current_->base() + span.offset,
                      span.bytes, work.get()));
  }
  TRY(work.finish());
  current_ = range;
  return std::shared_ptr<AddressRange>(range);
}

}  // namespace

std::unique_ptr<DeviceMemory> plain_memory(std::shared_ptr<GpuDevice> device) {
  return std::make_unique<PlainMemory>(std::move(device));
}

}  // namespace gpufs::gpu
