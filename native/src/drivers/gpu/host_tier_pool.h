// Pieces of pinned host memory, made ahead and left mapped: the driver takes 0.35 s to make 1 GiB of them and 10 to 22
// ms to map it, a copy to it 19 ms (H100, H200).
//
// A thread makes pieces and fills them with zeros until all that the device may have exists, and zeroes those that come
// back, once nobody has taken or returned any for a while: that uses the bus, as copies do. It takes 64 MiB of
// addresses, and one thread as long as the device is open.
//
// A piece that comes back stays mapped where it was, in a range that nobody uses then. The next memory of about that
// size gets the range with the pieces in it, so that a model which sleeps again costs its copy alone. A piece that is
// needed elsewhere is unmapped. Takes 2 MiB of each GPU's memory for each GiB that is mapped (page tables), and at most
// eight times as many addresses.
// Ownership: the GpuDevice's. Thread-safe.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "base/extents.h"
#include "base/status.h"
#include "base/worker.h"
#include "drivers/driver.h"

namespace gpufs::gpu {

using PhysicalHandle = std::uint64_t;

struct AcquiredMemory {
  PhysicalHandle handle = 0;
  bool zeroed = false;
  bool mapped = false;  // at the address that the caller has asked for
};

class HostTierPool {
 public:
  static constexpr std::uint64_t kPieceBytes = std::uint64_t{64} << 20;

  struct Source {
    std::function<Status(PhysicalHandle*)> create;  // a piece of kPieceBytes
    // Fills a piece with zeros. address: where it is mapped; 0: nowhere.
    std::function<Status(PhysicalHandle, DeviceAddress address)> zero;
    std::function<void(PhysicalHandle)> release;
    std::function<Status(DeviceAddress)> unmap;  // a piece
    std::function<void(const Extent&)> free_addresses;
    std::function<std::uint64_t()> wanted;  // the bytes that may lie in the pool now
  };

  explicit HostTierPool(Source source) : source_(std::move(source)) {}
  ~HostTierPool() { close(); }

  // Starts to make pieces.
  Status start() { return worker_.start(); }
  // The piece that is mapped at `address`. If there is none, one of zeros if the caller wants that and there is one, or
  // any. nullopt: there is none.
  std::optional<AcquiredMemory> take(DeviceAddress address, bool wants_zeros);
  // Takes ownership of a piece with any contents. address: where it is mapped, in a range that the caller gives back
  // later; 0: nowhere.
  void give(PhysicalHandle handle, DeviceAddress address);
  // More may be wanted: memory that the pool does not get was released.
  void refill();
  // A range of at least so many bytes, though not much longer, in which pieces of the pool are mapped.
  std::optional<Extent> take_range(std::uint64_t bytes);
  // Takes ownership of a range in which nothing but pieces of the pool is mapped, with access.
  void give_range(const Extent& range);
  // Unmaps the pieces that are mapped there.
  Status clear(const Extent& addresses);
  // Releases pieces while the pool has more than is wanted.
  void trim();
  // Releases a piece if the pool has more than so many bytes. False: it has not.
  bool release_one(std::uint64_t wanted = 0);
  // Releases all pieces, and makes none from now on.
  void close();

 private:
  using Lock = std::unique_lock<std::mutex>;

  Worker::Clock::time_point work();
  [[nodiscard]] std::uint64_t bytes_locked() const {
    return (ready_.size() + used_.size() + mapped_.size()) * kPieceBytes;
  }
  using Mapped = std::map<DeviceAddress, PhysicalHandle>::iterator;
  // Takes that piece as it is mapped.
  AcquiredMemory take_locked(Mapped piece);
  // Frees its range, too, if that is idle and nothing else is mapped there.
  Status unmap_locked(Mapped piece);
  [[nodiscard]] bool is_empty_locked(const Extent& range) const;
  // Unmaps a piece of the range that has been idle longest, if any is.
  Status unmap_one(Lock& lock);
  // The first piece that touches [from, end), once it is not being zeroed.
  Mapped find_mapped(Lock& lock, DeviceAddress from, DeviceAddress end);
  Status clear_locked(Lock& lock, const Extent& addresses);

  const Source source_;
  std::mutex mutex_;  // guards all below; a leaf: only the driver is called with it held, to unmap
  std::vector<PhysicalHandle> ready_;
  std::vector<PhysicalHandle> used_;  // with what their last user left
  std::map<DeviceAddress, PhysicalHandle> mapped_;
  std::set<DeviceAddress> dirty_;  // those of mapped_ that are not zeros
  std::deque<Extent> idle_;        // unused ranges, in the order in which they came back
  DeviceAddress zeroing_ = 0;      // the one of mapped_ that the thread fills now
  std::condition_variable zeroed_;
  Worker::Clock::time_point quiet_from_;  // when it is quiet again
  bool closed_ = false;

  Worker worker_{"gpufs-pinned", [this] { return work(); }};
};

}  // namespace gpufs::gpu
