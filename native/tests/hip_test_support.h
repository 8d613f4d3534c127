// Opens the HIP driver for tests over the fake library.
// Owned by the tests that include it.
// One thread, except where a test starts more.
#pragma once

#include <memory>

#include "drivers/hip/hip_driver.h"
#include "fake_gpu_fixture.h"
#include "fake_hip/fake_hip.h"
#include "fake_libraries.h"

namespace gpufs::hip_test {

using namespace gpufs::gpu_test;

inline const FakeHipControl& control_of(const char* library) {
  return gpu_test::control_of<FakeHipControl>(library, "fake_hip_control");
}
inline const FakeHipControl& fake() {
  static const FakeHipControl& control = control_of(GPUFS_FAKE_HIP);
  return control;
}
inline FakeGpuState fake_state() { return state_of(fake()); }

inline Result<std::unique_ptr<Driver>> open_fake(const DriverOptions& options = {}) {
  return open_hip_driver(options, {GPUFS_FAKE_HIP});
}

class FakeHip : public FakeGpu {
 protected:
  FakeHip() : FakeGpu(fake(), open_fake) {}
};

}  // namespace gpufs::hip_test
