// What the tests of all GPU drivers use: patterns, and results that must be there.
// Owned by the tests that include it.
// Any thread.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/status.h"
#include "bytes.h"
#include "drivers/gpu/api.h"

namespace gpufs::gpu_test {

namespace api = gpu::api;

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr std::uint64_t kGranule = 2 * kMiB;

// A pattern that differs between offsets, and between seeds.
inline std::vector<std::byte> pattern(std::size_t bytes, unsigned seed) { return testing::pattern_bytes(bytes, seed); }

template <typename T>
T must(Result<T> result) {
  EXPECT_TRUE(result.ok()) << result.status().message();
  return result.take();
}

#define ASSERT_OK(expression)                                 \
  do {                                                        \
    const ::gpufs::Status status_of_it = (expression);        \
    ASSERT_TRUE(status_of_it.ok()) << status_of_it.message(); \
  } while (false)
#define EXPECT_OK(expression)                                 \
  do {                                                        \
    const ::gpufs::Status status_of_it = (expression);        \
    EXPECT_TRUE(status_of_it.ok()) << status_of_it.message(); \
  } while (false)

}  // namespace gpufs::gpu_test
