// Counters of all transfers of an engine: what moved by which path, what was refused and why.
// Owned by the TransferEngine.
// Any thread may call any function; a reading is not one moment's, each counter is exact by itself.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "io/bounce_pool.h"
#include "io/refusal.h"
#include "io/scoring.h"

namespace gpufs {

using Counter = std::atomic<std::uint64_t>;
inline void count(Counter& counter, std::uint64_t amount = 1) { counter.fetch_add(amount, std::memory_order_relaxed); }

struct PathCounters {
  Counter bytes{0};
  Counter operations{0};  // pieces of work: one chunk each
  Counter errors{0};
};

struct DirectionCounters {
  std::array<PathCounters, kPathCount> paths;
  std::array<Counter, kRefusalCount> refusals{};  // of fastpath, once for each request and reason
  Counter transfers{0};
  Counter failed{0};
  Counter cancelled{0};
  Counter abandoned{0};  // cancelled, and a thread still hung in the file
  // Parts of fallback's bytes.
  Counter buffered_bytes{0};   // through the page cache
  Counter direct_bytes{0};     // by O_DIRECT
  Counter pagecache_bytes{0};  // copied straight from the page cache's pages
  Counter hole_bytes{0};       // holes of a buffer, never read from the device
};

class IoStatistics {
 public:
  explicit IoStatistics(std::size_t devices) : devices_(std::make_unique<Device[]>(devices)), count_(devices) {}

  DirectionCounters& of(int device, Direction direction) {
    return devices_[static_cast<std::size_t>(device)].directions[static_cast<std::size_t>(direction)];
  }
  void count_refusals(int device, Direction direction, RefusalMask mask);

  // {"devices": [{"load": {...}, "store": {...}}], "bounce_pool": {...}}
  [[nodiscard]] std::string to_json(const BouncePool::Statistics& pool, std::size_t active) const;

 private:
  struct Device {
    std::array<DirectionCounters, kDirectionCount> directions;
  };
  std::unique_ptr<Device[]> devices_;
  std::size_t count_;
};

}  // namespace gpufs
