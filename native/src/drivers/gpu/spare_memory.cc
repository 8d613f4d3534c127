#include "drivers/gpu/spare_memory.h"

#include <algorithm>
#include <system_error>

namespace gpufs::gpu {

bool SpareMemory::keep(PhysicalHandle handle, std::uint64_t bytes) {
  if (patience_.count() <= 0) return false;
  const std::lock_guard lock(mutex_);
  if (closed_) return false;
  if (!working_) {
    if (thread_.joinable()) thread_.join();  // it has said that it ends
    try {
      thread_ = std::thread([this] { work(); });
    } catch (const std::system_error&) {
      return false;  // no thread to be had: nobody would release it later
    }
    working_ = true;
  }
  pieces_[bytes].push_back({handle, Clock::now()});
  bytes_ += bytes;
  ++changes_;
  return true;
}

std::optional<PhysicalHandle> SpareMemory::take(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto found = pieces_.find(bytes);
  if (found == pieces_.end()) return std::nullopt;
  const PhysicalHandle handle = found->second.back().handle;
  found->second.pop_back();
  if (found->second.empty()) pieces_.erase(found);
  bytes_ -= bytes;
  ++changes_;
  changed_.notify_all();
  return handle;
}

bool SpareMemory::drop() {
  std::unique_lock lock(mutex_);
  const std::vector<PhysicalHandle> pieces = take_older(Clock::time_point::max());
  const bool any = !pieces.empty() || releasing_ > 0;
  if (!pieces.empty()) release(lock, pieces);
  changed_.wait(lock, [this] { return releasing_ == 0; });
  return any;
}

void SpareMemory::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  static_cast<void>(drop());
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

std::uint64_t SpareMemory::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

std::optional<std::uint64_t> SpareMemory::changes() const {
  const std::lock_guard lock(mutex_);
  return releasing_ == 0 ? std::optional(changes_) : std::nullopt;
}

std::optional<std::uint64_t> SpareMemory::settled(Clock::time_point deadline) const {
  std::unique_lock lock(mutex_);
  if (!changed_.wait_until(lock, deadline, [this] { return releasing_ == 0; })) return std::nullopt;
  return changes_;
}

void SpareMemory::work() {
  std::unique_lock lock(mutex_);
  while (!pieces_.empty()) {
    const Clock::time_point due = oldest() + patience_;
    if (Clock::now() < due) {
      changed_.wait_until(lock, due);
      continue;
    }
    release(lock, take_older(Clock::now() - patience_));
  }
  working_ = false;
}

void SpareMemory::release(std::unique_lock<std::mutex>& lock, const std::vector<PhysicalHandle>& pieces) {
  ++releasing_;
  lock.unlock();
  release_(pieces);
  lock.lock();
  --releasing_;
  ++changes_;
  changed_.notify_all();
}

std::vector<PhysicalHandle> SpareMemory::take_older(Clock::time_point before) {
  std::vector<PhysicalHandle> taken;
  for (auto size = pieces_.begin(); size != pieces_.end();) {
    std::deque<Piece>& pieces = size->second;
    while (!pieces.empty() && pieces.front().since <= before) {
      taken.push_back(pieces.front().handle);
      pieces.pop_front();
      bytes_ -= size->first;
    }
    size = pieces.empty() ? pieces_.erase(size) : std::next(size);
  }
  return taken;
}

SpareMemory::Clock::time_point SpareMemory::oldest() const {
  Clock::time_point oldest = Clock::time_point::max();
  for (const auto& [bytes, pieces] : pieces_) oldest = std::min(oldest, pieces.front().since);
  return oldest;
}

}  // namespace gpufs::gpu
