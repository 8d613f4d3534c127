// Choosing the way of a request: each backend scores it or says why it refuses; the highest score takes it.
// Pure functions on values that were probed before: no system call, no driver call.
// Any thread may call any function.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "io/io_options.h"
#include "io/refusal.h"

namespace gpufs {

struct BackingFacts;  // io/backing_file.h

enum class Direction : int { kLoad = 0, kStore = 1 };  // file to device, device to file
enum class Path : int { kFastpath = 0, kFallback = 1 };
inline constexpr int kPathCount = 2;
inline constexpr int kDirectionCount = 2;
const char* path_name(Path path);
const char* direction_name(Direction direction);

// What scoring looks at. memory_phase: the device address modulo BackingFacts::memory_align.
struct ScoredRequest {
  const BackingFacts* file = nullptr;
  std::uint64_t file_offset = 0;
  std::uint64_t bytes = 0;
  std::uint64_t memory_phase = 0;
  RefusalMask vendor_refusals = 0;  // of the device's direct path
  RefusalMask waived = 0;           // refusals of the file that the operator has overruled
  FastpathMode fastpath = FastpathMode::kAuto;
  bool fallback = true;
};

struct Score {
  int points = -1;  // below 0: refused
  RefusalMask refusals = 0;
};
Score score_fastpath(const ScoredRequest& request);  // 100
Score score_fallback(const ScoredRequest& request);  // 0

struct Choice {
  bool found = false;
  Path path = Path::kFallback;
  RefusalMask fastpath_refusals = 0;
};
// The first of the highest scores (a later backend must score strictly more).
Choice choose(const ScoredRequest& request);

// One part of a request, offsets relative to the request's start.
struct Segment {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  Path path = Path::kFallback;
  bool hole = false;  // nothing to move: by neither path
};
using Plan = std::vector<Segment>;  // in order, covering the request
// Cuts an unaligned request into head, body and tail so that the body can take the fastpath. *refusals: why all of it
// or its edges do not, also on failure. EOPNOTSUPP, with the reasons in the text, when fastpath is required and the
// body cannot take it, or when nothing may take the request.
Result<Plan> plan_request(const ScoredRequest& request, RefusalMask* refusals);

}  // namespace gpufs
