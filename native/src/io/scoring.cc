#include "io/scoring.h"

#include <cerrno>
#include <limits>

#include "base/math.h"
#include "io/backing_file.h"

namespace gpufs {
namespace {

constexpr int kFastpathPoints = 100;
constexpr int kFallbackPoints = 0;
constexpr auto kLargestOffset = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());

// Refusals that cutting head and tail off can cure.
constexpr RefusalMask kEdges = mask_of(Refusal::kOffsetUnaligned) | mask_of(Refusal::kSizeUnaligned);

Status refused(const ScoredRequest& request, RefusalMask reasons) {
  if (request.fastpath == FastpathMode::kRequire) {
    return Status(EOPNOTSUPP, "fastpath is required but refused: " + describe_refusals(reasons));
  }
  return Status(EOPNOTSUPP, "fallback is off and fastpath refused: " + describe_refusals(reasons));
}

}  // namespace

std::string describe_refusals(RefusalMask mask) {
  std::string text;
  for (std::size_t bit = 0; bit < kRefusalCount; ++bit) {
    if ((mask >> bit & 1U) == 0) continue;
    if (!text.empty()) text += ", ";
    text += kRefusalNames[bit];
  }
  return text.empty() ? "none" : text;
}

const char* path_name(Path path) { return path == Path::kFastpath ? "fastpath" : "fallback"; }
const char* direction_name(Direction direction) { return direction == Direction::kLoad ? "load" : "store"; }

Score score_fastpath(const ScoredRequest& request) {
  const BackingFacts& file = *request.file;
  RefusalMask reasons = request.vendor_refusals | (file.fastpath_refusals & ~request.waived);
  if (request.fastpath == FastpathMode::kOff) reasons |= mask_of(Refusal::kDisabled);
  if (request.bytes == 0) reasons |= mask_of(Refusal::kNothingToMove);
  std::uint64_t end = 0;
  if (add_overflows(request.file_offset, request.bytes, &end) || end > kLargestOffset) {
    reasons |= mask_of(Refusal::kOffsetRange);
  }
  if (request.file_offset % file.unit != 0) reasons |= mask_of(Refusal::kOffsetUnaligned);
  if (request.bytes % file.unit != 0) reasons |= mask_of(Refusal::kSizeUnaligned);
  if (request.memory_phase % file.memory_align != 0) reasons |= mask_of(Refusal::kMemoryUnaligned);
  return reasons == 0 ? Score{kFastpathPoints, 0} : Score{-1, reasons};
}

Score score_fallback(const ScoredRequest& request) {
  if (!request.fallback) return Score{-1, mask_of(Refusal::kDisabled)};
  return Score{kFallbackPoints, 0};
}

Choice choose(const ScoredRequest& request) {
  Choice choice;
  int best = -1;
  const Score fast = score_fastpath(request);
  choice.fastpath_refusals = fast.refusals;
  if (fast.points > best) {
    best = fast.points;
    choice.found = true;
    choice.path = Path::kFastpath;
  }
  const Score slow = score_fallback(request);
  if (slow.points > best) {
    choice.found = true;
    choice.path = Path::kFallback;
  }
  return choice;
}

Result<Plan> plan_request(const ScoredRequest& request, RefusalMask* refusals) {
  const Choice whole = choose(request);
  *refusals = whole.fastpath_refusals;
  if (whole.found && whole.path == Path::kFastpath) return Plan{{0, request.bytes, Path::kFastpath}};

  const std::uint64_t unit = request.file->unit;
  const std::uint64_t end = request.file_offset + request.bytes;
  // The address of the body is another one than that of the whole, so its alignment is judged anew below.
  const RefusalMask incurable = whole.fastpath_refusals & ~(kEdges | mask_of(Refusal::kMemoryUnaligned));
  if (incurable == 0) {
    const std::uint64_t body_start = round_up(request.file_offset, unit);
    const std::uint64_t body_end = round_down(end, unit);
    if (body_end <= body_start) {
      *refusals |= mask_of(Refusal::kTooSmall);
    } else if (request.fallback) {
      ScoredRequest body = request;
      const std::uint64_t head = body_start - request.file_offset;
      body.file_offset = body_start;
      body.bytes = body_end - body_start;
      body.memory_phase = (request.memory_phase + head) % request.file->memory_align;
      const Choice chosen = choose(body);
      if (chosen.path == Path::kFastpath) {
        *refusals &= kEdges;
        Plan plan;
        if (head > 0) plan.push_back({0, head, Path::kFallback});
        plan.push_back({head, body.bytes, Path::kFastpath});
        if (end > body_end) plan.push_back({head + body.bytes, end - body_end, Path::kFallback});
        return plan;
      }
      *refusals |= chosen.fastpath_refusals;
    }
  }
  if (request.fastpath == FastpathMode::kRequire || !whole.found) return refused(request, *refusals);
  return Plan{{0, request.bytes, Path::kFallback}};
}

}  // namespace gpufs
