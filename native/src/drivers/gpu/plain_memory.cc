#include "drivers/gpu/plain_memory.h"

#include "base/math.h"

namespace gpufs::gpu {

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

}  // namespace gpufs::gpu
