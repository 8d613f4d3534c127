#include "drivers/gpu/pinned_pool.h"

#include "base/log.h"

namespace gpufs::gpu {
namespace {

constexpr std::chrono::seconds kQuiet{2};

}  // namespace

std::optional<PhysicalHandle> PinnedPool::take(bool wants_zeros, bool* zeroed) {
  const std::lock_guard lock(mutex_);
  quiet_from_ = Worker::Clock::now() + kQuiet;
  *zeroed = wants_zeros ? !ready_.empty() : used_.empty();
  std::vector<PhysicalHandle>& from = *zeroed ? ready_ : used_;
  if (from.empty()) return std::nullopt;
  const PhysicalHandle handle = from.back();
  from.pop_back();
  return handle;
}

void PinnedPool::give(PhysicalHandle handle) {
  {
    const std::lock_guard lock(mutex_);
    if (!closed_) {
      quiet_from_ = Worker::Clock::now() + kQuiet;
      used_.push_back(handle);
      worker_.wake();
      return;
    }
  }
  source_.release(handle);
}

void PinnedPool::trim() {
  const std::uint64_t wanted = source_.wanted();
  std::vector<PhysicalHandle> released;
  {
    const std::lock_guard lock(mutex_);
    while (bytes_locked() > wanted) {
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
    const std::lock_guard lock(mutex_);
    closed_ = true;
    released.swap(ready_);
    released.insert(released.end(), used_.begin(), used_.end());
    used_.clear();
  }
  for (const PhysicalHandle handle : released) source_.release(handle);
}

// One piece at a time, so that close() waits for one at most.
Worker::Clock::time_point PinnedPool::work() {
  std::optional<PhysicalHandle> used;
  bool makes = false;
  {
    const std::lock_guard lock(mutex_);
    if (Worker::Clock::now() < quiet_from_) return quiet_from_;
    if (!used_.empty()) {
      used = used_.back();
      used_.pop_back();
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
  status = source_.zero(handle);
  if (!status.ok()) {
    source_.release(handle);
    return Worker::kNever;
  }
  const std::lock_guard lock(mutex_);
  ready_.push_back(handle);
  return Worker::Clock::now();
}

}  // namespace gpufs::gpu
