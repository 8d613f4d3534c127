// Opens the CUDA driver for tests over the fake library.
// Owned by the tests that include it.
// One thread, except where a test starts more.
#pragma once

#include <memory>

#include "drivers/cuda/cuda_driver.h"
#include "fake_cuda/fake_cuda.h"
#include "fake_gpu_fixture.h"
#include "fake_libraries.h"

namespace gpufs::cuda_test {

using namespace gpufs::gpu_test;

inline const FakeCudaControl& fake() {
  static const auto& control = control_of<FakeCudaControl>(GPUFS_FAKE_CUDA, "fake_cuda_control");
  return control;
}
inline FakeGpuState fake_state() { return state_of(fake()); }

inline Result<std::unique_ptr<Driver>> open_fake(const DriverOptions& options = {}) {
  return open_cuda_driver(options, GPUFS_FAKE_CUDA);
}

class FakeCuda : public FakeGpu {
 protected:
  FakeCuda() : FakeGpu(fake(), open_fake) {}
};

}  // namespace gpufs::cuda_test
