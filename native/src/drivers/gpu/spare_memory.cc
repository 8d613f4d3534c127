#include "drivers/gpu/spare_memory.h"

#include <algorithm>
#include <array>
#include <new>
#include <utility>

#include "base/thread.h"

namespace gpufs::gpu {
namespace {

// Handles that one call of the vendor's context is set up for.
constexpr std::size_t kTogether = 64;

}  // namespace

bool SpareMemory::keep(PhysicalHandle handle, std::uint64_t bytes) {
  if (patience_.count() <= 0) return false;
  const std::lock_guard lock(mutex_);
  if (closed_) return false;
  // Called where nothing may fail: without memory, or a thread that would release it later, it is not kept.
  try {
    std::list<Piece> piece{{handle, Clock::now()}};
    if (!working_) {
      if (thread_.joinable()) thread_.join();  // it has said that it ends
      Result<std::thread> started = start_thread("gpufs-spares", [this] { work(); });
      if (!started.ok()) return false;
      thread_ = started.take();
      working_ = true;
    }
    std::list<Piece>& same = pieces_[bytes];
    same.splice(same.end(), piece);
  } catch (const std::bad_alloc&) {
    return false;
  }
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
  const std::list<Piece> pieces = take_older(Clock::time_point::max());
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

void SpareMemory::release(std::unique_lock<std::mutex>& lock, const std::list<Piece>& pieces) {
  ++releasing_;
  lock.unlock();
  std::array<PhysicalHandle, kTogether> handles;
  for (auto piece = pieces.begin(); piece != pieces.end();) {
    std::size_t count = 0;
    for (; piece != pieces.end() && count < handles.size(); ++piece) handles[count++] = piece->handle;
    release_(std::span(handles).first(count));
  }
  lock.lock();
  --releasing_;
  ++changes_;
  changed_.notify_all();
}

std::list<SpareMemory::Piece> SpareMemory::take_older(Clock::time_point before) {
  std::list<Piece> taken;  // needs no memory, which releasing must not
  for (auto size = pieces_.begin(); size != pieces_.end();) {
    std::list<Piece>& pieces = size->second;
    while (!pieces.empty() && pieces.front().since <= before) {
      taken.splice(taken.end(), pieces, pieces.begin());
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
