// What only the host driver has: its limits, bad spans, exports, mappings, and the rules for pinning.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "drivers/driver.h"
#include "drivers/host/streaming_copy.h"

namespace gpufs {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
constexpr std::uint64_t kGranule = 2 * kMiB;

class HostDriverTest : public ::testing::Test {
 protected:
  void open(std::uint64_t memory, int devices = 1) {
    Result<std::unique_ptr<Driver>> opened = open_driver("host", {devices, memory});
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    driver = opened.take();
  }
  Device& device(std::size_t index = 0) { return *driver->devices()[index]; }
  std::uint64_t free_bytes(std::size_t index = 0) { return device(index).memory().value().free_bytes; }
  static char* at(const std::shared_ptr<AddressRange>& range, std::uint64_t offset) {
    return reinterpret_cast<char*>(range->base() + offset);
  }
  std::unique_ptr<Driver> driver;
};

TEST(StreamingCopyTest, CopiesWhatMemcpyCopies) {
  constexpr std::size_t kBytes = (std::size_t{1} << 20) + 300;
  std::vector<unsigned char> source(kBytes);
  for (std::size_t i = 0; i < kBytes; ++i) source[i] = static_cast<unsigned char>(i * 131 + (i >> 8));
  for (const std::size_t skip : {0U, 1U, 15U, 63U, 64U}) {
    for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{256} << 10,
                                    (std::size_t{256} << 10) + 1, (std::size_t{1} << 20) + 65}) {
      std::vector<unsigned char> target(kBytes + 128, 0xee);
      copy_to_memory(target.data() + skip, source.data() + 7, bytes);
      EXPECT_EQ(std::memcmp(target.data() + skip, source.data() + 7, bytes), 0) << skip << " " << bytes;
      EXPECT_TRUE(std::all_of(target.begin(), target.begin() + static_cast<std::ptrdiff_t>(skip),
                              [](unsigned char byte) { return byte == 0xee; }));
      EXPECT_TRUE(std::all_of(target.begin() + static_cast<std::ptrdiff_t>(skip + bytes), target.end(),
                              [](unsigned char byte) { return byte == 0xee; }));
    }
  }
}

TEST(OpenDriverTest, RefusesUnknownDriversAndBadOptions) {
  EXPECT_EQ(open_driver("opencl", {}).error(), EINVAL);
  EXPECT_EQ(open_driver("", {}).error(), EINVAL);
  const Result<std::unique_ptr<Driver>> hip = open_driver("hip", {});
  EXPECT_EQ(hip.error(), ENODEV);
  EXPECT_NE(hip.status().message().find("hip is not available"), std::string::npos);
  EXPECT_EQ(open_driver("host", {1, 0}).error(), EINVAL);
  EXPECT_EQ(open_driver("host", {1, kGranule - 1}).error(), EINVAL);
  EXPECT_EQ(open_driver("host", {-1, kGranule}).error(), EINVAL);
  EXPECT_EQ(open_driver("host", {65, kGranule}).error(), EINVAL);
}

TEST_F(HostDriverTest, EachDeviceHasItsOwnLimit) {
  open(8 * kMiB + 5, 2);
  ASSERT_EQ(driver->devices().size(), 2U);
  EXPECT_EQ(device(0).info().total_bytes, 8 * kMiB);
  EXPECT_EQ(device(1).info().index, 1);
  std::unique_ptr<DeviceMemory> memory = device(0).create_memory().take();
  ASSERT_TRUE(memory->reserve(64 * kMiB).ok());
  ASSERT_TRUE(memory->populate(0, 6 * kMiB).ok());
  EXPECT_EQ(free_bytes(0), kGranule);
  EXPECT_EQ(free_bytes(1), 8 * kMiB);
  EXPECT_EQ(memory->populate(16 * kMiB, 2 * kGranule).error(), ENOSPC);
  EXPECT_EQ(free_bytes(0), kGranule);
  ASSERT_TRUE(memory->populate(16 * kMiB, kGranule).ok());
  EXPECT_EQ(free_bytes(0), 0U);
  memory.reset();
  EXPECT_EQ(free_bytes(0), 8 * kMiB);
}

TEST_F(HostDriverTest, EveryRangeAndExportShowsTheSameMemoryUntilTheLastIsGone) {
  open(64 * kMiB);
  std::unique_ptr<DeviceMemory> memory = device().create_memory().take();
  const std::shared_ptr<AddressRange> old = memory->reserve(8 * kMiB).take();
  ASSERT_TRUE(memory->populate(0, kGranule).ok());
  ASSERT_TRUE(memory->populate(2 * kGranule, kGranule).ok());
  *at(old, 5) = 'a';
  std::shared_ptr<AddressRange> wide = memory->reserve(64 * kMiB).take();
  EXPECT_EQ(*at(wide, 5), 'a');
  *at(wide, 2 * kGranule) = 'b';
  EXPECT_EQ(*at(old, 2 * kGranule), 'b');
  ASSERT_TRUE(memory->populate(20 * kMiB, kGranule).ok());
  *at(wide, 20 * kMiB) = 'c';

  const std::vector<ExportedMemory> exported = memory->export_memory(0, UINT64_MAX, SIZE_MAX, true).take();
  ASSERT_EQ(exported.size(), 1U);
  EXPECT_EQ(exported[0].offset, 0U);
  EXPECT_EQ(exported[0].bytes, 20 * kMiB + kGranule);
  EXPECT_EQ(::fcntl(exported[0].descriptor.get(), F_GETFD), FD_CLOEXEC);
  void* const mapped = ::mmap(nullptr, 3 * kGranule, PROT_READ, MAP_SHARED, exported[0].descriptor.get(), 0);
  ASSERT_NE(mapped, MAP_FAILED);
  EXPECT_EQ(static_cast<const char*>(mapped)[2 * kGranule], 'b');
  ::munmap(mapped, 3 * kGranule);

  memory.reset();
  wide.reset();
  EXPECT_EQ(*at(old, 5), 'a');
  EXPECT_EQ(free_bytes(), 64 * kMiB - 3 * kGranule);  // still in use, so still charged
}

TEST_F(HostDriverTest, AdjacentGranulesAreOneMapping) {
  open(512 * kMiB);
  const auto mappings = [] {
    std::ifstream maps("/proc/self/maps");
    int count = 0;
    for (std::string line; std::getline(maps, line);) count += line.find("gpufs-buffer") != std::string::npos ? 1 : 0;
    return count;
  };
  const std::unique_ptr<DeviceMemory> memory = device().create_memory().take();
  const std::shared_ptr<AddressRange> range = memory->reserve(1024 * kMiB).take();
  for (std::uint64_t granule = 0; granule < 32; ++granule) {
    ASSERT_TRUE(memory->populate((granule * 7 % 32) * kGranule, kGranule).ok());
  }
  EXPECT_LE(mappings(), 3);
}

TEST_F(HostDriverTest, ALimitOfTheProcessIsReportedAsAFullDevice) {
  open(64 * kMiB);
  const std::unique_ptr<DeviceMemory> memory = device().create_memory().take();
  ASSERT_TRUE(memory->reserve(64 * kMiB).ok());
  ASSERT_TRUE(memory->populate(0, kGranule).ok());
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit low = before;
  low.rlim_cur = 8 * kMiB;
  const auto ignored = ::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &low), 0);
  const Status status = memory->populate(kGranule, 16 * kMiB);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  ::signal(SIGXFSZ, ignored);
  EXPECT_EQ(status.error(), ENOSPC);
  EXPECT_EQ(free_bytes(), 62 * kMiB);
  ASSERT_TRUE(memory->populate(kGranule, 16 * kMiB).ok());
}

TEST_F(HostDriverTest, SignalsDoNotInterruptPopulate) {
  open(256 * kMiB);
  struct sigaction action {};
  struct sigaction before {};
  action.sa_handler = [](int) {};
  ASSERT_EQ(::sigaction(SIGUSR2, &action, &before), 0);
  const std::unique_ptr<DeviceMemory> memory = device().create_memory().take();
  ASSERT_TRUE(memory->reserve(256 * kMiB).ok());
  std::atomic<bool> end{false};
  const pthread_t target = ::pthread_self();
  std::thread nuisance([&] {
    while (!end) {
      ::pthread_kill(target, SIGUSR2);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  });
  const Status status = memory->populate(0, 64 * kMiB);
  end = true;
  nuisance.join();
  ::sigaction(SIGUSR2, &before, nullptr);
  EXPECT_TRUE(status.ok()) << status.message();
}

TEST_F(HostDriverTest, PinningRefusesOverlapsAsGpusDo) {
  open(8 * kMiB, 2);
  std::vector<char> host(16384);
  EXPECT_TRUE(device(0).pin(host.data() + 4096, 4096).ok());
  EXPECT_EQ(device(1).pin(host.data() + 4096, 4096).error(), EEXIST);
  EXPECT_EQ(device(0).pin(host.data() + 8191, 10).error(), EEXIST);
  EXPECT_EQ(device(0).pin(host.data(), 4097).error(), EEXIST);
  EXPECT_TRUE(device(0).pin(host.data(), 4096).ok());
  EXPECT_EQ(device(0).pin(host.data(), 0).error(), EINVAL);
  EXPECT_EQ(device(0).pin(host.data(), ~std::size_t{0}).error(), EINVAL);
  EXPECT_TRUE(device(0).unpin(host.data()).ok());
  EXPECT_TRUE(device(0).unpin(host.data() + 4096).ok());
  EXPECT_EQ(device(0).unpin(host.data()).error(), ENOENT);
  EXPECT_EQ(device(0).pinned_range(host.data()).error(), ENOENT);
}

}  // namespace
}  // namespace gpufs
