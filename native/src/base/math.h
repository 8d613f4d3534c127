// Arithmetic on sizes and offsets.
// Ownership: pure functions.
// Thread-safe.
#pragma once

#include <cstdint>

namespace gpufs {

// Stores a + b in *sum; true if it does not fit.
[[nodiscard]] constexpr bool add_overflows(std::uint64_t a, std::uint64_t b, std::uint64_t* sum) {
  return __builtin_add_overflow(a, b, sum);
}

// To a multiple of `unit`, a power of two. round_up wraps to 0 above 2^64 - unit: check the value first.
[[nodiscard]] constexpr std::uint64_t round_down(std::uint64_t value, std::uint64_t unit) {
  return value & ~(unit - 1);
}
[[nodiscard]] constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) {
  return (value + unit - 1) & ~(unit - 1);
}

}  // namespace gpufs
