// The CUDA driver's own error paths, beside those that all GPU drivers have (gpu_faults_test.cc).
#include <cerrno>
#include <functional>
#include <thread>

#include "cuda_test_support.h"
#include "drivers/cuda/cuda_api.h"

namespace gpufs::cuda_test {
namespace {

using namespace gpufs::cuda;

using CudaFaults = FakeCuda;

TEST(CudaLibrary, IsNotThere) {
  Result<std::unique_ptr<Driver>> driver = open_cuda_driver_from("libcuda-that-nobody-has.so.1", {});
  ASSERT_FALSE(driver.ok());
  EXPECT_EQ(driver.error(), ENODEV);
  EXPECT_NE(driver.status().message().find("cuda is not available: libcuda-that-nobody-has.so.1 was not found"),
            std::string::npos)
      << driver.status().message();
}

TEST(CudaLibrary, LacksASymbol) {
  Result<std::unique_ptr<Driver>> driver = open_cuda_driver_from(GPUFS_FAKE_CUDA_OLD, {});
  ASSERT_FALSE(driver.ok());
  EXPECT_EQ(driver.error(), ENODEV);
  EXPECT_NE(driver.status().message().find("cuMemHostRegister_v2"), std::string::npos) << driver.status().message();
}

TEST_F(CudaFaults, TheLibraryDoesNotStart) {
  fake().fail("cuInit", 1, api::kNoDevice, 1);
  Result<std::unique_ptr<Driver>> driver = open_cuda_driver_from(GPUFS_FAKE_CUDA, {});
  ASSERT_FALSE(driver.ok());
  EXPECT_EQ(driver.error(), ENODEV);
  EXPECT_EQ(driver.status().device_code(), api::kNoDevice);
  EXPECT_EQ(driver.status().message(),
            "cuda is not available: cuInit: CUDA_ERROR_NO_DEVICE (100): as the test planned");
}

TEST_F(CudaFaults, ThreadsKeepTheContextTheyHad) {
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

TEST_F(CudaFaults, DevicesWithoutExport) {
  FakeGpuSetup setup;
  setup.export_descriptors = false;
  open(setup);
  Filled filled = fill(2);
  EXPECT_EQ(filled.memory->export_memory().error(), EOPNOTSUPP);
}

TEST_F(CudaFaults, ManagedMemoryIsNotTheDevices) {
  FakeGpuSetup setup;
  setup.managed = true;
  open(setup);
  auto memory = must(device().create_memory());
  auto range = must(memory->reserve(kGranule));
  ASSERT_OK(memory->populate(0, kGranule));
  EXPECT_FALSE(device().holds(range->base()));
}

TEST_F(CudaFaults, DevicesThatCannotPinReadOnlyMemorySaySo) {
  open();
  std::vector<std::byte> memory(kMiB);
  fake().fail("cuMemHostRegister_v2", 1, api::kNotSupported, 1);
  EXPECT_EQ(device().pin_read_only(memory.data(), memory.size()).error(), EOPNOTSUPP);
  EXPECT_OK(device().health());
}

}  // namespace
}  // namespace gpufs::cuda_test
