// Pieces of pinned host memory, made ahead: the driver takes 0.35 s to make 1 GiB of them, a copy to it 0.02 s (H100).
//
// A thread makes pieces and fills them with zeros until all that the device may have exists, and zeroes those that come
// back, once nobody has taken or returned any for a while: that uses the bus, as copies do. It takes 64 MiB of
// addresses, and one thread as long as the device is open.
// Ownership: the GpuDevice's. Thread-safe.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include "base/status.h"
#include "base/worker.h"

namespace gpufs::gpu {

using PhysicalHandle = std::uint64_t;

class PinnedPool {
 public:
  static constexpr std::uint64_t kPieceBytes = std::uint64_t{64} << 20;

  struct Source {
    std::function<Status(PhysicalHandle*)> create;  // a piece of kPieceBytes
    std::function<Status(PhysicalHandle)> zero;     // fills a piece with zeros
    std::function<void(PhysicalHandle)> release;
    std::function<std::uint64_t()> wanted;  // the bytes that may lie in the pool now
  };

  explicit PinnedPool(Source source) : source_(std::move(source)) {}
  ~PinnedPool() { close(); }
  PinnedPool(const PinnedPool&) = delete;
  PinnedPool& operator=(const PinnedPool&) = delete;

  // Starts to make pieces.
  Status start() { return worker_.start(); }
  // A piece, of zeros if the caller wants them and there is one; *zeroed: whether it is. nullopt: there is none.
  std::optional<PhysicalHandle> take(bool wants_zeros, bool* zeroed);
  // Takes ownership of a piece, whatever is in it.
  void give(PhysicalHandle handle);
  // Releases pieces while the pool has more than is wanted.
  void trim();
  // Releases all pieces, and makes none from now on.
  void close();

 private:
  Worker::Clock::time_point work();
  [[nodiscard]] std::uint64_t bytes_locked() const { return (ready_.size() + used_.size()) * kPieceBytes; }

  const Source source_;
  std::mutex mutex_;  // guards all below; a leaf
  std::vector<PhysicalHandle> ready_;
  std::vector<PhysicalHandle> used_;      // with what their last user left
  Worker::Clock::time_point quiet_from_;  // when it is quiet again
  bool closed_ = false;

  Worker worker_{"gpufs-pinned", [this] { return work(); }};
};

}  // namespace gpufs::gpu
