// Ranges of bytes, and arithmetic on sorted lists of them.
// Ownership: none, these are values and pure functions.
// Thread-safe.
#pragma once

#include <cstdint>
#include <vector>

namespace gpufs {

// [offset, end()): of a file, of memory, or of a request.
struct Extent {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;

  [[nodiscard]] static Extent between(std::uint64_t offset, std::uint64_t end) { return {offset, end - offset}; }
  [[nodiscard]] std::uint64_t end() const { return offset + bytes; }
  bool operator==(const Extent&) const = default;
};

// In ascending order; no two overlap or touch.
using Extents = std::vector<Extent>;

// The first extent that ends above `offset`.
[[nodiscard]] Extents::const_iterator first_above(const Extents& extents, std::uint64_t offset);

// True when [offset, end) lies in one extent. An empty range always does.
[[nodiscard]] bool covered(const Extents& extents, std::uint64_t offset, std::uint64_t end);

// The parts of [offset, end) that exist, and those that do not.
[[nodiscard]] Extents inside(const Extents& extents, std::uint64_t offset, std::uint64_t end);
[[nodiscard]] Extents holes(const Extents& extents, std::uint64_t offset, std::uint64_t end);

// Without what of it lies in [offset, end), or in the other list.
[[nodiscard]] Extents without(const Extents& extents, std::uint64_t offset, std::uint64_t end);
[[nodiscard]] Extents without(const Extents& extents, const Extents& removed);

// Both lists in one, neighbours joined. The lists do not overlap.
[[nodiscard]] Extents joined(const Extents& extents, const Extents& added);

[[nodiscard]] std::uint64_t total_bytes(const Extents& extents);
// The end of the last one; 0 without any.
[[nodiscard]] std::uint64_t end_of(const Extents& extents);

}  // namespace gpufs
