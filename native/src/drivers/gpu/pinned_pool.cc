#include "drivers/gpu/pinned_pool.h"

#include <cerrno>
#include <iterator>
#include <utility>

#include "base/log.h"

namespace gpufs::gpu {
namespace {

constexpr std::chrono::milliseconds kQuiet{500};

// How much longer than asked for a range may be.
constexpr std::uint64_t kMostLonger = 2;

}  // namespace

std::optional<PinnedPool::Piece> PinnedPool::take(DeviceAddress address, bool wants_zeros) {
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
  return Piece{.handle = handle, .zeroed = zeroed, .mapped = false};
}

PinnedPool::Piece PinnedPool::take_locked(Mapped piece) {
  const Piece taken{.handle = piece->second, .zeroed = dirty_.erase(piece->first) == 0, .mapped = true};
  mapped_.erase(piece);
  return taken;
}

Status PinnedPool::unmap_locked(Mapped piece) {
  if (Status status = source_.unmap(piece->first); !status.ok()) return status;
  const Piece taken = take_locked(piece);
  (taken.zeroed ? ready_ : used_).push_back(taken.handle);
  return {};
}

PinnedPool::Mapped PinnedPool::find_mapped(Lock& lock, DeviceAddress from, DeviceAddress end) {
  for (;;) {
    Mapped piece = mapped_.upper_bound(from);
    if (piece != mapped_.begin() && std::prev(piece)->first + kPieceBytes > from) --piece;
    if (piece == mapped_.end() || piece->first >= end) return mapped_.end();
    if (piece->first != zeroing_) return piece;
    zeroed_.wait(lock, [&, busy = piece->first] { return zeroing_ != busy; });
  }
}

Status PinnedPool::unmap_one(Lock& lock) {
  if (mapped_.empty()) return {ENOSPC, "the pool has no piece"};
  // The last one: a range whose first pieces are there serves shorter memory, too.
  const DeviceAddress end = idle_.empty() ? UINT64_MAX : idle_.front().end();
  const DeviceAddress last = std::prev(mapped_.lower_bound(end))->first;
  const Mapped piece = find_mapped(lock, last, last + 1);
  if (piece == mapped_.end()) return {EAGAIN, "another thread has taken the piece"};
  Status status = unmap_locked(piece);
  free_empty_locked();
  return status;
}

Status PinnedPool::clear(const Extent& addresses) {
  Lock lock(mutex_);
  for (;;) {
    const Mapped piece = find_mapped(lock, addresses.offset, addresses.end());
    if (piece == mapped_.end()) return {};
    if (Status status = unmap_locked(piece); !status.ok()) return status;
  }
}

void PinnedPool::give(PhysicalHandle handle, DeviceAddress address) {
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

std::optional<Extent> PinnedPool::take_range(std::uint64_t bytes) {
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

void PinnedPool::give_range(const Extent& range) {
  const std::lock_guard lock(mutex_);
  idle_.push_back(range);
  free_empty_locked();
}

void PinnedPool::free_empty_locked() {
  std::erase_if(idle_, [this](const Extent& range) {
    const auto first = mapped_.lower_bound(range.offset);
    if (first != mapped_.end() && first->first < range.end()) return false;
    source_.free_addresses(range);
    return true;
  });
}

void PinnedPool::trim() {
  const std::uint64_t wanted = source_.wanted();
  std::vector<PhysicalHandle> released;
  {
    Lock lock(mutex_);
    while (bytes_locked() > wanted) {
      if (used_.empty() && ready_.empty() && !unmap_one(lock).ok()) break;
      std::vector<PhysicalHandle>& from = used_.empty() ? ready_ : used_;
      released.push_back(from.back());
      from.pop_back();
    }
  }
  for (const PhysicalHandle handle : released) source_.release(handle);
}

void PinnedPool::close() {
  worker_.stop();
  std::vector<PhysicalHandle> released;
  {
    Lock lock(mutex_);
    closed_ = true;
    while (unmap_one(lock).ok()) {
    }
    released.swap(ready_);
    released.insert(released.end(), used_.begin(), used_.end());
    used_.clear();
  }
  for (const PhysicalHandle handle : released) source_.release(handle);
}

// One piece at a time, so that close() waits for one at most.
Worker::Clock::time_point PinnedPool::work() {
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
    return Worker::kNever;  // until a piece comes back
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
