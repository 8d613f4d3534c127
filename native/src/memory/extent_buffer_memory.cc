// The memory of an ExtentBuffer: what takes it (growth, preallocation, moving out of a slot, taking over from another
// process) and what releases it (trimming, shrinking, punching, clearing what a failed write left).
//
// When the device is full (ENOSPC), retry_when_full() has every buffer of the device trim what it took ahead, then
// small files move together, and it tries again. At a limit (EDQUOT) it asks the buffers that charge the same account.
// Then, where the mount does that, files that nobody uses are evicted. Nothing else is given up for a caller; memory of
// removed files is waited for above this layer.

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <string>
#include <utility>

#include "base/log.h"
#include "base/math.h"
#include "base/thread.h"
#include "memory/extent_buffer_exclusion.h"

namespace gpufs {
namespace {

// No reservation is smaller: a file that grows to this size never moves.
constexpr std::uint64_t kSmallestReservation = AddressSpace::kSmallRange;
// A growing file preallocates as much as it has, up to the most: a call of a GPU's driver costs 0.1 to 0.3 ms whatever
// it takes, and this is 16 ms of writing at 4 GB/s. It never takes more than one part in so many of the device's free
// memory, since releasing the unused part of a piece needs space to copy the used part to, nor of what limits allow.
constexpr std::uint64_t kMostPreallocated = std::uint64_t{64} << 20;
constexpr std::uint64_t kFreeParts = 16;
// A full device: how long a caller waits altogether for memory that others are using or releasing, and for each of
// them.
constexpr std::chrono::milliseconds kReclaimTimeout{100};
constexpr std::chrono::milliseconds kTrimTimeout{10};
constexpr std::chrono::milliseconds kPause{1};
constexpr int kMostAttempts = 4;  // others that grow may be faster to take what was released

}  // namespace

// ---- a full device ----

Status ExtentBuffer::retry_when_full(DeviceContext& device, const Charge& payers, std::uint64_t offset,
                                     std::uint64_t end, const std::function<Status()>& attempt, Wait wait) {
  for (int number = 1;;) {
    const std::uint64_t releases = device.releases().count();
    Status status = attempt();
    if (!lacks_memory(status.error()) || wait == Wait::kForbidden || overwritten_) return status;
    if (number < kMostAttempts && reclaim(device, releases, status.error() == EDQUOT ? &payers : nullptr)) {
      ++number;
    } else if (status.error() != ENOSPC || !device.releases().evict(missing_bytes(offset, end))) {
      return status;  // a large file may need the space of many
    }
  }
}

Status ExtentBuffer::change_at_home(std::uint64_t offset, std::uint64_t end, Growth how,
                                    const std::function<Status()>& change) {
  bool in_place = false;
  const auto attempt = [&]() -> Status {
    const std::unique_lock mutation = lock_mutation(how.wait);
    if (!mutation) return would_wait();
    if (!in_place) TRY(come_home(how.wait));
    return change();
  };
  const Status status = retry_when_full(*context_, charge(), offset, end, attempt, how.wait);
  if (!how.anywhere || !lacks_memory(status.error())) return status;
  std::shared_ptr<Residence> here;
  {
    const std::lock_guard lock(state_mutex_);
    here = here_;
  }
  if (here->device == context_) return status;
  in_place = true;
  return retry_when_full(*here->device, *here->charge, offset, end, attempt, how.wait);
}

std::uint64_t ExtentBuffer::missing_bytes(std::uint64_t offset, std::uint64_t end) const {
  const std::lock_guard lock(state_mutex_);
  if (!at_home()) return bytes_parked();
  const Extent range = placed(offset, end);
  return total_bytes(holes(own(), round_down(range.offset, granule()), round_up(range.end(), granule())));
}

// True once some buffer has released memory since that many had.
bool ExtentBuffer::reclaim(DeviceContext& device, std::uint64_t releases_before, const Charge* payers) {
  const auto deadline = std::chrono::steady_clock::now() + kReclaimTimeout;
  for (;;) {
    bool busy = false;
    for (const std::weak_ptr<ExtentBuffer>& listed : device.releases().trimmable()) {
      const std::shared_ptr<ExtentBuffer> buffer = listed.lock();
      if (payers != nullptr && buffer != nullptr && !buffer->charge().shares_account(*payers)) continue;
      // A buffer that is gone is releasing all it has.
      if (buffer == nullptr || !buffer->trim(kTrimTimeout)) busy = true;
      if (std::chrono::steady_clock::now() >= deadline) break;
    }
    if (device.releases().count() == releases_before && payers == nullptr && device.slabs() != nullptr) {
      device.slabs()->compact(std::chrono::steady_clock::now() + kReclaimTimeout);
    }
    if (device.releases().count() != releases_before) return true;
    if (!busy || std::chrono::steady_clock::now() >= deadline) return false;
    device.releases().wait_for_next(releases_before, std::chrono::steady_clock::now() + kPause);
  }
}

// ---- snapshots and accounts ----

ExtentBuffer::SnapshotPointer ExtentBuffer::make_snapshot(Extents extents) {
  return std::make_shared<Snapshot>(*this, snapshot_->placement, std::move(extents), here_.get());
}

void ExtentBuffer::replace(SnapshotPointer next) {
  {
    const std::lock_guard lock(state_mutex_);
    snapshot_.swap(next);
  }
  watcher_.moved();  // the old one is destroyed with the argument
}

Extents ExtentBuffer::own() const { return snapshot_->slot != nullptr ? Extents{} : snapshot_->extents; }

Extents ExtentBuffer::hidden() const {
  return snapshot_->slot != nullptr ? Extents{} : without(here_->ahead, snapshot_->extents);
}

Extents ExtentBuffer::unreached() const {
  const std::uint64_t above = round_up(snapshot_->placement + size(), granule());
  return joined(without(inside(here_->ahead, 0, above), snapshot_->extents), inside(here_->ahead, above, kNoLimit));
}

void ExtentBuffer::account() {
  const SlabPool::Slot* const slot = snapshot_->slot.get();
  const std::uint64_t now = total_bytes(hidden()) + total_bytes(own());
  const std::uint64_t before = std::exchange(here_->held, now);
  // The slot's slab is counted by its pool.
  const std::uint64_t held = slot != nullptr ? slot->bytes : now;
  held_.store(at_home() ? held : 0, std::memory_order_release);
  parked_bytes_.store(at_home() ? 0 : held, std::memory_order_release);
  here_->charge->settle(held);
  here_->charge->settle_descriptors(here_->memory == nullptr ? 0 : here_->memory->descriptors());
  if (now > before) here_->device->took(now - before);
  if (now < before) here_->device->released(before - now);
}

Status ExtentBuffer::take(const Extents& missing, Wait wait, std::uint64_t replaced) {
  TRY(here_->charge->grow(total_bytes(missing) - replaced));
  Status status = here_->charge->take_descriptors(here_->memory->descriptors_for(missing));
  if (status.ok()) status = here_->memory->populate_all(missing, wait);
  if (!status.ok()) account();
  return status;
}

// ---- growth ----

Status ExtentBuffer::ensure(std::uint64_t offset, std::uint64_t end, Growth how) {
  if (shift_.step != 0) return torn();
  if (covered(snapshot_->extents, offset, end)) return {};
  SlabPool* const slabs = here_->device->slabs();
  if (here_->memory == nullptr && slabs != nullptr && snapshot_->placement == 0 && end <= slabs->largest() &&
      !overwritten_) {
    // Without a slab the file can still have memory of its own, unless the device is full.
    Result<std::shared_ptr<const SlabPool::Slot>> slot = slabs->take(end, owner(), /*may_add_slab=*/true, how.wait);
    const Status status = slot.ok() ? enter_slot(slot.take(), how.wait) : slot.status();
    if (status.ok() || lacks_memory(status.error()) || status.error() == EAGAIN) return status;
    log_debug("a small file gets memory of its own: ", status.message());
  }
  return ensure_own(offset, end, end, how);
}

Status ExtentBuffer::enter_slot(std::shared_ptr<const SlabPool::Slot> slot, Wait wait) {
  Exclusion exclusion(*this);
  const std::shared_ptr<const SlabPool::Slot> old = snapshot_->slot;
  if (old != nullptr) {
    if (!exclusion.stop_writers(wait)) return would_wait();
    TRY(here_->device->device().copy_within(slot->address, old->address, old->bytes));
  }
  TRY(here_->charge->grow(slot->bytes - bytes_held()));
  replace(std::make_shared<Snapshot>(*this, std::move(slot)));
  if (old == nullptr) here_->ahead = {{0, granule()}};
  account();
  return {};
}

bool ExtentBuffer::leave_slab(SlabPool& slabs, DeviceAddress start, std::uint64_t bytes) {
  const std::unique_lock mutation = lock_mutation(Wait::kForbidden);
  if (!mutation) return false;
  const std::shared_ptr<const SlabPool::Slot> old = snapshot_->slot;
  if (old == nullptr || old->address - start >= bytes) return true;
  Result<std::shared_ptr<const SlabPool::Slot>> slot = slabs.take(old->bytes, owner(), /*may_add_slab=*/false);
  return slot.ok() && enter_slot(slot.take(), Wait::kForbidden).ok();
}

Status ExtentBuffer::ensure_own(std::uint64_t offset, std::uint64_t end, std::uint64_t reserve_end, Growth how) {
  const std::shared_ptr<const SlabPool::Slot> slot = snapshot_->slot;
  const std::uint64_t slot_end = slot != nullptr ? granule() : 0;
  if (here_->memory == nullptr) {
    std::unique_ptr<DeviceMemory> created = TRY(here_->device->device().create_memory());
    TRY(here_->charge->take_descriptors(created->descriptors()));
    here_->memory = std::move(created);
    if (overwritten_) here_->memory->leave_undefined(true);
  }
  Status status = reserve_own(std::max(reserve_end, slot_end), how.wait);
  if (status.ok()) {
    Extents missing = slot != nullptr ? Extents{{0, slot_end}} : Extents{};
    if (offset < end) {
      const Extents wanted = holes(joined(own(), missing), round_down(offset, granule()), round_up(end, granule()));
      missing = joined(missing, wanted);
    }
    if (slot != nullptr) {
      status = leave_slot(missing, how.wait);
    } else if (!missing.empty()) {
      status = grow_own(missing, how);
    }
  }
  if (!status.ok()) {
    drop_empty_memory();
  } else if (here_->memory != nullptr && !overwritten_) {
    here_->device->releases().list_trimmable(this, owner());
  }
  return status;
}

// Makes all of `missing` exist, from what is preallocated and from the device.
Status ExtentBuffer::grow_own(const Extents& missing, Growth how) {
  const Extents existing = snapshot_->extents;
  const Extents preallocated = hidden();
  Extents fresh = without(missing, preallocated);
  if (!fresh.empty()) {
    const std::uint64_t end = end_of(fresh);
    const bool highest = end > end_of(existing) && end > end_of(preallocated);
    const std::uint64_t more =
        how.speculative && highest ? bytes_to_preallocate(end, total_bytes(existing), how.wait) : 0;
    fresh.back().bytes += more;
    Status status = take(fresh, how.wait);
    if (lacks_memory(status.error()) && more > 0) {
      fresh.back().bytes -= more;
      status = take(fresh, how.wait);
    }
    if (!status.ok()) return status;
    here_->ahead = joined(unreached(), fresh);
  }
  replace(make_snapshot(joined(existing, missing)));
  account();
  return {};
}

std::uint64_t ExtentBuffer::bytes_to_preallocate(std::uint64_t end, std::uint64_t existing, Wait wait) {
  // Fixed memory could not go back.
  if (!preallocates_ || !at_home() || existing == 0 || leased()) return 0;
  const Result<MemoryInfo> memory = here_->device->device().memory(wait);
  if (!memory.ok()) return 0;
  const std::uint64_t free = std::min(memory.value().free_bytes, here_->charge->available());
  const std::uint64_t most = std::min(kMostPreallocated, free / kFreeParts);
  return round_down(std::min({existing, most, here_->range->bytes() - end}), granule());
}

Status ExtentBuffer::reserve_own(std::uint64_t end, Wait wait) {
  if (end == 0 || (here_->range != nullptr && end <= here_->range->bytes())) return {};
  const Extents populated = joined(own(), hidden());
  const std::uint64_t needed = round_up(std::max(end, end_of(populated)), granule());
  const bool copies = here_->device->info().reserve_copies;
  if (copies && here_->range != nullptr && leased()) {
    return Status(EFBIG, "a program uses the file's memory, which the device cannot keep in place beyond " +
                             std::to_string(here_->range->bytes()) + " bytes");
  }
  std::uint64_t expected = 0;
  {
    const std::lock_guard lock(state_mutex_);
    for (const Claim& claim : claims_) expected = std::max(expected, snapshot_->placement + claim.range.end());
  }
  // More than the device has cannot come, whatever is claimed.
  const std::uint64_t possible = needed + round_up(here_->device->info().total_bytes, granule());
  expected = round_up(std::min(expected, possible), granule());
  // A growing file moves each time its length doubles. Addresses are limited, too: see AddressSpace.
  std::uint64_t wanted = !copies             ? std::bit_ceil(std::max({needed, expected, kSmallestReservation}))
                         : expected > needed ? expected
                                             : std::bit_ceil(needed);
  wanted = std::max(needed, std::min(wanted, round_up(kPlacementEnd + kMaximumBytes, granule())));
  Exclusion exclusion(*this);
  if (copies && !own().empty() && !exclusion.stop_writers(wait)) return would_wait();
  Result<std::shared_ptr<AddressRange>> reserved = reserve_addresses(wanted, populated);
  while (wanted > needed && (reserved.error() == ENOMEM || lacks_memory(reserved.error()))) {
    wanted = std::max(needed, wanted / 2);
    reserved = reserve_addresses(wanted, populated);
  }
  // A lack of addresses is reported as a lack of space: programs know what to do about ENOSPC.
  if (reserved.error() == ENOMEM) return Status(ENOSPC, reserved.status().message());
  if (!reserved.ok()) return reserved.status();
  here_->range = reserved.take();
  // Later memory appears in the new range alone, so whatever is published from now on must show that.
  if (snapshot_->slot == nullptr) replace(make_snapshot(own()));
  return {};
}

Result<std::shared_ptr<AddressRange>> ExtentBuffer::reserve_addresses(std::uint64_t bytes, const Extents& populated) {
  if (here_->device->info().reserve_copies) return here_->memory->reserve(bytes, populated);  // addresses are memory
  struct Charged {
    ~Charged() {
      range.reset();
      charge->release_addresses(bytes);
    }
    std::shared_ptr<Charge> charge;
    std::uint64_t bytes;
    std::shared_ptr<AddressRange> range;
  };
  TRY(here_->charge->take_addresses(bytes));
  const std::shared_ptr<Charged> charged(new Charged{here_->charge, bytes, nullptr});
  charged->range = TRY(here_->memory->reserve(bytes, populated));
  return std::shared_ptr<AddressRange>(charged, charged->range.get());
}

// Copies the slot's bytes into the buffer's own memory, which nobody sees yet, and publishes that.
Status ExtentBuffer::leave_slot(const Extents& missing, Wait wait) {
  TRY(take(missing, wait, bytes_held()));
  Exclusion exclusion(*this);
  if (!exclusion.stop_writers(wait)) return would_wait();
  const SlabPool::Slot& slot = *snapshot_->slot;
  TRY(here_->device->device().copy_within(here_->range->base(), slot.address, slot.bytes));
  here_->ahead = joined(here_->ahead, without(missing, 0, granule()));
  replace(make_snapshot(missing));
  account();
  return {};
}

void ExtentBuffer::drop_empty_memory() {
  if (leased()) return;
  if (snapshot_->slot == nullptr) {
    if (!snapshot_->extents.empty()) return;
    replace(std::make_shared<Snapshot>(*this, snapshot_->placement));  // the next try begins there, too
    here_->ahead.clear();
  }
  {
    const std::lock_guard lock(state_mutex_);
    shift_ = {};
  }
  if (!at_home()) {
    (void)enter(std::make_shared<Residence>(context_, shared_charge()), snapshot_);
    return;
  }
  here_->range.reset();
  here_->memory.reset();
  account();
}

// ---- calls that take memory ----

Status ExtentBuffer::allocate(std::uint64_t offset, std::uint64_t bytes, bool keep_size) {
  return allocate_range(offset, bytes, keep_size, /*zeroes=*/false);
}

Status ExtentBuffer::zero_range(std::uint64_t offset, std::uint64_t bytes, bool keep_size) {
  return allocate_range(offset, bytes, keep_size, /*zeroes=*/true);
}

Status ExtentBuffer::allocate_range(std::uint64_t offset, std::uint64_t bytes, bool keep_size, bool zeroes) {
  std::uint64_t end = 0;
  if (bytes == 0) return Status(EINVAL, "allocating nothing");
  TRY(check_end(offset, bytes, &end));
  return change_at_home(offset, end, {.anywhere = true}, [&] {
    const Extent range = placed(offset, end);
    const Extents existing = zeroes ? inside(snapshot_->extents, range.offset, range.end()) : Extents{};
    Status allocated = ensure(range.offset, range.end(), {});
    for (const Extent& extent : existing) {
      if (allocated.ok()) allocated = zero_existing(extent.offset, extent.end());
    }
    if (!allocated.ok()) return allocated;
    here_->ahead = without(here_->ahead, round_down(range.offset, granule()), round_up(range.end(), granule()));
    if (!keep_size) publish(end);
    return allocated;
  });
}

Status ExtentBuffer::zero_existing(std::uint64_t offset, std::uint64_t end) {
  if (offset >= end) return {};
  const SnapshotPointer now = current();
  for (const Extent& extent : inside(now->extents, offset, end)) {
    TRY(now->device->device().zero(now->base + extent.offset, extent.bytes));
  }
  return {};
}

// ---- releasing ----

bool ExtentBuffer::await_readers(TimePoint deadline) {
  std::unique_lock lock(state_mutex_);
  const auto unused = [this] { return snapshots_ == 1; };
  if (deadline != TimePoint::max()) return state_changed_.wait_until(lock, deadline, unused);
  state_changed_.wait(lock, unused);
  return true;
}

bool ExtentBuffer::detach(const Extents& kept, const Extents& removed, Exclusion* exclusion, TimePoint deadline) {
  Extents before = snapshot_->extents;
  SnapshotPointer next = make_snapshot(kept);
  {
    const std::lock_guard lock(state_mutex_);
    exclusion->close_gate_locked(removed);
    snapshot_.swap(next);
  }
  watcher_.moved();
  next.reset();
  if (await_readers(deadline)) return true;
  replace(make_snapshot(std::move(before)));
  return false;
}

void ExtentBuffer::release(const Extents& removed) {
  here_->ahead = without(here_->ahead, removed);
  here_->memory->release_all(removed);
  account();
  drop_empty_memory();
}

// ---- trimming ----

bool ExtentBuffer::may_trim() const {
  const std::lock_guard lock(state_mutex_);
  if (snapshot_->slot != nullptr) return false;
  const std::uint64_t end = round_up(snapshot_->placement + size_.load(std::memory_order_relaxed), granule());
  return bytes_held() > total_bytes(inside(snapshot_->extents, 0, end));
}

bool ExtentBuffer::trim(std::chrono::milliseconds timeout) {
  const std::unique_lock mutation = lock_mutation(Wait::kForbidden);
  return mutation && release_unused(std::chrono::steady_clock::now() + timeout);
}

Extents ExtentBuffer::unused_locked() const {
  if (snapshot_->slot != nullptr || shift_.step != 0) return {};
  Extents unused = unreached();
  const auto keep = [&](const Extent& used) {
    unused = without(unused, round_down(used.offset, granule()), round_up(used.end(), granule()));
  };
  for (const WritePin* writer : writers_) keep(writer->range_);
  for (const Claim& claim : claims_) keep(placed(claim.range.offset, claim.range.end()));
  return unused;
}

bool ExtentBuffer::release_unused(TimePoint deadline) {
  unfix_unless_leased();
  Exclusion exclusion(*this);
  Extents removed;
  bool moves = false;
  bool in_use = false;
  {
    const std::lock_guard lock(state_mutex_);
    in_use = !writers_.empty() || !claims_.empty();
    removed = unused_locked();
    if (!removed.empty()) {
      exclusion.limit_writers_locked(round_up(snapshot_->placement + size_.load(std::memory_order_relaxed), granule()));
      // Readers use nothing above the size, and writers there are left out: only what moves has users.
      moves = exclusion.close_gate_locked(removed);
    }
  }
  if (!removed.empty()) {
    Extents kept = without(snapshot_->extents, removed);
    if (moves) {
      if (!detach(kept, removed, &exclusion, deadline)) return false;
    } else {
      replace(make_snapshot(std::move(kept)));
    }
    release(removed);
  }
  // Not before: whoever finds the device full must wait for this.
  if (!in_use) here_->device->releases().unlist_trimmable(this);
  return true;
}

// ---- shrinking and punching ----

Status ExtentBuffer::resize(std::uint64_t size, Wait wait) {
  if (size > kMaximumBytes) return Status(EFBIG, "beyond the largest size of a buffer");
  const std::unique_lock mutation = lock_mutation(wait);
  if (!mutation) return would_wait();
  unfix_unless_leased();
  Exclusion exclusion(*this);
  std::uint64_t before = 0;
  std::uint64_t highest = 0;
  std::uint64_t end = 0;  // the position behind what stays; the first granule goes with the last byte
  {
    const std::lock_guard lock(state_mutex_);
    before = size_.load(std::memory_order_relaxed);
    end = size == 0 ? 0 : snapshot_->placement + size;
    const bool nothing_above = hidden().empty() && end_of(snapshot_->extents) <= round_up(end, granule());
    if (size > before || (size == before && nothing_above)) {
      size_.store(size, std::memory_order_release);
      return {};
    }
    TRY(check_leases_locked("made smaller", size));
    if (wait == Wait::kForbidden) return would_wait();
    // Writes in progress count as done before: what they put above the size goes with the rest, and the end that they
    // publish is ignored. Later ones that end above it wait for this.
    highest = highest_locked();
    exclusion.limit_writers_locked(end);
    publish_limit_ = size;
    ++shrinks_;
    size_.store(size, std::memory_order_release);
  }
  Status status = shrink(end, highest, &exclusion);
  if (!status.ok()) {
    const std::lock_guard lock(state_mutex_);
    size_.store(before, std::memory_order_release);
  }
  return status;
}

Status ExtentBuffer::shrink(std::uint64_t end, std::uint64_t highest, Exclusion* exclusion) {
  if (snapshot_->slot != nullptr && end > 0) {
    replace(std::make_shared<Snapshot>(*this, snapshot_->slot));
    (void)await_readers(TimePoint::max());
    return zero_existing(end, highest);
  }
  const std::uint64_t kept_end = round_up(end, granule());
  const Extents before = own();
  const Extents kept = without(before, kept_end, kNoLimit);
  const Extents removed = joined(inside(before, kept_end, kNoLimit), hidden());
  // Waits also if nothing is removed: users of the rest of the last granule must be gone.
  (void)detach(kept, removed, exclusion, TimePoint::max());
  Status status = zero_existing(end, std::min(kept_end, highest));
  if (!status.ok()) {
    replace(make_snapshot(before));
    return status;
  }
  if (kept.empty() && !leased()) {
    drop_empty_memory();  // as a whole, without a release of its parts
    if (end == 0) replace(std::make_shared<Snapshot>(*this));
  } else if (!removed.empty()) {
    release(removed);
  }
  return {};
}

Status ExtentBuffer::punch(std::uint64_t offset, std::uint64_t bytes) {
  if (bytes == 0) return Status(EINVAL, "punching nothing");
  std::uint64_t end = 0;
  if (add_overflows(offset, bytes, &end)) end = kMaximumBytes;
  end = std::min(end, kMaximumBytes);
  if (offset >= end) return {};
  const std::lock_guard mutation(mutation_mutex_);
  {
    const std::lock_guard lock(state_mutex_);
    TRY(check_leases_locked("punched", offset));
  }
  (void)release_unused(TimePoint{});  // the caller wants memory back; as much as nobody uses now
  Exclusion exclusion(*this);
  bool to_the_end = false;
  std::uint64_t slot_bytes = 0;
  {
    const std::lock_guard lock(state_mutex_);
    end += snapshot_->placement;
    if (offset > 0) offset += snapshot_->placement;  // else the first granule goes as a whole
    exclusion.limit_writers_locked(offset);
    to_the_end = end >= highest_locked();
    if (snapshot_->slot != nullptr) slot_bytes = snapshot_->slot->bytes;
  }
  // What is above everything is zeros, and goes with the last granule.
  if (to_the_end) end = std::max(end, round_up(end, granule()));
  if (slot_bytes > 0) {
    if (offset > 0 || end < slot_bytes) return zero_existing(offset, end);
    (void)detach({}, {}, &exclusion, TimePoint::max());
    here_->ahead.clear();
    account();
    return {};
  }
  const std::uint64_t first = round_up(offset, granule());
  const std::uint64_t last = round_down(end, granule());
  if (first >= last) return zero_existing(offset, end);
  const Extents existing = snapshot_->extents;
  const Extents removed = inside(existing, first, last);
  Status status;
  if (!removed.empty() && !here_->device->info().cpu_addressable && here_->memory->descriptors() != 0) {
    status = here_->charge->take_descriptors(1);  // a piece with the hole in its middle becomes two
  }
  if (status.ok()) status = zero_existing(offset, first);
  if (status.ok()) status = zero_existing(last, end);
  if (removed.empty() || !status.ok()) {
    account();  // the descriptor is not used
    return status;
  }
  (void)detach(without(existing, first, last), removed, &exclusion, TimePoint::max());
  release(removed);
  return {};
}

Status ExtentBuffer::discard_above_size(std::uint64_t offset, std::uint64_t bytes) {
  std::uint64_t end = 0;
  Status status = check_end(offset, bytes, &end);
  if (!status.ok()) return status;
  const std::lock_guard mutation(mutation_mutex_);
  // A trim() of the caller's may have found another thread changing the buffer, and so released nothing.
  (void)release_unused(TimePoint{});
  Exclusion exclusion(*this);
  Extents regions;
  {
    const std::lock_guard lock(state_mutex_);
    const std::uint64_t size = snapshot_->placement + size_.load(std::memory_order_relaxed);
    const std::uint64_t start = std::max(snapshot_->placement + offset, size);
    end += snapshot_->placement;
    if (start >= end) return {};
    exclusion.limit_writers_locked(size);
    regions.assign(1, {start, end - start});
    for (const WritePin* writer : writers_) regions = without(regions, writer->range_.offset, writer->range_.end());
  }
  for (const Extent& region : regions) {
    if (status.ok()) status = zero_existing(region.offset, region.end());
  }
  return status;
}

// ---- for the process that takes over from this one ----

KeptContents ExtentBuffer::kept() const {
  const std::lock_guard lock(state_mutex_);
  const SlabPool::Slot* const slot = snapshot_->slot.get();
  return {{.device = snapshot_->device->info().index,
           .memory = snapshot_->memory,
           .slot = slot != nullptr ? Extent{slot->offset, slot->bytes} : Extent{},
           .placement = snapshot_->placement,
           .shift = shift_},
          size_.load(std::memory_order_relaxed),
          own()};
}

Status ExtentBuffer::check_kept(const KeptContents& contents) const {
  bool possible = contents.size <= kMaximumBytes && contents.placement < kPlacementEnd &&
                  contents.shift.to < kPlacementEnd && (contents.slot.bytes == 0 || contents.placement == 0);
  std::uint64_t last = 0;
  for (const auto& [offset, bytes] : contents.extents) {
    possible = possible && offset >= last && offset < 2 * kMaximumBytes && bytes - 1 < 2 * kMaximumBytes &&
               (offset | bytes) % granule() == 0;
    last = offset + bytes;
  }
  if (contents.shift.step != 0) possible = possible && has_scratch(contents);
  return possible ? Status() : Status(EPROTO, "no file can be like that");
}

Status ExtentBuffer::restore(const KeptContents& contents, const std::shared_ptr<DeviceContext>& where) {
  const std::lock_guard mutation(mutation_mutex_);
  if (where != context_) {
    if (contents.slot.bytes != 0 || contents.memory == 0) return Status(EPROTO, "nothing can be parked like that");
    here_ = std::make_shared<Residence>(where, std::make_shared<Charge>());
  }
  TRY(check_kept(contents));
  size_.store(contents.size, std::memory_order_release);
  if (contents.slot.bytes != 0) {
    if (here_->device->slabs() == nullptr) return Status(EPROTO, "a small file on a device without slabs");
    replace(std::make_shared<Snapshot>(*this, here_->device->slabs()->take_restored(contents.slot, owner())));
  } else if (contents.memory != 0) {
    Result<std::unique_ptr<DeviceMemory>> memory =
        here_->device->device().restore_memory(contents.memory, contents.extents);
    if (!memory.ok()) return memory.status();
    here_->memory = memory.take();
    const Extents surplus = here_->memory->surplus();
    const Extents populated = joined(contents.extents, surplus);
    const std::uint64_t bytes = std::bit_ceil(std::max(end_of(populated), AddressSpace::kSmallRange));
    here_->range = TRY(reserve_addresses(bytes, populated));
    for (const Extent& extent : surplus) {
      TRY(here_->device->device().zero(here_->range->base() + extent.offset, extent.bytes));
    }
    here_->ahead = surplus;
    replace(std::make_shared<Snapshot>(*this, contents.placement, contents.extents, here_.get()));
    shift_ = contents.shift;
    // Other memory above the size is not in Residence::ahead: fallocate(2) may have asked for it.
    here_->device->releases().list_trimmable(this, owner());
  }
  account();
  // While a shift is in progress, its scratch is above the size.
  if (shift_.step != 0) return {};
  Status status = zero_existing(0, snapshot_->placement);
  return status.ok() ? zero_existing(snapshot_->placement + contents.size, UINT64_MAX) : status;
}

}  // namespace gpufs
