// Which path a request takes: fastpath (the vendor moves the bytes between storage and device) or fallback (through
// host memory). Fastpath scores highest unless one of its rules refuses the request; each refusal is a bit. Pure
// functions on values that were probed before: no system calls, no driver calls.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "io/io_options.h"
#include "io/refusal.h"
#include "observe/counters.h"

namespace gpufs {

struct BackingFacts;  // io/backing_file.h

enum class Direction : int { kLoad = 0, kStore = 1 };  // file to device, device to file
enum class Path : int { kFastpath = 0, kFallback = 1 };
inline constexpr int kPathCount = 2;
const char* direction_name(Direction direction);
[[nodiscard]] constexpr observe::Backend backend_of(Path path) {
  return path == Path::kFastpath ? observe::Backend::kFastpath : observe::Backend::kFallback;
}
[[nodiscard]] constexpr observe::Flow flow_of(Direction direction) {
  return direction == Direction::kLoad ? observe::Flow::kIn : observe::Flow::kOut;
}

// What the rules depend on. memory_phase: the device address modulo BackingFacts::memory_align.
struct ScoredRequest {
  const BackingFacts* file = nullptr;
  std::uint64_t file_offset = 0;
  std::uint64_t bytes = 0;
  std::uint64_t memory_phase = 0;
  RefusalMask vendor_refusals = 0;  // of the device's direct path
  RefusalMask waived = 0;           // refusals of the file that the operator has overruled
  FastpathMode fastpath = FastpathMode::kAuto;
  std::uint64_t fastpath_min_bytes = 0;  // IoOptions::fastpath_min_bytes
  bool fallback = true;
};

// Why fastpath does not take the request as it is; 0 if it does.
RefusalMask fastpath_refusals(const ScoredRequest& request);

// One part of a request, offsets relative to the request's start.
struct Segment {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  Path path = Path::kFallback;
  bool hole = false;  // nothing to move: by neither path
};
using Plan = std::vector<Segment>;  // in order, covering the request

// Cuts an unaligned request into head, body and tail so that the body can take the fastpath. *refusals: why all of it
// or its edges do not, also on failure. EOPNOTSUPP, with the reasons in the text, if fastpath is required and the body
// cannot take it, or if nothing may take the request.
Result<Plan> plan_request(const ScoredRequest& request, RefusalMask* refusals);

}  // namespace gpufs
