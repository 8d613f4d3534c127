// Memory set aside: blocks of all sizes, what comes back, and what stands behind an interpreter's allocators.

#include <gtest/gtest.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <set>
#include <thread>
#include <vector>

#include "base/reserve.h"
#include "gpufs.h"

namespace gpufs {
namespace {

TEST(ReserveTest, BlocksAreApartAndComeBack) {
  Reserve& reserve = Reserve::instance();
  ASSERT_TRUE(reserve.open().ok());
  EXPECT_EQ(reserve.allocate(Reserve::kLargest + 1), nullptr);
  const std::size_t before = reserve.taken();
  std::vector<std::pair<unsigned char*, std::size_t>> blocks;
  for (int round = 0; round < 3; ++round) {
    for (const std::size_t bytes :
         {0UL, 1UL, 16UL, 17UL, 48UL, 49UL, 4096UL, 65569UL, std::size_t{Reserve::kLargest}}) {
      auto* const block = static_cast<unsigned char*>(reserve.allocate(bytes));
      ASSERT_NE(block, nullptr) << bytes;
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block) % alignof(std::max_align_t), 0U);
      EXPECT_TRUE(reserve.owns(block));
      EXPECT_GE(Reserve::room_of(block), bytes);
      std::memset(block, static_cast<int>(blocks.size()), bytes);
      blocks.emplace_back(block, bytes);
    }
  }
  EXPECT_GT(reserve.taken(), before);
  for (std::size_t number = 0; number < blocks.size(); ++number) {
    const auto [block, bytes] = blocks[number];
    for (std::size_t i = 0; i < bytes; ++i) ASSERT_EQ(block[i], number);
    reserve.release(block);
  }
  EXPECT_EQ(reserve.taken(), before);
  int ordinary = 0;
  EXPECT_FALSE(reserve.owns(&ordinary));
  EXPECT_FALSE(reserve.owns(nullptr));
}

TEST(ReserveTest, WhatIsTakenIsReplacedWhereThereIsMemory) {
  Reserve& reserve = Reserve::instance();
  ASSERT_TRUE(reserve.open().ok());
  std::vector<void*> blocks;
  while (void* const block = reserve.allocate(Reserve::kLargest)) blocks.push_back(block);
  const std::size_t before = reserve.bytes();
  EXPECT_GE(reserve.taken(), before / 2);
  EXPECT_FALSE(reserve.low());  // there is memory, and so there is more set aside now
  EXPECT_GT(reserve.bytes(), before);
  void* const more = reserve.allocate(100);
  EXPECT_NE(more, nullptr);
  reserve.release(more);
  for (void* const block : blocks) reserve.release(block);
  EXPECT_FALSE(reserve.low());
}

TEST(ReserveTest, ServesThreads) {
  Reserve& reserve = Reserve::instance();
  ASSERT_TRUE(reserve.open().ok());
  const std::size_t before = reserve.taken();
  std::vector<std::thread> threads;
  for (int number = 0; number < 4; ++number) {
    threads.emplace_back([&reserve, number] {
      for (int round = 0; round < 2000; ++round) {
        const std::size_t bytes = static_cast<std::size_t>((round * 37) % 3000);
        auto* const block = static_cast<unsigned char*>(reserve.allocate(bytes));
        ASSERT_NE(block, nullptr);
        std::memset(block, number, bytes);
        for (std::size_t i = 0; i < bytes; ++i) ASSERT_EQ(block[i], number);
        reserve.release(block);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(reserve.taken(), before);
}

bool failing = false;

gpufs_allocator failing_allocator() {
  return {nullptr, [](void*, size_t bytes) { return failing ? nullptr : std::malloc(bytes); },
          [](void*, size_t count, size_t bytes) { return failing ? nullptr : std::calloc(count, bytes); },
          [](void*, void* block, size_t bytes) { return failing ? nullptr : std::realloc(block, bytes); },
          [](void*, void* block) { std::free(block); }};
}

gpufs_page_allocator failing_pages() {
  return {nullptr, [](void*, size_t bytes) { return failing ? nullptr : std::malloc(bytes); },
          [](void*, void* pages, size_t) { std::free(pages); }};
}

TEST(ReserveTest, StandsBehindAllocators) {
  gpufs_allocator memory = failing_allocator();
  gpufs_page_allocator pages = failing_pages();
  ASSERT_EQ(gpufs_reserve_behind(&memory, &pages).error, 0);
  Reserve& reserve = Reserve::instance();
  const auto allocate = [&](std::size_t bytes) { return memory.allocate(memory.context, bytes); };
  const auto reallocate = [&](void* block, std::size_t bytes) {
    return static_cast<char*>(memory.reallocate(memory.context, block, bytes));
  };
  auto* block = static_cast<char*>(allocate(100));
  ASSERT_NE(block, nullptr);
  EXPECT_FALSE(reserve.owns(block));
  std::strcpy(block, "kept");
  failing = true;
  char* grown = reallocate(block, 5000);  // ordinary memory that has none to grow into
  ASSERT_NE(grown, nullptr);
  EXPECT_TRUE(reserve.owns(grown));
  EXPECT_STREQ(grown, "kept");
  EXPECT_EQ(reallocate(grown, 200), grown);  // as long as there is nothing else
  EXPECT_EQ(reallocate(grown, Reserve::kLargest + 1), nullptr);
  EXPECT_STREQ(grown, "kept");
  auto* const zeroed = static_cast<char*>(memory.allocate_zeroed(memory.context, 30, 40));
  ASSERT_NE(zeroed, nullptr);
  for (int i = 0; i < 30 * 40; ++i) ASSERT_EQ(zeroed[i], 0);
  EXPECT_EQ(memory.allocate_zeroed(memory.context, SIZE_MAX, SIZE_MAX), nullptr);
  char* const fresh = reallocate(nullptr, 10);
  EXPECT_TRUE(reserve.owns(fresh));
  void* const page = pages.allocate(pages.context, 16384);
  EXPECT_TRUE(reserve.owns(page));
  EXPECT_EQ(pages.allocate(pages.context, std::size_t{1} << 20), nullptr);
  failing = false;
  grown = reallocate(grown, 300);  // back to where it came from
  ASSERT_NE(grown, nullptr);
  EXPECT_FALSE(reserve.owns(grown));
  EXPECT_STREQ(grown, "kept");
  for (void* const one : {static_cast<void*>(grown), static_cast<void*>(zeroed), static_cast<void*>(fresh)}) {
    memory.release(memory.context, one);
  }
  pages.release(pages.context, page, 16384);
  memory.release(memory.context, nullptr);
  EXPECT_EQ(gpufs_reserve_behind(&memory, &pages).error, EBUSY);
}

TEST(ReserveTest, ThreadsOfOthersArePrepared) {
  std::thread([] { EXPECT_EQ(gpufs_prepare_thread(), 0); }).join();
}

}  // namespace
}  // namespace gpufs
