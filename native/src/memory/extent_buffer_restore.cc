// An ExtentBuffer for the process that takes over from another one: what must be known of its contents, and a buffer
// with them.

#include <algorithm>
#include <bit>
#include <utility>

#include "base/math.h"
#include "memory/extent_buffer.h"

namespace gpufs {

KeptContents ExtentBuffer::kept() const {
  const std::lock_guard lock(state_mutex_);
  KeptContents contents{size_.load(std::memory_order_relaxed), snapshot_->memory, {}, {}};
  if (snapshot_->slot != nullptr) {
    contents.slot = {snapshot_->slot->offset, snapshot_->slot->bytes};
  } else {
    contents.extents = snapshot_->extents;
  }
  return contents;
}

Status ExtentBuffer::restore(const KeptContents& contents) {
  const std::lock_guard mutation(mutation_mutex_);
  size_.store(contents.size, std::memory_order_release);
  if (contents.slot.bytes != 0) {
    if (context_->slabs() == nullptr) return Status(EPROTO, "a small file on a device without slabs");
    replace(std::make_shared<Snapshot>(*this, context_->slabs()->take_restored(contents.slot, owner())));
  } else if (contents.memory != 0) {
    Result<std::unique_ptr<DeviceMemory>> memory = context_->device().restore_memory(contents.memory, contents.extents);
    if (!memory.ok()) return memory.status();
    memory_ = memory.take();
    const std::uint64_t bytes = std::bit_ceil(std::max(end_of(contents.extents), AddressSpace::kSmallRange));
    Result<std::shared_ptr<AddressRange>> range = reserve_addresses(bytes, contents.extents);
    if (!range.ok()) return range.status();
    range_ = range.take();
    replace(make_snapshot(contents.extents));
    // Memory above the size was asked for by fallocate(), or was left by a write that did not end.
    if (const std::uint64_t end = end_of(contents.extents); end > contents.size) add_fallocated(contents.size, end);
    context_->reclaim().list_trimmable(this, weak_from_this());
  }
  account();
  return zero_existing(contents.size, UINT64_MAX);
}

}  // namespace gpufs
