// Memory above a buffer's size: preallocation by growing files, memory from fallocate(), memory that failed loads
// leave, and when each is released.

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <functional>
#include <random>
#include <thread>

#include "base/thread.h"
#include "buffer_fixture.h"

namespace gpufs::testing {
namespace {

constexpr std::chrono::milliseconds kNoPatience{0};

class BufferPreallocationTest : public BufferFixture {
 protected:
  void SetUp() override { plan->cpu_addressable = false; }
  void TearDown() override { expect_nothing_left(); }

  // A file of `granules` that was written from the start in pieces of 1 MiB and has preallocated memory.
  std::shared_ptr<ExtentBuffer> grown(std::uint64_t granules) {
    const std::shared_ptr<ExtentBuffer> buffer = make(0, /*preallocates=*/true);
    grow(*buffer, granules);
    return buffer;
  }
  void grow(Buffer& buffer, std::uint64_t granules) {
    while (buffer.size() < granules * kGranule) {
      const std::uint64_t at = buffer.size();
      write(buffer, at, block(at));
    }
  }
  std::shared_ptr<ExtentBuffer> fill_device(std::uint64_t memory_bytes) {
    const std::shared_ptr<ExtentBuffer> filler = make();
    EXPECT_TRUE(filler->allocate(0, memory_bytes - used(), true).ok());
    return filler;
  }
  static std::vector<std::byte> block(std::uint64_t at) { return pattern(kMiB, static_cast<unsigned>(at / kMiB)); }
  static void expect_blocks(Buffer& buffer) {
    for (std::uint64_t at = 0; at < buffer.size(); at += kMiB) {
      ASSERT_TRUE(same_bytes(contents(buffer, at, kMiB), block(at))) << at;
    }
  }
  // Whether reading has to wait.
  static bool would_wait(Buffer& buffer) { return buffer.pin_for_read(0, 1, Wait::kForbidden).error() == EAGAIN; }
  // Bytes held beyond the granules of the contents.
  static std::uint64_t preallocated(Buffer& buffer) {
    return buffer.bytes_held() - (buffer.size() + kGranule - 1) / kGranule * kGranule;
  }
};

TEST_F(BufferPreallocationTest, AGrowingFileAllocatesRarely) {
  start(1024 * kMiB);
  const auto buffer = grown(60);
  EXPECT_LT(plan->populate.calls(), 10);
  EXPECT_GT(preallocated(*buffer), 0U);
  EXPECT_EQ(used(), buffer->bytes_held());
  EXPECT_EQ(contexts[0]->held_bytes(), buffer->bytes_held());
  EXPECT_TRUE(buffer->may_trim());
  EXPECT_TRUE(buffer->trim(kNoPatience));
  EXPECT_FALSE(buffer->may_trim());
  EXPECT_EQ(buffer->bytes_held(), 60 * kGranule);
  EXPECT_EQ(used(), 60 * kGranule);
  expect_blocks(*buffer);
  grow(*buffer, 70);
  expect_blocks(*buffer);
}

TEST_F(BufferPreallocationTest, OnlyWhenRequestedAndReleasable) {
  start(256 * kMiB);
  const auto exact = make();
  grow(*exact, 8);
  const auto used_here = grown(8);
  EXPECT_GT(preallocated(*used_here), 0U);
  const auto local = must(used_here->lease(false, false, ""));
  grow(*used_here, 12);
  const auto exported = grown(8);
  const auto lease = must(exported->lease(false, true, ""));
  grow(*exported, 12);
  EXPECT_EQ(used(), 32 * kGranule);
}

TEST_F(BufferPreallocationTest, HolesStayHoles) {
  start(512 * kMiB);
  const auto buffer = grown(9);
  const std::uint64_t held = buffer->bytes_held();
  ASSERT_GE(preallocated(*buffer), 4 * kGranule);
  const int calls = plan->populate.calls();
  ASSERT_TRUE(buffer->resize(held).ok());
  EXPECT_EQ(buffer->seek_hole(0).value(), 9 * kGranule);
  EXPECT_EQ(buffer->seek_data(9 * kGranule).error(), ENXIO);
  // Requests that overtake each other take from its middle.
  write(*buffer, 12 * kGranule, block(0));
  EXPECT_EQ(buffer->seek_data(9 * kGranule).value(), 12 * kGranule);
  write(*buffer, 10 * kGranule + kMiB, block(1));
  EXPECT_EQ(plan->populate.calls(), calls);
  EXPECT_EQ(buffer->bytes_held(), held);
  EXPECT_TRUE(all_zero(contents(*buffer, 9 * kGranule, kGranule + kMiB)));
  EXPECT_TRUE(all_zero(contents(*buffer, 11 * kGranule, kGranule)));
  EXPECT_TRUE(buffer->trim(kNoPatience));
  EXPECT_EQ(used(), 11 * kGranule);
  EXPECT_TRUE(contents(*buffer, 12 * kGranule, kMiB) == block(0));
}

TEST_F(BufferPreallocationTest, TruncatingAndPunchingReleaseIt) {
  start(512 * kMiB);
  for (const std::uint64_t size : {std::uint64_t{0}, 3 * kGranule + 5, 17 * kGranule}) {
    const auto buffer = grown(17);
    ASSERT_GT(preallocated(*buffer), 0U);
    ASSERT_TRUE(buffer->resize(size).ok());
    EXPECT_EQ(preallocated(*buffer), 0U);
    EXPECT_EQ(used(), buffer->bytes_held());
  }
  const auto punched = grown(17);
  ASSERT_TRUE(punched->punch(0, punched->size()).ok());
  EXPECT_EQ(used(), 0U);
}

TEST_F(BufferPreallocationTest, AFullDeviceTrimsOtherFiles) {
  using Call = std::function<Status(Buffer&)>;
  const std::vector<std::byte> data = block(0);
  const std::vector<Call> calls{
      [&](Buffer& late) { return late.write(0, data).status(); },
      [&](Buffer& late) { return late.write(0, std::span(data).first(100)).status(); },  // a slot of a slab
      [&](Buffer& late) { return late.pin_for_write(0, kMiB).status(); },
      [&](Buffer& late) { return late.allocate(0, kMiB, false); },
      [&](Buffer& late) { return late.zero_range(0, kMiB, false); },
  };
  start(64 * kMiB, /*slab_file_bytes=*/65536);
  for (const Call& call : calls) {
    const auto growing = grown(4);
    ASSERT_GT(preallocated(*growing), 0U);
    const auto filler = fill_device(64 * kMiB);
    const auto late = make();
    EXPECT_TRUE(call(*late).ok());
    EXPECT_EQ(preallocated(*growing), 0U);
    expect_blocks(*growing);
  }
  for (const bool exports : {false, true}) {
    const auto small = make();
    write(*small, 0, pattern(100, 1));
    const auto growing = grown(4);
    const auto filler = fill_device(64 * kMiB);
    EXPECT_EQ(small->lease(true, exports, "").error(), 0);
    EXPECT_EQ(preallocated(*growing), 0U);
    EXPECT_TRUE(contents(*small) == pattern(100, 1));
  }
}

TEST_F(BufferPreallocationTest, AnAllocationWaitsForMemoryThatIsBeingReleased) {
  start(256 * kMiB);
  const auto growing = grown(17);
  const auto filler = fill_device(256 * kMiB);
  const auto late = make();
  std::atomic<bool> over{false};
  int error = -1;
  std::thread writing;
  std::chrono::steady_clock::time_point began;
  plan->on_release = [&] {
    if (writing.joinable()) return;
    began = std::chrono::steady_clock::now();
    const int before = plan->populate.calls();
    writing = std::thread([&] {
      error = late->write(0, block(0)).error();
      over = true;
    });
    while (plan->populate.calls() == before) std::this_thread::yield();
    // It found the device full; it must not report that now.
    for (int look = 0; look < 20 && !over; ++look) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  };
  EXPECT_TRUE(growing->trim(kNoPatience));
  // It waits a tenth of a second, which a busy machine may need here.
  const bool in_time = std::chrono::steady_clock::now() - began < std::chrono::milliseconds(50);
  writing.join();
  plan->on_release = nullptr;
  EXPECT_TRUE(error == 0 || (error == ENOSPC && !in_time)) << error;
}

TEST_F(BufferPreallocationTest, AStalledUserKeepsOnlyItsOwnFile) {
  plan->span = 64 * kGranule;  // releasing a part moves all of a file
  start(256 * kMiB);
  const auto stalled = grown(17);
  const auto idle = grown(17);
  const std::uint64_t kept = preallocated(*stalled);
  ASSERT_GT(kept, 0U);
  const auto filler = fill_device(256 * kMiB);
  auto pin = must(stalled->pin_for_read(0, kMiB));
  const auto late = make();
  write(*late, 0, block(0));
  EXPECT_EQ(preallocated(*idle), 0U);
  EXPECT_FALSE(stalled->trim(kNoPatience));
  EXPECT_EQ(preallocated(*stalled), kept);
  ASSERT_TRUE(filler->allocate(filler->bytes_held(), 256 * kMiB - used(), true).ok());
  EXPECT_EQ(late->write(kGranule, block(1)).error(), ENOSPC);
  // It is as it was: readable, growing into what is preallocated.
  expect_blocks(*stalled);
  grow(*stalled, 18);
  EXPECT_EQ(preallocated(*stalled), kept - kGranule);
  // Nor does a call wait that takes memory away and itself waits for the user.
  std::thread punching([&] { EXPECT_TRUE(stalled->punch(0, kGranule).ok()); });
  while (!would_wait(*stalled)) std::this_thread::yield();
  EXPECT_FALSE(stalled->trim(kNoPatience));
  pin = {};
  punching.join();
  write(*late, kGranule, block(1));
  write(*late, 2 * kGranule, block(2));
  EXPECT_TRUE(contents(*late, 0, kMiB) == block(0));
  EXPECT_TRUE(stalled->trim(kNoPatience));
  EXPECT_EQ(stalled->bytes_held(), 17 * kGranule);
}

TEST_F(BufferPreallocationTest, AnAlmostFullDevicePreallocatesNothing) {
  start(1024 * kMiB);
  const auto buffer = grown(1);
  for (std::uint64_t granules = 2; granules <= 20; ++granules) {
    plan->populate.at(1, 1, ENOSPC);  // with what would be preallocated
    grow(*buffer, granules);
    EXPECT_EQ(plan->populate.calls(), 2);
    ASSERT_EQ(used(), granules * kGranule);
  }
  plan->populate.at(1, 2, ENOSPC);
  EXPECT_EQ(buffer->write(20 * kGranule, block(0)).error(), ENOSPC);
  plan->populate.clear();
  EXPECT_EQ(used(), 20 * kGranule);
  expect_blocks(*buffer);
}

TEST_F(BufferPreallocationTest, MemoryFromFallocateStays) {
  start(256 * kMiB);
  const auto buffer = make();
  write(*buffer, 0, block(0));
  ASSERT_TRUE(buffer->pin_for_write(0, 20 * kGranule).ok());
  ASSERT_TRUE(buffer->allocate(4 * kGranule + 5, kGranule, true).ok());  // two granules
  ASSERT_TRUE(buffer->zero_range(8 * kGranule, kGranule, true).ok());
  ASSERT_TRUE(buffer->allocate(10 * kGranule, 6 * kGranule, true).ok());
  ASSERT_TRUE(buffer->punch(12 * kGranule, kGranule).ok());
  ASSERT_TRUE(buffer->pin_for_write(12 * kGranule, kGranule).ok());
  ASSERT_TRUE(buffer->punch(18 * kGranule, kGranule).ok());
  ASSERT_TRUE(buffer->allocate(18 * kGranule, kGranule, true).ok());
  EXPECT_TRUE(buffer->trim(kNoPatience));
  EXPECT_EQ(buffer->bytes_held(), (1 + 2 + 1 + 5 + 1) * kGranule);
  EXPECT_EQ(used(), buffer->bytes_held());
  // All of that needs no further memory.
  const auto filler = fill_device(256 * kMiB);
  for (const std::uint64_t granule : {4, 5, 8, 15, 18}) write(*buffer, granule * kGranule, block(granule));
  EXPECT_EQ(buffer->write(12 * kGranule, block(0)).error(), ENOSPC);
  ASSERT_TRUE(filler->resize(0).ok());
  // Truncation releases that, too.
  ASSERT_TRUE(buffer->resize(0).ok());
  ASSERT_TRUE(buffer->pin_for_write(0, 20 * kGranule).ok());
  EXPECT_TRUE(buffer->trim(kNoPatience));
  EXPECT_EQ(buffer->bytes_held(), 0U);
  EXPECT_EQ(plan->memories, 0);
}

TEST_F(BufferPreallocationTest, FallocateKeepsWhatAFailedWriteLeft) {
  start(256 * kMiB);
  const auto buffer = make();
  ASSERT_TRUE(buffer->pin_for_write(0, 4 * kGranule).ok());
  ASSERT_TRUE(buffer->allocate(kGranule, 2 * kGranule, true).ok());
  EXPECT_TRUE(buffer->trim(kNoPatience));
  EXPECT_EQ(buffer->bytes_held(), 2 * kGranule);
  // Also if contents have been there in between.
  write(*buffer, 0, pattern(3 * kGranule, 1));
  ASSERT_TRUE(buffer->resize(0).ok());
  ASSERT_TRUE(buffer->pin_for_write(0, 4 * kGranule).ok());
  EXPECT_TRUE(buffer->trim(kNoPatience));
  EXPECT_EQ(buffer->bytes_held(), 0U);
}

TEST_F(BufferPreallocationTest, ASmallFileKeepsWhatFallocateAskedForWhenItMoves) {
  start(256 * kMiB, /*slab_file_bytes=*/65536);
  for (const bool allocated : {false, true}) {
    const auto buffer = make();
    ASSERT_TRUE(buffer->pin_for_write(0, 100).ok());
    if (allocated) {
      ASSERT_TRUE(buffer->allocate(0, 200, true).ok());
    }
    ASSERT_TRUE(buffer->pin_for_write(3 * kGranule, kMiB).ok());  // moves it out of its slot
    EXPECT_EQ(buffer->bytes_held(), 2 * kGranule);
    EXPECT_TRUE(buffer->trim(kNoPatience));
    EXPECT_EQ(buffer->bytes_held(), allocated ? kGranule : 0U);
  }
}

TEST_F(BufferPreallocationTest, MemoryThatAWriterUsesStays) {
  start(256 * kMiB, /*slab_file_bytes=*/65536);
  const auto buffer = make();
  write(*buffer, 0, pattern(100, 1));
  auto pin = buffer->pin_for_write(3 * kGranule, kMiB).take();
  ASSERT_TRUE(buffer->pin_for_write(0, 10 * kGranule).ok());
  EXPECT_TRUE(buffer->trim(kNoPatience));
  EXPECT_EQ(buffer->bytes_held(), 2 * kGranule);
  const auto data = block(1);
  ASSERT_TRUE(contexts[0]->device().copy_in(pin.pieces[0].address, data.data(), data.size()).ok());
  buffer->publish(3 * kGranule + kMiB);
  pin = {};
  EXPECT_TRUE(contents(*buffer, 3 * kGranule, kMiB) == data);
  EXPECT_TRUE(contents(*buffer, 0, 100) == pattern(100, 1));
  EXPECT_TRUE(buffer->trim(kNoPatience));
  EXPECT_EQ(buffer->bytes_held(), 2 * kGranule);
}

TEST_F(BufferPreallocationTest, MemoryOfALoadStaysUntilItEnds) {
  start(64 * kMiB);
  const auto buffer = make();
  {
    const auto loading = buffer->claim({0, 10 * kGranule});
    ASSERT_TRUE(buffer->pin_for_write(0, 10 * kGranule).ok());
    EXPECT_TRUE(buffer->trim(kNoPatience));
    EXPECT_EQ(buffer->bytes_held(), 10 * kGranule);
    const auto other = make();
    EXPECT_EQ(other->allocate(0, 23 * kGranule, true).error(), ENOSPC);
    EXPECT_EQ(buffer->bytes_held(), 10 * kGranule);
    // Only its own.
    ASSERT_TRUE(buffer->pin_for_write(12 * kGranule, kGranule).ok());
    EXPECT_TRUE(buffer->trim(kNoPatience));
    EXPECT_EQ(buffer->bytes_held(), 10 * kGranule);
    // It does not undo a truncation.
    write(*buffer, 0, block(0));
    ASSERT_TRUE(buffer->resize(kMiB / 2).ok());
    EXPECT_FALSE(buffer->publish(kMiB, loading.get()));
    EXPECT_EQ(buffer->size(), kMiB / 2);
    ASSERT_TRUE(buffer->resize(0).ok());
  }
  const auto other = make();
  EXPECT_TRUE(other->allocate(0, 23 * kGranule, true).ok());
  EXPECT_EQ(buffer->bytes_held(), 0U);
}

TEST_F(BufferPreallocationTest, ManyFilesGrowOnAFullDevice) {
  plan->span = 2 * kGranule;
  start(96 * kMiB);
  std::vector<std::thread> threads;
  for (unsigned index = 0; index < 3; ++index) {
    threads.emplace_back([&, index] {
      std::mt19937 random(index);
      for (int round = 0; round < 3; ++round) {
        const auto buffer = make(0, /*preallocates=*/true);
        for (std::uint64_t at = 0; at < 48 * kMiB; at += kMiB) {
          const Result<std::size_t> count = buffer->write(at, block(at));
          if (!count.ok()) {
            ASSERT_EQ(count.error(), ENOSPC);
            break;
          }
          if (random() % 16 == 0) (void)buffer->trim(kNoPatience);
        }
        expect_blocks(*buffer);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace gpufs::testing
