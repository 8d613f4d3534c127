// What the tests of Buffer share: reading and writing, and devices of a driver that fails as planned.
// Owned by the test.
// The test's thread.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "bytes.h"
#include "device/device_context.h"
#include "faulty_driver.h"
#include "memory/extent_buffer.h"
#include "memory/slab_pool.h"
#include "results.h"

namespace gpufs::testing {

inline std::vector<std::byte> contents(Buffer& buffer, std::uint64_t offset, std::size_t bytes) {
  std::vector<std::byte> data(bytes, std::byte{0xee});
  data.resize(must(buffer.read(offset, data)));
  return data;
}
inline std::vector<std::byte> contents(Buffer& buffer) { return contents(buffer, 0, buffer.size()); }

inline void write(Buffer& buffer, std::uint64_t offset, std::span<const std::byte> data) {
  ASSERT_EQ(must(buffer.write(offset, data)), data.size());
}

class BufferFixture : public ::testing::Test {
 protected:
  void start(std::uint64_t memory_bytes, std::uint64_t slab_file_bytes = 0, int devices = 1) {
    driver = make_faulty_driver(plan, memory_bytes, devices);
    ASSERT_NE(driver, nullptr);
    for (int index = 0; index < devices; ++index) {
      contexts.push_back(must(DeviceContext::create(driver, static_cast<std::size_t>(index))));
      if (slab_file_bytes > 0) contexts.back()->set_slabs(must(SlabPool::create(*contexts.back(), slab_file_bytes)));
    }
  }

  std::shared_ptr<ExtentBuffer> make(std::size_t device = 0, bool preallocates = false) {
    return std::make_shared<ExtentBuffer>(contexts.at(device), preallocates);
  }

  // Without what the device has as soon as it is needed: slabs that are kept without files.
  std::uint64_t used(std::size_t device = 0) {
    const MemoryInfo memory = contexts.at(device)->memory().take();
    return memory.total_bytes - memory.free_bytes;
  }

  // What must hold when no buffer is left.
  void expect_nothing_left() {
    for (std::size_t device = 0; device < contexts.size(); ++device) {
      EXPECT_EQ(used(device), 0U);
      EXPECT_EQ(contexts[device]->held_bytes(), 0U);
    }
  }

  std::shared_ptr<FaultPlan> plan = std::make_shared<FaultPlan>();
  std::shared_ptr<Driver> driver;
  std::vector<std::shared_ptr<DeviceContext>> contexts;
};

}  // namespace gpufs::testing
