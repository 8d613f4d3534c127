// Where a load has nothing to read: holes of its file, cut to the memory that leaving them out saves.
// Pure functions over a BackingFile.
// Any thread may call any function; holes_of() blocks for as long as the file does.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "base/status.h"
#include "io/backing_file.h"
#include "io/scoring.h"

namespace gpufs {

// Part of a request, relative to its start.
struct HoleRange {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

struct HoleSearch {
  std::uint64_t file_offset = 0;
  std::uint64_t file_size = 0;
  std::uint64_t target_offset = 0;
  std::uint64_t bytes = 0;
  std::uint64_t granule = 1;  // in which the target takes memory, a power of two
};

// The holes in order, apart from each other, reaching from data to data or to the request's ends. Towards data they end
// at granules of the target, since a part of one saves nothing, and at units of the file's O_DIRECT. A file that takes
// up its whole size is not searched, and costs one call; any other two for each granule with data at most. Where the
// file system does not tell there are none. ECANCELED once `cancelled` is true.
Result<std::vector<HoleRange>> holes_of(BackingFile& file, const HoleSearch& search,
                                        const std::atomic<bool>& cancelled);

// The plan with these holes as segments of their own.
Plan without_holes(const Plan& plan, const std::vector<HoleRange>& holes);

}  // namespace gpufs
