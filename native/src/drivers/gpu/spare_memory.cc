#include "drivers/gpu/spare_memory.h"

#include <algorithm>
#include <iterator>

namespace gpufs::gpu {

bool SpareMemory::keep(PhysicalHandle handle, std::uint64_t bytes) {
  if (keep_time_.count() <= 0) return false;
  const std::lock_guard lock(mutex_);
  if (!worker_.start().ok()) return false;
  if (pieces_.empty()) worker_.wake();
  pieces_.push_back({handle, bytes, Clock::now()});
  bytes_ += bytes;
  return true;
}

std::optional<PhysicalHandle> SpareMemory::take(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto found =
      std::find_if(pieces_.rbegin(), pieces_.rend(), [&](const auto& spare) { return spare.bytes == bytes; });
  if (found == pieces_.rend()) return std::nullopt;
  const PhysicalHandle handle = found->handle;
  pieces_.erase(std::next(found).base());
  bytes_ -= bytes;
  return handle;
}

std::uint64_t SpareMemory::drop() {
  std::unique_lock lock(mutex_);
  const std::vector<PhysicalHandle> handles = take_older(Clock::time_point::max());
  if (!handles.empty()) release(lock, handles);
  changed_.wait(lock, [this] { return releasing_ == 0; });
  return releases_;
}

std::uint64_t SpareMemory::releases() const {
  const std::lock_guard lock(mutex_);
  return releases_;
}

void SpareMemory::close() {
  worker_.stop();  // keep() refuses pieces from now on
  drop();
}

std::uint64_t SpareMemory::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

void SpareMemory::while_settled(std::chrono::milliseconds timeout,
                                const std::function<void(std::uint64_t bytes)>& look) const {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, timeout, [this] { return releasing_ == 0; });
  look(bytes_);
}

SpareMemory::Clock::time_point SpareMemory::release_old() {
  std::unique_lock lock(mutex_);
  const std::vector<PhysicalHandle> old = take_older(Clock::now() - keep_time_);
  if (!old.empty()) release(lock, old);
  return pieces_.empty() ? Worker::kNever : pieces_.front().since + keep_time_;
}

void SpareMemory::release(std::unique_lock<std::mutex>& lock, const std::vector<PhysicalHandle>& handles) {
  ++releasing_;
  lock.unlock();
  release_(handles);
  lock.lock();
  --releasing_;
  ++releases_;
  changed_.notify_all();
}

std::vector<PhysicalHandle> SpareMemory::take_older(Clock::time_point before) {
  std::vector<PhysicalHandle> taken;
  for (; !pieces_.empty() && pieces_.front().since <= before; pieces_.pop_front()) {
    taken.push_back(pieces_.front().handle);
    bytes_ -= pieces_.front().bytes;
  }
  return taken;
}

}  // namespace gpufs::gpu
