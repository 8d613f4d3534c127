// Memory that is taken ahead of growing files and of transfers: who sees it, who gets it back, and what fails.

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <random>
#include <thread>
#include <vector>

#include "buffer_fixture.h"

namespace gpufs::testing {
namespace {

class BufferAheadTest : public BufferFixture {
 protected:
  void SetUp() override { plan->cpu_addressable = false; }
  void TearDown() override {
    expect_nothing_left();
    for (const auto& context : contexts) EXPECT_EQ(context->ahead_bytes(), 0U);
  }
  // A file of `granules`, written from the start in pieces of 1 MiB.
  std::shared_ptr<Buffer> grown(std::uint64_t granules) {
    const std::shared_ptr<Buffer> buffer = make();
    buffer->take_ahead();
    grow(*buffer, granules);
    return buffer;
  }
  void grow(Buffer& buffer, std::uint64_t granules) {
    while (buffer.size() < granules * kGranule) {
      const std::uint64_t at = buffer.size();
      write(buffer, at, block(at));
    }
  }
  static std::vector<std::byte> block(std::uint64_t at) { return pattern(kMiB, static_cast<unsigned>(at / kMiB)); }
  static void expect_blocks(Buffer& buffer) {
    for (std::uint64_t at = 0; at < buffer.size(); at += kMiB) {
      ASSERT_TRUE(same_bytes(contents(buffer, at, kMiB), block(at))) << at;
    }
  }
};

TEST_F(BufferAheadTest, AGrowingFileTakesMemorySeldom) {
  start(1024 * kMiB);
  const auto buffer = grown(60);
  EXPECT_LT(plan->populate.calls(), 10);
  EXPECT_EQ(buffer->bytes_held(), 60 * kGranule);
  EXPECT_GT(buffer->bytes_ahead(), 0U);
  EXPECT_EQ(contexts[0]->ahead_bytes(), buffer->bytes_ahead());
  EXPECT_EQ(used(), buffer->bytes_held() + buffer->bytes_ahead());
  buffer->trim();
  EXPECT_EQ(buffer->bytes_ahead(), 0U);
  EXPECT_EQ(used(), 60 * kGranule);
  expect_blocks(*buffer);
  grow(*buffer, 70);
  EXPECT_EQ(buffer->bytes_held(), 70 * kGranule);
  expect_blocks(*buffer);
}

TEST_F(BufferAheadTest, OnlyWhereItWasAskedForAndCanGoBack) {
  start(256 * kMiB);
  const auto exact = make();
  grow(*exact, 8);
  EXPECT_EQ(exact->bytes_ahead(), 0U);
  const auto promised = grown(8);
  EXPECT_GT(promised->bytes_ahead(), 0U);
  ASSERT_TRUE(promised->pin_address(128 * kMiB).ok());
  EXPECT_EQ(promised->bytes_ahead(), 0U);
  grow(*promised, 12);
  EXPECT_EQ(promised->bytes_ahead(), 0U);
  const auto exported = grown(8);
  ASSERT_TRUE(exported->export_memory().ok());
  grow(*exported, 12);
  EXPECT_EQ(exported->bytes_ahead(), 0U);
  EXPECT_EQ(used(), 32 * kGranule);
}

TEST_F(BufferAheadTest, WhatIsAheadIsNobodysAndZeros) {
  start(512 * kMiB);
  const auto buffer = grown(9);  // the ninth granule took as much ahead as there was
  const std::uint64_t ahead = buffer->bytes_ahead();
  ASSERT_GE(ahead, 4 * kGranule);
  const int calls = plan->populate.calls();
  // Longer than what is written: all of it a hole.
  ASSERT_TRUE(buffer->resize(9 * kGranule + ahead).ok());
  EXPECT_EQ(buffer->bytes_held(), 9 * kGranule);
  EXPECT_EQ(buffer->seek_hole(0).value(), 9 * kGranule);
  EXPECT_EQ(buffer->seek_data(9 * kGranule).error(), ENXIO);
  // Requests that overtake each other take from its middle.
  write(*buffer, 12 * kGranule, block(0));
  EXPECT_EQ(buffer->bytes_held(), 10 * kGranule);
  EXPECT_EQ(buffer->seek_data(9 * kGranule).value(), 12 * kGranule);
  write(*buffer, 10 * kGranule + kMiB, block(1));
  EXPECT_EQ(buffer->bytes_held(), 11 * kGranule);
  EXPECT_EQ(plan->populate.calls(), calls);
  EXPECT_EQ(buffer->bytes_ahead(), ahead - 2 * kGranule);
  EXPECT_TRUE(all_zero(contents(*buffer, 9 * kGranule, kGranule + kMiB)));
  EXPECT_TRUE(all_zero(contents(*buffer, 11 * kGranule, kGranule)));
  EXPECT_TRUE(contents(*buffer, 12 * kGranule, kMiB) == block(0));
  buffer->trim();
  EXPECT_EQ(used(), 11 * kGranule);
  EXPECT_TRUE(contents(*buffer, 12 * kGranule, kMiB) == block(0));
}

TEST_F(BufferAheadTest, TruncatingAndPunchingGiveItBack) {
  start(512 * kMiB);
  for (const std::uint64_t size : {std::uint64_t{0}, 3 * kGranule + 5, 16 * kGranule}) {
    const auto buffer = grown(16);
    grow(*buffer, 17);
    ASSERT_TRUE(buffer->resize(16 * kGranule).ok());
    grow(*buffer, 17);
    ASSERT_GT(buffer->bytes_ahead(), 0U);
    ASSERT_TRUE(buffer->resize(size).ok());
    EXPECT_EQ(buffer->bytes_ahead(), 0U);
    EXPECT_EQ(used(), buffer->bytes_held());
  }
  const auto buffer = grown(17);
  ASSERT_GT(buffer->bytes_ahead(), 0U);
  ASSERT_TRUE(buffer->punch(kGranule, kGranule).ok());
  EXPECT_EQ(used(), 16 * kGranule);
}

TEST_F(BufferAheadTest, AFullDeviceTakesItFromOthers) {
  start(256 * kMiB, /*slab_file_bytes=*/65536);
  const auto growing = grown(17);
  const std::uint64_t ahead = growing->bytes_ahead();
  ASSERT_GT(ahead, 0U);
  const auto other = make();
  ASSERT_TRUE(other->allocate(0, 256 * kMiB - growing->bytes_held(), false).ok());
  EXPECT_EQ(growing->bytes_ahead(), 0U);
  EXPECT_EQ(used(), 256 * kMiB);
  EXPECT_EQ(growing->write(growing->size(), block(0)).error(), ENOSPC);
  expect_blocks(*growing);
  // For a small file, too; and for pins and for zeroing.
  for (int way = 0; way < 4; ++way) {
    ASSERT_TRUE(other->resize(96 * kMiB).ok());
    grow(*growing, growing->size() / kGranule + 1);
    ASSERT_GT(growing->bytes_ahead(), 0U) << way;
    const auto filler = make();
    const std::uint64_t rest = 256 * kMiB - used();
    if (rest > 0) {
      ASSERT_TRUE(filler->allocate(0, rest, false).ok());
    }
    ASSERT_GT(growing->bytes_ahead(), 0U) << way;
    const auto late = make();
    switch (way) {
      case 0:
        EXPECT_TRUE(late->write(0, pattern(100, 1)).ok());
        break;
      case 1:
        EXPECT_TRUE(late->pin_for_write(0, kMiB).ok());
        break;
      case 2:
        EXPECT_TRUE(late->zero_range(0, kMiB, false).ok());
        break;
      default: {
        Buffer::Made made;
        EXPECT_TRUE(late->populate(0, kMiB, &made).ok());
      }
    }
    EXPECT_EQ(growing->bytes_ahead(), 0U) << way;
  }
  expect_blocks(*growing);
}

TEST_F(BufferAheadTest, AnAddressOrAnExportTakesItFromOthers) {
  for (const bool exported : {false, true}) {
    contexts.clear();
    start(256 * kMiB, /*slab_file_bytes=*/65536);
    const auto small = make();
    write(*small, 0, pattern(100, 1));
    const auto growing = grown(17);
    const std::uint64_t rest = 256 * kMiB - used();
    const auto filler = make();
    ASSERT_TRUE(filler->allocate(0, rest, false).ok());
    ASSERT_GT(growing->bytes_ahead(), 0U);
    if (exported) {
      EXPECT_TRUE(small->export_memory().ok());
    } else {
      EXPECT_TRUE(small->pin_address(kMiB).ok());
    }
    EXPECT_EQ(growing->bytes_ahead(), 0U);
    EXPECT_TRUE(contents(*small) == pattern(100, 1));
    expect_blocks(*growing);
  }
}

TEST_F(BufferAheadTest, WhatIsOnItsWayBackIsWaitedFor) {
  start(256 * kMiB);
  const auto growing = grown(17);
  ASSERT_GT(growing->bytes_ahead(), 0U);
  const auto filler = make();
  ASSERT_TRUE(filler->allocate(0, 256 * kMiB - used(), false).ok());
  const auto late = make();
  std::atomic<bool> over{false};
  int error = -1;
  std::thread writing;
  plan->on_release = [&] {
    if (writing.joinable()) return;
    const int before = plan->populate.calls();
    writing = std::thread([&] {
      error = late->write(0, block(0)).error();
      over = true;
    });
    while (plan->populate.calls() == before) std::this_thread::yield();
    // It has not found room; it must not say so now.
    for (int look = 0; look < 50 && !over; ++look) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  growing->trim();
  writing.join();
  plan->on_release = nullptr;
  EXPECT_EQ(error, 0);
}

TEST_F(BufferAheadTest, WhoeverUsesWhatWouldMoveIsNotWaitedForLong) {
  plan->span = 64 * kGranule;  // giving back a part moves all of a file
  start(256 * kMiB);
  const auto used_one = grown(17);
  const auto idle = grown(17);
  ASSERT_GT(used_one->bytes_ahead(), 0U);
  ASSERT_GT(idle->bytes_ahead(), 0U);
  const std::uint64_t ahead = used_one->bytes_ahead();
  const auto filler = make();
  ASSERT_TRUE(filler->allocate(0, 256 * kMiB - used(), true).ok());
  auto pin = used_one->pin_for_read(0, kMiB);
  ASSERT_TRUE(pin.ok());
  const auto late = make();
  write(*late, 0, block(0));  // what the other had
  EXPECT_EQ(idle->bytes_ahead(), 0U);
  EXPECT_EQ(used_one->bytes_ahead(), ahead);
  ASSERT_TRUE(filler->allocate(filler->bytes_held(), 256 * kMiB - used(), true).ok());
  EXPECT_EQ(late->write(kGranule, block(1)).error(), ENOSPC);
  used_one->trim();
  EXPECT_EQ(used_one->bytes_ahead(), ahead);
  EXPECT_EQ(contexts[0]->ahead_bytes(), ahead);
  // As it was: readable, growing into what is ahead, and given back once nobody is in the way.
  expect_blocks(*used_one);
  grow(*used_one, 18);
  EXPECT_EQ(used_one->bytes_ahead(), ahead - kGranule);
  pin.value().reset();
  write(*late, kGranule, block(1));
  EXPECT_EQ(used_one->bytes_ahead(), 0U);
  expect_blocks(*used_one);
  EXPECT_TRUE(contents(*late, 0, kMiB) == block(0));
  EXPECT_TRUE(contents(*late, kGranule, kMiB) == block(1));
}

TEST_F(BufferAheadTest, WhoeverWaitsForAUserIsNotWaitedForLong) {
  plan->span = 64 * kGranule;
  start(256 * kMiB);
  const auto growing = grown(17);
  ASSERT_GT(growing->bytes_ahead(), 0U);
  const auto filler = make();
  ASSERT_TRUE(filler->allocate(0, 256 * kMiB - used(), true).ok());
  auto pin = growing->pin_for_read(0, kMiB);
  ASSERT_TRUE(pin.ok());
  std::thread punching([&] { EXPECT_TRUE(growing->punch(0, kGranule).ok()); });
  while (growing->try_pin_for_read(0, 1) != nullptr) std::this_thread::yield();
  const auto late = make();
  EXPECT_EQ(late->write(0, block(0)).error(), ENOSPC);
  EXPECT_GT(growing->bytes_ahead(), 0U);
  pin.value().reset();
  punching.join();
  EXPECT_EQ(growing->bytes_ahead(), 0U);
  write(*late, 0, block(0));
}

TEST_F(BufferAheadTest, NoRoomForMoreThanIsNeeded) {
  start(1024 * kMiB);
  const auto buffer = grown(1);
  for (std::uint64_t granules = 2; granules <= 20; ++granules) {
    plan->populate.at(1, 1, ENOSPC);  // with what would be ahead
    grow(*buffer, granules);
    EXPECT_EQ(plan->populate.calls(), 2);
    EXPECT_EQ(buffer->bytes_ahead(), 0U);
    ASSERT_EQ(used(), granules * kGranule);
  }
  plan->populate.at(1, 2, ENOSPC);
  EXPECT_EQ(buffer->write(20 * kGranule, block(0)).error(), ENOSPC);
  plan->populate.clear();
  EXPECT_EQ(used(), 20 * kGranule);
  expect_blocks(*buffer);
}

TEST_F(BufferAheadTest, WhatWasMadeInVainGoesBack) {
  start(256 * kMiB);
  const auto buffer = make();
  write(*buffer, 0, block(0));
  ASSERT_TRUE(buffer->allocate(20 * kGranule, kGranule, true).ok());
  Buffer::Made made;
  ASSERT_TRUE(buffer->populate(0, 10 * kGranule, &made).ok());
  ASSERT_TRUE(buffer->populate(10 * kGranule, 12 * kGranule, &made).ok());
  EXPECT_EQ(buffer->bytes_held(), 22 * kGranule);
  write(*buffer, 3 * kGranule, block(1));
  buffer->release_unused(made);
  EXPECT_TRUE(contents(*buffer, 3 * kGranule, kMiB) == block(1));
  EXPECT_EQ(buffer->bytes_held(), 5 * kGranule);  // and what was allocated before stays
  EXPECT_EQ(used(), 5 * kGranule);
}

TEST_F(BufferAheadTest, WhatWasAllocatedMeanwhileStays) {
  start(256 * kMiB);
  const auto buffer = make();
  Buffer::Made made;
  ASSERT_TRUE(buffer->populate(0, 20 * kGranule, &made).ok());
  ASSERT_TRUE(buffer->allocate(4 * kGranule + 5, kGranule, true).ok());  // two granules
  ASSERT_TRUE(buffer->zero_range(8 * kGranule, kGranule, true).ok());
  ASSERT_TRUE(buffer->allocate(10 * kGranule, 6 * kGranule, true).ok());
  ASSERT_TRUE(buffer->punch(12 * kGranule, kGranule).ok());
  ASSERT_TRUE(buffer->populate(12 * kGranule, kGranule, &made).ok());
  ASSERT_TRUE(buffer->punch(18 * kGranule, kGranule).ok());
  ASSERT_TRUE(buffer->allocate(18 * kGranule, kGranule, true).ok());
  buffer->release_unused(made);
  EXPECT_EQ(buffer->bytes_held(), (2 + 1 + 5 + 1) * kGranule);
  EXPECT_EQ(used(), buffer->bytes_held());
  // All of that was granted, and needs no room any more.
  const auto filler = make();
  ASSERT_TRUE(filler->allocate(0, 256 * kMiB - used(), true).ok());
  write(*buffer, 4 * kGranule, block(4));
  write(*buffer, 6 * kGranule - kMiB, block(5));
  write(*buffer, 8 * kGranule, block(8));
  write(*buffer, 15 * kGranule, block(15));
  write(*buffer, 18 * kGranule, block(18));
  EXPECT_EQ(buffer->write(12 * kGranule, block(0)).error(), ENOSPC);
  ASSERT_TRUE(filler->resize(0).ok());
  ASSERT_TRUE(buffer->resize(0).ok());
  // Truncation takes what was granted, too.
  ASSERT_TRUE(buffer->populate(0, 20 * kGranule, &made).ok());
  buffer->release_unused(made);
  EXPECT_EQ(buffer->bytes_held(), 0U);
}

TEST_F(BufferAheadTest, WhatASmallFileGotInVainGoesBack) {
  start(256 * kMiB, /*slab_file_bytes=*/65536);
  const auto buffer = make();
  write(*buffer, 0, pattern(100, 1));
  Buffer::Made made;
  ASSERT_TRUE(buffer->populate(0, 10 * kGranule, &made).ok());
  ASSERT_TRUE(buffer->allocate(7 * kGranule, kGranule, true).ok());
  buffer->release_unused(made);
  EXPECT_EQ(buffer->bytes_held(), 2 * kGranule);
  EXPECT_TRUE(contents(*buffer) == pattern(100, 1));
}

TEST_F(BufferAheadTest, WhatWasTruncatedSinceIsOthers) {
  start(256 * kMiB);
  const auto buffer = make();
  Buffer::Made made;
  ASSERT_TRUE(buffer->populate(0, 10 * kGranule, &made).ok());
  ASSERT_TRUE(buffer->resize(0).ok());
  EXPECT_EQ(used(), 0U);
  ASSERT_TRUE(buffer->allocate(0, 4 * kGranule, true).ok());
  buffer->release_unused(made);
  EXPECT_EQ(buffer->bytes_held(), 4 * kGranule);
  // What is made afterwards is known apart from what was before.
  ASSERT_TRUE(buffer->populate(0, 6 * kGranule, &made).ok());
  buffer->release_unused(made);
  EXPECT_EQ(buffer->bytes_held(), 4 * kGranule);
}

TEST_F(BufferAheadTest, AFileThatIsEmptyAgainHoldsNothing) {
  start(256 * kMiB);
  const auto buffer = make();
  Buffer::Made made;
  ASSERT_TRUE(buffer->populate(5, 10 * kGranule, &made).ok());
  buffer->release_unused(made);
  EXPECT_EQ(buffer->bytes_held(), 0U);
  EXPECT_EQ(plan->memories, 0);
  write(*buffer, 0, block(0));
  expect_blocks(*buffer);
}

TEST_F(BufferAheadTest, AnExpectedSizeIsReservedAtOnce) {
  start(256 * kMiB);
  for (const bool expected : {false, true}) {
    plan->reserve.clear();
    const auto buffer = make();
    if (expected) buffer->expect(240 * kMiB);
    write(*buffer, 0, block(0));
    ASSERT_TRUE(buffer->resize(240 * kMiB).ok());
    write(*buffer, 239 * kMiB, block(1));
    EXPECT_EQ(plan->reserve.calls(), expected ? 1 : 2);
  }
  // More than there can be is not reserved.
  const auto buffer = make();
  buffer->expect(Buffer::kMaximumBytes);
  write(*buffer, 0, block(0));
  expect_blocks(*buffer);
}

TEST_F(BufferAheadTest, ManyGrowWhileTheDeviceIsFull) {
  plan->span = 2 * kGranule;
  start(96 * kMiB);
  std::vector<std::thread> threads;
  for (unsigned index = 0; index < 3; ++index) {
    threads.emplace_back([&, index] {
      std::mt19937 random(index);
      for (int round = 0; round < 3; ++round) {
        const auto buffer = make();
        buffer->take_ahead();
        for (std::uint64_t at = 0; at < 48 * kMiB; at += kMiB) {
          const Result<std::size_t> count = buffer->write(at, block(at));
          if (!count.ok()) {
            ASSERT_EQ(count.error(), ENOSPC);
            break;
          }
          if (random() % 16 == 0) buffer->trim();
        }
        expect_blocks(*buffer);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace gpufs::testing
