// Which bytes of a transfer go by which path, in which chunks. Fastpath: the vendor moves the bytes between storage and
// device. Fallback: they pass through host memory. Pure values and functions: no system calls, no driver calls, no
// locks.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <set>
#include <vector>

#include "base/extents.h"
#include "base/status.h"
#include "io/fastpath.h"
#include "io/io_options.h"
#include "observe/counters.h"

namespace gpufs {

struct BackingFacts;  // io/backing_file.h

enum class Path : int { kFastpath = 0, kFallback = 1 };
inline constexpr int kPathCount = 2;
const char* direction_name(Direction direction);
inline constexpr auto kLargestOffset = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
[[nodiscard]] inline Status cancelled_status() { return Status(ECANCELED, "cancelled"); }
[[nodiscard]] constexpr observe::Backend backend_of(Path path) {
  return path == Path::kFastpath ? observe::Backend::kFastpath : observe::Backend::kFallback;
}
[[nodiscard]] constexpr observe::Flow flow_of(Direction direction) {
  return direction == Direction::kLoad ? observe::Flow::kToDevice : observe::Flow::kFromDevice;
}

// All that a plan depends on.
struct PlanRequest {
  const BackingFacts* file = nullptr;
  std::uint64_t file_offset = 0;
  std::uint64_t bytes = 0;
  std::uint64_t memory_phase = 0;   // the device address modulo BackingFacts::memory_align
  RefusalMask vendor_refusals = 0;  // of the device's fastpath
  RefusalMask waived = 0;           // refusals of the file that the operator has overruled
  FastpathMode fastpath = FastpathMode::kAuto;
  std::size_t chunk_bytes = std::size_t{4} << 20;
};

// Why fastpath does not take the request as it is; 0 if it does. Fastpath takes a request unless one of its rules
// refuses it.
RefusalMask fastpath_refusals(const PlanRequest& request);

// The bytes that one thread moves at a time. The offset is relative to the request.
struct Chunk : Extent {
  Path path = Path::kFallback;
  bool hole = false;  // a hole of a load's file, all of it: nothing to move

  bool operator==(const Chunk&) const = default;
};

class Plan {
 public:
  // An empty plan.
  Plan() = default;
  // Cuts an unaligned request into head, body and tail so that the body can take the fastpath. *refusals: why all of it
  // or its edges do not, also on failure. EOPNOTSUPP, with the reasons in the text, if fastpath is required and the
  // body cannot take it, or if no path may take the request.
  static Result<Plan> make(const PlanRequest& request, RefusalMask* refusals);

  // The same bytes, with these holes left out.
  [[nodiscard]] Plan without_holes(const Extents& holes) const;
  // The same bytes, for when the fastpath has failed.
  [[nodiscard]] Plan without_fastpath() const;

  [[nodiscard]] std::uint64_t bytes() const { return segments_.empty() ? 0 : segments_.back().end(); }
  [[nodiscard]] std::uint64_t hole_bytes() const;
  [[nodiscard]] bool uses_fastpath() const;
  // The chunk that begins at `offset`, which is below bytes(). Edges of chunks are multiples of their size in the file,
  // so that a bounce buffer holds all that O_DIRECT must read for one.
  [[nodiscard]] Chunk chunk_at(std::uint64_t offset) const;

 private:
  std::uint64_t file_offset_ = 0;
  std::uint64_t chunk_bytes_ = 1;
  std::vector<Chunk> segments_;  // in order, covering the request: of any size, each by one path
};

// What remains of a plan: hands out its chunks in order and records how each ended. Needs a lock of its owner's.
class PlanCursor {
 public:
  PlanCursor() = default;
  // Nothing to move, because of `failure`.
  explicit PlanCursor(Status failure) : status_(std::move(failure)) {}
  explicit PlanCursor(Plan plan);

  // The next chunk; nothing if there is none left.
  std::optional<Chunk> next();
  // The first `done` bytes of a chunk were moved. Fewer than all end the transfer there, with `status` (success: the
  // source ends there).
  void complete(const Chunk& chunk, std::uint64_t done, const Status& status);
  // Hands out no further chunks. Those handed out still count.
  void stop(const Status& why);
  // The rest goes by fallback.
  void give_up_fastpath() { plan_ = plan_.without_fastpath(); }

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
  std::uint64_t position_ = 0;
  std::uint64_t data_ = 0;  // bytes from position_ to the plan's end, without holes
  std::uint64_t end_ = 0;
  Status status_;
  std::set<std::uint64_t> in_flight_;  // offsets of chunks that are not complete
};

}  // namespace gpufs
