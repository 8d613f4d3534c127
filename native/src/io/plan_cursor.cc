#include "io/plan_cursor.h"

#include <algorithm>
#include <cerrno>
#include <utility>

namespace gpufs {

PlanCursor::PlanCursor(Plan plan, std::uint64_t total, std::uint64_t file_offset, ChunkSizes sizes)
    : plan_(std::move(plan)), file_offset_(file_offset), sizes_(sizes), end_(total) {
  for (const Segment& segment : plan_) data_ += segment.hole ? 0 : segment.bytes;
}

std::optional<Chunk> PlanCursor::next() {
  if (!has_next()) return std::nullopt;
  while (position_ >= plan_[segment_].offset + plan_[segment_].bytes) ++segment_;
  const Segment& segment = plan_[segment_];
  const std::uint64_t size = segment.path == Path::kFastpath ? sizes_.fastpath : sizes_.fallback;
  const std::uint64_t in_file = file_offset_ + position_;
  const std::uint64_t edge = in_file - in_file % size + size - file_offset_;
  const std::uint64_t segment_end = std::min(segment.offset + segment.bytes, end_);
  Chunk chunk;
  chunk.offset = position_;
  chunk.bytes = (segment.hole ? segment_end : std::min(edge, segment_end)) - position_;
  chunk.path = segment.path;
  chunk.hole = segment.hole;
  in_flight_.insert(chunk.offset);
  position_ += chunk.bytes;
  if (!segment.hole) data_ -= chunk.bytes;
  return chunk;
}

void PlanCursor::complete(const Chunk& chunk, const Status& status) {
  in_flight_.erase(chunk.offset);
  if (chunk.done == chunk.bytes) return;
  const std::uint64_t reached = chunk.offset + chunk.done;
  // At the place where a cancellation stopped it, the reason is this failure.
  const bool explains = reached == end_ && status_.error() == ECANCELED && !status.ok();
  if (reached < end_ || explains) {
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
