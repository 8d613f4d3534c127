// The counters: buckets and stripes.

#include <gtest/gtest.h>

#include <memory>
#include <thread>
#include <vector>

#include "observe/counters.h"

namespace gpufs::observe {
namespace {

TEST(Buckets, ArePowersOfTwo) {
  EXPECT_EQ(bucket_of(0), 0U);
  EXPECT_EQ(bucket_of(1), 0U);
  EXPECT_EQ(bucket_of(2), 1U);
  EXPECT_EQ(bucket_of(3), 2U);
  EXPECT_EQ(bucket_of(4), 2U);
  EXPECT_EQ(bucket_of(4096), 12U);
  EXPECT_EQ(bucket_of(4097), 13U);
  EXPECT_EQ(bucket_of(~std::uint64_t{0}), kBuckets - 1);
  for (std::uint64_t value = 1; value < (std::uint64_t{1} << 40); value = value * 3 + 1) {
    const std::size_t bucket = bucket_of(value);
    EXPECT_LE(value, std::uint64_t{1} << bucket);
    if (bucket > 0) {
      EXPECT_GT(value, std::uint64_t{1} << (bucket - 1));
    }
  }
}

TEST(Counters, ThreadsLoseNoCounts) {
  const std::shared_ptr<Region> region = Region::create(2, "").take();
  const DeviceCounters counters(region, 1);
  constexpr int kThreads = 40;  // more than there are stripes
  constexpr std::uint64_t kTimes = 2000;
  std::vector<std::thread> threads;
  for (int number = 0; number < kThreads; ++number) {
    threads.emplace_back([&, number] {
      for (std::uint64_t time = 0; time < kTimes; ++time) {
        counters.begin(Backend::kMount, Flow::kFromDevice);
        counters.end(Backend::kMount, Flow::kFromDevice, 4096, number == 0, 1000);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(region->sum(1, Backend::kMount, Flow::kFromDevice, &Block::started), kThreads * kTimes);
  EXPECT_EQ(region->sum(1, Backend::kMount, Flow::kFromDevice, &Block::ended), kThreads * kTimes);
  EXPECT_EQ(region->sum(1, Backend::kMount, Flow::kFromDevice, &Block::errors), kTimes);
  EXPECT_EQ(region->sum(1, Backend::kMount, Flow::kFromDevice, &Block::bytes), kThreads * kTimes * 4096);
  EXPECT_EQ(region->sum(1, Backend::kMount, Flow::kToDevice, &Block::started), 0U);
  EXPECT_EQ(region->sum(0, Backend::kMount, Flow::kFromDevice, &Block::started), 0U);
}

}  // namespace
}  // namespace gpufs::observe
