// What releases memory of an ExtentBuffer: trimming, shrinking, punching, clearing what a failed write left.

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "base/math.h"
#include "base/thread.h"
#include "memory/exclusion.h"
#include "memory/extent_buffer.h"

namespace gpufs {

bool ExtentBuffer::detach(const Extents& kept, const Extents& removed, Exclusion* exclusion, TimePoint deadline) {
  Extents before = snapshot_->extents;
  SnapshotPointer next = make_snapshot(kept);
  {
    const std::lock_guard lock(state_mutex_);
    exclusion->close_gate_locked(removed);
    snapshot_.swap(next);
  }
  moved_();
  next.reset();
  {
    std::unique_lock lock(state_mutex_);
    const auto unused = [this] { return snapshots_ == 1; };
    if (deadline == TimePoint::max()) {
      state_changed_.wait(lock, unused);
      return true;
    }
    if (state_changed_.wait_until(lock, deadline, unused)) return true;
  }
  replace(make_snapshot(std::move(before)));
  return false;
}

void ExtentBuffer::release(const Extents& removed) {
  ahead_ = without(ahead_, removed);
  memory_->release(removed);
  account();
  drop_empty_memory();
}

// ---- trimming ----

bool ExtentBuffer::may_trim() const {
  const std::lock_guard lock(state_mutex_);
  if (snapshot_->slot != nullptr) return false;
  const std::uint64_t end = round_up(size_.load(std::memory_order_relaxed), granule_);
  return bytes_held() > total_bytes(inside(snapshot_->extents, 0, end));
}

bool ExtentBuffer::trim(std::chrono::milliseconds timeout) {
  const std::unique_lock mutation(mutation_mutex_, std::try_to_lock);
  return mutation && release_unused(std::chrono::steady_clock::now() + timeout);
}

Extents ExtentBuffer::unused_locked() const {
  if (snapshot_->slot != nullptr) return {};
  Extents unused = unreached();
  const auto keep = [&](const Extent& used) {
    unused = without(unused, round_down(used.offset, granule_), round_up(used.end(), granule_));
  };
  for (const WritePin* writer : writers_) keep(writer->range_);
  for (const Claim& claim : claims_) keep(claim.range);
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
      exclusion.limit_writers_locked(round_up(size_.load(std::memory_order_relaxed), granule_));
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
  if (!in_use) context_->reclaim().unlist_trimmable(this);
  return true;
}

// ---- shrinking and punching ----

Status ExtentBuffer::resize(std::uint64_t size, Wait wait) {
  if (size > kMaximumBytes) return Status(EFBIG, "beyond the largest size of a buffer");
  std::unique_lock mutation(mutation_mutex_, std::defer_lock);
  if (wait == Wait::kAllowed) {
    mutation.lock();
  } else if (!mutation.try_lock()) {
    return would_wait();
  }
  unfix_unless_leased();
  Exclusion exclusion(*this);
  std::uint64_t before = 0;
  std::uint64_t highest = 0;
  {
    const std::lock_guard lock(state_mutex_);
    before = size_.load(std::memory_order_relaxed);
    const bool nothing_above = hidden().empty() && end_of(snapshot_->extents) <= round_up(size, granule_);
    if (size > before || (size == before && nothing_above)) {
      size_.store(size, std::memory_order_release);
      return {};
    }
    if (Status leases = check_leases_locked("made smaller", size); !leases.ok()) return leases;
    if (wait == Wait::kForbidden) return would_wait();
    // Writes in progress count as done before: what they put above the size goes with the rest, and the end that they
    // publish is ignored. Later ones that end above it wait for this.
    highest = highest_locked();
    exclusion.limit_writers_locked(size);
    publish_limit_ = size;
    ++shrinks_;
    size_.store(size, std::memory_order_release);
  }
  Status status = shrink(size, highest, &exclusion);
  if (!status.ok()) {
    const std::lock_guard lock(state_mutex_);
    size_.store(before, std::memory_order_release);
  }
  return status;
}

Status ExtentBuffer::shrink(std::uint64_t size, std::uint64_t highest, Exclusion* exclusion) {
  const bool in_slot = snapshot_->slot != nullptr;
  if (in_slot && size > 0) {
    SnapshotPointer same = std::make_shared<Snapshot>(*this, snapshot_->slot);
    replace(std::move(same));
    std::unique_lock lock(state_mutex_);
    state_changed_.wait(lock, [this] { return snapshots_ == 1; });
    lock.unlock();
    return zero_existing(size, highest);
  }
  const std::uint64_t kept_end = round_up(size, granule_);
  const Extents before = in_slot ? Extents{} : snapshot_->extents;
  const Extents kept = without(before, kept_end, kNoLimit);
  const Extents removed = joined(inside(before, kept_end, kNoLimit), hidden());
  // Waits also if nothing is removed: users of the rest of the last granule must be gone.
  (void)detach(kept, removed, exclusion, TimePoint::max());
  Status status = zero_existing(size, std::min(kept_end, highest));
  if (!status.ok()) {
    replace(make_snapshot(before));
    return status;
  }
  if (kept.empty() && !leased()) {
    drop_empty_memory();  // as a whole, without a release of its parts
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
    if (Status leases = check_leases_locked("punched", offset); !leases.ok()) return leases;
  }
  (void)release_unused(TimePoint{});  // the caller wants memory back; as much as nobody uses now
  Exclusion exclusion(*this);
  bool to_the_end = false;
  std::uint64_t slot_bytes = 0;
  {
    const std::lock_guard lock(state_mutex_);
    exclusion.limit_writers_locked(offset);
    to_the_end = end >= highest_locked();
    if (snapshot_->slot != nullptr) slot_bytes = snapshot_->slot->bytes;
  }
  // What is above everything is zeros, and goes with the last granule.
  if (to_the_end) end = std::max(end, round_up(end, granule_));
  if (slot_bytes > 0) {
    if (offset > 0 || end < slot_bytes) return zero_existing(offset, end);
    (void)detach({}, {}, &exclusion, TimePoint::max());
    ahead_.clear();
    account();
    return {};
  }
  const std::uint64_t first = round_up(offset, granule_);
  const std::uint64_t last = round_down(end, granule_);
  if (first >= last) return zero_existing(offset, end);
  Status status = zero_existing(offset, first);
  if (status.ok()) status = zero_existing(last, end);
  if (!status.ok()) return status;
  const Extents existing = snapshot_->extents;
  const Extents removed = inside(existing, first, last);
  if (removed.empty()) return {};
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
    const std::uint64_t size = size_.load(std::memory_order_relaxed);
    const std::uint64_t start = std::max(offset, size);
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

}  // namespace gpufs
