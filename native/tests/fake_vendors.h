// Both vendors' drivers over the fake libraries, and tests that run over each of them.
// Owned by the tests that include it.
// One thread, except where a test starts more.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <string>

#include "drivers/driver.h"
#include "fake_cuda/fake_cuda.h"
#include "fake_gpu_fixture.h"
#include "fake_hip/fake_hip.h"
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

namespace gpufs::gpu_test {

struct FakeVendor {
  const char* name;
  const FakeGpuControl& (*fake)();
  Result<std::unique_ptr<Driver>> (*open)(const DriverOptions& options);
};

inline constexpr std::array<FakeVendor, 2> kVendors{{
    {"Cuda", []() -> const FakeGpuControl& { return cuda_test::fake(); }, cuda_test::open_fake},
    {"Hip", []() -> const FakeGpuControl& { return hip_test::fake(); }, hip_test::open_fake},
}};

// A function as CUDA and HIP name it.
using Names = std::array<const char*, kVendors.size()>;

inline constexpr Names kAddressReserve{"cuMemAddressReserve", "hipMemAddressReserve"};
inline constexpr Names kMemoryCreate{"cuMemCreate", "hipMemCreate"};
inline constexpr Names kMemoryExport{"cuMemExportToShareableHandle", "hipMemExportToShareableHandle"};
inline constexpr Names kMemoryMap{"cuMemMap", "hipMemMap"};
inline constexpr Names kMemoryUnmap{"cuMemUnmap", "hipMemUnmap"};
inline constexpr Names kMemorySetAccess{"cuMemSetAccess", "hipMemSetAccess"};

// A test that runs once for each vendor.
class FakeVendorTest : public FakeGpu, public ::testing::WithParamInterface<std::size_t> {
 protected:
  FakeVendorTest() : FakeGpu(vendor().fake(), vendor().open) {}
  static const FakeVendor& vendor() { return kVendors.at(GetParam()); }
  static const char* symbol(const Names& names) { return names.at(GetParam()); }
  [[nodiscard]] const FakeGpuControl& fake() const { return control_; }
  [[nodiscard]] FakeGpuState fake_state() const { return state_of(control_); }
};

inline const auto kEachVendor = ::testing::Range(std::size_t{0}, kVendors.size());
inline std::string vendor_name(const ::testing::TestParamInfo<std::size_t>& vendor) {
  return kVendors.at(vendor.param).name;
}

}  // namespace gpufs::gpu_test
