// What remains of a transfer's plan: hands out chunks in order and records how each ended.
// Not thread-safe: its Transfer locks it.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <utility>

#include "base/status.h"
#include "io/scoring.h"

namespace gpufs {

// A part of a transfer that one thread moves. Offsets are relative to the request.
struct Chunk {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::uint64_t done = 0;  // bytes at its front that have been moved
  Path path = Path::kFallback;
  bool hole = false;          // a hole of a load's file, all of it
  std::uint64_t skipped = 0;  // of `done`: holes that stayed holes
  // For the counters of its path: when the path took it over, and what was done by then.
  std::uint64_t started = 0;
  std::uint64_t before = 0;
};

class PlanCursor {
 public:
  struct ChunkSizes {
    std::uint64_t fastpath = 0;
    std::uint64_t fallback = 0;
  };
  PlanCursor() = default;
  // Nothing to move, because of `failure`.
  explicit PlanCursor(Status failure) : status_(std::move(failure)) {}
  PlanCursor(Plan plan, std::uint64_t total, std::uint64_t file_offset, ChunkSizes sizes);

  // The next chunk; nothing if there is none left. Edges of chunks are multiples of their size in the file, so that a
  // bounce buffer holds all that O_DIRECT must read for one.
  std::optional<Chunk> next();
  // A chunk that is done in part ends the transfer there, with `status` (success: the source ends there).
  void complete(const Chunk& chunk, const Status& status);
  // Hands out no further chunks. Those handed out still count.
  void stop(const Status& why);

  [[nodiscard]] bool has_next() const { return position_ < end_; }
  // Everything below it was handed out.
  [[nodiscard]] std::uint64_t position() const { return position_; }
  // Where the transfer ends, as far as is known, and why.
  [[nodiscard]] std::uint64_t end() const { return end_; }
  [[nodiscard]] const Status& status() const { return status_; }
  // From the start without a gap.
  [[nodiscard]] std::uint64_t prefix() const;
  // Bytes to hand out, without holes.
  [[nodiscard]] std::uint64_t remaining() const;

 private:
  Plan plan_;
  std::uint64_t file_offset_ = 0;
  ChunkSizes sizes_;
  std::size_t segment_ = 0;  // the one that position_ is in
  std::uint64_t position_ = 0;
  std::uint64_t data_ = 0;  // bytes from position_ to the plan's end, without holes
  std::uint64_t end_ = 0;
  Status status_;
  std::set<std::uint64_t> in_flight_;  // offsets of chunks that are not complete
};

}  // namespace gpufs
