// What only the HIP driver has: libraries that lack something, kinds of memory, the current device, error paths.
// gpu_faults_test.cc has the error paths that it shares with CUDA.
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <thread>
#include <vector>

#include "drivers/hip/hip_api.h"
#include "drivers/hip/hip_library.h"
#include "fake_vendors.h"

namespace gpufs::hip_test {
namespace {

using namespace gpufs::hip;

using HipFaults = FakeHip;

TEST(HipLibrary, AMissingOrBrokenOneIsReported) {
  struct Case {
    std::vector<std::string> candidates;
    std::string message;
  };
  const std::vector<Case> cases = {
      {{"libamdhip64.so.99"}, "libamdhip64.so.99 was not found"},
      {{"libamdhip64.so.99", "libamdhip64.so.98"}, "libamdhip64.so.99, libamdhip64.so.98: none of these was found"},
      // A file that is not a library is reported rather than those that do not exist.
      {{"libamdhip64.so.99", "/dev/null"}, "/dev/null: "},
      {{GPUFS_FAKE_HIP_OLD}, GPUFS_FAKE_HIP_OLD " lacks hipHostRegister"},
  };
  for (const Case& expected : cases) {
    const Result<std::unique_ptr<Driver>> driver = open_hip_driver({}, expected.candidates);
    EXPECT_EQ(driver.error(), ENODEV);
    EXPECT_TRUE(driver.status().message().starts_with("hip is not available: " + expected.message))
        << driver.status().message();
  }
  EXPECT_EQ(fake().reset(std::make_unique<FakeGpuSetup>().get()), 0);
  EXPECT_TRUE(open_hip_driver({}, {"libamdhip64.so.99", GPUFS_FAKE_HIP_OLD, GPUFS_FAKE_HIP}).ok());
}

TEST(HipLibrary, ALoadedOneComesFirstAndThenTheNewest) {
  const std::filesystem::path rocm =
      std::filesystem::path(::testing::TempDir()) / ("rocm" + std::to_string(::getpid()));
  for (const char* version : {"core-7.9", "core-10.10", "core-10.2", "bin"}) {
    std::filesystem::create_directories(rocm / version);
  }
  ASSERT_NE(::dlopen(GPUFS_FAKE_HIP, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE), nullptr);
  const std::vector<std::string> names = hip::Library::names(rocm.string());
  std::filesystem::remove_all(rocm);
  const auto place = [&names](const std::string& name) { return std::ranges::find(names, name) - names.begin(); };
  const std::vector<std::string> expected = {GPUFS_FAKE_HIP,
                                             "libamdhip64.so.8",
                                             "libamdhip64.so.7",
                                             "libamdhip64.so",
                                             rocm / "lib/libamdhip64.so",
                                             rocm / "core-10.10/lib/libamdhip64.so",
                                             rocm / "core-10.2/lib/libamdhip64.so",
                                             rocm / "core-7.9/lib/libamdhip64.so"};
  for (std::size_t i = 1; i < expected.size(); ++i) EXPECT_LT(place(expected[i - 1]), place(expected[i]));
  EXPECT_EQ(place(expected.back()) + 1, static_cast<std::ptrdiff_t>(names.size()));
}

TEST_F(HipFaults, VirtualMemoryIsNotUsedBeforeRocm6) {
  FakeGpuSetup setup;
  setup.version = 50'700'000;
  EXPECT_TRUE(open(setup).info().reserve_copies);
  EXPECT_EQ(fake().calls("hipMemGetAllocationGranularity"), 0);
  driver_.reset();
  fake().reset(&setup);
  fake().fail("hipRuntimeGetVersion", 1, api::kInvalidValue, 1);
  EXPECT_TRUE(must(open_hip_driver({}, {GPUFS_FAKE_HIP}))->devices().at(0)->info().reserve_copies);
}

TEST_F(HipFaults, TheKindOfMemoryCanBeChosen) {
  DriverOptions options;
  EXPECT_FALSE(open({}, options).info().reserve_copies);  // no kernel driver here that moves files
  EXPECT_FALSE(device().info().files_reach_memory);
  driver_.reset();
  options.hip_memory = HipMemory::kPlain;
  EXPECT_TRUE(open({}, options).info().reserve_copies);
  EXPECT_TRUE(device().info().files_reach_memory);
  EXPECT_EQ(fake().calls("hipMemGetAllocationGranularity"), 0);
}

TEST_F(HipFaults, RangesThatCannotGrowAreDetectedWhenTheDriverOpens) {
  FakeGpuSetup setup;
  setup.tail_access = false;
  DriverOptions options;
  options.hip_memory = HipMemory::kVirtual;
  EXPECT_TRUE(open(setup, options).info().reserve_copies);
  EXPECT_TRUE(device().info().files_reach_memory);
  EXPECT_EQ(fake_state().reservations, 0);
  const Filled filled = fill(2);
  std::vector<std::byte> back(filled.data.size());
  EXPECT_OK(device().copy_out(back.data(), filled.range->base(), back.size()));
  EXPECT_TRUE(testing::same_bytes(back, filled.data));
  EXPECT_OK(device().health());
}

TEST_F(HipFaults, AFailureToGrowLaterNamesTheKnob) {
  open();
  auto memory = must(device().create_memory());
  auto range = must(memory->reserve(2 * kGranule));
  fake().fail("hipMemSetAccess", 1, api::kInvalidValue, 1);
  const Status refused = memory->populate(0, kGranule);
  EXPECT_EQ(refused.error(), EIO);
  EXPECT_NE(refused.message().find("hip_memory = plain"), std::string::npos) << refused.message();
  EXPECT_OK(memory->populate(0, kGranule));
}

TEST_F(HipFaults, AMissingDeviceIsReported) {
  // Some versions fail in hipInit, some when the devices are counted, some count none.
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
      expect_no_device(open_hip_driver({}, {GPUFS_FAKE_HIP}));
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

TEST_F(HipFaults, MemoryOfAnUnknownOwnerIsNotTheDevices) {
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

TEST_F(HipFaults, MemoryIsPinnedForAllDevicesAndNeverReadOnly) {
  open();
  std::vector<std::byte> memory(kMiB);
  EXPECT_OK(device().pin(memory.data(), memory.size()));
  EXPECT_EQ(fake().last_pin_flags(), 1U);
  EXPECT_OK(device().unpin(memory.data()));
  // CUDA's flag for read-only pinning means something else here.
  const int calls = fake().calls("hipHostRegister");
  EXPECT_EQ(device().pin_read_only(memory.data(), memory.size()).error(), EOPNOTSUPP);
  EXPECT_EQ(fake().calls("hipHostRegister"), calls);
  EXPECT_OK(device().health());
}

}  // namespace
}  // namespace gpufs::hip_test
