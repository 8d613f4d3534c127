#include "base/extents.h"

#include <algorithm>

namespace gpufs {
namespace {

void append_holes(const Extents& extents, std::uint64_t offset, std::uint64_t end, Extents* found) {
  for (auto extent = first_above(extents, offset); offset < end; ++extent) {
    const bool last = extent == extents.end() || extent->offset >= end;
    const std::uint64_t stop = last ? end : extent->offset;
    if (stop > offset) found->push_back(Extent::between(offset, stop));
    if (last) return;
    offset = extent->end();
  }
}

}  // namespace

Extents::const_iterator first_above(const Extents& extents, std::uint64_t offset) {
  return std::partition_point(extents.begin(), extents.end(),
                              [offset](const Extent& extent) { return extent.end() <= offset; });
}

bool covered(const Extents& extents, std::uint64_t offset, std::uint64_t end) {
  if (offset >= end) return true;
  const auto extent = first_above(extents, offset);
  return extent != extents.end() && extent->offset <= offset && end <= extent->end();
}

Extents inside(const Extents& extents, std::uint64_t offset, std::uint64_t end) {
  Extents found;
  for (auto extent = first_above(extents, offset); extent != extents.end() && extent->offset < end; ++extent) {
    found.push_back(Extent::between(std::max(offset, extent->offset), std::min(end, extent->end())));
  }
  return found;
}

Extents holes(const Extents& extents, std::uint64_t offset, std::uint64_t end) {
  Extents found;
  append_holes(extents, offset, end, &found);
  return found;
}

Extents without(const Extents& extents, std::uint64_t offset, std::uint64_t end) {
  return offset < end ? without(extents, {Extent::between(offset, end)}) : extents;
}

Extents without(const Extents& extents, const Extents& removed) {
  Extents left;
  left.reserve(extents.size());
  for (const Extent& extent : extents) append_holes(removed, extent.offset, extent.end(), &left);
  return left;
}

Extents joined(const Extents& extents, const Extents& added) {
  Extents all(extents.size() + added.size());
  std::merge(extents.begin(), extents.end(), added.begin(), added.end(), all.begin(),
             [](const Extent& a, const Extent& b) { return a.offset < b.offset; });
  Extents result;
  result.reserve(all.size());
  for (const Extent& extent : all) {
    if (!result.empty() && result.back().end() == extent.offset) {
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

std::uint64_t end_of(const Extents& extents) { return extents.empty() ? 0 : extents.back().end(); }

}  // namespace gpufs
