#include "memory/extents.h"

#include <algorithm>

namespace gpufs {

Extents::const_iterator first_above(const Extents& extents, std::uint64_t offset) {
  return std::partition_point(extents.begin(), extents.end(),
                              [offset](const Extent& extent) { return extent.offset + extent.bytes <= offset; });
}

bool covered(const Extents& extents, std::uint64_t offset, std::uint64_t end) {
  if (offset >= end) return true;
  const auto extent = first_above(extents, offset);
  return extent != extents.end() && extent->offset <= offset && end <= extent->offset + extent->bytes;
}

Extents inside(const Extents& extents, std::uint64_t offset, std::uint64_t end) {
  Extents found;
  for (auto extent = first_above(extents, offset); extent != extents.end() && extent->offset < end; ++extent) {
    const std::uint64_t start = std::max(offset, extent->offset);
    found.push_back({start, std::min(end, extent->offset + extent->bytes) - start});
  }
  return found;
}

Extents holes(const Extents& extents, std::uint64_t offset, std::uint64_t end) {
  Extents found;
  for (auto extent = first_above(extents, offset); offset < end; ++extent) {
    const bool last = extent == extents.end() || extent->offset >= end;
    const std::uint64_t stop = last ? end : extent->offset;
    if (stop > offset) found.push_back({offset, stop - offset});
    if (last) break;
    offset = extent->offset + extent->bytes;
  }
  return found;
}

Extents without(const Extents& extents, std::uint64_t offset, std::uint64_t end) {
  Extents left;
  left.reserve(extents.size() + 1);
  for (const Extent& extent : extents) {
    const std::uint64_t extent_end = extent.offset + extent.bytes;
    if (offset >= end || extent_end <= offset || extent.offset >= end) {
      left.push_back(extent);
      continue;
    }
    if (extent.offset < offset) left.push_back({extent.offset, offset - extent.offset});
    if (extent_end > end) left.push_back({end, extent_end - end});
  }
  return left;
}

Extents without(const Extents& extents, const Extents& removed) {
  Extents left = extents;
  for (const Extent& extent : removed) left = without(left, extent.offset, extent.offset + extent.bytes);
  return left;
}

Extents joined(const Extents& extents, const Extents& added) {
  Extents all(extents.size() + added.size());
  std::merge(extents.begin(), extents.end(), added.begin(), added.end(), all.begin(),
             [](const Extent& a, const Extent& b) { return a.offset < b.offset; });
  Extents result;
  result.reserve(all.size());
  for (const Extent& extent : all) {
    if (!result.empty() && result.back().offset + result.back().bytes == extent.offset) {
      result.back().bytes += extent.bytes;
    } else {
      result.push_back(extent);
    }
  }
  return result;
}

std::uint64_t total_bytes(const Extents& extents) {
  std::uint64_t total = 0;
  for (const Extent& extent : extents) total += extent.bytes;
  return total;
}

std::uint64_t end_of(const Extents& extents) {
  return extents.empty() ? 0 : extents.back().offset + extents.back().bytes;
}

}  // namespace gpufs
