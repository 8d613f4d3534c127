// Opens the CUDA driver for tests: over the fake library, or over the real one where there is a GPU.
// Owned by the tests that include it.
// One thread, except where a test starts more.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "drivers/cuda/cuda_driver.h"
#include "fake_cuda/fake_cuda.h"
#include "fake_libraries.h"
#include "gpu_test_support.h"

namespace gpufs::cuda_test {

using namespace gpufs::gpu_test;

inline const FakeCudaControl& fake() {
  static const FakeCudaControl* const control = [] {
    void* library = ::dlopen(GPUFS_FAKE_CUDA, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (library == nullptr) ADD_FAILURE() << ::dlerror();
    return reinterpret_cast<const FakeCudaControl* (*)()>(::dlsym(library, "fake_cuda_control"))();
  }();
  return *control;
}

inline FakeCudaState fake_state() {
  FakeCudaState state{};
  fake().state(&state);
  return state;
}

// Opens the driver over the fake library, and asserts at the end that everything was given back.
class FakeCuda : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(fake().reset(&setup_), 0) << "an earlier test left something open"; }
  void TearDown() override {
    driver_.reset();
    EXPECT_EQ(fake().reset(&setup_), 0) << "something was left open";
  }
  Device& open(const FakeCudaSetup& setup = {}, const DriverOptions& options = {}) {
    setup_ = setup;
    fake().reset(&setup_);
    Result<std::unique_ptr<Driver>> driver = open_cuda_driver_from(GPUFS_FAKE_CUDA, options);
    EXPECT_TRUE(driver.ok()) << driver.status().message();
    if (driver.ok()) driver_ = driver.take();
    return *driver_->devices().at(0);
  }
  Device& device(std::size_t index = 0) { return *driver_->devices().at(index); }

  FakeCudaSetup setup_;
  std::unique_ptr<Driver> driver_;
};

}  // namespace gpufs::cuda_test
