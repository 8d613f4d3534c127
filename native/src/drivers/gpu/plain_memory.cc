#include "drivers/gpu/plain_memory.h"

#include <algorithm>
#include <cerrno>
#include <string>

namespace gpufs::gpu {

Result<std::shared_ptr<PlainRange>> PlainRange::allocate(std::shared_ptr<GpuDevice> device, std::uint64_t bytes) {
  DeviceAddress base = 0;
  if (Status status = device->acquire_plain(bytes, &base); !status.ok()) return status;
  return std::shared_ptr<PlainRange>(new PlainRange(std::move(device), base, bytes));
}

PlainRange::~PlainRange() { device_->return_plain(base_, bytes_); }

bool PlainMemory::uniform(const MemorySpan& span, bool populated) const {
  const auto [offset, bytes] = span;
  if (bytes == 0 || offset % granule_ != 0 || bytes % granule_ != 0 || offset + bytes < offset) return false;
  if (current_ == nullptr || offset + bytes > current_->bytes()) return false;
  const auto from = live_.begin() + static_cast<std::ptrdiff_t>(offset / granule_);
  return std::all_of(from, from + static_cast<std::ptrdiff_t>(bytes / granule_),
                     [populated](bool live) { return live == populated; });
}

void PlainMemory::mark(const MemorySpan& span, bool live) {
  const auto from = live_.begin() + static_cast<std::ptrdiff_t>(span.offset / granule_);
  std::fill(from, from + static_cast<std::ptrdiff_t>(span.bytes / granule_), live);
}

Result<std::shared_ptr<AddressRange>> PlainMemory::reserve(std::uint64_t bytes) {
  if (bytes == 0 || bytes > UINT64_MAX - granule_) return Status{EINVAL, "a range of size zero, or too large"};
  bytes = (bytes + granule_ - 1) / granule_ * granule_;
  const std::uint64_t granules = bytes / granule_;
  if (live_.size() > granules &&
      std::find(live_.begin() + static_cast<std::ptrdiff_t>(granules), live_.end(), true) != live_.end()) {
    return Status{EINVAL, "the new range is smaller than the memory it has to show"};
  }
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
    if (!uniform(span, false)) return {EINVAL, "not whole granules of the range, none of them populated"};
    Status status = device_->call(device_->functions().fill, current_->base() + span.offset, 0, span.bytes, work.get());
    if (!status.ok()) return status;
  }
  if (Status status = work.finish(); !status.ok()) return status;
  for (const MemorySpan& span : spans) mark(span, true);
  return {};
}

void PlainMemory::release(std::span<const MemorySpan> spans) {
  for (const MemorySpan& span : spans) {
    if (uniform(span, true)) mark(span, false);
  }
}

Result<std::vector<ExportedMemory>> PlainMemory::export_memory(std::uint64_t /*from*/, std::uint64_t /*end*/,
                                                               std::size_t /*capacity*/, bool /*writable*/) {
  return device_->check_sharing();
}

}  // namespace gpufs::gpu
