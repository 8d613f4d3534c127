// Opens the HIP driver for tests: over the fake library.
// Owned by the tests that include it.
// One thread, except where a test starts more.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "drivers/hip/hip_driver.h"
#include "fake_hip/fake_hip.h"
#include "fake_libraries.h"
#include "gpu_test_support.h"

namespace gpufs::hip_test {

using namespace gpufs::gpu_test;

inline const FakeHipControl& control_of(const char* library) {
  void* const handle = ::dlopen(library, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) ADD_FAILURE() << ::dlerror();
  return *reinterpret_cast<const FakeHipControl* (*)()>(::dlsym(handle, "fake_hip_control"))();
}

inline const FakeHipControl& fake() {
  static const FakeHipControl& control = control_of(GPUFS_FAKE_HIP);
  return control;
}

inline FakeHipState fake_state() {
  FakeHipState state{};
  fake().state(&state);
  return state;
}

// Opens the driver over the fake library, and asserts at the end that everything was given back.
class FakeHip : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(fake().reset(&setup_), 0) << "an earlier test left something open"; }
  void TearDown() override {
    driver_.reset();
    EXPECT_EQ(fake().reset(&setup_), 0) << "something was left open";
  }
  Device& open(const FakeHipSetup& setup = {}, const DriverOptions& options = {}) {
    setup_ = setup;
    fake().reset(&setup_);
    Result<std::unique_ptr<Driver>> driver = open_hip_driver_from({GPUFS_FAKE_HIP}, options);
    EXPECT_TRUE(driver.ok()) << driver.status().message();
    if (driver.ok()) driver_ = driver.take();
    return *driver_->devices().at(0);
  }
  Device& device(std::size_t index = 0) { return *driver_->devices().at(index); }

  FakeHipSetup setup_;
  std::unique_ptr<Driver> driver_;
};

}  // namespace gpufs::hip_test
