// The mutations of an ExtentBuffer: growing, shrinking, punching, moving out of a slot, giving addresses to others.

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <string>
#include <utility>

#include "base/caught.h"
#include "base/log.h"
#include "base/math.h"
#include "memory/extent_buffer.h"

namespace gpufs {
namespace {

// No reservation is smaller: a file that grows to this size moves its range once at most.
constexpr std::uint64_t kSmallestReservation = std::uint64_t{64} << 20;
// Memory is taken ahead of a growing file by as much as the file has, up to the most: a call of a GPU's driver costs
// 0.1 to 0.3 ms whatever it takes, and this is 16 ms of writing at 4 GB/s. Of the device's free memory never more than
// one part of so many, since what shares a piece with the file's end needs room to be given back.
constexpr std::uint64_t kMostAhead = std::uint64_t{64} << 20;
constexpr std::uint64_t kFreeParts = 16;
// How long giving it back waits for those who use memory that would move with it: until some copies are over, but not
// for one whose file hangs.
constexpr std::chrono::milliseconds kAheadPatience{1000};

}  // namespace

// Keeps writers out, wholly or above a limit, until it is destroyed. begin_locked() needs state_mutex_, the destructor
// takes it.
class ExtentBuffer::Exclusion {
 public:
  explicit Exclusion(ExtentBuffer& buffer) : buffer_(buffer) {}
  ~Exclusion() {
    if (!begun_) return;
    {
      const std::lock_guard lock(buffer_.state_mutex_);
      buffer_.write_limit_ = kNoLimit;
      buffer_.publish_limit_ = kNoLimit;
      buffer_.gate_offset_ = 0;
      buffer_.gate_end_ = 0;
    }
    buffer_.state_changed_.notify_all();
  }
  Exclusion(const Exclusion&) = delete;
  Exclusion& operator=(const Exclusion&) = delete;

  // Keeps out who would use what close_gate_locked() says. An exclusion around this one ends with it.
  void begin_gate_locked() { begun_ = true; }

  void begin_locked(std::uint64_t limit) {
    begun_ = true;
    buffer_.write_limit_ = limit;
  }

  // Nobody may start to write any more, and nobody writes when this returns true. False: somebody does, and this thread
  // must not wait.
  [[nodiscard]] bool of_all_writers() {
    std::unique_lock lock(buffer_.state_mutex_);
    begin_locked(0);
    if (!this_thread_may_wait()) return buffer_.writers_ == nullptr;
    buffer_.state_changed_.wait(lock, [this] { return buffer_.writers_ == nullptr; });
    return true;
  }

 private:
  ExtentBuffer& buffer_;
  bool begun_ = false;
};

ExtentBuffer::ExtentBuffer(std::shared_ptr<DeviceContext> device)
    : context_(std::move(device)),
      granule_(context_->info().granule),
      census_(std::make_shared<Census>()),
      snapshot_(std::make_shared<Snapshot>(census_, nullptr, Extents{})) {}

ExtentBuffer::~ExtentBuffer() {
  set_ahead({});
  snapshot_.reset();
  range_.reset();
  memory_.reset();
  context_->account(-static_cast<std::int64_t>(own_held_));
}

ExtentBuffer::SnapshotPointer ExtentBuffer::make_snapshot(Extents extents) const {
  return std::make_shared<Snapshot>(census_, range_, std::move(extents));
}

void ExtentBuffer::replace(SnapshotPointer next) {
  const std::lock_guard lock(state_mutex_);
  // The old one is destroyed with the argument, after the lock is released.
  snapshot_.swap(next);
}

void ExtentBuffer::wait_for_old_snapshots(std::uint64_t unpublished) {
  std::unique_lock lock(census_->mutex);
  census_->changed.wait(lock, [&] { return census_->snapshots == 1 + unpublished; });
}

bool ExtentBuffer::wait_for_old_snapshots_until(TimePoint deadline) {
  if (deadline == TimePoint::max()) {
    wait_for_old_snapshots();
    return true;
  }
  std::unique_lock lock(census_->mutex);
  return census_->changed.wait_until(lock, deadline, [&] { return census_->snapshots == 1; });
}

void ExtentBuffer::account_own(std::uint64_t bytes) {
  context_->account(static_cast<std::int64_t>(bytes) - static_cast<std::int64_t>(own_held_));
  own_held_ = bytes;
  held_.store(bytes, std::memory_order_release);
}

// Above this there is nothing in the buffer, neither published nor being written.
std::uint64_t ExtentBuffer::highest_locked() const {
  std::uint64_t highest = size_.load(std::memory_order_relaxed);
  for (const WriteLease* writer = writers_; writer != nullptr; writer = writer->next_) {
    highest = std::max(highest, writer->end_);
  }
  return highest;
}

// ---- growth ----

Status ExtentBuffer::ensure(std::uint64_t offset, std::uint64_t end, const Growth& growth) {
  if (end > promised_) {
    return Status(EFBIG, "the buffer's address is promised for " + std::to_string(promised_) + " bytes at most");
  }
  if (covered(current()->extents, offset, end)) return {};
  SlabPool* const slabs = context_->slabs();
  if (memory_ == nullptr && slabs != nullptr && end <= slabs->largest()) {
    // A slab that cannot be had does not mean that the file cannot have memory of its own, unless the device is full.
    Status status = ensure_slot(*slabs, end);
    if (status.ok() || status.error() == ENOSPC || status.error() == EAGAIN) return status;
    log_debug("a small file gets memory of its own: ", status.message());
  }
  return ensure_own(offset, end, end, /*promise=*/false, growth);
}

void ExtentBuffer::forget_shrunk(Made* made) const {
  if (made == nullptr) return;
  // Shrinks take the mutation's mutex: there is none before the caller is done.
  const std::lock_guard lock(state_mutex_);
  if (made->shrinks != shrinks_) *made = {{}, shrinks_};
}

Extents ExtentBuffer::made_with(const Growth& growth, const Extents& extents) {
  if (growth.made == nullptr) return {};
  return joined(growth.made->extents, without(extents, growth.made->extents));
}

void ExtentBuffer::reserve_for_others(std::uint64_t offset, std::uint64_t end) {
  const Extents asked{{round_down(offset, granule_), round_up(end, granule_) - round_down(offset, granule_)}};
  reserved_ = joined(reserved_, without(asked, reserved_));
}

Status ExtentBuffer::ensure_slot(SlabPool& slabs, std::uint64_t end) {
  Result<std::shared_ptr<SlabPool::Slot>> taken = slabs.take(end);
  if (!taken.ok()) return taken.status();
  const std::shared_ptr<SlabPool::Slot> slot = taken.take();
  SnapshotPointer next = std::make_shared<Snapshot>(census_, slot);
  Exclusion exclusion(*this);
  const std::shared_ptr<SlabPool::Slot> old = current()->slot;
  if (old != nullptr) {
    if (!exclusion.of_all_writers()) return would_wait();
    Status status = context_->device().copy_within(slot->address(), old->address(), old->bytes());
    if (!status.ok()) return status;
  }
  replace(std::move(next));
  held_.store(slot->bytes(), std::memory_order_release);
  return {};
}

Status ExtentBuffer::ensure_own(std::uint64_t offset, std::uint64_t end, std::uint64_t reserve_end, bool promise,
                                const Growth& growth) {
  const bool in_slot = current()->slot != nullptr;
  const std::uint64_t slot_end = in_slot ? round_up(current()->slot->bytes(), granule_) : 0;
  if (memory_ == nullptr) {
    Result<std::unique_ptr<DeviceMemory>> made = context_->device().create_memory();
    if (!made.ok()) return made.status();
    memory_ = made.take();
  }
  Status status = reserve_own(std::max(reserve_end, slot_end), promise);
  if (status.ok()) {
    const Extents existing = in_slot ? Extents{} : current()->extents;
    Extents missing;
    if (in_slot) missing = holes(existing, 0, slot_end);
    if (offset < end) {
      const Extents wanted = holes(joined(existing, missing), round_down(offset, granule_), round_up(end, granule_));
      missing = joined(missing, wanted);
    }
    if (in_slot) {
      Extents made = made_with(growth, without(missing, 0, slot_end));
      status = memory_->populate(missing);
      if (status.ok()) status = leave_slot(missing);
      if (status.ok() && growth.made != nullptr) growth.made->extents = std::move(made);
    } else if (!missing.empty()) {
      status = grow_own(existing, missing, growth);
    }
  }
  if (!status.ok()) drop_unused_memory();
  return status;
}

// Makes all of `missing` exist, from what was taken ahead and from the device.
Status ExtentBuffer::grow_own(const Extents& existing, const Extents& missing, const Growth& growth) {
  // Made before the memory: once that is populated, nothing may fail any more.
  SnapshotPointer grown = make_snapshot(joined(existing, missing));
  const std::uint64_t held = total_bytes(grown->extents);
  Extents ahead = without(ahead_, missing);
  Extents fresh = without(missing, ahead_);
  Extents made = made_with(growth, missing);
  if (!fresh.empty()) {
    const std::uint64_t end = end_of(fresh);
    const bool highest = growth.ahead && end > end_of(existing) && end > end_of(ahead_);
    const std::uint64_t more = highest ? wanted_ahead(end, total_bytes(existing)) : 0;
    if (more > 0) ahead = joined(ahead, {{end, more}});
    fresh.back().bytes += more;
    Status status = memory_->populate(fresh);
    if (status.error() == ENOSPC && more > 0) {
      ahead = without(ahead, end, end + more);
      fresh.back().bytes -= more;
      status = memory_->populate(fresh);
    }
    if (!status.ok()) return status;
  }
  replace(std::move(grown));
  account_own(held);
  set_ahead(std::move(ahead));
  if (growth.made != nullptr) growth.made->extents = std::move(made);
  return {};
}

std::uint64_t ExtentBuffer::wanted_ahead(std::uint64_t end, std::uint64_t existing) {
  // Where memory is fixed in its place, or addresses are memory, it could not go back.
  if (!takes_ahead_ || existing == 0 || exported_ || promised_ != kNoLimit) return 0;
  const Result<MemoryInfo> memory = context_->device().memory();
  if (!memory.ok()) return 0;
  const std::uint64_t most = std::min(kMostAhead, memory.value().free_bytes / kFreeParts);
  return round_down(std::min({existing, most, range_->bytes() - end}), granule_);
}

void ExtentBuffer::take_ahead() {
  // Where the CPU can address the memory, what costs is the memory and not the call.
  if (context_->info().cpu_addressable || context_->info().reserve_copies) return;
  const std::lock_guard mutation(mutation_mutex_);
  takes_ahead_ = true;
}

void ExtentBuffer::count_ahead(const Extents& ahead) {
  const std::uint64_t before = total_bytes(ahead_);
  const std::uint64_t now = total_bytes(ahead);
  if (now == before) return;
  context_->account_ahead(static_cast<std::int64_t>(now) - static_cast<std::int64_t>(before));
  ahead_bytes_.store(now, std::memory_order_release);
}

void ExtentBuffer::set_ahead(Extents ahead) {
  count_ahead(ahead);
  const bool before = !ahead_.empty();
  ahead_ = std::move(ahead);
  const bool now = !ahead_.empty();
  if (before && !now) context_->drop_ahead(this);
  if (now && !before) context_->hold_ahead(std::shared_ptr<AheadHolder>(shared_from_this(), this), this);
}

void ExtentBuffer::trim() { give_back_ahead(std::chrono::steady_clock::now() + kAheadPatience); }

void ExtentBuffer::give_back_ahead(TimePoint deadline) {
  // What is in use for longer may be so for ever: once that was seen, nobody waits for it again until it is over.
  if (ahead_in_use_.load(std::memory_order_relaxed)) deadline = std::chrono::steady_clock::now();
  bool given_back = mutation_mutex_.try_lock_until(deadline);
  if (given_back) {
    const std::lock_guard mutation(mutation_mutex_, std::adopt_lock);
    given_back = release_ahead(deadline);
  }
  ahead_in_use_.store(!given_back, std::memory_order_relaxed);
}

bool ExtentBuffer::release_ahead(TimePoint deadline) {
  if (ahead_.empty()) return true;
  const Extents kept = current()->extents;  // a copy, since a snapshot in hand would be one to wait for
  {
    Exclusion gate(*this);
    if (!set_apart(kept, ahead_, &gate, deadline)) return false;
    count_ahead({});
    memory_->release(std::exchange(ahead_, {}));
  }
  // Not before: who finds the device full meanwhile must wait for this.
  context_->drop_ahead(this);
  return true;
}

void ExtentBuffer::expect(std::uint64_t end) {
  std::uint64_t before = expected_end_.load(std::memory_order_relaxed);
  while (before < end && !expected_end_.compare_exchange_weak(before, end, std::memory_order_relaxed)) {
  }
}

Status ExtentBuffer::reserve_own(std::uint64_t end, bool promise) {
  const SnapshotPointer before = current();
  const bool in_slot = before->slot != nullptr;
  if (end == 0 || (range_ != nullptr && end <= range_->bytes())) return {};
  const std::uint64_t existing_end = in_slot ? 0 : std::max(end_of(before->extents), end_of(ahead_));
  const std::uint64_t needed = round_up(std::max(end, existing_end), granule_);
  const std::uint64_t largest = round_up(kMaximumBytes, granule_);
  const bool copies = context_->info().reserve_copies;
  std::uint64_t wanted = needed;
  if (!promise) {
    // More than the device has cannot come, whatever is expected.
    const std::uint64_t possible = needed + round_up(context_->info().total_bytes, granule_);
    const std::uint64_t expected =
        round_up(std::min(expected_end_.load(std::memory_order_relaxed), possible), granule_);
    // Addresses cost nothing, so a growing file seldom needs new ones; where they are memory, doubling has to do.
    wanted = !copies             ? std::bit_ceil(std::max({needed, expected, kSmallestReservation / 4})) * 4
             : expected > needed ? expected
                                 : std::bit_ceil(needed);
    wanted = std::max(needed, std::min(wanted, largest));
  }
  Exclusion exclusion(*this);
  if (copies && !before->extents.empty() && !exclusion.of_all_writers()) return would_wait();
  Result<std::shared_ptr<AddressRange>> made = memory_->reserve(wanted);
  while (wanted > needed && (made.error() == ENOMEM || made.error() == ENOSPC)) {
    wanted = std::max(needed, wanted / 2);
    made = memory_->reserve(wanted);
  }
  // A lack of addresses is reported as a lack of space: programs know what to do about ENOSPC.
  if (made.error() == ENOMEM) return Status(ENOSPC, made.status().message());
  if (!made.ok()) return made.status();
  range_ = made.take();
  // Later memory appears in the new range alone, so whatever is published from now on must show that.
  if (!in_slot) replace(make_snapshot(before->extents));
  return {};
}

// Copies the slot's bytes into the buffer's own memory, which nobody sees yet, and publishes that.
Status ExtentBuffer::leave_slot(const Extents& populated) {
  SnapshotPointer next = make_snapshot(populated);
  const std::uint64_t held = total_bytes(populated);
  const std::shared_ptr<SlabPool::Slot> slot = current()->slot;
  Exclusion exclusion(*this);
  if (!exclusion.of_all_writers()) return would_wait();
  Status status = context_->device().copy_within(range_->base(), slot->address(), slot->bytes());
  if (!status.ok()) return status;
  replace(std::move(next));
  account_own(held);
  return {};
}

// After a failure: a file that has nothing in memory of its own is as if it had never asked for any.
void ExtentBuffer::drop_unused_memory() {
  const SnapshotPointer now = current();
  if (exported_ || promised_ != kNoLimit) return;
  if (now->slot == nullptr) {
    if (!now->extents.empty()) return;
    if (now->range != nullptr) replace(std::make_shared<Snapshot>(census_, nullptr, Extents{}));
  }
  set_ahead({});
  range_.reset();
  memory_.reset();
}

Status ExtentBuffer::populate(std::uint64_t offset, std::uint64_t bytes, Made* made) {
  std::uint64_t end = 0;
  Status status = check_end(offset, bytes, &end);
  if (!status.ok() || bytes == 0) return status;
  return with_reclaiming([&] {
    const std::lock_guard mutation(mutation_mutex_);
    forget_shrunk(made);
    return ensure(offset, end, {.ahead = false, .made = made});
  });
}

void ExtentBuffer::release_unused(const Made& made) {
  if (made.extents.empty()) return;
  const std::lock_guard mutation(mutation_mutex_);
  release_ahead();
  Exclusion exclusion(*this);
  Extents unused;
  Extents kept;
  {
    const std::lock_guard lock(state_mutex_);
    if (made.shrinks != shrinks_ || snapshot_->slot != nullptr) return;
    const std::uint64_t above = round_up(size_.load(std::memory_order_relaxed), granule_);
    unused = without(common(snapshot_->extents, inside(made.extents, above, kNoLimit)), reserved_);
    for (const WriteLease* writer = writers_; writer != nullptr; writer = writer->next_) {
      unused = without(unused, round_down(writer->offset_, granule_), round_up(writer->end_, granule_));
    }
    if (unused.empty()) return;
    kept = without(snapshot_->extents, unused);
    exclusion.begin_locked(above);
  }
  take_away(kept, unused);
  drop_unused_memory();
}

Status ExtentBuffer::allocate(std::uint64_t offset, std::uint64_t bytes, bool keep_size) {
  std::uint64_t end = 0;
  if (bytes == 0) return Status(EINVAL, "allocating nothing");
  Status status = check_end(offset, bytes, &end);
  if (!status.ok()) return status;
  return with_reclaiming([&] {
    const std::lock_guard mutation(mutation_mutex_);
    Status allocated = ensure(offset, end, {});
    if (allocated.ok()) keep_size ? reserve_for_others(offset, end) : publish(end);
    return allocated;
  });
}

Status ExtentBuffer::zero_range(std::uint64_t offset, std::uint64_t bytes, bool keep_size) {
  std::uint64_t end = 0;
  if (bytes == 0) return Status(EINVAL, "zeroing nothing");
  Status status = check_end(offset, bytes, &end);
  if (!status.ok()) return status;
  return with_reclaiming([&] {
    const std::lock_guard mutation(mutation_mutex_);
    const Extents existing = inside(current()->extents, offset, end);
    Status zeroed = ensure(offset, end, {});
    for (const Extent& extent : existing) {
      if (zeroed.ok()) zeroed = zero_existing(extent.offset, extent.offset + extent.bytes);
    }
    if (zeroed.ok()) keep_size ? reserve_for_others(offset, end) : publish(end);
    return zeroed;
  });
}

Status ExtentBuffer::zero_existing(std::uint64_t offset, std::uint64_t end) {
  if (offset >= end) return {};
  const SnapshotPointer now = current();
  for (const Extent& extent : inside(now->extents, offset, end)) {
    Status status = context_->device().zero(now->base + extent.offset, extent.bytes);
    if (!status.ok()) return status;
  }
  return {};
}

// ---- taking away ----

std::uint64_t ExtentBuffer::limit() const {
  const std::lock_guard lock(state_mutex_);
  return std::min(promised_, kMaximumBytes);
}

Status ExtentBuffer::resize(std::uint64_t size) {
  if (size > kMaximumBytes) return Status(EFBIG, "beyond the largest size of a buffer");
  const std::unique_lock mutation = lock_mutation();
  if (!mutation) return would_wait();
  if (size > promised_) {
    return Status(EFBIG, "the buffer's address is promised for " + std::to_string(promised_) + " bytes at most");
  }
  if (size <= this->size()) {
    if (!this_thread_may_wait() && bytes_held() + bytes_ahead() > 0) return would_wait();
    release_ahead();
    expected_end_.store(0, std::memory_order_relaxed);
  }
  Exclusion exclusion(*this);
  std::uint64_t before = 0;
  std::uint64_t highest = 0;
  {
    const std::lock_guard lock(state_mutex_);
    before = size_.load(std::memory_order_relaxed);
    const bool nothing_above = end_of(snapshot_->extents) <= round_up(size, granule_);
    if (size > before || (size == before && nothing_above)) {
      size_.store(size, std::memory_order_release);
      return {};
    }
    if (!this_thread_may_wait()) return would_wait();
    // Writes that are under way count as done before: what they put above the size goes with the rest, and when they
    // publish their end it is not taken. Later ones that end above it wait for this.
    highest = highest_locked();
    exclusion.begin_locked(size);
    publish_limit_ = size;
    ++shrinks_;
    size_.store(size, std::memory_order_release);
  }
  Status status = caught([&] { return shrink(size, highest); });
  if (!status.ok()) {
    const std::lock_guard lock(state_mutex_);
    size_.store(before, std::memory_order_release);
    return status;
  }
  reserved_ = without(reserved_, round_up(size, granule_), kNoLimit);
  return status;
}

Status ExtentBuffer::shrink(std::uint64_t size, std::uint64_t highest) {
  std::shared_ptr<SlabPool::Slot> slot = current()->slot;
  if (slot != nullptr) {
    replace(size == 0 ? std::make_shared<Snapshot>(census_, nullptr, Extents{})
                      : std::make_shared<Snapshot>(census_, slot));
    slot.reset();
    wait_for_old_snapshots();
    if (size > 0) return zero_existing(size, highest);
    held_.store(0, std::memory_order_release);
    return {};
  }
  if (size == 0 && !exported_ && promised_ == kNoLimit) {
    // All of it: the memory goes as a whole, which cannot fail, and the file may live in a slot again.
    replace(std::make_shared<Snapshot>(census_, nullptr, Extents{}));
    wait_for_old_snapshots();
    set_ahead({});
    range_.reset();
    memory_.reset();
    account_own(0);
    return {};
  }
  const std::uint64_t kept_end = round_up(size, granule_);
  Extents before = current()->extents;
  const Extents removed = inside(before, kept_end, kNoLimit);
  Extents kept = without(before, kept_end, kNoLimit);
  SnapshotPointer next = make_snapshot(kept);
  // All that needs memory comes first: what has begun to go must not be lost for want of it.
  SnapshotPointer back = make_snapshot(std::move(before));
  {
    const std::lock_guard lock(state_mutex_);
    close_gate_locked(removed);
    snapshot_.swap(next);
  }
  next.reset();
  wait_for_old_snapshots(1);  // `back` is the one
  Status status = caught([&] { return zero_existing(size, std::min(kept_end, highest)); });
  if (!status.ok()) {
    replace(std::move(back));
    return status;
  }
  back.reset();
  if (removed.empty()) return {};  // also of a file that has no memory of its own yet
  memory_->release(removed);
  account_own(total_bytes(kept));
  return {};
}

Status ExtentBuffer::punch(std::uint64_t offset, std::uint64_t bytes) {
  if (bytes == 0) return Status(EINVAL, "punching nothing");
  std::uint64_t end = 0;
  if (add_overflows(offset, bytes, &end)) end = kMaximumBytes;
  end = std::min(end, kMaximumBytes);
  if (offset >= end) return {};
  const std::lock_guard mutation(mutation_mutex_);
  release_ahead();
  Exclusion exclusion(*this);
  bool to_the_end = false;
  {
    const std::lock_guard lock(state_mutex_);
    exclusion.begin_locked(offset);
    to_the_end = end >= highest_locked();
  }
  // What is above everything is zeros, and goes with the last granule.
  if (to_the_end) end = std::max(end, round_up(end, granule_));
  if (current()->slot != nullptr) {
    if (offset > 0 || end < current()->slot->bytes()) return zero_existing(offset, end);
    replace(std::make_shared<Snapshot>(census_, nullptr, Extents{}));
    wait_for_old_snapshots();
    held_.store(0, std::memory_order_release);
    reserved_.clear();
    return {};
  }
  const std::uint64_t first = round_up(offset, granule_);
  const std::uint64_t last = round_down(end, granule_);
  if (first >= last) return zero_existing(offset, end);
  Status status = zero_existing(offset, first);
  if (status.ok()) status = zero_existing(last, end);
  if (!status.ok()) return status;
  Extents kept;
  Extents removed;
  {
    const SnapshotPointer now = current();
    removed = inside(now->extents, first, last);
    if (removed.empty()) return {};
    kept = without(now->extents, first, last);
  }
  reserved_ = without(reserved_, first, last);
  take_away(kept, removed);
  return {};
}

void ExtentBuffer::take_away(const Extents& kept, const Extents& removed) {
  Exclusion gate(*this);
  (void)set_apart(kept, removed, &gate, TimePoint::max());
  memory_->release(removed);
  account_own(total_bytes(kept));
}

bool ExtentBuffer::set_apart(const Extents& kept, const Extents& removed, Exclusion* gate, TimePoint deadline) {
  SnapshotPointer next = make_snapshot(kept);
  bool used = false;
  {
    const std::lock_guard lock(state_mutex_);
    gate->begin_gate_locked();
    close_gate_locked(removed);
    // What is in no snapshot has no users, unless the driver moves more than that.
    used = gate_end_ > gate_offset_ || total_bytes(kept) != total_bytes(snapshot_->extents);
    snapshot_.swap(next);
  }
  next.reset();
  return !used || wait_for_old_snapshots_until(deadline);
}

void ExtentBuffer::close_gate_locked(const Extents& removed) {
  bool moves = false;
  std::uint64_t start = kNoLimit;
  std::uint64_t end = 0;
  for (const Extent& extent : removed) {
    const MemorySpan span = memory_->release_span(extent.offset, extent.bytes);
    moves = moves || span.offset < extent.offset || span.offset + span.bytes > extent.offset + extent.bytes;
    start = std::min(start, span.offset);
    end = std::max(end, span.offset + span.bytes);
  }
  if (!moves) return;
  gate_offset_ = start;
  gate_end_ = end;
}

Status ExtentBuffer::discard_above_size(std::uint64_t offset, std::uint64_t bytes) {
  std::uint64_t end = 0;
  Status status = check_end(offset, bytes, &end);
  if (!status.ok()) return status;
  const std::lock_guard mutation(mutation_mutex_);
  Exclusion exclusion(*this);
  Extents regions;
  {
    const std::lock_guard lock(state_mutex_);
    const std::uint64_t size = size_.load(std::memory_order_relaxed);
    if (end <= size) return {};
    const std::uint64_t start = std::max(offset, size);
    if (start == end) return {};
    exclusion.begin_locked(size);
    regions.assign(1, {start, end - start});
    for (const WriteLease* writer = writers_; writer != nullptr; writer = writer->next_) {
      regions = without(regions, writer->offset_, writer->end_);
    }
  }
  for (const Extent& region : regions) {
    if (status.ok()) status = zero_existing(region.offset, region.offset + region.bytes);
  }
  return status;
}

// ---- for others ----

Result<DeviceAddress> ExtentBuffer::pin_address(std::uint64_t maximum_bytes) {
  if (maximum_bytes == 0) return Status(EINVAL, "an address for nothing");
  if (maximum_bytes > kMaximumBytes) return Status(EFBIG, "beyond the largest size of a buffer");
  DeviceAddress address = 0;
  const Status status = with_reclaiming([&] {
    const std::lock_guard mutation(mutation_mutex_);
    return promise_address(maximum_bytes, &address);
  });
  if (!status.ok()) return status;
  return address;
}

Status ExtentBuffer::promise_address(std::uint64_t maximum_bytes, DeviceAddress* address) {
  release_ahead();
  if (promised_ == kNoLimit) {
    {
      const std::lock_guard lock(state_mutex_);
      const std::uint64_t highest = highest_locked();
      if (highest > maximum_bytes) {
        return Status(EFBIG,
                      "the buffer has " + std::to_string(highest) + " bytes, more than an address is wanted for");
      }
    }
    Status status = ensure_own(0, 0, maximum_bytes, /*promise=*/true, {});
    if (!status.ok()) return status;
    // Writes that began meanwhile, in memory that was allocated ahead, count too; later ones see the promise.
    const std::lock_guard lock(state_mutex_);
    if (highest_locked() > maximum_bytes)
      return Status(EFBIG, "the buffer is growing past what an address is wanted for");
    promised_ = maximum_bytes;
  } else if (maximum_bytes > promised_) {
    if (maximum_bytes > range_->bytes()) {
      return Status(EFBIG, "the buffer's address is promised for " + std::to_string(promised_) + " bytes at most");
    }
    const std::lock_guard lock(state_mutex_);
    promised_ = maximum_bytes;
  }
  memory_->fix_in_place();
  *address = range_->base();
  return {};
}

Result<std::vector<ExportedMemory>> ExtentBuffer::export_memory() {
  Result<std::vector<ExportedMemory>> exported = Status(EIO, "");
  const Status status = with_reclaiming([&] {
    const std::lock_guard mutation(mutation_mutex_);
    release_ahead();
    Status done = ensure_own(0, 0, 0, /*promise=*/false, {});
    if (!done.ok()) return done;
    exported = memory_->export_memory();
    done = exported.status();
    exported_ = exported_ || done.ok();
    if (!done.ok()) drop_unused_memory();
    return done;
  });
  if (!status.ok()) return status;
  return exported;
}

}  // namespace gpufs
