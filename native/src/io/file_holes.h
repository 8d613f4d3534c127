// Finds the holes of a load's file: what a load need not read, cut to the granules in which the target saves memory.
// Blocks for as long as the file does.
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
  std::uint64_t granule = 1;  // in which the target allocates memory, a power of two
};

// The holes in order, not adjacent, each from data to data or to the request's ends. Next to data they end at granules
// of the target, since a part of one saves nothing, and at units of the file's O_DIRECT. A file that occupies its whole
// size costs one system call, others at most two for each granule with data. None if the file system does not report
// holes. ECANCELED once `cancelled` is true.
Result<std::vector<HoleRange>> holes_of(BackingFile& file, const HoleSearch& search,
                                        const std::atomic<bool>& cancelled);

// The plan with these holes as segments of their own.
Plan without_holes(const Plan& plan, const std::vector<HoleRange>& holes);

}  // namespace gpufs
