// Physical memory that was given back a moment ago, kept for whoever takes as much next.
//
// A driver clears what it gets back, by the engines that copies need: 8 GiB over the bus take 157 ms alone, and 198 ms
// while 16 GiB that were released just before are being cleared (one H200). Whoever replaces a large file by another of
// its size would pay that each time; pieces that are used again are not cleared by the driver at all.
// Owned by the device's Context.
// Any thread. The function that releases is called with no lock held, on a thread of this class or that of the caller.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <thread>

namespace gpufs::gpu {

using PhysicalHandle = std::uint64_t;

class SpareMemory {
 public:
  using Clock = std::chrono::steady_clock;
  using Release = std::function<void(std::span<const PhysicalHandle>)>;

  explicit SpareMemory(Release release) : release_(std::move(release)) {}
  // Releases everything.
  ~SpareMemory() { close(); }
  SpareMemory(const SpareMemory&) = delete;
  SpareMemory& operator=(const SpareMemory&) = delete;

  // How long pieces are kept, 0 for not at all. Before the first keep().
  void set_patience(std::chrono::milliseconds patience) { patience_ = patience; }

  // Takes a piece over; false, and nothing has happened, where it is not to be kept.
  bool keep(PhysicalHandle handle, std::uint64_t bytes);
  // A piece of exactly so many bytes, which are what somebody left there.
  std::optional<PhysicalHandle> take(std::uint64_t bytes);
  // Releases all that is kept now. True if there was anything, so that there is more memory than before.
  bool drop();
  // Releases everything, and keeps nothing from now on.
  void close();
  [[nodiscard]] std::uint64_t bytes() const;
  // How often anything was kept, taken or released. Without an answer while something is being released, which is
  // neither kept nor free for others then.
  [[nodiscard]] std::optional<std::uint64_t> changes() const;
  // The same once nothing is being released, or without an answer when the time has come.
  [[nodiscard]] std::optional<std::uint64_t> settled(Clock::time_point deadline) const;

 private:
  struct Piece {
    PhysicalHandle handle;
    Clock::time_point since;
  };

  void work();
  // Takes out what was kept before `before`. Under the lock.
  std::list<Piece> take_older(Clock::time_point before);
  // Releases what was taken out, with the lock let go meanwhile.
  void release(std::unique_lock<std::mutex>& lock, const std::list<Piece>& pieces);
  [[nodiscard]] Clock::time_point oldest() const;

  const Release release_;
  std::chrono::milliseconds patience_{0};

  mutable std::mutex mutex_;  // guards what follows; a leaf
  mutable std::condition_variable changed_;
  std::map<std::uint64_t, std::list<Piece>> pieces_;  // by bytes, the oldest first; no empty ones
  std::uint64_t bytes_ = 0;
  std::uint64_t changes_ = 0;
  int releasing_ = 0;  // threads that release pieces which they have taken out
  bool working_ = false;
  bool closed_ = false;
  std::thread thread_;  // while there are pieces
};

}  // namespace gpufs::gpu
