#include "memory/slab_pool.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <string>
#include <utility>

#include "device/device_context.h"

namespace gpufs {
namespace {

std::uint64_t slot_bytes(std::size_t size_class) { return SlabPool::kSmallestSlot << size_class; }

std::size_t class_for(std::uint64_t bytes) {
  const std::uint64_t size = std::bit_ceil(std::max(bytes, SlabPool::kSmallestSlot));
  return static_cast<std::size_t>(std::countr_zero(size) - std::countr_zero(SlabPool::kSmallestSlot));
}

}  // namespace

SlabPool::SlabPool(DeviceContext& context, std::uint64_t largest)
    : context_(context), granule_(context.info().granule), largest_(largest), free_slabs_(class_for(largest) + 1) {}

SlabPool::~SlabPool() = default;  // every slot keeps the pool, so all are back

Result<std::shared_ptr<SlabPool>> SlabPool::create(DeviceContext& context, std::uint64_t file_bytes) {
  if (file_bytes == 0 || file_bytes > context.info().granule / 2) {
    return Status(EINVAL, "files of " + std::to_string(file_bytes) + " bytes cannot share granules of " +
                              std::to_string(context.info().granule));
  }
  if (context.info().reserve_copies) return Status(EOPNOTSUPP, "the device reserves no addresses without memory");
  return std::shared_ptr<SlabPool>(new SlabPool(context, slot_bytes(class_for(file_bytes))));
}

std::shared_ptr<SlabPool::Slot> SlabPool::take_free(std::size_t size_class, bool* dirty) {
  const std::lock_guard lock(mutex_);
  std::set<std::uint64_t>& candidates = free_slabs_[size_class];
  if (candidates.empty()) return nullptr;
  const std::uint64_t offset = *candidates.begin();
  Slab& slab = slabs_.at(offset);
  std::size_t index = slab.lowest_free;
  while (slab.taken[index]) ++index;
  const std::uint64_t bytes = slot_bytes(size_class);
  auto slot = std::make_shared<Slot>(shared_from_this(), offset, index, base_ + offset + index * bytes, bytes);
  slab.lowest_free = index + 1;
  *dirty = slab.dirty[index];
  slab.taken[index] = true;
  slab.dirty[index] = true;
  if (++slab.used == slab.taken.size()) candidates.erase(candidates.begin());
  return slot;
}

Result<std::shared_ptr<SlabPool::Slot>> SlabPool::take(std::uint64_t bytes) {
  if (bytes == 0 || bytes > largest_) return Status(EINVAL, "no slot of that size");
  const std::size_t size_class = class_for(bytes);
  for (;;) {
    bool dirty = false;
    if (std::shared_ptr<Slot> slot = take_free(size_class, &dirty)) {
      if (dirty) {
        Status zeroed = context_.device().zero(slot->address(), slot->bytes());
        if (!zeroed.ok()) return zeroed;
      }
      return slot;
    }
    // Other threads may take all slots of the new slab first: then another is added.
    Status added = add_slab(size_class);
    if (!added.ok()) return added;
  }
}

Status SlabPool::add_slab(std::size_t size_class) {
  Device& device = context_.device();
  const std::lock_guard memory_lock(memory_mutex_);
  std::uint64_t offset = 0;
  {
    const std::lock_guard lock(mutex_);
    if (!free_slabs_[size_class].empty()) return {};  // another thread was faster
    offset = free_offsets_.empty() ? used_end_ : *free_offsets_.begin();
  }
  if (memory_ == nullptr) {
    Result<std::unique_ptr<DeviceMemory>> created = device.create_memory();
    if (!created.ok()) return created.status();
    // Addresses for all of the device's memory, so that slots never move.
    const std::uint64_t bytes = std::bit_ceil(std::max(device.info().total_bytes, granule_));
    Result<std::shared_ptr<AddressRange>> range = created.value()->reserve(bytes);
    if (!range.ok()) return range.status();
    memory_ = created.take();
    range_ = range.take();
    const std::lock_guard lock(mutex_);
    base_ = range_->base();
  }
  if (offset + granule_ > range_->bytes()) return Status(ENOSPC, "the device has no memory for another slab");
  Status populated = memory_->populate(offset, granule_);
  if (!populated.ok()) return populated;
  context_.account(static_cast<std::int64_t>(granule_));
  const auto slots = static_cast<std::size_t>(granule_ / slot_bytes(size_class));
  const std::lock_guard lock(mutex_);
  slabs_.emplace(offset, Slab{size_class, 0, 0, std::vector<bool>(slots), std::vector<bool>(slots)});
  free_slabs_[size_class].insert(offset);
  free_offsets_.erase(offset);
  used_end_ = std::max(used_end_, offset + granule_);
  return {};
}

void SlabPool::put_back(std::uint64_t offset, std::size_t index) {
  {
    const std::lock_guard lock(mutex_);
    Slab& slab = slabs_.at(offset);
    slab.taken[index] = false;
    slab.lowest_free = std::min(slab.lowest_free, index);
    std::set<std::uint64_t>& candidates = free_slabs_[slab.size_class];
    candidates.insert(offset);
    if (--slab.used > 0) return;
    // Removed first, so that no slot of a slab that is being released is taken.
    candidates.erase(offset);
    slabs_.erase(offset);
  }
  const std::lock_guard memory_lock(memory_mutex_);
  memory_->release(offset, granule_);
  context_.account(-static_cast<std::int64_t>(granule_));
  const std::lock_guard lock(mutex_);
  free_offsets_.insert(offset);
}

std::size_t SlabPool::slab_count() const {
  const std::lock_guard lock(mutex_);
  return slabs_.size();
}

}  // namespace gpufs
