// Pinned host memory as a device: what comes back stays mapped for the next memory of that size, and is never seen.
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "cuda_test_support.h"
#include "drivers/gpu/gpu_device.h"
#include "drivers/gpu/pinned_pool.h"
#include "drivers/gpu/virtual_memory.h"

namespace gpufs::cuda_test {
namespace {

constexpr std::uint64_t kPiece = gpu::PinnedPool::kPieceBytes;

class PinnedPoolTest : public FakeCuda {
 protected:
  void start(std::uint64_t bytes, const FakeGpuSetup& setup = {}) {
    DriverOptions options;
    options.host_memory_bytes = bytes;
    open(setup, options);
  }
  // The same, once the pool has made all pieces: its thread calls nothing until one comes back.
  void start_full(std::uint64_t bytes, const FakeGpuSetup& setup = {}) {
    start(bytes, setup);
    while (fake().calls("cuMemAddressFree") < static_cast<int>(bytes / kPiece)) std::this_thread::yield();
  }
  void TearDown() override {
    driver_.reset();
    // A mapping that could not be undone keeps its addresses and its memory, until the process ends.
    EXPECT_EQ(control_.reset(&setup_), 3 * stuck_);
    FakeCuda::TearDown();
  }
  Device& host() { return device(1); }
  // Memory whose contents the caller is about to write, as a parked file's.
  Taken take_undefined(std::uint64_t bytes) {
    Taken taken{must(host().create_memory()), nullptr};
    taken.memory->leave_undefined();
    taken.range = must(taken.memory->reserve(bytes));
    EXPECT_OK(taken.memory->populate(0, bytes));
    return taken;
  }
  // Of each MiB the first bytes.
  static constexpr std::uint64_t kSample = 64;
  void fill(const Taken& taken, std::uint64_t bytes, std::byte value) {
    const std::vector<std::byte> data(kSample, value);
    for (std::uint64_t at = 0; at < bytes; at += kMiB) {
      ASSERT_OK(host().copy_in(taken.range->base() + at, data.data(), kSample));
    }
  }
  void expect_all(const Taken& taken, std::uint64_t offset, std::uint64_t bytes, std::byte value) {
    const std::vector<std::byte> expected(kSample, value);
    std::vector<std::byte> found(kSample);
    for (std::uint64_t at = offset; at < offset + bytes; at += kMiB) {
      ASSERT_OK(host().copy_out(found.data(), taken.range->base() + at, kSample));
      EXPECT_EQ(found, expected) << at;
    }
  }

  int stuck_ = 0;  // mappings
};

TEST_F(PinnedPoolTest, MemoryOfTheSameSizeIsMappedOnce) {
  start(4 * kPiece);
  take_undefined(3 * kPiece + 2 * kMiB);
  // The pool's thread maps pieces, too, while it makes them.
  int fewest = 3;
  for (int round = 0; round < 100 && fewest > 0; ++round) {
    const int before = fake().calls("cuMemMap") + fake().calls("cuMemAddressReserve");
    const Taken again = take_undefined(3 * kPiece);
    fill(again, 3 * kPiece, std::byte{1});
    fewest = std::min(fewest, fake().calls("cuMemMap") + fake().calls("cuMemAddressReserve") - before);
  }
  EXPECT_EQ(fewest, 0);
}

TEST_F(PinnedPoolTest, NobodySeesWhatTheLastUserLeft) {
  start(4 * kPiece);
  fill(take_undefined(3 * kPiece), 3 * kPiece, std::byte{7});
  const Taken same = take(host(), 3 * kPiece);
  expect_all(same, 0, 3 * kPiece, std::byte{0});
}

TEST_F(PinnedPoolTest, MappedPiecesServeMemoryOfAnySize) {
  start(4 * kPiece);
  fill(take_undefined(4 * kPiece), 4 * kPiece, std::byte{7});
  // Each is zeros, wherever its pieces come from: a range that is too long, the middle of one, less than a piece.
  {
    const Taken one = take(host(), kPiece);
    const Taken two = take(host(), 2 * kPiece + 2 * kMiB);
    expect_all(one, 0, kPiece, std::byte{0});
    expect_all(two, 0, 2 * kPiece + 2 * kMiB, std::byte{0});
    EXPECT_EQ(take(host(), 0, kPiece).memory->populate(0, kPiece).error(), ENOSPC);
    fill(one, kPiece, std::byte{1});
    expect_all(two, 0, 2 * kPiece, std::byte{0});
  }
  Taken sparse = take(host(), 0, 3 * kPiece);
  ASSERT_OK(sparse.memory->populate(10 * kMiB, kPiece));
  ASSERT_OK(sparse.memory->populate(10 * kMiB + kPiece, kPiece));
  expect_all(sparse, 10 * kMiB, 2 * kPiece, std::byte{0});
  EXPECT_EQ(must(host().memory()).free_bytes, 2 * kPiece);
}

TEST_F(PinnedPoolTest, MappedPiecesAreFree) {
  start(4 * kPiece);
  take_undefined(4 * kPiece);
  EXPECT_EQ(must(host().memory()).free_bytes, 4 * kPiece);
}

TEST_F(PinnedPoolTest, APieceThatCannotBeUnmappedIsNotLost) {
  start(2 * kPiece);
  take_undefined(2 * kPiece);
  fake().fail("cuMemUnmap", 1, 1, 1);
  Taken other = take(host(), 0, 4 * kPiece);  // no range that is there is as long
  (void)other.memory->populate(0, 2 * kPiece);
  other = {};
  const Taken again = take(host(), 2 * kPiece);
  expect_all(again, 0, 2 * kPiece, std::byte{0});
}

TEST_F(PinnedPoolTest, ThreadsNeverShareAPiece) {
  start(8 * kPiece);
  std::vector<std::thread> threads;
  for (int number = 1; number <= 4; ++number) {
    threads.emplace_back([&, number] {
      std::mt19937 random(static_cast<unsigned>(number));
      for (int round = 0; round < 12; ++round) {
        const std::uint64_t bytes = kPiece * (1 + random() % 2) + (random() % 3) * 2 * kMiB;
        const bool undefined = random() % 2 == 0;
        Taken mine{must(host().create_memory()), nullptr};
        if (undefined) mine.memory->leave_undefined();
        mine.range = must(mine.memory->reserve(bytes));
        if (!mine.memory->populate(0, bytes).ok()) continue;
        if (!undefined) expect_all(mine, bytes - 2 * kMiB, 2 * kMiB, std::byte{0});
        fill(mine, bytes, static_cast<std::byte>(number));
        std::this_thread::yield();
        expect_all(mine, 0, bytes, static_cast<std::byte>(number));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Access to memory that is mapped without it would end the device's context.
TEST_F(PinnedPoolTest, APieceWithoutAccessIsNotLeftMapped) {
  start_full(2 * kPiece);
  {
    Taken broken = take(host(), 0, 2 * kPiece);
    fake().fail("cuMemSetAccess", 1, api::kOutOfMemory, 1);
    fake().fail("cuMemUnmap", 1, api::kOutOfMemory, 1);
    EXPECT_EQ(broken.memory->populate(0, 2 * kPiece).error(), ENOSPC);
  }
  const Taken again = take_undefined(2 * kPiece);
  fill(again, 2 * kPiece, std::byte{1});
  expect_all(again, 0, 2 * kPiece, std::byte{1});
}

TEST_F(PinnedPoolTest, ARangeWithSomethingElseInItIsNotUsedAgain) {
  start_full(4 * kPiece);
  constexpr std::uint64_t kBytes = 2 * kPiece + 2 * kMiB;
  {
    const Taken one = take_undefined(kBytes);
    fake().fail("cuMemUnmap", 1, 1, 2);  // of what is no piece of the pool
  }
  for (int round = 0; round < 3; ++round) fill(take_undefined(kBytes), kBytes, std::byte{1});
  const Taken all = take(host(), 4 * kPiece);
  expect_all(all, 0, 4 * kPiece, std::byte{0});
  stuck_ = 1;
}

TEST_F(PinnedPoolTest, AllIsReleasedAtTheEndWhateverFails) {
  start_full(4 * kPiece);
  take_undefined(4 * kPiece);
  fake().fail("cuMemUnmap", 1, 1, 1);
  stuck_ = 1;
}

// Nobody is charged for the addresses that the pool has.
TEST_F(PinnedPoolTest, SparseMemoryLeavesNoAddressesBehind) {
  FakeGpuSetup setup;
  setup.address_space_bytes = std::uint64_t{8} << 30;
  start_full(4 * kPiece, setup);
  for (const std::uint64_t bytes : {setup.address_space_bytes / 8, setup.address_space_bytes / 2}) {
    const Taken sparse = take(host(), kPiece, bytes);
    fill(sparse, kPiece, std::byte{7});
  }
  const Taken on_gpu = take(device(), 0, setup.address_space_bytes / 4 * 3);
  const Taken all = take(host(), 4 * kPiece);
  expect_all(all, 0, 4 * kPiece, std::byte{0});
}

// A small part of a file is no piece of the pool, whose pieces may be all that the host has left.
TEST_F(PinnedPoolTest, AFullHostReleasesPieces) {
  start_full(4 * kPiece);
  fill(take_undefined(2 * kPiece), 2 * kPiece, std::byte{7});
  fake().fail("cuMemCreate", 1, api::kOutOfMemory, 3);
  const Taken small = take(host(), 2 * kMiB);
  expect_all(small, 0, 2 * kMiB, std::byte{0});
}

TEST_F(PinnedPoolTest, RestoredMemoryCountsTowardsTheCap) {
  start_full(2 * kPiece);
  const Taken kept = take(device(), kPiece);  // any memory will do
  std::vector<ExportedMemory> exported = must(kept.memory->export_memory(0, kPiece, 1, true));
  const int before = fake_state().handles;
  const auto restored =
      must(gpu::PhysicalMemory::adopt(std::dynamic_pointer_cast<gpu::GpuDevice>(driver_->devices().at(1)),
                                      {{0, kPiece}, 0, std::move(exported.at(0).descriptor)}));
  EXPECT_EQ(fake_state().handles, before);
  EXPECT_EQ(must(host().memory()).free_bytes, kPiece);
}

// 2 TiB of memory that was parked in small files.
TEST(PinnedPool, ManyRangesComeAndGo) {
  constexpr std::uint64_t kRanges = 32768;
  std::uint64_t ranges = kRanges;
  std::uint64_t pieces = kRanges;
  gpu::PinnedPool pool({.create = [](gpu::PhysicalHandle*) { return Status(ENOSPC, "no more"); },
                        .zero = [](gpu::PhysicalHandle, DeviceAddress) { return Status(); },
                        .release = [&](gpu::PhysicalHandle) { --pieces; },
                        .unmap = [](DeviceAddress) { return Status(); },
                        .free_addresses = [&](const Extent&) { --ranges; },
                        .wanted = [] { return std::uint64_t{0}; }});
  const auto start = std::chrono::steady_clock::now();
  for (std::uint64_t number = 1; number <= kRanges; ++number) {
    pool.give(number, number * kPiece);
    pool.give_range({number * kPiece, kPiece});
  }
  pool.trim();
  EXPECT_EQ(pieces, 0U);
  EXPECT_EQ(ranges, 0U);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

}  // namespace
}  // namespace gpufs::cuda_test
