// What the tests of all GPU drivers use: patterns, and results that must be there.
// Owned by the tests that include it.
// Any thread.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/status.h"
#include "bytes.h"
#include "drivers/driver.h"
#include "drivers/gpu/api.h"

namespace gpufs::gpu_test {

namespace api = gpu::api;

using testing::kGranule;
using testing::kMiB;

using testing::pattern;

template <typename T>
T must(Result<T> result) {
  EXPECT_TRUE(result.ok()) << result.status().message();
  return result.take();
}

// Memory of a device, and the range that shows it.
struct Taken {
  std::unique_ptr<DeviceMemory> memory;
  std::shared_ptr<AddressRange> range;
};
// Reserves addresses, and populates the first `bytes` of them.
inline Taken take(Device& device, std::uint64_t bytes, std::uint64_t reserved = 0) {
  Taken taken{must(device.create_memory()), nullptr};
  taken.range = must(taken.memory->reserve(std::max(bytes, reserved)));
  if (bytes > 0) {
    const Status populated = taken.memory->populate(0, bytes);
    EXPECT_TRUE(populated.ok()) << populated.message();
  }
  return taken;
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
