// The counters of an engine's transfers as JSON: what moved by which path, what was refused and why. Each counter is
// exact by itself, but they are not read at one moment.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "io/bounce_pool.h"
#include "io/scoring.h"
#include "observe/counters.h"

namespace gpufs {

// {"active": n, "devices": [{"load": {...}, "store": {...}}], "bounce_pool": {...}}
std::string transfer_statistics_json(const std::vector<observe::DeviceCounters>& devices,
                                     const BouncePool::Statistics& pool, std::size_t active);

}  // namespace gpufs
