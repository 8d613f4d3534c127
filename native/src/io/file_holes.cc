#include "io/file_holes.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/math.h"

namespace gpufs {
namespace {

// The first offset from `offset` on at which a hole may begin, with data before it.
std::uint64_t hole_start(const HoleSearch& search, std::uint64_t unit, std::uint64_t offset) {
  const std::uint64_t start = round_up(search.target_offset + offset, search.granule) - search.target_offset;
  return start + (round_up(search.file_offset + start, unit) - (search.file_offset + start));
}

// The last offset up to `offset` at which a hole may end, with data after it; 0 if there is none.
std::uint64_t hole_end(const HoleSearch& search, std::uint64_t unit, std::uint64_t offset) {
  const std::uint64_t end = round_down(search.target_offset + offset, search.granule);
  if (end <= search.target_offset) return 0;
  const std::uint64_t relative = end - search.target_offset;
  return relative - std::min(relative, (search.file_offset + relative) % unit);
}

}  // namespace

Result<std::vector<HoleRange>> holes_of(BackingFile& file, const HoleSearch& search,
                                        const std::atomic<bool>& cancelled) {
  std::vector<HoleRange> holes;
  FileOps& system = file.operations();
  const int fd = file.buffered_fd();
  const std::uint64_t unit = file.facts().unit;
  std::uint64_t stored = 0;
  if (file.facts().block_device || system.stored_bytes(fd, &stored) != 0 || stored >= search.file_size) return holes;
  for (std::uint64_t position = 0; position < search.bytes;) {
    if (cancelled) return Status(ECANCELED, "cancelled");
    std::uint64_t data = 0;
    if (system.seek(fd, search.file_offset + position, SEEK_DATA, &data) == 0) {
      data = std::min(data - search.file_offset, search.bytes);
    } else if (errno == ENXIO) {
      data = search.bytes;
    } else {
      break;
    }
    const std::uint64_t end = data == search.bytes ? data : hole_end(search, unit, data);
    if (end > position) holes.push_back({position, end - position});
    if (data == search.bytes) break;
    std::uint64_t hole = 0;
    if (system.seek(fd, search.file_offset + data, SEEK_HOLE, &hole) != 0) break;
    position = hole_start(search, unit, std::max(hole - search.file_offset, data + 1));
  }
  return holes;
}

Plan without_holes(const Plan& plan, const std::vector<HoleRange>& holes) {
  Plan cut;
  auto hole = holes.begin();
  std::uint64_t position = 0;
  for (const Segment& segment : plan) {
    const std::uint64_t end = segment.offset + segment.bytes;
    while (position < end) {
      if (hole != holes.end() && position == hole->offset) {
        cut.push_back({hole->offset, hole->bytes, Path::kFallback, /*hole=*/true});
        position += hole->bytes;
        ++hole;
        continue;
      }
      const std::uint64_t next = hole == holes.end() ? end : std::min(end, hole->offset);
      cut.push_back({position, next - position, segment.path});
      position = next;
    }
  }
  return cut;
}

}  // namespace gpufs
