// Slots for small files: sizes, reuse, empty slabs, planned failures.

#include "memory/slab_pool.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "buffer_fixture.h"

namespace gpufs::testing {
namespace {

class SlabPoolTest : public BufferFixture {
 protected:
  void SetUp() override { start(16 * kMiB, 65536); }
  SlabPool& slabs() { return *contexts[0]->slabs(); }
};

TEST_F(SlabPoolTest, SlotsAreTheSmallestThatFit) {
  EXPECT_EQ(slabs().take(1).value()->bytes(), 512U);
  EXPECT_EQ(slabs().take(512).value()->bytes(), 512U);
  EXPECT_EQ(slabs().take(513).value()->bytes(), 1024U);
  EXPECT_EQ(slabs().take(65536).value()->bytes(), 65536U);
  EXPECT_EQ(slabs().take(65537).error(), EINVAL);
  EXPECT_EQ(slabs().take(0).error(), EINVAL);
  EXPECT_EQ(SlabPool::create(*contexts[0], 5000).value()->largest(), 8192U);
  EXPECT_EQ(SlabPool::create(*contexts[0], 0).error(), EINVAL);
  EXPECT_EQ(SlabPool::create(*contexts[0], kGranule).error(), EINVAL);
}

TEST_F(SlabPoolTest, SlabsAreSharedAndReleased) {
  std::vector<std::shared_ptr<SlabPool::Slot>> held;
  std::set<DeviceAddress> addresses;
  for (std::uint64_t index = 0; index < kGranule / 512 + 1; ++index) {
    held.push_back(slabs().take(100).take());
    ASSERT_TRUE(addresses.insert(held.back()->address()).second);
  }
  EXPECT_EQ(used(), 2 * kGranule);
  held.pop_back();
  EXPECT_EQ(used(), kGranule);
  held.clear();
  expect_nothing_left();
}

TEST_F(SlabPoolTest, AFailureLeaksNothing) {
  plan->create_memory.at(1, 1, ENOMEM);
  EXPECT_EQ(slabs().take(1).error(), ENOMEM);
  plan->reserve.at(1, 1, ENOMEM);
  EXPECT_EQ(slabs().take(1).error(), ENOMEM);
  plan->populate.at(1, 1, ENOSPC);
  EXPECT_EQ(slabs().take(1).error(), ENOSPC);
  expect_nothing_left();
  std::vector<std::shared_ptr<SlabPool::Slot>> held;
  while (held.size() < 16 * kMiB / 65536) held.push_back(slabs().take(65536).take());
  EXPECT_EQ(slabs().take(65536).error(), ENOSPC);
  held.resize(held.size() - kGranule / 65536);  // one slab, which another size may have
  held.push_back(slabs().take(512).take());
  held.clear();
  expect_nothing_left();
}

TEST_F(SlabPoolTest, ManyThreads) {
  std::vector<std::thread> threads;
  for (unsigned thread = 0; thread < 4; ++thread) {
    threads.emplace_back([this, thread] {
      std::mt19937 random(thread);
      std::vector<std::shared_ptr<SlabPool::Slot>> held;
      for (int step = 0; step < 2000; ++step) {
        if (held.size() < 20 && random() % 2 == 0) {
          held.push_back(slabs().take(1 + random() % 4096).take());
          const std::uint64_t mark = (std::uint64_t{thread} << 32) + static_cast<std::uint64_t>(step);
          std::uint64_t seen = 1;
          ASSERT_TRUE(contexts[0]->device().copy_out(&seen, held.back()->address(), sizeof seen).ok());
          ASSERT_EQ(seen, 0U);
          ASSERT_TRUE(contexts[0]->device().copy_in(held.back()->address(), &mark, sizeof mark).ok());
        } else if (!held.empty()) {
          held.erase(held.begin() + static_cast<std::ptrdiff_t>(random() % held.size()));
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  expect_nothing_left();
}

}  // namespace
}  // namespace gpufs::testing
