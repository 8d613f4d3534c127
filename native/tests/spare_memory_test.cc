// Cached free memory: who gets it, when it is released, and that no allocation fails because of it.
#include "drivers/gpu/spare_memory.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "cuda_test_support.h"

namespace gpufs::cuda_test {
namespace {

using api::kLaunchFailed;
using api::kOutOfMemory;
using gpu::PhysicalHandle;
using gpu::SpareMemory;
using std::chrono::hours;
using std::chrono::milliseconds;

template <typename Condition>
bool eventually(Condition condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(milliseconds(1));
  }
  return true;
}

// What has been released, and how often.
class Released {
 public:
  SpareMemory::Release function() {
    return [this](const std::vector<PhysicalHandle>& handles) {
      const std::lock_guard lock(mutex_);
      for (const PhysicalHandle handle : handles) ++counts_[handle];
    };
  }
  std::map<PhysicalHandle, int> counts() {
    const std::lock_guard lock(mutex_);
    return counts_;
  }

 private:
  std::mutex mutex_;
  std::map<PhysicalHandle, int> counts_;
};

TEST(SpareMemory, GivesBackTheLatestOfTheSameSize) {
  Released released;
  {
    SpareMemory spares(released.function());
    spares.set_patience(hours(1));
    EXPECT_TRUE(spares.keep(1, 100));
    EXPECT_TRUE(spares.keep(2, 100));
    EXPECT_TRUE(spares.keep(3, 200));
    EXPECT_EQ(spares.bytes(), 400U);
    EXPECT_EQ(spares.take(300), std::nullopt);
    EXPECT_EQ(spares.take(100), 2U);
    EXPECT_EQ(spares.take(100), 1U);
    EXPECT_EQ(spares.take(100), std::nullopt);
    EXPECT_EQ(spares.bytes(), 200U);
    EXPECT_TRUE(released.counts().empty());
  }
  EXPECT_EQ(released.counts(), (std::map<PhysicalHandle, int>{{3, 1}}));
}

TEST(SpareMemory, KeepsNothingWithoutPatienceOrOnceClosed) {
  Released released;
  SpareMemory spares(released.function());
  EXPECT_FALSE(spares.keep(1, 100));
  spares.set_patience(hours(1));
  EXPECT_TRUE(spares.keep(2, 100));
  EXPECT_TRUE(spares.drop());
  EXPECT_TRUE(spares.keep(3, 100));
  spares.close();
  EXPECT_FALSE(spares.keep(4, 100));
  EXPECT_FALSE(spares.drop());
  EXPECT_EQ(released.counts(), (std::map<PhysicalHandle, int>{{2, 1}, {3, 1}}));
}

TEST(SpareMemory, EachPieceGoesWhenItsTimeIsOver) {
  Released released;
  SpareMemory spares(released.function());
  spares.set_patience(milliseconds(20));
  for (PhysicalHandle handle = 1; handle <= 3; ++handle) {
    ASSERT_TRUE(spares.keep(handle, 100 * handle));
    ASSERT_TRUE(eventually([&] { return released.counts().contains(handle); }));  // its thread starts again each time
  }
  EXPECT_EQ(spares.bytes(), 0U);
}

TEST(SpareMemory, DropAndMeasuringWaitForAReleaseInProgress) {
  std::atomic<bool> entered{false};
  std::atomic<bool> open{false};
  SpareMemory spares([&](const std::vector<PhysicalHandle>&) {
    entered = true;
    while (!open) std::this_thread::yield();
  });
  spares.set_patience(milliseconds(1));
  ASSERT_TRUE(spares.keep(1, 100));
  ASSERT_TRUE(eventually([&] { return entered.load(); }));
  EXPECT_EQ(spares.bytes(), 0U);
  spares.while_settled(milliseconds(1), [&](std::uint64_t) { EXPECT_FALSE(open); });  // not for ever
  std::atomic<int> done{0};
  std::thread dropper([&] {
    (void)spares.drop();
    EXPECT_TRUE(open);  // trying again now finds the memory
    ++done;
  });
  std::thread measurer([&] {
    spares.while_settled(hours(1), [&](std::uint64_t) { EXPECT_TRUE(open); });
    ++done;
  });
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_EQ(done, 0);
  open = true;
  dropper.join();
  measurer.join();
  EXPECT_FALSE(spares.drop());
}

TEST(SpareMemory, ManyThreadsLoseNothingAndReleaseNothingTwice) {
  constexpr int kThreads = 8;
  constexpr int kEach = 2'000;
  Released released;
  std::atomic<std::uint64_t> next{1};
  std::mutex mutex;
  std::map<PhysicalHandle, int> held;  // what threads have taken and not returned
  {
    SpareMemory spares(released.function());
    spares.set_patience(milliseconds(1));
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kThreads; ++thread) {
      threads.emplace_back([&, thread] {
        for (int step = 0; step < kEach; ++step) {
          const std::uint64_t bytes = static_cast<std::uint64_t>((thread + step) % 3) + 1;
          std::optional<PhysicalHandle> handle = spares.take(bytes);
          if (!handle) handle = next++;
          {
            const std::lock_guard lock(mutex);
            EXPECT_EQ(++held[*handle], 1);  // nobody else has it
          }
          std::this_thread::yield();
          {
            const std::lock_guard lock(mutex);
            --held[*handle];
          }
          if (!spares.keep(*handle, bytes)) ADD_FAILURE();
          if (step % 500 == 0) (void)spares.drop();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  const std::map<PhysicalHandle, int> counts = released.counts();
  EXPECT_EQ(counts.size(), next - 1);
  for (const auto& [handle, count] : counts) EXPECT_EQ(count, 1) << handle;
}

class SparePhysicalTest : public FakeCuda {
 protected:
  static constexpr std::uint64_t kPiece = 64 * kMiB;

  void start(milliseconds keep_freed, std::uint64_t cap = 0) {
    DriverOptions options;
    options.keep_freed = keep_freed;
    options.memory_bytes = cap;
    open({}, options);
  }
  struct Memory {
    std::unique_ptr<DeviceMemory> memory;
    std::shared_ptr<AddressRange> range;
  };
  Memory take(std::uint64_t bytes) {
    Memory taken{must(device().create_memory()), nullptr};
    taken.range = must(taken.memory->reserve(bytes));
    EXPECT_OK(taken.memory->populate(0, bytes));
    return taken;
  }
  static int created() { return fake().calls("cuMemCreate"); }
};

TEST_F(SparePhysicalTest, ReleasedMemoryIsReusedZeroed) {
  start(hours(1));
  Memory first = take(kPiece);
  const std::vector<std::byte> data(kPiece, std::byte{7});
  ASSERT_OK(device().copy_in(first.range->base(), data.data(), data.size()));
  const std::uint64_t before = must(device().memory()).free_bytes;
  first = {};
  EXPECT_EQ(fake_state().handles, 1);
  EXPECT_EQ(fake_state().mappings, 0);
  EXPECT_EQ(must(device().memory()).free_bytes, before + kPiece);  // it counts as free

  Memory second = take(kPiece);
  EXPECT_EQ(created(), 1);
  std::vector<std::byte> found(kPiece, std::byte{1});
  ASSERT_OK(device().copy_out(found.data(), second.range->base(), found.size()));
  EXPECT_EQ(found, std::vector<std::byte>(kPiece));

  Memory other = take(kPiece / 2);
  EXPECT_EQ(created(), 2);
}

TEST_F(SparePhysicalTest, FreeMemoryIsTheSameBeforeAndAfterTheRelease) {
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

TEST_F(SparePhysicalTest, NoAllocationFailsBecauseOfIt) {
  start(hours(1));
  take(kPiece);
  ASSERT_EQ(fake_state().handles, 1);
  fake().fail("cuMemCreate", 1, kOutOfMemory, 1);
  Memory larger = take(2 * kPiece);
  EXPECT_EQ(fake_state().handles, 1);
  EXPECT_EQ(fake_state().bytes_used, 2 * kPiece);
}

TEST_F(SparePhysicalTest, TheCapHoldsForUsedAndCachedMemoryTogether) {
  start(hours(1), 4 * kPiece);
  take(3 * kPiece);
  ASSERT_EQ(fake_state().bytes_used, 3 * kPiece);
  Memory small = take(kPiece);
  EXPECT_EQ(fake_state().bytes_used, 4 * kPiece);
  Memory more = take(2 * kPiece);
  EXPECT_EQ(fake_state().bytes_used, 3 * kPiece);
}

TEST_F(SparePhysicalTest, MemoryThatMustNotBeReusedIsReleased) {
  start(milliseconds(0));  // not kept unless asked for
  take(kPiece);
  EXPECT_EQ(fake_state().handles, 0);
  driver_.reset();

  start(hours(1));
  Memory shared = take(kPiece);  // others may have mapped it
  ASSERT_EQ(must(shared.memory->export_memory(0, UINT64_MAX, SIZE_MAX, true)).size(), 1U);
  shared = {};
  EXPECT_EQ(fake_state().handles, 0);

  Memory taken = take(kPiece);  // of a device that goes out of service
  fake().fail("cuMemcpyHtoDAsync_v2", 1, kLaunchFailed, 1);
  const std::byte byte{};
  EXPECT_EQ(device().copy_in(taken.range->base(), &byte, 1).error(), EIO);
  taken = {};
  EXPECT_EQ(fake_state().handles, 0);
}

}  // namespace
}  // namespace gpufs::cuda_test
