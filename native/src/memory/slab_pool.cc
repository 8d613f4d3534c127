#include "memory/slab_pool.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <new>
#include <string>
#include <utility>

#include "base/caught.h"
#include "base/log.h"
#include "base/math.h"
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
    : context_(context), granule_(context.info().granule), largest_(largest), with_room_(class_for(largest) + 1) {}

SlabPool::~SlabPool() {
  // Every slot keeps the pool, so all have come back and their slabs with them, but for what the device refused.
  if (!slabs_.empty()) context_.account(-static_cast<std::int64_t>(slabs_.size() * granule_));
}

Result<std::shared_ptr<SlabPool>> SlabPool::create(DeviceContext& context, std::uint64_t file_bytes) {
  if (file_bytes == 0 || file_bytes > context.info().granule / 2) {
    return Status(EINVAL, "files of " + std::to_string(file_bytes) + " bytes cannot share granules of " +
                              std::to_string(context.info().granule));
  }
  if (context.info().reserve_copies) return Status(EOPNOTSUPP, "the device reserves no addresses without memory");
  return std::shared_ptr<SlabPool>(new SlabPool(context, slot_bytes(class_for(file_bytes))));
}

bool SlabPool::find_place_locked(std::size_t size_class, Place* place) {
  std::set<std::uint64_t>& candidates = with_room_[size_class];
  if (candidates.empty()) return false;
  place->slab = *candidates.begin();
  Slab& slab = slabs_.at(place->slab);
  std::size_t index = slab.lowest_free;
  while (slab.taken[index]) ++index;  // there is one, or the slab would not be among those with room
  slab.lowest_free = index + 1;
  place->index = index;
  place->dirty = slab.dirty[place->index];
  slab.taken[place->index] = true;
  slab.dirty[place->index] = true;
  if (++slab.used == slab.taken.size()) slab.entry = candidates.extract(candidates.begin());
  return true;
}

Result<std::shared_ptr<SlabPool::Slot>> SlabPool::take(std::uint64_t bytes) {
  if (bytes == 0 || bytes > largest_) return Status(EINVAL, "no slot of that size");
  const std::size_t size_class = class_for(bytes);
  Place place;
  DeviceAddress address = 0;
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      if (find_place_locked(size_class, &place)) {
        address = base_ + place.slab + place.index * slot_bytes(size_class);
        break;
      }
    }
    // Another thread may take all of the new slab's slots before this one looks: then another is added.
    Status added = add_slab(size_class);
    if (!added.ok()) return added;
  }
  std::shared_ptr<Slot> slot;
  try {
    slot = std::make_shared<Slot>(shared_from_this(), place.slab, place.index, address, slot_bytes(size_class));
  } catch (const std::bad_alloc&) {
    give(place.slab, place.index);
    return Status(ENOMEM, "");
  }
  if (place.dirty) {
    Status zeroed = context_.device().zero(slot->address(), slot->bytes());
    if (!zeroed.ok()) return zeroed;
  }
  return slot;
}

Status SlabPool::add_slab(std::size_t size_class) {
  Device& device = context_.device();
  const std::lock_guard memory_lock(memory_mutex_);
  std::uint64_t offset = 0;
  {
    const std::lock_guard lock(mutex_);
    if (!with_room_[size_class].empty()) return {};  // somebody was quicker
    offset = free_offsets_.empty() ? used_end_ : *free_offsets_.begin();
  }
  if (memory_ == nullptr) {
    Result<std::unique_ptr<DeviceMemory>> made = device.create_memory();
    if (!made.ok()) return made.status();
    // Addresses for all of the device's memory, so that slots never move.
    const std::uint64_t bytes = std::bit_ceil(std::max(device.info().total_bytes, granule_));
    Result<std::shared_ptr<AddressRange>> range = made.value()->reserve(bytes);
    if (!range.ok()) return range.status();
    memory_ = made.take();
    range_ = range.take();
    const std::lock_guard lock(mutex_);
    base_ = range_->base();
  }
  if (offset + granule_ > range_->bytes()) return Status(ENOSPC, "the device has no room for another slab");
  // All that can throw comes first: memory that is populated is always known.
  const std::size_t slots = static_cast<std::size_t>(granule_ / slot_bytes(size_class));
  std::map<std::uint64_t, Slab> made_slab;
  made_slab.emplace(offset,
                    Slab{size_class, 0, 0, std::vector<bool>(slots, false), std::vector<bool>(slots, false), {}});
  std::set<std::uint64_t> made_entry{offset};
  Status populated = memory_->populate(offset, granule_);
  if (!populated.ok()) return populated;
  context_.account(static_cast<std::int64_t>(granule_));
  const std::lock_guard lock(mutex_);
  slabs_.merge(made_slab);
  with_room_[size_class].merge(made_entry);
  free_offsets_.erase(offset);
  used_end_ = std::max(used_end_, offset + granule_);
  return {};
}

void SlabPool::give(std::uint64_t offset, std::size_t index) {
  std::map<std::uint64_t, Slab>::node_type emptied;
  std::set<std::uint64_t>::node_type entry;
  {
    const std::lock_guard lock(mutex_);
    const auto found = slabs_.find(offset);
    Slab& slab = found->second;
    std::set<std::uint64_t>& candidates = with_room_[slab.size_class];
    slab.taken[index] = false;
    slab.lowest_free = std::min(slab.lowest_free, index);
    if (!slab.entry.empty()) candidates.insert(std::move(slab.entry));
    if (--slab.used > 0) return;
    // Out of sight first, so that nobody takes a slot of a slab that is going.
    entry = candidates.extract(offset);
    emptied = slabs_.extract(found);
  }
  const std::lock_guard memory_lock(memory_mutex_);
  memory_->release(offset, granule_);
  context_.account(-static_cast<std::int64_t>(granule_));
  const std::lock_guard lock(mutex_);
  free_offsets_.insert(std::move(entry));
}

std::size_t SlabPool::slab_count() const {
  const std::lock_guard lock(mutex_);
  return slabs_.size();
}

}  // namespace gpufs
