// Memory that is kept after it was given back: who gets it, when it goes, and that nobody runs out because of it.
#include "drivers/gpu/spare_memory.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "cuda_test_support.h"
#include "drivers/cuda/cuda_api.h"

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
    return [this](std::span<const PhysicalHandle> handles) {
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

TEST(SpareMemory, HoweverManyGoEachIsReleasedOnce) {
  Released released;
  SpareMemory spares(released.function());
  spares.set_patience(hours(1));
  std::map<PhysicalHandle, int> once;
  for (PhysicalHandle handle = 1; handle <= 200; ++handle) {
    ASSERT_TRUE(spares.keep(handle, 100 + handle % 3));
    once[handle] = 1;
  }
  EXPECT_TRUE(spares.drop());
  EXPECT_EQ(spares.bytes(), 0U);
  EXPECT_EQ(released.counts(), once);
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
    ASSERT_TRUE(eventually([&] { return released.counts().contains(handle); }));  // its thread begins anew each time
  }
  EXPECT_EQ(spares.bytes(), 0U);
}

TEST(SpareMemory, DropWaitsForWhatIsBeingReleased) {
  std::atomic<bool> entered{false};
  std::atomic<bool> open{false};
  SpareMemory spares([&](std::span<const PhysicalHandle>) {
    entered = true;
    while (!open) std::this_thread::yield();
  });
  spares.set_patience(milliseconds(1));
  ASSERT_TRUE(spares.keep(1, 100));
  ASSERT_TRUE(eventually([&] { return entered.load(); }));
  EXPECT_EQ(spares.bytes(), 0U);
  std::atomic<bool> dropped{false};
  std::thread dropper([&] {
    (void)spares.drop();
    EXPECT_TRUE(open);  // whoever tries again now finds the memory
    dropped = true;
  });
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_FALSE(dropped);
  open = true;
  dropper.join();
  EXPECT_FALSE(spares.drop());
}

TEST(SpareMemory, ManyThreadsLoseNothingAndReleaseNothingTwice) {
  constexpr int kThreads = 8;
  constexpr int kEach = 2'000;
  Released released;
  std::atomic<std::uint64_t> next{1};
  std::mutex mutex;
  std::map<PhysicalHandle, int> held;  // what threads have taken and not given back
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

TEST(SpareMemory, IsSettledOnceNothingIsBeingReleased) {
  std::promise<void> ended;
  const std::shared_future<void> end = ended.get_future().share();
  SpareMemory spares([end](std::span<const PhysicalHandle> /*handles*/) { end.wait(); });
  spares.set_patience(hours(1));
  ASSERT_TRUE(spares.keep(1, 4096));
  const std::optional<std::uint64_t> before = spares.settled(SpareMemory::Clock::now());
  EXPECT_TRUE(before.has_value());
  std::thread releasing([&] { EXPECT_TRUE(spares.drop()); });
  EXPECT_TRUE(eventually([&] { return !spares.changes().has_value(); }));
  EXPECT_EQ(spares.settled(SpareMemory::Clock::now()), std::nullopt);
  std::optional<std::uint64_t> after;
  std::thread waiting([&] { after = spares.settled(SpareMemory::Clock::now() + hours(1)); });
  ended.set_value();
  waiting.join();
  releasing.join();
  ASSERT_TRUE(after.has_value());
  EXPECT_GT(*after, *before);
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

TEST_F(SparePhysicalTest, WhatWasGivenBackIsTakenAgainAndEmpty) {
  start(hours(1));
  Memory first = take(kPiece);
  const std::vector<std::byte> data(kPiece, std::byte{7});
  ASSERT_OK(device().copy_in(first.range->base(), data.data(), data.size()));
  const std::uint64_t before = must(device().memory()).free_bytes;
  first = {};
  EXPECT_EQ(fake_state().handles, 1);
  EXPECT_EQ(fake_state().mappings, 0);
  EXPECT_EQ(must(device().memory()).free_bytes, before + kPiece);  // for whoever asks it is free

  Memory second = take(kPiece);
  EXPECT_EQ(created(), 1);
  std::vector<std::byte> found(kPiece, std::byte{1});
  ASSERT_OK(device().copy_out(found.data(), second.range->base(), found.size()));
  EXPECT_EQ(found, std::vector<std::byte>(kPiece));

  Memory other = take(kPiece / 2);
  EXPECT_EQ(created(), 2);
}

TEST_F(SparePhysicalTest, OtherProgramsGetItBack) {
  start(milliseconds(30));
  take(kPiece);
  EXPECT_TRUE(eventually([] { return fake_state().handles == 0; }));
  EXPECT_EQ(fake_state().bytes_used, 0U);
}

TEST_F(SparePhysicalTest, WhatIsFreeDoesNotChangeWhenItGoesBack) {
  start(milliseconds(5));
  const std::uint64_t all = must(device().memory()).free_bytes;
  for (int round = 0; round < 20; ++round) {
    take(8 * 256 * kMiB);
    do {
      ASSERT_EQ(must(device().memory()).free_bytes, all);
    } while (fake_state().handles > 0);
  }
}

TEST_F(SparePhysicalTest, NotKeptUnlessAskedFor) {
  start(milliseconds(0));
  take(kPiece);
  EXPECT_EQ(fake_state().handles, 0);
}

TEST_F(SparePhysicalTest, NobodyRunsOutBecauseOfIt) {
  start(hours(1));
  take(kPiece);
  ASSERT_EQ(fake_state().handles, 1);
  fake().fail("cuMemCreate", 1, kOutOfMemory, 1);
  Memory larger = take(2 * kPiece);
  EXPECT_EQ(fake_state().handles, 1);
  EXPECT_EQ(fake_state().bytes_used, 2 * kPiece);
}

TEST_F(SparePhysicalTest, TheCapHoldsForBothTogether) {
  start(hours(1), 4 * kPiece);
  take(3 * kPiece);
  ASSERT_EQ(fake_state().bytes_used, 3 * kPiece);
  Memory small = take(kPiece);
  EXPECT_EQ(fake_state().bytes_used, 4 * kPiece);
  Memory more = take(2 * kPiece);
  EXPECT_EQ(fake_state().bytes_used, 3 * kPiece);
}

TEST_F(SparePhysicalTest, WhatOthersMayMapIsNotUsedAgain) {
  start(hours(1));
  Memory shared = take(kPiece);
  ASSERT_EQ(must(shared.memory->export_memory()).size(), 1U);
  shared = {};
  EXPECT_EQ(fake_state().handles, 0);
}

TEST_F(SparePhysicalTest, ADeviceOutOfServiceKeepsNothing) {
  start(hours(1));
  Memory taken = take(kPiece);
  fake().fail("cuMemcpyHtoDAsync_v2", 1, kLaunchFailed, 1);
  const std::byte byte{};
  EXPECT_EQ(device().copy_in(taken.range->base(), &byte, 1).error(), EIO);
  taken = {};
  EXPECT_EQ(fake_state().handles, 0);
}

}  // namespace
}  // namespace gpufs::cuda_test
