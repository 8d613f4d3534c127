// The CUDA driver's error paths, planned through the fake library: the right errno and text, everything as it was,
// nothing left open.
#include <cerrno>
#include <functional>
#include <thread>

#include "cuda_test_support.h"
#include "drivers/cuda/cuda_api.h"

namespace gpufs::cuda_test {
namespace {

using namespace gpufs::cuda;

class CudaFaults : public FakeCuda {
 protected:
  // Memory of `granules` with a known content, mapped in two ranges.
  struct Filled {
    std::unique_ptr<DeviceMemory> memory;
    std::shared_ptr<AddressRange> earlier;
    std::shared_ptr<AddressRange> range;
    std::vector<std::byte> data;
  };
  Filled fill(std::uint64_t granules) {
    Filled filled;
    filled.memory = must(device().create_memory());
    filled.earlier = must(filled.memory->reserve(granules * kGranule));
    EXPECT_OK(filled.memory->populate(0, granules * kGranule));
    filled.range = must(filled.memory->reserve(4 * granules * kGranule));
    filled.data = pattern(granules * kGranule, 77);
    EXPECT_OK(device().copy_in(filled.range->base(), filled.data.data(), filled.data.size()));
    return filled;
  }
  void expect_content(const Filled& filled, std::uint64_t offset, std::uint64_t bytes) {
    for (const auto& range : {filled.earlier, filled.range}) {
      std::vector<std::byte> back(bytes);
      EXPECT_OK(device().copy_out(back.data(), range->base() + offset, bytes));
      EXPECT_TRUE(std::equal(back.begin(), back.end(), filled.data.begin() + static_cast<std::ptrdiff_t>(offset)));
    }
  }
};

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

TEST_F(CudaFaults, EveryStepOfOpeningMayFail) {
  setup_.devices = 2;
  fake().reset(&setup_);
  const int before = fake_state().contexts;  // those of devices that other tests left behind
  for (const char* symbol : {"cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetPCIBusId",
                             "cuDeviceTotalMem_v2", "cuDevicePrimaryCtxRetain", "cuMemGetAllocationGranularity"}) {
    for (const int n : {1, 2}) {
      if (n == 2 && std::string(symbol) == "cuDeviceGetCount") continue;
      fake().fail(symbol, n, api::kNotInitialized, 1);
      EXPECT_FALSE(open_cuda_driver_from(GPUFS_FAKE_CUDA, {}).ok()) << symbol;
      EXPECT_EQ(fake_state().contexts, before) << symbol;
    }
  }
}

TEST_F(CudaFaults, DevicesAreCounted) {
  setup_.devices = 2;
  fake().reset(&setup_);
  DriverOptions options;
  options.devices = 3;
  EXPECT_EQ(open_cuda_driver_from(GPUFS_FAKE_CUDA, options).error(), ENODEV);
  options.devices = 1;
  EXPECT_EQ(must(open_cuda_driver_from(GPUFS_FAKE_CUDA, options))->devices().size(), 1U);
  options.devices = 0;
  EXPECT_EQ(must(open_cuda_driver_from(GPUFS_FAKE_CUDA, options))->devices().size(), 2U);
  options.devices = -1;
  EXPECT_EQ(open_cuda_driver_from(GPUFS_FAKE_CUDA, options).error(), EINVAL);
  setup_.devices = 0;
  fake().reset(&setup_);
  EXPECT_EQ(open_cuda_driver_from(GPUFS_FAKE_CUDA, {}).error(), ENODEV);
}

TEST_F(CudaFaults, PopulateIsAllOrNothing) {
  open();
  auto memory = must(device().create_memory());
  auto range = must(memory->reserve(1024 * kMiB));
  ASSERT_OK(memory->populate(0, kGranule));
  const FakeCudaState before = fake_state();
  struct Plan {
    const char* symbol;
    int n;
    api::Code code;
    int error;
  };
  for (const Plan& plan :
       {Plan{"cuMemCreate", 1, api::kOutOfMemory, ENOSPC}, Plan{"cuMemCreate", 3, api::kOutOfMemory, ENOSPC},
        Plan{"cuMemMap", 1, api::kInvalidValue, EIO}, Plan{"cuMemMap", 3, api::kOutOfMemory, ENOSPC},
        Plan{"cuMemSetAccess", 1, api::kInvalidValue, EIO}, Plan{"cuMemsetD8Async", 1, api::kInvalidValue, EIO},
        Plan{"cuStreamSynchronize", 1, api::kInvalidValue, EIO}}) {
    fake().fail(plan.symbol, plan.n, plan.code, 1);
    const Status status = memory->populate(kGranule, 700 * kMiB);
    EXPECT_EQ(status.error(), plan.error) << plan.symbol;
    EXPECT_EQ(status.device_code(), plan.code) << plan.symbol;
    EXPECT_NE(status.message().find("gpu 0: cu"), std::string::npos) << status.message();
    const FakeCudaState after = fake_state();
    EXPECT_EQ(after.bytes_used, before.bytes_used) << plan.symbol;
    EXPECT_EQ(after.handles, before.handles) << plan.symbol;
    EXPECT_EQ(after.mappings, before.mappings) << plan.symbol;
  }
  EXPECT_OK(device().health());
  EXPECT_OK(memory->populate(kGranule, 700 * kMiB));
  EXPECT_EQ(fake_state().handles, 4);  // 256 + 256 + 188 MiB beside the first
}

TEST_F(CudaFaults, ReserveFailsAndTheEarlierRangeStays) {
  open();
  Filled filled = fill(8);
  const FakeCudaState before = fake_state();
  fake().fail("cuMemAddressReserve", 1, api::kOutOfMemory, 1);
  EXPECT_EQ(filled.memory->reserve(64 * kGranule).error(), ENOMEM);
  for (const char* symbol : {"cuMemMap", "cuMemSetAccess"}) {
    fake().fail(symbol, 1, api::kInvalidValue, 1);
    EXPECT_EQ(filled.memory->reserve(64 * kGranule).error(), EIO);
    EXPECT_EQ(fake_state().mappings, before.mappings);
    EXPECT_EQ(fake_state().reservations, before.reservations);
  }
  EXPECT_EQ(filled.memory->reserve(kGranule).error(), EINVAL);  // smaller than what is there
  EXPECT_EQ(filled.memory->reserve(0).error(), EINVAL);
  expect_content(filled, 0, 8 * kGranule);
  EXPECT_OK(filled.memory->populate(8 * kGranule, kGranule));
}

TEST_F(CudaFaults, NoAddressSpaceIsNoMemory) {
  FakeCudaSetup setup;
  setup.address_space_bytes = 64 * kMiB;
  open(setup);
  auto memory = must(device().create_memory());
  EXPECT_EQ(memory->reserve(65 * kMiB).error(), ENOMEM);
  EXPECT_OK(memory->reserve(64 * kMiB).status());
}

TEST_F(CudaFaults, SplittingFallsBackToKeepingThePiece) {
  open();
  struct Plan {
    const char* symbol;
    int n;
    api::Code code;
  };
  // Out of memory for the copy is no failure: the memory goes back when all of the piece has been released.
  for (const Plan& plan : {Plan{"cuMemCreate", 1, api::kOutOfMemory}, Plan{"cuMemCreate", 2, api::kOutOfMemory},
                           Plan{"cuMemMap", 1, api::kOutOfMemory}, Plan{"cuMemMap", 4, api::kOutOfMemory},
                           Plan{"cuMemMap", 6, api::kOutOfMemory}, Plan{"cuMemSetAccess", 5, api::kOutOfMemory}}) {
    SCOPED_TRACE(std::string(plan.symbol) + " " + std::to_string(plan.n));
    Filled filled = fill(8);
    const FakeCudaState before = fake_state();
    fake().fail(plan.symbol, plan.n, plan.code, 1);
    EXPECT_OK(filled.memory->release(3 * kGranule, kGranule));
    EXPECT_EQ(fake_state().bytes_used, before.bytes_used);
    EXPECT_EQ(fake_state().mappings, before.mappings);
    EXPECT_EQ(fake_state().reservations, before.reservations);
    expect_content(filled, 0, 3 * kGranule);
    expect_content(filled, 4 * kGranule, 4 * kGranule);
    // The next release of a part tries again, and succeeds.
    EXPECT_OK(filled.memory->release(6 * kGranule, kGranule));
    EXPECT_EQ(fake_state().bytes_used, 6 * kGranule);
    expect_content(filled, 0, 3 * kGranule);
    expect_content(filled, 4 * kGranule, 2 * kGranule);
    expect_content(filled, 7 * kGranule, kGranule);
    EXPECT_OK(filled.memory->populate(3 * kGranule, kGranule));
    std::vector<std::byte> fresh(kGranule);
    EXPECT_OK(device().copy_out(fresh.data(), filled.range->base() + 3 * kGranule, kGranule));
    EXPECT_EQ(fresh, std::vector<std::byte>(kGranule));
  }
}

TEST_F(CudaFaults, SplittingReportsOtherFailures) {
  open();
  struct Plan {
    const char* symbol;
    int n;
  };
  // The first two unmappings are those of the place where the copy was made.
  for (const auto& [symbol, n] :
       {Plan{"cuMemcpyDtoDAsync_v2", 1}, Plan{"cuStreamSynchronize", 1}, Plan{"cuMemUnmap", 3}}) {
    SCOPED_TRACE(symbol);
    Filled filled = fill(8);
    fake().fail(symbol, n, api::kInvalidValue, 1);
    EXPECT_EQ(filled.memory->release(3 * kGranule, kGranule).error(), EIO);
    expect_content(filled, 0, 3 * kGranule);
    expect_content(filled, 4 * kGranule, 4 * kGranule);
    EXPECT_OK(device().health());
  }
}

TEST_F(CudaFaults, AMappingThatIsLostPutsTheDeviceOutOfService) {
  open();
  Filled filled = fill(8);
  fake().fail("cuMemMap", 3, api::kInvalidValue, 100);  // two for the copy, and then none any more
  EXPECT_EQ(filled.memory->release(3 * kGranule, kGranule).error(), EIO);
  EXPECT_EQ(device().health().error(), EIO);
  EXPECT_NE(device().health().message().find("a mapping could not be restored"), std::string::npos);
}

TEST_F(CudaFaults, CopiesReportTheCode) {
  open();
  Filled filled = fill(2);
  std::byte byte{};
  fake().fail("cuMemcpyDtoHAsync_v2", 1, kCuNotPermitted, 1);
  const Status status = device().copy_out(&byte, filled.range->base(), 1);
  EXPECT_EQ(status.error(), EIO);
  EXPECT_EQ(status.device_code(), kCuNotPermitted);
  EXPECT_EQ(status.message(), "gpu 0: cuMemcpyDtoHAsync: unknown CUDA error (800)");
  EXPECT_OK(device().health());
  EXPECT_OK(device().copy_out(&byte, filled.range->base(), 1));
}

TEST_F(CudaFaults, AFatalFailureStaysWithItsDevice) {
  FakeCudaSetup setup;
  setup.devices = 2;
  open(setup);
  Filled filled = fill(2);
  auto stream = must(device().create_stream());
  auto event = must(device().create_event());
  std::byte byte{};
  fake().fail("cuStreamSynchronize", 1, api::kIllegalAddress, 1);
  const Status status = device().copy_out(&byte, filled.range->base(), 1);
  EXPECT_EQ(status.error(), EIO);
  EXPECT_EQ(status.device_code(), api::kIllegalAddress);
  const Status health = device().health();
  EXPECT_EQ(health.error(), EIO);
  EXPECT_EQ(health.device_code(), api::kIllegalAddress);
  EXPECT_EQ(health.message(),
            "out of service since gpu 0: cuStreamSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS (700): as the test planned");
  const int copies = fake().calls("cuMemcpyDtoHAsync_v2");
  EXPECT_EQ(device().copy_out(&byte, filled.range->base(), 1).error(), EIO);
  EXPECT_EQ(fake().calls("cuMemcpyDtoHAsync_v2"), copies);  // the device is not asked any more
  EXPECT_EQ(filled.memory->populate(4 * kGranule, kGranule).error(), EIO);
  EXPECT_EQ(filled.memory->release(0, kGranule).error(), EIO);
  EXPECT_EQ(event->query().error(), EIO);
  EXPECT_EQ(stream->synchronize().error(), EIO);
  EXPECT_EQ(device().memory().error(), EIO);
  EXPECT_EQ(device().create_memory().error(), EIO);

  EXPECT_OK(device(1).health());
  auto memory = must(device(1).create_memory());
  auto range = must(memory->reserve(kGranule));
  ASSERT_OK(memory->populate(0, kGranule));
  EXPECT_OK(device(1).copy_out(&byte, range->base(), 1));
}

TEST_F(CudaFaults, EveryFatalCodeIsSticky) {
  for (const api::Code code : {214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 999}) {
    driver_.reset();
    open();
    fake().fail("cuStreamCreate", 1, code, 1);
    EXPECT_EQ(device().create_stream().error(), EIO);
    EXPECT_EQ(device().health().device_code(), code);
    driver_.reset();
  }
  for (const api::Code code : {1, 2, 400, 701, 800, 801}) {
    driver_.reset();
    open();
    fake().fail("cuStreamCreate", 1, code, 1);
    EXPECT_FALSE(device().create_stream().ok());
    EXPECT_OK(device().health());
  }
}

TEST_F(CudaFaults, PinningReportsWhatWentWrong) {
  open();
  std::vector<std::byte> memory(kMiB);
  fake().fail("cuMemHostRegister_v2", 1, api::kOutOfMemory, 1);
  EXPECT_EQ(device().pin(memory.data(), memory.size()).error(), ENOMEM);
  fake().fail("cuMemHostRegister_v2", 1, api::kNotSupported, 1);
  EXPECT_EQ(device().pin_read_only(memory.data(), memory.size()).error(), EOPNOTSUPP);
  EXPECT_OK(device().health());
}

TEST_F(CudaFaults, EventsWaitUntilTheWorkIsDone) {
  open();
  auto stream = must(device().create_stream());
  auto event = must(device().create_event());
  ASSERT_OK(stream->record(*event));
  fake().hold(true);
  EXPECT_FALSE(must(event->query()));
  std::thread waiter([&] { EXPECT_OK(event->synchronize()); });
  fake().hold(false);
  waiter.join();
  EXPECT_TRUE(must(event->query()));
  fake().fail("cuEventQuery", 1, api::kLaunchFailed, 1);
  EXPECT_EQ(event->query().error(), EIO);
}

TEST_F(CudaFaults, ThreadsKeepTheContextTheyHad) {
  FakeCudaSetup setup;
  setup.devices = 2;
  open(setup);
  Filled filled = fill(2);
  std::thread other([&] {
    int depth = 0;
    std::byte byte{};
    EXPECT_EQ(fake().current(&depth), -1);
    EXPECT_OK(device(0).copy_out(&byte, filled.range->base(), 1));
    EXPECT_EQ(fake().current(&depth), -1);
    EXPECT_EQ(depth, 0);
    EXPECT_OK(device(1).bind_thread());
    EXPECT_EQ(fake().current(&depth), 1);
    EXPECT_OK(device(0).copy_out(&byte, filled.range->base(), 1));
    EXPECT_EQ(device(0).copy_out(&byte, filled.range->base() + (std::uint64_t{1} << 40), 1).error(), EIO);
    EXPECT_EQ(fake().current(&depth), 1);
    EXPECT_EQ(depth, 1);
    EXPECT_OK(device(1).bind_thread());
    const int sets = fake().calls("cuCtxSetCurrent");
    EXPECT_OK(device(1).bind_thread());
    EXPECT_EQ(fake().calls("cuCtxSetCurrent"), sets);  // cheap when it already is
  });
  other.join();
}

TEST_F(CudaFaults, PeersWithoutADirectWay) {
  FakeCudaSetup setup;
  setup.devices = 2;
  setup.peers = false;
  open(setup);
  Filled filled = fill(2);
  EXPECT_EQ(device(0).copy_to_peer(device(1), 0, filled.range->base(), 1).error(), EOPNOTSUPP);
}

TEST_F(CudaFaults, DevicesWithoutExport) {
  FakeCudaSetup setup;
  setup.export_descriptors = false;
  open(setup);
  Filled filled = fill(2);
  EXPECT_EQ(filled.memory->export_memory().error(), EOPNOTSUPP);
}

TEST_F(CudaFaults, AnExportThatFailsHalfwayClosesWhatItOpened) {
  open();
  Filled filled = fill(2);
  ASSERT_OK(filled.memory->populate(4 * kGranule, kGranule));
  fake().fail("cuMemExportToShareableHandle", 2, api::kInvalidValue, 1);
  EXPECT_EQ(filled.memory->export_memory().error(), EIO);
  // Nothing was exported, so nothing is fixed yet.
  EXPECT_EQ(filled.memory->release_span(0, kGranule).bytes, 2 * kGranule);
  EXPECT_EQ(must(filled.memory->export_memory()).size(), 2U);
  EXPECT_EQ(filled.memory->release_span(0, kGranule).bytes, kGranule);
}

TEST_F(CudaFaults, PlainMemoryReportsNoSpace) {
  FakeCudaSetup setup;
  setup.virtual_memory = false;
  setup.memory_bytes = 64 * kMiB;
  open(setup);
  EXPECT_TRUE(device().info().reserve_copies);
  auto memory = must(device().create_memory());
  auto range = must(memory->reserve(32 * kMiB));
  ASSERT_OK(memory->populate(0, 32 * kMiB));
  EXPECT_EQ(memory->reserve(40 * kMiB).error(), ENOSPC);
  fake().fail("cuMemcpyDtoDAsync_v2", 1, api::kInvalidValue, 1);
  EXPECT_EQ(memory->reserve(32 * kMiB).error(), EIO);
  EXPECT_EQ(fake_state().allocations, 1);
  EXPECT_OK(memory->reserve(32 * kMiB).status());
  EXPECT_EQ(memory->reserve(kGranule).error(), EINVAL);
  EXPECT_EQ(fake_state().allocations, 2);  // `range` still shows the earlier one
}

TEST_F(CudaFaults, ManagedMemoryIsNotTheDevices) {
  FakeCudaSetup setup;
  setup.managed = true;
  open(setup);
  auto memory = must(device().create_memory());
  auto range = must(memory->reserve(kGranule));
  ASSERT_OK(memory->populate(0, kGranule));
  EXPECT_FALSE(device().holds(range->base()));
}

}  // namespace
}  // namespace gpufs::cuda_test
