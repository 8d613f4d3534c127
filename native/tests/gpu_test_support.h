// What the tests of all GPU drivers use: patterns, and memory.
// Owned by the tests that include it.
// Any thread.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>

#include "bytes.h"
#include "drivers/driver.h"
#include "drivers/gpu/api.h"
#include "results.h"

namespace gpufs::gpu_test {

namespace api = gpu::api;

using testing::kGranule;
using testing::kMiB;
using testing::must;
using testing::pattern;

// Memory of a device, and the range that shows it.
struct Taken {
  std::unique_ptr<DeviceMemory> memory;
  std::shared_ptr<AddressRange> range;
};
// Reserves addresses, and populates the first `bytes` of them.
inline Taken take(Device& device, std::uint64_t bytes, std::uint64_t reserved = 0) {
  Taken taken{must(device.create_memory()), nullptr};
  taken.range = must(taken.memory->reserve(std::max(bytes, reserved)));
  if (bytes > 0) EXPECT_OK(taken.memory->populate(0, bytes));
  return taken;
}

}  // namespace gpufs::gpu_test
