#include "drivers/gpu/host_tier_pool.h"

#include <algorithm>
#include <cerrno>
#include <iterator>

#include "base/log.h"

namespace gpufs::gpu {
namespace {

constexpr std::chrono::milliseconds kQuiet{500};

// How much longer than asked for a range may be.
constexpr std::uint64_t kMostLonger = 2;
// How many times as long as what is mapped in it a range may be that lies idle: its addresses are in nobody's share. A
// file without holes comes to four.
constexpr std::uint64_t kMostAddresses = 8;

}  // namespace

std::optional<AcquiredMemory> HostTierPool::take(DeviceAddress address, bool wants_zeros) {
  Lock lock(mutex_);
  quiet_from_ = Worker::Clock::now() + kQuiet;
  if (const Mapped there = find_mapped(lock, address, address + 1); there != mapped_.end() && there->first == address) {
    return take_locked(there);
  }
  if (ready_.empty() && used_.empty() && !unmap_one(lock).ok()) return std::nullopt;
  const bool zeroed = wants_zeros ? !ready_.empty() : used_.empty();
  std::vector<PhysicalHandle>& from = zeroed ? ready_ : used_;
  const PhysicalHandle handle = from.back();
  from.pop_back();
  return AcquiredMemory{.handle = handle, .zeroed = zeroed, .mapped = false};
}

AcquiredMemory HostTierPool::take_locked(Mapped piece) {
  const AcquiredMemory taken{.handle = piece->second, .zeroed = dirty_.erase(piece->first) == 0, .mapped = true};
  mapped_.erase(piece);
  return taken;
}

Status HostTierPool::unmap_locked(Mapped piece) {
  const DeviceAddress address = piece->first;
  TRY(source_.unmap(address));
  const AcquiredMemory taken = take_locked(piece);
  (taken.zeroed ? ready_ : used_).push_back(taken.handle);
  const auto range = std::ranges::find_if(idle_, [&](const Extent& one) { return address - one.offset < one.bytes; });
  if (range != idle_.end() && is_empty_locked(*range)) {
    source_.free_addresses(*range);
    idle_.erase(range);
  }
  return {};
}

bool HostTierPool::is_empty_locked(const Extent& range) const {
  const auto first = mapped_.lower_bound(range.offset);
  return first == mapped_.end() || first->first >= range.end();
}

HostTierPool::Mapped HostTierPool::find_mapped(Lock& lock, DeviceAddress from, DeviceAddress end) {
  for (;;) {
    Mapped piece = mapped_.upper_bound(from);
    if (piece != mapped_.begin() && std::prev(piece)->first + kPieceBytes > from) --piece;
    if (piece == mapped_.end() || piece->first >= end) return mapped_.end();
    if (piece->first != zeroing_) return piece;
    zeroed_.wait(lock, [&, busy = piece->first] { return zeroing_ != busy; });
  }
}

Status HostTierPool::unmap_one(Lock& lock) {
  while (!mapped_.empty()) {
    // The last one: a range whose first pieces are there serves shorter memory, too.
    const DeviceAddress end = idle_.empty() ? UINT64_MAX : idle_.front().end();
    const DeviceAddress last = std::prev(mapped_.lower_bound(end))->first;
    // Another thread may have taken it meanwhile.
    if (const Mapped piece = find_mapped(lock, last, last + 1); piece != mapped_.end()) return unmap_locked(piece);
  }
  return {ENOSPC, "the pool has no piece"};
}

Status HostTierPool::clear(const Extent& addresses) {
  Lock lock(mutex_);
  return clear_locked(lock, addresses);
}

Status HostTierPool::clear_locked(Lock& lock, const Extent& addresses) {
  for (;;) {
    const Mapped piece = find_mapped(lock, addresses.offset, addresses.end());
    if (piece == mapped_.end()) return {};
    TRY(unmap_locked(piece));
  }
}

void HostTierPool::give(PhysicalHandle handle, DeviceAddress address) {
  {
    const std::lock_guard lock(mutex_);
    if (!closed_) {
      quiet_from_ = Worker::Clock::now() + kQuiet;
      if (address == 0) {
        used_.push_back(handle);
      } else {
        mapped_.emplace(address, handle);
        dirty_.insert(address);
      }
      worker_.wake();
      return;
    }
  }
  source_.release(handle);
}

void HostTierPool::refill() {
  {
    const std::lock_guard lock(mutex_);
    quiet_from_ = Worker::Clock::now() + kQuiet;
  }
  worker_.wake();
}

std::optional<Extent> HostTierPool::take_range(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  auto best = idle_.end();
  for (auto range = idle_.begin(); range != idle_.end(); ++range) {
    if (range->bytes < bytes || range->bytes / kMostLonger > bytes) continue;
    if (best == idle_.end() || range->bytes <= best->bytes) best = range;
  }
  if (best == idle_.end()) return std::nullopt;
  const Extent taken = *best;
  idle_.erase(best);
  return taken;
}

void HostTierPool::give_range(const Extent& range) {
  Lock lock(mutex_);
  const auto pieces = std::distance(mapped_.lower_bound(range.offset), mapped_.lower_bound(range.end()));
  if (static_cast<std::uint64_t>(pieces) * kPieceBytes < range.bytes / kMostAddresses) {
    static_cast<void>(clear_locked(lock, range));
  }
  if (is_empty_locked(range)) {
    source_.free_addresses(range);
  } else {
    idle_.push_back(range);
  }
}

void HostTierPool::trim() {
  for (const std::uint64_t wanted = source_.wanted(); release_one(wanted);) {
  }
}

bool HostTierPool::release_one(std::uint64_t wanted) {
  PhysicalHandle released = 0;
  {
    Lock lock(mutex_);
    if (bytes_locked() <= wanted) return false;
    if (used_.empty() && ready_.empty() && !unmap_one(lock).ok()) return false;
    std::vector<PhysicalHandle>& from = used_.empty() ? ready_ : used_;
    released = from.back();
    from.pop_back();
  }
  source_.release(released);
  return true;
}

void HostTierPool::close() {
  worker_.stop();
  std::vector<PhysicalHandle> released;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    released.swap(ready_);
    released.insert(released.end(), used_.begin(), used_.end());
    used_.clear();
    // Whatever fails: nobody asks again.
    for (const auto& [address, handle] : mapped_) {
      static_cast<void>(source_.unmap(address));
      released.push_back(handle);
    }
    for (const Extent& range : idle_) source_.free_addresses(range);
    mapped_.clear();
    dirty_.clear();
    idle_.clear();
  }
  for (const PhysicalHandle handle : released) source_.release(handle);
}

// One piece at a time, so that close() waits for one at most.
Worker::Clock::time_point HostTierPool::work() {
  std::optional<PhysicalHandle> used;
  DeviceAddress address = 0;
  bool makes = false;
  {
    const std::lock_guard lock(mutex_);
    if (Worker::Clock::now() < quiet_from_) return quiet_from_;
    if (!used_.empty()) {
      used = used_.back();
      used_.pop_back();
    } else if (!dirty_.empty()) {
      address = *dirty_.begin();
      used = mapped_.at(address);
      zeroing_ = address;
    }
    makes = !used && bytes_locked() + kPieceBytes <= source_.wanted();
  }
  if (!used && !makes) return Worker::kNever;
  PhysicalHandle handle = used.value_or(0);
  Status status = makes ? source_.create(&handle) : Status();
  if (!status.ok()) {
    log_warning("pinned host memory is not made ahead: ", status.message());
    return Worker::kNever;  // until memory comes back
  }
  status = source_.zero(handle, address);
  if (address == 0 && !status.ok()) {
    source_.release(handle);
    return Worker::kNever;
  }
  const std::lock_guard lock(mutex_);
  if (address == 0) {
    ready_.push_back(handle);
  } else {
    if (status.ok()) dirty_.erase(address);
    zeroing_ = 0;
    zeroed_.notify_all();
  }
  return status.ok() ? Worker::Clock::now() : Worker::kNever;
}

}  // namespace gpufs::gpu
