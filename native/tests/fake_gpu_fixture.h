// Opens a GPU's driver for tests over the fake of its vendor's library.
// Owned by the tests that include it.
// One thread, except where a test starts more.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <span>
#include <vector>

#include "fake_gpu/fake_gpu.h"
#include "gpu_test_support.h"

namespace gpufs::gpu_test {

// The control of a fake library, which `symbol` gives.
template <typename Control>
const Control& control_of(const char* library, const char* symbol) {
  void* const handle = ::dlopen(library, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) ADD_FAILURE() << ::dlerror();
  return *reinterpret_cast<const Control* (*)()>(::dlsym(handle, symbol))();
}

inline FakeGpuState state_of(const FakeGpuControl& fake) {
  FakeGpuState state{};
  fake.state(&state);
  return state;
}

// Opens the driver over the fake library, and checks at the end that everything was released.
class FakeGpu : public ::testing::Test {
 protected:
  using OpenDriver = Result<std::unique_ptr<Driver>> (*)(const DriverOptions& options);

  FakeGpu(const FakeGpuControl& control, OpenDriver opener) : control_(control), opener_(opener) {}

  void SetUp() override { ASSERT_EQ(control_.reset(&setup_), 0) << "an earlier test left something open"; }
  void TearDown() override {
    driver_.reset();
    EXPECT_EQ(control_.calls("in a host function"), 0);
    EXPECT_EQ(control_.reset(&setup_), 0) << "something was left open";
  }
  Result<std::unique_ptr<Driver>> open_driver(const DriverOptions& options = {}) { return opener_(options); }
  Device& open(const FakeGpuSetup& setup = {}, const DriverOptions& options = {}) {
    setup_ = setup;
    control_.reset(&setup_);
    driver_ = must(open_driver(options));
    return *driver_->devices().at(0);
  }
  Device& device(std::size_t index = 0) { return *driver_->devices().at(index); }

  // Memory of `granules` with a known content, in the second of its ranges.
  struct Filled : Taken {
    std::vector<std::byte> data;
  };
  Filled fill(std::uint64_t granules) {
    Filled filled{take(device(), granules * kGranule), {}};
    const Extent all{0, granules * kGranule};
    filled.range = must(filled.memory->reserve(4 * granules * kGranule, {&all, 1}));
    filled.data = pattern(granules * kGranule, 77);
    EXPECT_OK(device().copy_in(filled.range->base(), filled.data.data(), filled.data.size()));
    return filled;
  }
  void expect_content(const Filled& filled, std::uint64_t offset, std::uint64_t bytes) {
    std::vector<std::byte> back(bytes);
    EXPECT_OK(device().copy_out(back.data(), filled.range->base() + offset, bytes));
    EXPECT_TRUE(testing::same_bytes(back, std::span(filled.data).subspan(offset, bytes)));
  }

  const FakeGpuControl& control_;
  const OpenDriver opener_;
  FakeGpuSetup setup_;
  std::unique_ptr<Driver> driver_;
};

}  // namespace gpufs::gpu_test
