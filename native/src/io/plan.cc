#include "io/plan.h"

#include <algorithm>
#include <utility>

#include "base/math.h"
#include "io/backing_file.h"

namespace gpufs {
namespace {

// Refusals that can be cured by cutting off head and tail.
constexpr RefusalMask kEdges = mask_of(Refusal::kOffsetUnaligned) | mask_of(Refusal::kSizeUnaligned);

}  // namespace

const char* direction_name(Direction direction) { return direction == Direction::kLoad ? "load" : "store"; }

// ---- paths ----

RefusalMask fastpath_refusals(const PlanRequest& request) {
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
  refuse_if(request.memory_phase % file.memory_align != 0, Refusal::kMemoryUnaligned);
  return reasons;
}

Result<Plan> Plan::make(const PlanRequest& request, RefusalMask* refusals) {
  Plan plan;
  plan.file_offset_ = request.file_offset;
  plan.chunk_bytes_ = request.chunk_bytes;
  const RefusalMask whole = fastpath_refusals(request);
  *refusals = whole;
  if (whole == 0) {
    plan.segments_ = {{{0, request.bytes}, Path::kFastpath}};
    return plan;
  }
  // The body starts at another address than the whole, so its alignment in memory is judged again below.
  const RefusalMask incurable = whole & ~(kEdges | mask_of(Refusal::kMemoryUnaligned));
  const std::uint64_t unit = request.file->unit;
  if (incurable == 0) {
    const std::uint64_t end = request.file_offset + request.bytes;
    const std::uint64_t body_start = round_up(request.file_offset, unit);
    const std::uint64_t body_end = round_down(end, unit);
    if (body_end <= body_start) {
      *refusals |= mask_of(Refusal::kTooSmall);
    } else {
      PlanRequest body = request;
      const std::uint64_t head = body_start - request.file_offset;
      body.file_offset = body_start;
      body.bytes = body_end - body_start;
      body.memory_phase = (request.memory_phase + head) % request.file->memory_align;
      const RefusalMask refused_body = fastpath_refusals(body);
      if (refused_body == 0) {
        *refusals &= kEdges;
        if (head > 0) plan.segments_.push_back({{0, head}, Path::kFallback});
        plan.segments_.push_back({{head, body.bytes}, Path::kFastpath});
        if (end > body_end) plan.segments_.push_back({{head + body.bytes, end - body_end}, Path::kFallback});
        return plan;
      }
      *refusals |= refused_body;
    }
  }
  if (request.fastpath == FastpathMode::kRequire) {
    return Status(EOPNOTSUPP, "fastpath is required but refused: " + describe_refusals(*refusals));
  }
  if (request.bytes > 0) plan.segments_ = {{{0, request.bytes}, Path::kFallback}};
  return plan;
}

// ---- other plans for the same bytes ----

Plan Plan::without_holes(const Extents& left_out) const {
  Plan plan = *this;
  plan.segments_.clear();
  for (const Extent& hole : left_out) plan.segments_.push_back({hole, Path::kFallback, /*hole=*/true});
  for (const Chunk& segment : segments_) {
    for (const Extent& data : holes(left_out, segment.offset, segment.end())) {
      plan.segments_.push_back({data, segment.path});
    }
  }
  std::ranges::sort(plan.segments_, {}, &Chunk::offset);
  return plan;
}

Plan Plan::without_fastpath() const {
  Plan plan = *this;
  for (Chunk& segment : plan.segments_) segment.path = Path::kFallback;
  return plan;
}

// ---- chunks ----

std::uint64_t Plan::hole_bytes() const {
  std::uint64_t bytes = 0;
  for (const Chunk& segment : segments_) bytes += segment.hole ? segment.bytes : 0;
  return bytes;
}

bool Plan::uses_fastpath() const {
  return std::any_of(segments_.begin(), segments_.end(),
                     [](const Chunk& segment) { return segment.path == Path::kFastpath; });
}

Chunk Plan::chunk_at(std::uint64_t offset) const {
  const Chunk& segment = *std::partition_point(segments_.begin(), segments_.end(),
                                               [&](const Chunk& each) { return each.end() <= offset; });
  Chunk chunk = segment;
  chunk.offset = offset;
  chunk.bytes = segment.end() - offset;
  if (!chunk.hole) chunk.bytes = std::min(chunk.bytes, chunk_bytes_ - (file_offset_ + offset) % chunk_bytes_);
  return chunk;
}

PlanCursor::PlanCursor(Plan plan)
    : plan_(std::move(plan)), data_(plan_.bytes() - plan_.hole_bytes()), end_(plan_.bytes()) {}

std::optional<Chunk> PlanCursor::next() {
  if (!has_next()) return std::nullopt;
  Chunk chunk = plan_.chunk_at(position_);
  chunk.bytes = std::min(chunk.bytes, end_ - position_);
  in_flight_.insert(chunk.offset);
  position_ += chunk.bytes;
  if (!chunk.hole) data_ -= chunk.bytes;
  return chunk;
}

void PlanCursor::complete(const Chunk& chunk, std::uint64_t done, const Status& status) {
  in_flight_.erase(chunk.offset);
  if (done == chunk.bytes) return;
  const std::uint64_t reached = chunk.offset + done;
  // At the place where a cancellation stopped it, the reason is this failure.
  const bool replaces_cancellation = reached == end_ && status_.error() == ECANCELED && !status.ok();
  if (reached < end_ || replaces_cancellation) {
    end_ = reached;
    status_ = status;
  }
}

void PlanCursor::stop(const Status& why) {
  if (!has_next()) return;
  end_ = position_;
  status_ = why;
}

std::uint64_t PlanCursor::prefix() const {
  const std::uint64_t handed_out = std::min(end_, position_);
  return in_flight_.empty() ? handed_out : std::min(handed_out, *in_flight_.begin());
}

std::uint64_t PlanCursor::remaining() const { return has_next() ? std::min(end_ - position_, data_) : 0; }

}  // namespace gpufs
