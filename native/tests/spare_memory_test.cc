// Cached free memory of a GPU: it is reused, counts as free, goes back to the device in time, and makes no allocation
// fail.
#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "fake_vendors.h"

namespace gpufs::cuda_test {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;

class SpareMemoryTest : public FakeCuda {
 protected:
  static constexpr std::uint64_t kPiece = 64 * kMiB;

  void start(milliseconds keep_freed, std::uint64_t cap = 0, const FakeGpuSetup& setup = {}) {
    DriverOptions options;
    options.keep_freed = keep_freed;
    options.memory_bytes = cap;
    open(setup, options);
  }
  Taken take(std::uint64_t bytes) { return gpu_test::take(device(), bytes); }
};

TEST_F(SpareMemoryTest, ReleasedMemoryIsReusedZeroed) {
  start(hours(1));
  Taken first = take(kPiece);
  const std::vector<std::byte> data(kPiece, std::byte{7});
  ASSERT_OK(device().copy_in(first.range->base(), data.data(), data.size()));
  const std::uint64_t before = must(device().memory()).free_bytes;
  first = {};
  EXPECT_EQ(fake_state().handles, 1);
  EXPECT_EQ(fake_state().mappings, 0);
  EXPECT_EQ(must(device().memory()).free_bytes, before + kPiece);  // it counts as free

  Taken second = take(kPiece);
  EXPECT_EQ(fake().calls("cuMemCreate"), 1);
  std::vector<std::byte> found(kPiece, std::byte{1});
  ASSERT_OK(device().copy_out(found.data(), second.range->base(), found.size()));
  EXPECT_EQ(found, std::vector<std::byte>(kPiece));

  Taken other = take(kPiece / 2);
  EXPECT_EQ(fake().calls("cuMemCreate"), 2);
}

TEST_F(SpareMemoryTest, FreeMemoryIsTheSameBeforeAndAfterTheRelease) {
  start(milliseconds(5));
  const std::uint64_t all = must(device().memory()).free_bytes;
  for (int round = 0; round < 20; ++round) {
    take(8 * 256 * kMiB);
    do {
      ASSERT_EQ(must(device().memory()).free_bytes, all);
    } while (fake_state().handles > 0);
  }
  EXPECT_EQ(fake_state().bytes_used, 0U);  // other programs have it back
}

TEST_F(SpareMemoryTest, NoAllocationFailsBecauseOfIt) {
  start(hours(1));
  take(kPiece);
  ASSERT_EQ(fake_state().handles, 1);
  fake().fail("cuMemCreate", 1, api::kOutOfMemory, 1);
  Taken larger = take(2 * kPiece);
  EXPECT_EQ(fake_state().handles, 1);
  EXPECT_EQ(fake_state().bytes_used, 2 * kPiece);
}

// Together they never use more than the device has, so none may find it full: not even while memory that was cached is
// being released.
TEST_F(SpareMemoryTest, ManyThreadsShareAFullDevice) {
  constexpr std::uint64_t kThreads = 4;
  constexpr std::uint64_t kUnit = 4 * kMiB;
  FakeGpuSetup setup;
  setup.memory_bytes = kThreads * 3 * kUnit;
  start(milliseconds(1), 0, setup);
  std::vector<std::thread> threads;
  for (std::uint64_t thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (std::uint64_t step = 0; step < 200; ++step) take(((thread + step) % 3 + 1) * kUnit);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(must(device().memory()).free_bytes, setup.memory_bytes);
}

TEST_F(SpareMemoryTest, TheCapHoldsForUsedAndCachedMemoryTogether) {
  start(hours(1), 4 * kPiece);
  take(3 * kPiece);
  ASSERT_EQ(fake_state().bytes_used, 3 * kPiece);
  Taken small = take(kPiece);
  EXPECT_EQ(fake_state().bytes_used, 4 * kPiece);
  Taken more = take(2 * kPiece);
  EXPECT_EQ(fake_state().bytes_used, 3 * kPiece);
}

TEST_F(SpareMemoryTest, MemoryThatMustNotBeReusedIsReleased) {
  start(milliseconds(0));  // not kept unless asked for
  take(kPiece);
  EXPECT_EQ(fake_state().handles, 0);
  driver_.reset();

  start(hours(1));
  Taken shared = take(kPiece);  // others may have mapped it
  ASSERT_EQ(must(shared.memory->export_memory(0, UINT64_MAX, SIZE_MAX, true)).size(), 1U);
  shared = {};
  EXPECT_EQ(fake_state().handles, 0);

  Taken taken = take(kPiece);  // of a device that goes out of service
  fake().fail("cuMemcpyHtoDAsync_v2", 1, api::kLaunchFailed, 1);
  const std::byte byte{};
  EXPECT_EQ(device().copy_in(taken.range->base(), &byte, 1).error(), EIO);
  taken = {};
  EXPECT_EQ(fake_state().handles, 0);
}

}  // namespace
}  // namespace gpufs::cuda_test
