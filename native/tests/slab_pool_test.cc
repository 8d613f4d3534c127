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
  EXPECT_EQ(slabs().slab_count(), 2U);
  EXPECT_EQ(used(), 2 * kGranule);
  EXPECT_EQ(contexts[0]->held_bytes(), 2 * kGranule);
  held.pop_back();
  EXPECT_EQ(slabs().slab_count(), 1U);
  EXPECT_EQ(used(), kGranule);
  // A freed slot is the next one given.
  const DeviceAddress freed = held[7]->address();
  held[7].reset();
  EXPECT_EQ(slabs().take(1).value()->address(), freed);
  held.clear();
  EXPECT_EQ(slabs().slab_count(), 0U);
  expect_nothing_left();
}

TEST_F(SlabPoolTest, AReusedSlotIsZero) {
  const std::shared_ptr<SlabPool::Slot> neighbour = slabs().take(512).take();
  {
    const std::shared_ptr<SlabPool::Slot> slot = slabs().take(512).take();
    const std::vector<std::byte> junk = pattern(512, 1);
    ASSERT_TRUE(contexts[0]->device().copy_in(slot->address(), junk.data(), junk.size()).ok());
  }
  const std::shared_ptr<SlabPool::Slot> slot = slabs().take(512).take();
  std::vector<std::byte> seen(512, std::byte{1});
  ASSERT_TRUE(contexts[0]->device().copy_out(seen.data(), slot->address(), seen.size()).ok());
  EXPECT_TRUE(all_zero(seen));
  slabs().take(512).take().reset();
  plan->zero.at(1);
  EXPECT_EQ(slabs().take(512).error(), EIO);
  EXPECT_TRUE(slabs().take(512).ok());  // the slot is still free
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
  for (;;) {
    Result<std::shared_ptr<SlabPool::Slot>> slot = slabs().take(65536);
    if (!slot.ok()) {
      EXPECT_EQ(slot.error(), ENOSPC);
      break;
    }
    held.push_back(slot.take());
  }
  EXPECT_EQ(held.size(), 16 * kMiB / 65536);
  held.resize(held.size() - kGranule / 65536);  // one slab's worth, and another class may have it
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
  EXPECT_EQ(slabs().slab_count(), 0U);
  expect_nothing_left();
}

}  // namespace
}  // namespace gpufs::testing
