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

#include "bytes.h"
#include "drivers/driver.h"
#include "drivers/host/host_memory.h"
#include "drivers/host/signal_ranges.h"
#include "results.h"

namespace gpufs {
namespace {

using testing::kGranule;
using testing::kMiB;

class HostDriverTest : public ::testing::Test {
 protected:
  void open(std::uint64_t memory, int devices = 1) { driver = testing::must(open_driver("host", {devices, memory})); }
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

TEST_F(HostDriverTest, AFileIsOneMappingWhateverItsHoles) {
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
    ASSERT_TRUE(memory->populate((granule * 7 % 32) * 2 * kGranule, kGranule).ok());
  }
  EXPECT_EQ(mappings(), 1);
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

TEST_F(HostDriverTest, AskingForFreeMemoryWaitsForNoAllocation) {
  open(512 * kMiB);
  const std::unique_ptr<DeviceMemory> memory = testing::must(device().create_memory());
  const std::shared_ptr<AddressRange> range = testing::must(memory->reserve(512 * kMiB, {}));
  ASSERT_TRUE(memory->populate(0, kGranule).ok());
  ASSERT_TRUE(memory->export_memory(0, kGranule, 1, /*writable=*/true).ok());  // a program may write to it
  std::atomic<bool> end{false};
  std::thread allocating([&] {
    EXPECT_TRUE(memory->populate(kGranule, 400 * kMiB).ok());
    end = true;
  });
  int calls = 0;
  for (; !end; ++calls) EXPECT_TRUE(device().memory().ok());
  allocating.join();
  EXPECT_GT(calls, 10);
}

TEST(SignalRangesTest, RangesAreFoundByTheirAddressesAlone) {
  SignalRanges<int, 8> ranges;
  auto* const first = ranges.add(0x1000, 0x1000, [](int& detail) { detail = 1; });
  auto* const second = ranges.add(0x9000, 0x1000, [](int& detail) { detail = 2; });
  EXPECT_EQ(ranges.find(0x1fff), first);
  EXPECT_EQ(ranges.find(0x2000), nullptr);
  EXPECT_EQ(ranges.find(0x9000)->detail, 2);
  ranges.remove(*first);
  EXPECT_EQ(ranges.find(0x1fff), nullptr);
  EXPECT_EQ(ranges.find(0x9000), second);
  for (int i = 0; i < 7; ++i) EXPECT_NE(ranges.add(0x100000, 1, [](int&) {}), nullptr);
  EXPECT_EQ(ranges.add(0x100000, 1, [](int&) {}), nullptr);
}

TEST(SignalRangesTest, ASlotThatIsUsedAgainNeverLooksLikeBothRanges) {
  SignalRanges<int, 8> ranges;
  std::atomic<bool> end{false};
  std::thread changing([&] {
    while (!end) {
      ranges.remove(*ranges.add(0x1000, 0x1000, [](int&) {}));
      ranges.remove(*ranges.add(0x900000, 0x1000, [](int&) {}));
    }
  });
  const auto time = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  int found = 0;
  while (std::chrono::steady_clock::now() < time) {
    for (int i = 0; i < 1000; ++i) found += ranges.find(0x50000) != nullptr ? 1 : 0;  // between the two
  }
  end = true;
  changing.join();
  EXPECT_EQ(found, 0);
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
