#include "drivers/gpu/plain_memory.h"

#include "base/math.h"

namespace gpufs::gpu {

Result<std::shared_ptr<PlainRange>> PlainRange::allocate(std::shared_ptr<GpuDevice> device, std::uint64_t bytes) {
  DeviceAddress base = 0;
  TRY(device->acquire_plain(bytes, &base));
  return std::shared_ptr<PlainRange>(new PlainRange(std::move(device), base, bytes));
}

PlainRange::~PlainRange() { device_->return_plain(base(), bytes()); }

Result<std::shared_ptr<AddressRange>> PlainMemory::reserve(std::uint64_t bytes, std::span<const Extent> populated) {
  SynchronousWork work(*device_);
  TRY(work.status());
  const std::shared_ptr<PlainRange> range =
      TRY(PlainRange::allocate(device_, round_up(bytes, device_->info().granule)));
  for (const Extent& span : populated) {
    TRY(device_->call(device_->functions().copy_on_device, range->base() + span.offset, current_->base() + span.offset,
                      span.bytes, work.get()));
  }
  TRY(work.finish());
  current_ = range;
  return std::shared_ptr<AddressRange>(range);
}

}  // namespace gpufs::gpu
