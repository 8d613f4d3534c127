#include "memory/slab_pool.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <string>

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

Result<std::shared_ptr<const SlabPool::Slot>> SlabPool::take(std::uint64_t bytes) {
  if (bytes == 0 || bytes > largest_) return Status(EINVAL, "no slot of that size");
  const std::size_t size_class = class_for(bytes);
  std::shared_ptr<const Slot> slot;
  bool used_before = false;
  {
    const std::lock_guard lock(mutex_);
    std::set<std::uint64_t>& candidates = free_slabs_[size_class];
    if (candidates.empty()) {
      if (Status added = add_slab(size_class); !added.ok()) return added;
    }
    const std::uint64_t offset = *candidates.begin();
    Slab& slab = slabs_.at(offset);
    used_before = !slab.returned.empty();
    const std::size_t index = used_before ? slab.returned.back() : slab.fresh;
    const std::uint64_t slot_size = slot_bytes(size_class);
    slot = {new Slot{range_->base() + offset + index * slot_size, slot_size},
            [pool = shared_from_this(), offset, index](const Slot* returned) {
              delete returned;
              pool->put_back(offset, index);
            }};
    if (used_before) {
      slab.returned.pop_back();
    } else {
      ++slab.fresh;
    }
    if (slab.returned.empty() && slab.fresh == granule_ / slot_size) candidates.erase(offset);
  }
  if (used_before) {
    if (Status zeroed = context_.device().zero(slot->address, slot->bytes); !zeroed.ok()) return zeroed;
  }
  return slot;
}

Status SlabPool::add_slab(std::size_t size_class) {
  Device& device = context_.device();
  if (memory_ == nullptr) {
    Result<std::unique_ptr<DeviceMemory>> created = device.create_memory();
    if (!created.ok()) return created.status();
    // Addresses for all of the device's memory, so that slots never move.
    const std::uint64_t bytes = std::bit_ceil(std::max(device.info().total_bytes, granule_));
    Result<std::shared_ptr<AddressRange>> range = created.value()->reserve(bytes);
    if (!range.ok()) return range.status();
    memory_ = created.take();
    range_ = range.take();
  }
  std::uint64_t offset = 0;  // the lowest granule that is not a slab
  for (auto slab = slabs_.begin(); slab != slabs_.end() && slab->first == offset; ++slab) offset += granule_;
  if (offset + granule_ > range_->bytes()) return Status(ENOSPC, "the device has no memory for another slab");
  if (Status populated = memory_->populate(offset, granule_); !populated.ok()) return populated;
  context_.account(static_cast<std::int64_t>(granule_));
  slabs_.emplace(offset, Slab{size_class, 0, {}});
  free_slabs_[size_class].insert(offset);
  return {};
}

void SlabPool::put_back(std::uint64_t offset, std::size_t index) {
  const std::lock_guard lock(mutex_);
  Slab& slab = slabs_.at(offset);
  slab.returned.push_back(index);
  std::set<std::uint64_t>& candidates = free_slabs_[slab.size_class];
  candidates.insert(offset);
  if (slab.returned.size() < slab.fresh) return;
  candidates.erase(offset);
  slabs_.erase(offset);
  memory_->release(offset, granule_);
  context_.account(-static_cast<std::int64_t>(granule_));
}

}  // namespace gpufs
