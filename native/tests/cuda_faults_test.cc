// What only the CUDA driver has: the library, the stack of contexts, attributes of devices. gpu_faults_test.cc has the
// error paths that it shares with HIP.
#include <cerrno>
#include <string>
#include <thread>

#include "cuda_test_support.h"
#include "drivers/cuda/cuda_api.h"

namespace gpufs::cuda_test {
namespace {

using namespace gpufs::cuda;

using CudaFaults = FakeCuda;

TEST(CudaLibrary, AMissingOrOldOneIsReported) {
  const std::string nowhere = "libcuda-that-nobody-has.so.1";
  Status status = open_cuda_driver_from(nowhere, {}).status();
  EXPECT_EQ(status.error(), ENODEV);
  EXPECT_TRUE(status.message().starts_with("cuda is not available: " + nowhere + " was not found")) << status.message();
  status = open_cuda_driver_from(GPUFS_FAKE_CUDA_OLD, {}).status();
  EXPECT_EQ(status.error(), ENODEV);
  EXPECT_NE(status.message().find("cuMemHostRegister_v2"), std::string::npos) << status.message();
}

TEST_F(CudaFaults, AFailureToInitialiseIsReported) {
  fake().fail("cuInit", 1, api::kNoDevice, 1);
  Result<std::unique_ptr<Driver>> driver = open_cuda_driver_from(GPUFS_FAKE_CUDA, {});
  ASSERT_FALSE(driver.ok());
  EXPECT_EQ(driver.error(), ENODEV);
  EXPECT_EQ(driver.status().device_code(), api::kNoDevice);
  EXPECT_EQ(driver.status().message(),
            "cuda is not available: cuInit: CUDA_ERROR_NO_DEVICE (100): as the test planned");
}

TEST_F(CudaFaults, ThreadsKeepTheirCurrentContext) {
  FakeGpuSetup setup;
  setup.devices = 2;
  open(setup);
  Filled filled = fill(2);
  std::thread other([&] {
    std::byte byte{};
    EXPECT_EQ(fake().current(), -1);
    EXPECT_OK(device(0).copy_out(&byte, filled.range->base(), 1));
    EXPECT_EQ(fake().current(), -1);
    EXPECT_EQ(fake().depth(), 0);
    EXPECT_OK(device(1).bind_thread());
    EXPECT_EQ(fake().current(), 1);
    EXPECT_OK(device(0).copy_out(&byte, filled.range->base(), 1));
    EXPECT_EQ(device(0).copy_out(&byte, filled.range->base() + (std::uint64_t{1} << 40), 1).error(), EIO);
    EXPECT_EQ(fake().current(), 1);
    EXPECT_EQ(fake().depth(), 1);
    EXPECT_OK(device(1).bind_thread());
    const int sets = fake().calls("cuCtxSetCurrent");
    EXPECT_OK(device(1).bind_thread());
    EXPECT_EQ(fake().calls("cuCtxSetCurrent"), sets);  // cheap when it already is
  });
  other.join();
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
  auto memory = must(device().create_memory());
  auto range = must(memory->reserve(kGranule));
  ASSERT_OK(memory->populate(0, kGranule));
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
