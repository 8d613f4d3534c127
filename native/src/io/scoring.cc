#include "io/scoring.h"

#include <cerrno>
#include <limits>

#include "base/math.h"
#include "io/backing_file.h"

namespace gpufs {
namespace {

constexpr auto kLargestOffset = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());

// Refusals that can be cured by cutting off head and tail.
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

const char* direction_name(Direction direction) { return direction == Direction::kLoad ? "load" : "store"; }

RefusalMask fastpath_refusals(const ScoredRequest& request) {
  const BackingFacts& file = *request.file;
  RefusalMask reasons = request.vendor_refusals | (file.fastpath_refusals & ~request.waived);
  const auto refuse_if = [&](bool condition, Refusal reason) {
    if (condition) reasons |= mask_of(reason);
  };
  std::uint64_t end = 0;
  const bool overflows = add_overflows(request.file_offset, request.bytes, &end);
  refuse_if(request.fastpath == FastpathMode::kOff, Refusal::kDisabled);
  refuse_if(request.bytes == 0, Refusal::kNothingToMove);
  refuse_if(overflows || end > kLargestOffset, Refusal::kOffsetRange);
  refuse_if(request.file_offset % file.unit != 0, Refusal::kOffsetUnaligned);
  refuse_if(request.bytes % file.unit != 0, Refusal::kSizeUnaligned);
  // A request that has no other way takes this one, however small it is.
  const bool has_choice = request.fallback && request.fastpath == FastpathMode::kAuto;
  refuse_if(has_choice && request.bytes != 0 && request.bytes < request.fastpath_min_bytes, Refusal::kTooSmall);
  refuse_if(request.memory_phase % file.memory_align != 0, Refusal::kMemoryUnaligned);
  return reasons;
}

Result<Plan> plan_request(const ScoredRequest& request, RefusalMask* refusals) {
  const RefusalMask whole = fastpath_refusals(request);
  *refusals = whole;
  if (whole == 0) return Plan{{0, request.bytes, Path::kFastpath}};

  // The body starts at another address than the whole, so its alignment in memory is judged again below.
  const RefusalMask incurable = whole & ~(kEdges | mask_of(Refusal::kMemoryUnaligned));
  const std::uint64_t unit = request.file->unit;
  if (incurable == 0) {
    const std::uint64_t end = request.file_offset + request.bytes;
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
      const RefusalMask refused_body = fastpath_refusals(body);
      if (refused_body == 0) {
        *refusals &= kEdges;
        Plan plan;
        if (head > 0) plan.push_back({0, head, Path::kFallback});
        plan.push_back({head, body.bytes, Path::kFastpath});
        if (end > body_end) plan.push_back({head + body.bytes, end - body_end, Path::kFallback});
        return plan;
      }
      *refusals |= refused_body;
    }
  }
  if (request.fastpath == FastpathMode::kRequire || !request.fallback) return refused(request, *refusals);
  return Plan{{0, request.bytes, Path::kFallback}};
}

}  // namespace gpufs
