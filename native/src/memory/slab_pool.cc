#include "memory/slab_pool.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <string>
#include <utility>

#include "base/math.h"
#include "device/device_context.h"
#include "memory/extent_buffer.h"

namespace gpufs {
namespace {

std::uint64_t slot_bytes(std::size_t size_class) { return SlabPool::kSmallestSlot << size_class; }

std::size_t class_for(std::uint64_t bytes) {
  const std::uint64_t size = std::bit_ceil(std::max(bytes, SlabPool::kSmallestSlot));
  return static_cast<std::size_t>(std::countr_zero(size) - std::countr_zero(SlabPool::kSmallestSlot));
}

}  // namespace

SlabPool::SlabPool(DeviceContext& context, std::uint64_t largest)
    : context_(context),
      granule_(context.info().granule),
      largest_(largest),
      free_slabs_(class_for(largest) + 1),
      free_slots_(free_slabs_.size()),
      spares_(free_slabs_.size()) {}

SlabPool::~SlabPool() = default;  // every slot keeps the pool, so all are back

Result<std::shared_ptr<SlabPool>> SlabPool::create(DeviceContext& context, std::uint64_t file_bytes) {
  if (file_bytes == 0 || file_bytes > context.info().granule / 2) {
    return Status(EINVAL, "files of " + std::to_string(file_bytes) + " bytes cannot share granules of " +
                              std::to_string(context.info().granule));
  }
  if (context.info().reserve_copies) return Status(EOPNOTSUPP, "the device reserves no addresses without memory");
  return std::shared_ptr<SlabPool>(new SlabPool(context, slot_bytes(class_for(file_bytes))));
}

std::size_t SlabPool::slots(const Slab& slab) const { return granule_ / slot_bytes(slab.size_class); }

std::size_t SlabPool::free_slots(const Slab& slab) const { return slots(slab) - slab.fresh + slab.returned.size(); }

void SlabPool::count_free(std::size_t size_class, std::ptrdiff_t change) {
  free_slots_[size_class] += static_cast<std::size_t>(change);
  std::uint64_t slabs = 0;
  for (std::size_t one = 0; one < free_slots_.size(); ++one) slabs += free_slots_[one] / (granule_ / slot_bytes(one));
  context_.set_reclaimable(slabs * granule_);
}

Result<std::shared_ptr<const SlabPool::Slot>> SlabPool::take(std::uint64_t bytes, std::weak_ptr<ExtentBuffer> owner,
                                                             bool may_add_slab, Wait wait) {
  if (bytes == 0 || bytes > largest_) return Status(EINVAL, "no slot of that size");
  const std::size_t size_class = class_for(bytes);
  std::shared_ptr<const Slot> slot;
  bool used_before = false;
  {
    std::unique_lock lock(mutex_, std::defer_lock);
    if (wait == Wait::kAllowed) {
      lock.lock();
    } else if (!lock.try_lock()) {
      return Status(EAGAIN, "the slabs are in use");  // perhaps over a call of the driver for another file
    }
    std::set<std::uint64_t>& candidates = free_slabs_[size_class];
    if (candidates.empty()) {
      if (!may_add_slab) return Status(ENOSPC, "no slot of that size is free");
      TRY(add_slab(size_class, wait));
    }
    auto chosen = candidates.begin();
    if (spares_[size_class] == *chosen && candidates.size() > 1) ++chosen;
    const std::uint64_t offset = *chosen;
    if (spares_[size_class] == offset) {
      spares_[size_class].reset();
      context_.took(granule_);
    }
    Slab& slab = slabs_.at(offset);
    used_before = !slab.returned.empty();
    const std::size_t index = used_before ? slab.returned.back() : slab.fresh;
    const std::uint64_t slot_size = slot_bytes(size_class);
    slot = make_slot(offset, index, slot_size);
    if (used_before) {
      slab.returned.pop_back();
      slab.owners[index] = std::move(owner);
    } else {
      ++slab.fresh;
      slab.owners.push_back(std::move(owner));
    }
    count_free(size_class, -1);
    if (free_slots(slab) == 0) candidates.erase(offset);
  }
  if (used_before) {
    TRY(context_.device().zero(slot->address, slot->bytes));
  }
  return slot;
}

std::shared_ptr<const SlabPool::Slot> SlabPool::make_slot(std::uint64_t slab, std::size_t index, std::uint64_t bytes) {
  const std::uint64_t offset = slab + index * bytes;
  return {new Slot{range_->base() + offset, bytes, memory_->number(), offset},
          [pool = shared_from_this(), slab, index](const Slot* returned) {
            delete returned;
            pool->put_back(slab, index);
          }};
}

Status SlabPool::restore(std::uint64_t memory, std::span<Extent> slots_in_use) {
  const std::lock_guard lock(mutex_);
  const auto slab_of = [this](const Extent& slot) { return round_down(slot.offset, granule_); };
  std::map<std::uint64_t, std::vector<std::size_t>> votes;  // by slab: how many of its slots have each size
  for (Extent& slot : slots_in_use) {
    const bool possible = slot.bytes != 0 && slot.bytes <= largest_ &&
                          slot.bytes == slot_bytes(class_for(slot.bytes)) && slot.offset % slot.bytes == 0 &&
                          slot.offset < address_bytes();
    if (!possible) slot = {};
    if (!possible) continue;
    std::vector<std::size_t>& sizes = votes[slab_of(slot)];
    sizes.resize(free_slabs_.size());
    ++sizes[class_for(slot.bytes)];
  }
  Extents populated;
  std::map<std::uint64_t, std::vector<bool>> used;  // by slab, for each slot
  for (const auto& [offset, sizes] : votes) {
    const auto size_class = static_cast<std::size_t>(std::ranges::max_element(sizes) - sizes.begin());
    const Slab& slab = slabs_.emplace(offset, Slab{size_class, 0, {}, {}}).first->second;
    used[offset].resize(slots(slab));
    const bool follows = !populated.empty() && populated.back().end() == offset;
    if (!follows) populated.push_back({offset, 0});
    populated.back().bytes += granule_;
  }
  Result<std::unique_ptr<DeviceMemory>> restored = context_.device().restore_memory(memory, populated);
  if (!restored.ok()) {
    slabs_.clear();
    return restored.status();
  }
  memory_ = restored.take();
  range_ = TRY(memory_->reserve(address_bytes(), populated));
  for (Extent& slot : slots_in_use) {
    if (slot.bytes == 0) continue;
    const std::uint64_t slab = slab_of(slot);
    const std::size_t index = static_cast<std::size_t>((slot.offset - slab) / slot.bytes);
    if (slabs_.at(slab).size_class != class_for(slot.bytes) || used[slab][index]) {
      slot = {};
    } else {
      used[slab][index] = true;
    }
  }
  for (auto& [offset, slab] : slabs_) {
    context_.took(granule_);
    slab.fresh = slots(slab);  // which of the others were used is not known
    slab.owners.resize(slab.fresh);
    for (std::size_t index = 0; index < slab.fresh; ++index) {
      if (!used[offset][index]) slab.returned.push_back(index);
    }
    if (free_slots(slab) == 0) continue;
    free_slabs_[slab.size_class].insert(offset);
    count_free(slab.size_class, static_cast<std::ptrdiff_t>(free_slots(slab)));
  }
  return {};
}

std::shared_ptr<const SlabPool::Slot> SlabPool::take_restored(const Extent& slot, std::weak_ptr<ExtentBuffer> owner) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t slab = round_down(slot.offset, granule_);
  const auto index = static_cast<std::size_t>((slot.offset - slab) / slot.bytes);
  slabs_.at(slab).owners[index] = std::move(owner);
  return make_slot(slab, index, slot.bytes);
}

std::uint64_t SlabPool::address_bytes() const { return std::bit_ceil(std::max(context_.info().total_bytes, granule_)); }

Status SlabPool::add_slab(std::size_t size_class, Wait wait) {
  Device& device = context_.device();
  if (memory_ == nullptr) {
    std::unique_ptr<DeviceMemory> created = TRY(device.create_memory());
    std::shared_ptr<AddressRange> range = TRY(created->reserve(address_bytes()));
    memory_ = std::move(created);
    range_ = std::move(range);
  }
  std::uint64_t offset = 0;  // the lowest granule that is not a slab
  for (auto slab = slabs_.begin(); slab != slabs_.end() && slab->first == offset; ++slab) offset += granule_;
  if (offset + granule_ > range_->bytes()) return Status(ENOSPC, "the device has no memory for another slab");
  TRY(memory_->populate(offset, granule_, wait));
  context_.took(granule_);
  const Slab& added = slabs_.emplace(offset, Slab{size_class, 0, {}, {}}).first->second;
  free_slabs_[size_class].insert(offset);
  count_free(size_class, static_cast<std::ptrdiff_t>(slots(added)));
  return {};
}

void SlabPool::put_back(std::uint64_t offset, std::size_t index) {
  const std::lock_guard lock(mutex_);
  Slab& slab = slabs_.at(offset);
  slab.returned.push_back(index);
  slab.owners[index].reset();
  std::set<std::uint64_t>& candidates = free_slabs_[slab.size_class];
  if (!slab.emptying) {
    candidates.insert(offset);
    count_free(slab.size_class, 1);
  }
  if (slab.returned.size() < slab.fresh) return;
  if (!slab.emptying && !spares_[slab.size_class]) {
    spares_[slab.size_class] = offset;
    context_.released(granule_);
    return;
  }
  if (!slab.emptying) {
    candidates.erase(offset);
    count_free(slab.size_class, -static_cast<std::ptrdiff_t>(slots(slab)));
  }
  release_slab(offset);
}

void SlabPool::release_slab(std::uint64_t offset) {
  std::optional<std::uint64_t>& spare = spares_[slabs_.at(offset).size_class];
  const bool was_spare = spare == offset;
  if (was_spare) spare.reset();
  slabs_.erase(offset);
  memory_->release(offset, granule_);
  context_.released(was_spare ? 0 : granule_);  // a spare one was counted as released
}

// ---- a full device ----

std::vector<std::uint64_t> SlabPool::emptiest() const {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> found;  // bytes of files, and the slab
  for (const std::set<std::uint64_t>& slabs : free_slabs_) {
    for (const std::uint64_t offset : slabs) {
      const Slab& slab = slabs_.at(offset);
      found.emplace_back((slots(slab) - free_slots(slab)) * slot_bytes(slab.size_class), offset);
    }
  }
  std::ranges::sort(found);
  std::vector<std::uint64_t> offsets;
  offsets.reserve(found.size());
  for (const auto& [bytes, offset] : found) offsets.push_back(offset);
  return offsets;
}

bool SlabPool::close(std::uint64_t offset, std::vector<std::shared_ptr<ExtentBuffer>>* owners) {
  const auto found = slabs_.find(offset);
  if (found == slabs_.end()) return false;
  Slab& slab = found->second;
  const std::size_t free = free_slots(slab);
  if (free == 0 || free_slots_[slab.size_class] < slots(slab)) return false;
  slab.emptying = true;
  free_slabs_[slab.size_class].erase(offset);
  count_free(slab.size_class, -static_cast<std::ptrdiff_t>(free));
  for (const std::weak_ptr<ExtentBuffer>& owner : slab.owners) {
    if (std::shared_ptr<ExtentBuffer> buffer = owner.lock()) owners->push_back(std::move(buffer));
  }
  return true;
}

void SlabPool::reopen(std::uint64_t offset) {
  const auto found = slabs_.find(offset);
  if (found == slabs_.end()) return;  // the slab has been freed
  Slab& slab = found->second;
  if (slab.returned.size() == slab.fresh) return release_slab(offset);
  slab.emptying = false;
  if (free_slots(slab) == 0) return;
  free_slabs_[slab.size_class].insert(offset);
  count_free(slab.size_class, static_cast<std::ptrdiff_t>(free_slots(slab)));
}

void SlabPool::compact(std::chrono::steady_clock::time_point deadline) {
  const std::lock_guard one_at_a_time(compact_mutex_);
  std::vector<std::uint64_t> slabs;
  DeviceAddress base = 0;
  {
    const std::lock_guard lock(mutex_);
    if (slabs_.empty()) return;
    slabs = emptiest();
    base = range_->base();
  }
  for (const std::uint64_t offset : slabs) {
    if (std::chrono::steady_clock::now() >= deadline) return;
    std::vector<std::shared_ptr<ExtentBuffer>> owners;
    {
      const std::lock_guard lock(mutex_);
      if (!close(offset, &owners)) continue;
    }
    for (std::shared_ptr<ExtentBuffer>& owner : owners) {
      if (!owner->leave_slab(*this, base + offset, granule_)) break;
      owner.reset();
    }
    owners.clear();  // perhaps the last references
    const std::lock_guard lock(mutex_);
    reopen(offset);
  }
}

}  // namespace gpufs
