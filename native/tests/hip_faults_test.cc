// The HIP driver's error paths, planned through the fake library: the right errno and text, everything as it was,
// nothing left open.
#include <cerrno>
#include <functional>
#include <thread>

#include "drivers/hip/hip_api.h"
#include "hip_test_support.h"

namespace gpufs::hip_test {
namespace {

using namespace gpufs::hip;

class HipFaults : public FakeHip {
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

TEST(HipLibrary, IsNotThere) {
  Result<std::unique_ptr<Driver>> driver = open_hip_driver_from({"libamdhip64.so.99"}, {});
  ASSERT_FALSE(driver.ok());
  EXPECT_EQ(driver.error(), ENODEV);
  EXPECT_EQ(driver.status().message(), "hip is not available: libamdhip64.so.99 was not found");
  driver = open_hip_driver_from({"libamdhip64.so.99", "libamdhip64.so.98"}, {});
  EXPECT_EQ(driver.status().message(),
            "hip is not available: libamdhip64.so.99, libamdhip64.so.98: none of these was found");
}

TEST(HipLibrary, CannotBeOpened) {
  // Something is there, but it is no library: that is said, and not that others are missing.
  Result<std::unique_ptr<Driver>> driver = open_hip_driver_from({"libamdhip64.so.99", "/dev/null"}, {});
  ASSERT_FALSE(driver.ok());
  EXPECT_EQ(driver.error(), ENODEV);
  EXPECT_TRUE(driver.status().message().starts_with("hip is not available: /dev/null: ")) << driver.status().message();
}

TEST(HipLibrary, LacksASymbol) {
  Result<std::unique_ptr<Driver>> driver = open_hip_driver_from({GPUFS_FAKE_HIP_OLD}, {});
  ASSERT_FALSE(driver.ok());
  EXPECT_EQ(driver.error(), ENODEV);
  EXPECT_EQ(driver.status().message(),
            std::string("hip is not available: ") + GPUFS_FAKE_HIP_OLD + " lacks hipHostRegister");
}

TEST(HipLibrary, ABetterOneIsTakenWhereTheFirstLacksSomething) {
  EXPECT_EQ(fake().reset(std::make_unique<FakeHipSetup>().get()), 0);
  EXPECT_TRUE(open_hip_driver_from({"libamdhip64.so.99", GPUFS_FAKE_HIP_OLD, GPUFS_FAKE_HIP}, {}).ok());
}

TEST(HipLibrary, WhatMayBeMissingIsDoneWithout) {
  const FakeHipControl& bare = control_of(GPUFS_FAKE_HIP_BARE);
  FakeHipSetup setup;
  setup.devices = 2;
  EXPECT_EQ(bare.reset(&setup), 0);
  {
    auto driver = must(open_hip_driver_from({GPUFS_FAKE_HIP_BARE}, {}));
    Device& device = *driver->devices().at(0);
    EXPECT_TRUE(device.info().reserve_copies);
    EXPECT_EQ(device.info().granule, kGranule);
    auto memory = must(device.create_memory());
    auto range = must(memory->reserve(2 * kGranule));
    EXPECT_OK(memory->populate(0, kGranule));
    EXPECT_EQ(bare.calls("hipMalloc"), 1);
    EXPECT_EQ(memory->export_memory().error(), EOPNOTSUPP);
    EXPECT_EQ(device.copy_to_peer(*driver->devices().at(1), 0, range->base(), 1).error(), EOPNOTSUPP);
  }
  EXPECT_EQ(bare.reset(&setup), 0);
}

TEST_F(HipFaults, VirtualMemoryOfEarlierVersionsIsAnotherInterface) {
  FakeHipSetup setup;
  setup.version = 50'700'000;
  EXPECT_TRUE(open(setup).info().reserve_copies);
  EXPECT_EQ(fake().calls("hipMemGetAllocationGranularity"), 0);
  driver_.reset();
  fake().reset(&setup);
  fake().fail("hipRuntimeGetVersion", 1, api::kInvalidValue, 1);
  EXPECT_TRUE(must(open_hip_driver_from({GPUFS_FAKE_HIP}, {}))->devices().at(0)->info().reserve_copies);
}

TEST_F(HipFaults, TheLibraryDoesNotStart) {
  std::thread([] {  // a thread that has not made the call yet
    fake().fail("hipInit", 1, api::kNotInitialized, 1);
    Result<std::unique_ptr<Driver>> driver = open_hip_driver_from({GPUFS_FAKE_HIP}, {});
    ASSERT_FALSE(driver.ok());
    EXPECT_EQ(driver.error(), ENODEV);
    EXPECT_EQ(driver.status().device_code(), api::kNotInitialized);
    EXPECT_EQ(driver.status().message(), std::string("hip is not available: ") + GPUFS_FAKE_HIP +
                                             ": hipInit: hipErrorNotInitialized (3): as the test planned");
  })
      .join();
}

TEST_F(HipFaults, NoDeviceIsSaidAsSuch) {
  // One version fails in hipInit, another when the devices are counted, a third counts none.
  const auto expect_no_device = [](Result<std::unique_ptr<Driver>> driver) {
    ASSERT_FALSE(driver.ok());
    EXPECT_EQ(driver.error(), ENODEV);
    EXPECT_TRUE(driver.status().message().starts_with(std::string("hip is not available: no device: ") +
                                                      GPUFS_FAKE_HIP + " shows none"))
        << driver.status().message();
  };
  for (const int devices : {0, 1}) {
    setup_.devices = devices;
    fake().reset(&setup_);
    if (devices == 1) fake().fail("hipGetDeviceCount", 1, api::kNoDevice, 1);
    std::thread([&] {
      fake().fail("hipInit", 1, api::kInvalidDevice, 1);
      expect_no_device(open_hip_driver_from({GPUFS_FAKE_HIP}, {}));
    }).join();
  }
  setup_.devices = 1;
}

TEST_F(HipFaults, EachThreadCallsInitOnce) {
  open();
  Filled filled = fill(2);
  const int before = fake().calls("hipInit");
  for (int i = 0; i < 3; ++i) {
    std::thread([&] {
      std::byte byte{};
      EXPECT_OK(device().copy_out(&byte, filled.range->base(), 1));
      EXPECT_OK(device().copy_out(&byte, filled.range->base(), 1));
    }).join();
  }
  EXPECT_EQ(fake().calls("hipInit"), before + 3);
  std::thread([&] {
    std::byte byte{};
    fake().fail("hipInit", 1, api::kUnknown, 1);
    EXPECT_EQ(device().copy_out(&byte, filled.range->base(), 1).error(), EIO);
    EXPECT_OK(device().copy_out(&byte, filled.range->base(), 1));  // it is tried again
  }).join();
}

TEST_F(HipFaults, EveryStepOfOpeningMayFail) {
  setup_.devices = 2;
  fake().reset(&setup_);
  for (const char* symbol : {"hipGetDeviceCount", "hipDeviceGetName", "hipDeviceGetPCIBusId", "hipDeviceTotalMem",
                             "hipMemGetAllocationGranularity"}) {
    for (const int n : {1, 2}) {
      if (n == 2 && std::string(symbol) == "hipGetDeviceCount") continue;
      fake().fail(symbol, n, api::kNotInitialized, 1);
      EXPECT_FALSE(open_hip_driver_from({GPUFS_FAKE_HIP}, {}).ok()) << symbol;
    }
  }
}

TEST_F(HipFaults, DevicesAreCounted) {
  setup_.devices = 2;
  fake().reset(&setup_);
  DriverOptions options;
  options.devices = 3;
  EXPECT_EQ(open_hip_driver_from({GPUFS_FAKE_HIP}, options).error(), ENODEV);
  options.devices = 1;
  EXPECT_EQ(must(open_hip_driver_from({GPUFS_FAKE_HIP}, options))->devices().size(), 1U);
  options.devices = 0;
  EXPECT_EQ(must(open_hip_driver_from({GPUFS_FAKE_HIP}, options))->devices().size(), 2U);
  options.devices = -1;
  EXPECT_EQ(open_hip_driver_from({GPUFS_FAKE_HIP}, options).error(), EINVAL);
  setup_.devices = 0;
  fake().reset(&setup_);
  EXPECT_EQ(open_hip_driver_from({GPUFS_FAKE_HIP}, {}).error(), ENODEV);
}

TEST_F(HipFaults, PopulateIsAllOrNothing) {
  open();
  auto memory = must(device().create_memory());
  auto range = must(memory->reserve(1024 * kMiB));
  ASSERT_OK(memory->populate(0, kGranule));
  const FakeHipState before = fake_state();
  struct Plan {
    const char* symbol;
    int n;
    api::Code code;
    int error;
  };
  for (const Plan& plan :
       {Plan{"hipMemCreate", 1, api::kOutOfMemory, ENOSPC}, Plan{"hipMemCreate", 3, api::kOutOfMemory, ENOSPC},
        Plan{"hipMemMap", 1, api::kInvalidValue, EIO}, Plan{"hipMemMap", 3, api::kOutOfMemory, ENOSPC},
        Plan{"hipMemSetAccess", 1, api::kInvalidValue, EIO}, Plan{"hipMemsetD8Async", 1, api::kInvalidValue, EIO},
        Plan{"hipStreamSynchronize", 1, api::kInvalidValue, EIO}}) {
    fake().fail(plan.symbol, plan.n, plan.code, 1);
    const Status status = memory->populate(kGranule, 700 * kMiB);
    EXPECT_EQ(status.error(), plan.error) << plan.symbol;
    EXPECT_EQ(status.device_code(), plan.code) << plan.symbol;
    EXPECT_NE(status.message().find("gpu 0: hip"), std::string::npos) << status.message();
    const FakeHipState after = fake_state();
    EXPECT_EQ(after.bytes_used, before.bytes_used) << plan.symbol;
    EXPECT_EQ(after.handles, before.handles) << plan.symbol;
    EXPECT_EQ(after.mappings, before.mappings) << plan.symbol;
  }
  EXPECT_OK(device().health());
  EXPECT_OK(memory->populate(kGranule, 700 * kMiB));
  EXPECT_EQ(fake_state().handles, 4);  // 256 + 256 + 188 MiB beside the first
}

TEST_F(HipFaults, ReserveFailsAndTheEarlierRangeStays) {
  open();
  Filled filled = fill(8);
  const FakeHipState before = fake_state();
  fake().fail("hipMemAddressReserve", 1, api::kOutOfMemory, 1);
  EXPECT_EQ(filled.memory->reserve(64 * kGranule).error(), ENOMEM);
  for (const char* symbol : {"hipMemMap", "hipMemSetAccess"}) {
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

TEST_F(HipFaults, NoAddressSpaceIsNoMemory) {
  FakeHipSetup setup;
  setup.address_space_bytes = 64 * kMiB;
  open(setup);
  auto memory = must(device().create_memory());
  EXPECT_EQ(memory->reserve(65 * kMiB).error(), ENOMEM);
  EXPECT_OK(memory->reserve(64 * kMiB).status());
}

TEST_F(HipFaults, SplittingFallsBackToKeepingThePiece) {
  open();
  struct Plan {
    const char* symbol;
    int n;
    api::Code code;
  };
  // Out of memory for the copy is no failure: the memory goes back when all of the piece has been released.
  for (const Plan& plan : {Plan{"hipMemCreate", 1, api::kOutOfMemory}, Plan{"hipMemCreate", 2, api::kOutOfMemory},
                           Plan{"hipMemMap", 1, api::kOutOfMemory}, Plan{"hipMemMap", 4, api::kOutOfMemory},
                           Plan{"hipMemMap", 6, api::kOutOfMemory}, Plan{"hipMemSetAccess", 5, api::kOutOfMemory}}) {
    SCOPED_TRACE(std::string(plan.symbol) + " " + std::to_string(plan.n));
    Filled filled = fill(8);
    const FakeHipState before = fake_state();
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

TEST_F(HipFaults, SplittingReportsOtherFailures) {
  open();
  struct Plan {
    const char* symbol;
    int n;
  };
  // The first two unmappings are those of the place where the copy was made.
  for (const auto& [symbol, n] :
       {Plan{"hipMemcpyDtoDAsync", 1}, Plan{"hipStreamSynchronize", 1}, Plan{"hipMemUnmap", 3}}) {
    SCOPED_TRACE(symbol);
    Filled filled = fill(8);
    fake().fail(symbol, n, api::kInvalidValue, 1);
    EXPECT_EQ(filled.memory->release(3 * kGranule, kGranule).error(), EIO);
    expect_content(filled, 0, 3 * kGranule);
    expect_content(filled, 4 * kGranule, 4 * kGranule);
    EXPECT_OK(device().health());
  }
}

TEST_F(HipFaults, AMappingThatIsLostPutsTheDeviceOutOfService) {
  open();
  Filled filled = fill(8);
  fake().fail("hipMemMap", 3, api::kInvalidValue, 100);  // two for the copy, and then none any more
  EXPECT_EQ(filled.memory->release(3 * kGranule, kGranule).error(), EIO);
  EXPECT_EQ(device().health().error(), EIO);
  EXPECT_NE(device().health().message().find("a mapping could not be restored"), std::string::npos);
}

TEST_F(HipFaults, CopiesReportTheCode) {
  open();
  Filled filled = fill(2);
  std::byte byte{};
  fake().fail("hipMemcpyDtoHAsync", 1, 900, 1);
  const Status status = device().copy_out(&byte, filled.range->base(), 1);
  EXPECT_EQ(status.error(), EIO);
  EXPECT_EQ(status.device_code(), 900);
  EXPECT_EQ(status.message(), "gpu 0: hipMemcpyDtoHAsync: hipErrorUnknown (900)");
  EXPECT_OK(device().health());
  EXPECT_OK(device().copy_out(&byte, filled.range->base(), 1));
}

TEST_F(HipFaults, AFatalFailureStaysWithItsDevice) {
  FakeHipSetup setup;
  setup.devices = 2;
  open(setup);
  Filled filled = fill(2);
  auto stream = must(device().create_stream());
  auto event = must(device().create_event());
  std::byte byte{};
  fake().fail("hipStreamSynchronize", 1, api::kIllegalAddress, 1);
  const Status status = device().copy_out(&byte, filled.range->base(), 1);
  EXPECT_EQ(status.error(), EIO);
  EXPECT_EQ(status.device_code(), api::kIllegalAddress);
  const Status health = device().health();
  EXPECT_EQ(health.error(), EIO);
  EXPECT_EQ(health.device_code(), api::kIllegalAddress);
  EXPECT_EQ(health.message(),
            "out of service since gpu 0: hipStreamSynchronize: hipErrorIllegalAddress (700): as the test planned");
  const int copies = fake().calls("hipMemcpyDtoHAsync");
  EXPECT_EQ(device().copy_out(&byte, filled.range->base(), 1).error(), EIO);
  EXPECT_EQ(fake().calls("hipMemcpyDtoHAsync"), copies);  // the device is not asked any more
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

TEST_F(HipFaults, EveryFatalCodeIsSticky) {
  for (const api::Code code : {53, 214, 700, 702, 709, 710, 719}) {
    driver_.reset();
    open();
    fake().fail("hipStreamCreateWithFlags", 1, code, 1);
    EXPECT_EQ(device().create_stream().error(), EIO);
    EXPECT_EQ(device().health().device_code(), code);
    driver_.reset();
  }
  for (const api::Code code : {1, 2, 400, 701, 801, 999}) {
    driver_.reset();
    open();
    fake().fail("hipStreamCreateWithFlags", 1, code, 1);
    EXPECT_FALSE(device().create_stream().ok());
    EXPECT_OK(device().health());
  }
}

TEST_F(HipFaults, PinningReportsWhatWentWrong) {
  open();
  std::vector<std::byte> memory(kMiB);
  fake().fail("hipHostRegister", 1, api::kOutOfMemory, 1);
  EXPECT_EQ(device().pin(memory.data(), memory.size()).error(), ENOMEM);
  fake().fail("hipHostRegister", 1, api::kNotSupported, 1);
  EXPECT_EQ(device().pin(memory.data(), memory.size()).error(), EOPNOTSUPP);
  EXPECT_OK(device().pin(memory.data(), memory.size()));
  EXPECT_EQ(fake().last_pin_flags(), 1U);  // portable: every device may use it
  EXPECT_OK(device().unpin(memory.data()));
  // There is no such thing, and the flag that is CUDA's for it means something else.
  const int calls = fake().calls("hipHostRegister");
  EXPECT_EQ(device().pin_read_only(memory.data(), memory.size()).error(), EOPNOTSUPP);
  EXPECT_EQ(fake().calls("hipHostRegister"), calls);
  EXPECT_OK(device().health());
}

TEST_F(HipFaults, EventsWaitUntilTheWorkIsDone) {
  open();
  Filled filled = fill(1);
  auto stream = must(device().create_stream());
  auto event = must(device().create_event());
  std::vector<std::byte> back(64);
  fake().hold(true);
  ASSERT_OK(stream->copy_to_host(back.data(), filled.range->base(), back.size()));
  ASSERT_OK(stream->record(*event));
  EXPECT_FALSE(must(event->query()));
  EXPECT_EQ(back, std::vector<std::byte>(64));  // queued, and not done
  std::thread waiter([&] { EXPECT_OK(event->synchronize()); });
  fake().hold(false);
  waiter.join();
  EXPECT_TRUE(must(event->query()));
  EXPECT_TRUE(std::equal(back.begin(), back.end(), filled.data.begin()));
  fake().fail("hipEventQuery", 1, api::kLaunchFailed, 1);
  EXPECT_EQ(event->query().error(), EIO);
  EXPECT_EQ(device().health().device_code(), api::kLaunchFailed);
}

TEST_F(HipFaults, AStreamWaitsForAnothersEvent) {
  open();
  Filled filled = fill(1);
  auto one = must(device().create_stream());
  auto two = must(device().create_stream());
  auto event = must(device().create_event());
  std::vector<std::byte> data = pattern(4096, 5);
  std::vector<std::byte> back(data.size());
  fake().hold(true);
  ASSERT_OK(one->copy_to_device(filled.range->base(), data.data(), data.size()));
  ASSERT_OK(one->record(*event));
  ASSERT_OK(two->wait(*event));
  ASSERT_OK(two->copy_to_host(back.data(), filled.range->base(), back.size()));
  fake().hold(false);
  ASSERT_OK(two->synchronize());
  EXPECT_EQ(back, data);
}

TEST_F(HipFaults, ThreadsKeepTheDeviceTheyHad) {
  FakeHipSetup setup;
  setup.devices = 2;
  open(setup);
  Filled filled = fill(2);
  std::thread other([&] {
    std::byte byte{};
    EXPECT_EQ(fake().current(), 0);
    auto memory = must(device(1).create_memory());
    auto range = must(memory->reserve(kGranule));
    EXPECT_OK(memory->populate(0, kGranule));
    EXPECT_EQ(fake().current(), 0);
    EXPECT_OK(device(1).bind_thread());
    EXPECT_EQ(fake().current(), 1);
    EXPECT_OK(device(0).copy_out(&byte, filled.range->base(), 1));
    EXPECT_EQ(device(0).copy_out(&byte, filled.range->base() + (std::uint64_t{1} << 40), 1).error(), EIO);
    EXPECT_EQ(fake().current(), 1);
    EXPECT_OK(device(1).bind_thread());
    const int sets = fake().calls("hipSetDevice");
    EXPECT_OK(device(1).bind_thread());
    EXPECT_EQ(fake().calls("hipSetDevice"), sets);  // cheap when it already is
  });
  other.join();
}

TEST_F(HipFaults, PeersWithoutADirectWay) {
  FakeHipSetup setup;
  setup.devices = 2;
  setup.peers = false;
  open(setup);
  Filled filled = fill(2);
  EXPECT_EQ(device(0).copy_to_peer(device(1), 0, filled.range->base(), 1).error(), EOPNOTSUPP);
}

TEST_F(HipFaults, AnExportThatFailsHalfwayClosesWhatItOpened) {
  open();
  Filled filled = fill(2);
  ASSERT_OK(filled.memory->populate(4 * kGranule, kGranule));
  fake().fail("hipMemExportToShareableHandle", 2, api::kInvalidValue, 1);
  EXPECT_EQ(filled.memory->export_memory().error(), EIO);
  // Nothing was exported, so nothing is fixed yet.
  EXPECT_EQ(filled.memory->release_span(0, kGranule).bytes, 2 * kGranule);
  EXPECT_EQ(must(filled.memory->export_memory()).size(), 2U);
  EXPECT_EQ(filled.memory->release_span(0, kGranule).bytes, kGranule);
}

TEST_F(HipFaults, WhoseMemoryItIsMustBeSaid) {
  open();
  const Filled filled = fill(1);
  const DeviceAddress address = filled.range->base();
  EXPECT_TRUE(device().holds(address));
  fake().fail("hipPointerGetAttributes", 1, api::kInvalidValue, 1);
  EXPECT_FALSE(device().holds(address));
  fake().fail("hipGetDevice", 1, api::kInvalidDevice, 1);
  EXPECT_FALSE(device().holds(address));
  EXPECT_TRUE(device().holds(address));
}

TEST_F(HipFaults, PlainMemoryReportsNoSpace) {
  FakeHipSetup setup;
  setup.virtual_memory = false;
  setup.memory_bytes = 64 * kMiB;
  open(setup);
  EXPECT_TRUE(device().info().reserve_copies);
  auto memory = must(device().create_memory());
  auto range = must(memory->reserve(32 * kMiB));
  ASSERT_OK(memory->populate(0, 32 * kMiB));
  EXPECT_EQ(memory->reserve(40 * kMiB).error(), ENOSPC);
  fake().fail("hipMemcpyDtoDAsync", 1, api::kInvalidValue, 1);
  EXPECT_EQ(memory->reserve(32 * kMiB).error(), EIO);
  EXPECT_EQ(fake_state().allocations, 1);
  EXPECT_OK(memory->reserve(32 * kMiB).status());
  EXPECT_EQ(memory->reserve(kGranule).error(), EINVAL);
  EXPECT_EQ(fake_state().allocations, 2);  // `range` still shows the earlier one
}

}  // namespace
}  // namespace gpufs::hip_test
