// Counters of all transfers of an engine: what moved by which path, what was refused and why.
// A view, owned by the TransferEngine, of what the devices' contexts hold.
// Any thread may call any function; a reading is not one moment's, each counter is exact by itself.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "io/bounce_pool.h"
#include "io/scoring.h"
#include "observe/counters.h"

namespace gpufs {

[[nodiscard]] constexpr observe::Backend backend_of(Path path) {
  return path == Path::kFastpath ? observe::Backend::kFastpath : observe::Backend::kFallback;
}
[[nodiscard]] constexpr observe::Flow flow_of(Direction direction) {
  return direction == Direction::kLoad ? observe::Flow::kIn : observe::Flow::kOut;
}

class IoStatistics {
 public:
  explicit IoStatistics(std::vector<observe::DeviceCounters> devices) : devices_(std::move(devices)) {}

  // {"active": n, "devices": [{"load": {...}, "store": {...}}], "bounce_pool": {...}}
  [[nodiscard]] std::string to_json(const BouncePool::Statistics& pool, std::size_t active) const;

 private:
  const std::vector<observe::DeviceCounters> devices_;
};

}  // namespace gpufs
