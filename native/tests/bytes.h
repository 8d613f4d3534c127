// Bytes that tests move and compare: by words and by the C library, since a sanitizer looks at every access.
// Owned by the tests that include it.
// Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace gpufs::testing {

inline constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
inline constexpr std::uint64_t kGranule = 2 * kMiB;

// Whether this is a build under a sanitizer, where the longest tests take fewer steps.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// Bytes that differ between offsets and between seeds, none of them zero. A shorter pattern is the beginning of a
// longer one.
inline std::vector<std::byte> pattern(std::size_t bytes, unsigned seed = 1) {
  std::vector<std::uint64_t> words((bytes + sizeof(std::uint64_t) - 1) / sizeof(std::uint64_t));
  std::uint64_t* const end = words.data() + words.size();  // by pointers: calls take long in tests, not optimized
  std::uint64_t state = seed * std::uint64_t{2654435761} + 1;
  for (std::uint64_t* word = words.data(); word != end; ++word) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    *word = (state ^ (state >> 33)) | std::uint64_t{0x0101010101010101};
  }
  const auto* const begin = reinterpret_cast<const std::byte*>(words.data());
  return {begin, begin + bytes};
}

inline bool same_bytes(std::span<const std::byte> left, std::span<const std::byte> right) {
  return left.size() == right.size() && (left.empty() || std::memcmp(left.data(), right.data(), left.size()) == 0);
}

inline bool all_zero(std::span<const std::byte> data) {
  return data.empty() || (data[0] == std::byte{0} && std::memcmp(data.data(), data.data() + 1, data.size() - 1) == 0);
}

}  // namespace gpufs::testing
