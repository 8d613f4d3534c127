#include "drivers/gpu/plain_memory.h"

#include <algorithm>

#include "base/math.h"

namespace gpufs::gpu {

Result<std::shared_ptr<PlainRange>> PlainRange::allocate(std::shared_ptr<GpuDevice> device, std::uint64_t bytes) {
  DeviceAddress base = 0;
  if (Status status = device->acquire_plain(bytes, &base); !status.ok()) return status;
  return std::shared_ptr<PlainRange>(new PlainRange(std::move(device), base, bytes));
}

PlainRange::~PlainRange() { device_->return_plain(base_, bytes_); }

void PlainMemory::mark(const MemorySpan& span, bool live) {
  const auto from = live_.begin() + static_cast<std::ptrdiff_t>(span.offset / granule_);
  std::fill(from, from + static_cast<std::ptrdiff_t>(span.bytes / granule_), live);
}

Result<std::shared_ptr<AddressRange>> PlainMemory::reserve(std::uint64_t bytes) {
  bytes = round_up(bytes, granule_);
  const std::uint64_t granules = bytes / granule_;
  SynchronousWork work(*device_);
  if (!work.status().ok()) return work.status();
  Result<std::shared_ptr<PlainRange>> allocated = PlainRange::allocate(device_, bytes);
  if (!allocated.ok()) return allocated.status();
  const std::shared_ptr<PlainRange> range = allocated.take();
  for (std::uint64_t from = 0; from < live_.size();) {
    if (!live_[from]) {
      ++from;
      continue;
    }
    std::uint64_t to = from;
    while (to < live_.size() && live_[to]) ++to;
    Status status = device_->call(device_->functions().copy_on_device, range->base() + from * granule_,
                                  current_->base() + from * granule_, (to - from) * granule_, work.get());
    if (!status.ok()) return status;
    from = to;
  }
  if (Status status = work.finish(); !status.ok()) return status;
  current_ = range;
  live_.resize(granules, false);
  return std::shared_ptr<AddressRange>(range);
}

Status PlainMemory::populate(std::span<const MemorySpan> spans) {
  SynchronousWork work(*device_);
  if (!work.status().ok()) return work.status();
  for (const MemorySpan& span : spans) {
    Status status = device_->call(device_->functions().fill, current_->base() + span.offset, 0, span.bytes, work.get());
    if (!status.ok()) return status;
  }
  if (Status status = work.finish(); !status.ok()) return status;
  for (const MemorySpan& span : spans) mark(span, true);
  return {};
}

void PlainMemory::release(std::span<const MemorySpan> spans) {
  for (const MemorySpan& span : spans) mark(span, false);
}

Result<std::vector<ExportedMemory>> PlainMemory::export_memory(std::uint64_t /*from*/, std::uint64_t /*end*/,
                                                               std::size_t /*capacity*/, bool /*writable*/) {
  return device_->check_sharing();
}

}  // namespace gpufs::gpu
