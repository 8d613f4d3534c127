// Cached free memory: physical memory that was released a moment ago, kept for the next caller that takes as much.
//
// A driver clears the memory that it gets back, with the engines that copies need: copying 8 GiB over the bus takes
// 157 ms alone, and 198 ms while 16 GiB that were released just before are being cleared (one H200). Replacing a large
// file by another of its size would cost that each time. The driver does not clear pieces that are reused here.
// Ownership: the GpuDevice's.
// Thread-safe. The release function is called without a lock, on a thread of this class or on the caller's.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include "base/worker.h"

namespace gpufs::gpu {

using PhysicalHandle = std::uint64_t;

class SpareMemory {
 public:
  using Clock = Worker::Clock;
  using Release = std::function<void(const std::vector<PhysicalHandle>&)>;

  explicit SpareMemory(Release release) : release_(std::move(release)) {}
  // Releases everything.
  ~SpareMemory() { close(); }

  // How long pieces are kept, 0 for not at all. Before the first keep().
  void set_keep_time(std::chrono::milliseconds time) { keep_time_ = time; }

  // Takes ownership of a piece. False, and the caller still owns it, if it is not to be kept.
  bool keep(PhysicalHandle handle, std::uint64_t bytes);
  // A piece of exactly so many bytes, with the contents that its last user left.
  std::optional<PhysicalHandle> take(std::uint64_t bytes);
  // Releases all pieces, and returns releases(). If that has changed since an allocation failed, try it again.
  std::uint64_t drop();
  // How often pieces have been released.
  [[nodiscard]] std::uint64_t releases() const;
  // Releases all pieces, and keeps none from now on.
  void close();
  [[nodiscard]] std::uint64_t bytes() const;
  // Calls look(bytes) with the cached bytes while no piece comes or goes. Waits until no release is in progress, whose
  // pieces are neither cached nor free, but not longer than `timeout`. look() must not call this object.
  void while_settled(std::chrono::milliseconds timeout, const std::function<void(std::uint64_t bytes)>& look) const;

 private:
  struct CachedPiece {
    PhysicalHandle handle;
    std::uint64_t bytes;
    Clock::time_point since;
  };

  // Releases pieces whose time is over; returns when that of the next one is.
  Clock::time_point release_old();
  // Removes the pieces that were kept until `before`. Under the lock.
  std::vector<PhysicalHandle> take_older(Clock::time_point before);
  // Releases handles without the lock, which it takes again.
  void release(std::unique_lock<std::mutex>& lock, const std::vector<PhysicalHandle>& handles);

  const Release release_;
  std::chrono::milliseconds keep_time_{0};

  mutable std::mutex mutex_;  // guards the rest; held over one call of the driver's by while_settled()
  mutable std::condition_variable changed_;
  std::deque<CachedPiece> pieces_;  // the oldest first
  std::uint64_t bytes_ = 0;
  int releasing_ = 0;  // releases in progress
  std::uint64_t releases_ = 0;

  Worker worker_{"gpufs-spares", [this] { return release_old(); }};  // keep() calls it under the lock
};

}  // namespace gpufs::gpu
