// What only the CUDA driver has: the library and attributes of devices. gpu_faults_test.cc has what it shares with HIP.
#include <cerrno>

#include "fake_vendors.h"

namespace gpufs::cuda_test {
namespace {

using CudaFaults = FakeCuda;

TEST(CudaLibrary, AMissingOrOldOneIsReported) {
  const std::string nowhere = "libcuda-that-nobody-has.so.1";
  Status status = open_cuda_driver({}, nowhere).status();
  EXPECT_EQ(status.error(), ENODEV);
  EXPECT_TRUE(status.message().starts_with("cuda is not available: " + nowhere + " was not found")) << status.message();
  status = open_cuda_driver({}, GPUFS_FAKE_CUDA_OLD).status();
  EXPECT_EQ(status.error(), ENODEV);
  EXPECT_NE(status.message().find("cuMemHostRegister_v2"), std::string::npos) << status.message();
}

TEST_F(CudaFaults, DevicesThatCannotExportMemoryRefuse) {
  FakeGpuSetup setup;
  setup.export_descriptors = false;
  open(setup);
  Filled filled = fill(2);
  EXPECT_EQ(filled.memory->export_memory(0, UINT64_MAX, SIZE_MAX, true).error(), EOPNOTSUPP);
}

TEST_F(CudaFaults, ManagedMemoryIsNotTheDevicesOwn) {
  FakeGpuSetup setup;
  setup.managed = true;
  open(setup);
  auto [memory, range] = take(device(), kGranule);
  EXPECT_FALSE(device().holds(range->base()));
}

TEST_F(CudaFaults, DevicesThatCannotPinReadOnlyMemoryRefuse) {
  open();
  std::vector<std::byte> memory(kMiB);
  fake().fail("cuMemHostRegister_v2", 1, api::kNotSupported, 1);
  EXPECT_EQ(device().pin_read_only(memory.data(), memory.size()).error(), EOPNOTSUPP);
  EXPECT_OK(device().health());
}

}  // namespace
}  // namespace gpufs::cuda_test
