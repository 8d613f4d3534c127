// Buffers on the CUDA driver over the fake library: copies within the device, what cancels or breaks them, and changes
// of the memory at the same time.

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <random>
#include <thread>

#include "buffer_fixture.h"
#include "fake_vendors.h"

namespace gpufs::cuda_test {
namespace {

using testing::contents;

constexpr std::uint64_t kChunk = kMiB;
constexpr const char* kCopy = "cuMemcpyDtoDAsync_v2";
constexpr int kInvalidValue = 1;

class BufferGpuTest : public FakeCuda {
 protected:
  void start(const FakeGpuSetup& setup = {}) {
    open(setup);
    shared_ = std::shared_ptr<Driver>(std::move(driver_));
    for (int index = 0; index < setup.devices; ++index) {
      contexts_.push_back(must(DeviceContext::create(shared_, static_cast<std::size_t>(index), kChunk)));
    }
  }
  void stop() {
    contexts_.clear();
    shared_.reset();
  }
  void TearDown() override {
    stop();
    FakeCuda::TearDown();
  }

  std::shared_ptr<ExtentBuffer> make(std::size_t device = 0, bool preallocates = false) {
    return std::make_shared<ExtentBuffer>(contexts_.at(device), preallocates);
  }
  std::shared_ptr<ExtentBuffer> filled(const std::vector<std::byte>& data, std::size_t device = 0) {
    const std::shared_ptr<ExtentBuffer> buffer = make(device);
    EXPECT_EQ(must(buffer->write(0, data)), data.size());
    return buffer;
  }
  static std::vector<std::byte> front(const std::vector<std::byte>& data, std::uint64_t bytes) {
    return {data.begin(), data.begin() + static_cast<std::ptrdiff_t>(bytes)};
  }
  std::shared_ptr<Driver> shared_;
  std::vector<std::shared_ptr<DeviceContext>> contexts_;
};

TEST_F(BufferGpuTest, ACancelledCopyCountsWholeChunks) {
  start();
  const auto data = pattern(20 * kChunk, 1);
  const auto from = filled(data);
  const auto to = make();
  ASSERT_OK(to->allocate(0, data.size(), true));
  std::atomic<bool> cancelled{false};
  std::uint64_t copied = 0;
  fake().hold(true);
  const int before = fake().calls(kCopy);
  std::thread copying([&] { copied = must(to->copy_from(*from, 0, 0, data.size(), &cancelled)); });
  while (fake().calls(kCopy) == before) std::this_thread::yield();
  EXPECT_EQ(to->size(), 0U);  // nothing counts before it is there
  cancelled = true;
  fake().hold(false);
  copying.join();
  EXPECT_EQ(copied, kChunk);
  EXPECT_EQ(to->size(), copied);
  EXPECT_TRUE(contents(*to) == front(data, copied));
  EXPECT_EQ(to->copy_from(*from, 0, 0, data.size(), &cancelled).error(), ECANCELED);
}

TEST_F(BufferGpuTest, ACopyThatFailsCountsWhatCameBefore) {
  start();
  const auto data = pattern(8 * kChunk, 1);
  const auto from = filled(data);
  const auto to = make();
  ASSERT_OK(to->allocate(0, data.size(), true));
  fake().fail(kCopy, 3, kInvalidValue, 1);
  EXPECT_EQ(must(to->copy_from(*from, 0, 0, data.size(), nullptr)), 2 * kChunk);
  EXPECT_EQ(to->size(), 2 * kChunk);
  ASSERT_OK(to->resize(data.size()));
  EXPECT_TRUE(contents(*to, 0, 2 * kChunk) == front(data, 2 * kChunk));
  EXPECT_TRUE(contents(*to, 2 * kChunk, data.size()) == std::vector<std::byte>(data.size() - 2 * kChunk));
  fake().fail(kCopy, 1, kInvalidValue, 1);
  EXPECT_EQ(to->copy_from(*from, 0, 0, data.size(), nullptr).error(), EIO);
}

TEST_F(BufferGpuTest, AFullDeviceEndsACopyWithWhatFitted) {
  FakeGpuSetup setup;
  setup.memory_bytes = 16 * kMiB;
  start(setup);
  const auto data = pattern(9 * kMiB, 1);
  const auto from = filled(data);  // ten of sixteen
  const auto to = make();
  ASSERT_OK(to->allocate(0, 4 * kMiB, true));
  EXPECT_EQ(must(to->copy_from(*from, 0, 0, data.size(), nullptr)), 6 * kMiB);
  EXPECT_EQ(to->size(), 6 * kMiB);
  EXPECT_TRUE(contents(*to) == front(data, 6 * kMiB));
  EXPECT_EQ(to->copy_from(*from, 0, 6 * kMiB, kMiB, nullptr).error(), ENOSPC);
}

// A call that takes memory away waits for the chunk of a copy that uses it, and not for the whole copy.
TEST_F(BufferGpuTest, MemoryIsTakenAwayDuringACopy) {
  start();
  constexpr std::uint64_t kBytes = 32 * kChunk;
  const auto data = pattern(kBytes, 1);
  const auto from = filled(data);
  const auto to = filled(pattern(kBytes, 2));
  std::atomic<bool> end{false};
  std::thread shrinking([&] {
    std::mt19937 random(1);
    while (!end) {
      EXPECT_OK(to->resize(random() % kBytes));
      EXPECT_OK(to->punch(random() % 8 * kGranule, kGranule));
    }
  });
  std::thread punching([&] {
    std::mt19937 random(2);
    while (!end) {
      EXPECT_OK(from->punch(random() % 16 * kGranule, 2 * kGranule));
      EXPECT_OK(from->allocate(random() % 16 * kGranule, kGranule, true));
      EXPECT_OK(from->resize(random() % 2 == 0 ? 20 * kChunk : kBytes));
    }
  });
  for (int round = 0; round < (testing::kSanitized ? 10 : 60); ++round) {
    must(to->copy_from(*from, 0, 0, kBytes, nullptr));
  }
  end = true;
  shrinking.join();
  punching.join();
  ASSERT_OK(to->resize(0));
  ASSERT_OK(from->resize(0));
  ASSERT_EQ(must(from->write(0, data)), data.size());
  ASSERT_EQ(must(to->copy_from(*from, 0, 0, kBytes, nullptr)), kBytes);
  EXPECT_TRUE(testing::same_bytes(contents(*to), data));
}

// Growth that fails releases what it had taken. That may share a piece of memory with what others read, which the
// driver then moves.
TEST_F(BufferGpuTest, AFailedGrowthMovesNothingUnderAReader) {
  for (int round = 0; round < (testing::kSanitized ? 4 : 20); ++round) {
    FakeGpuSetup setup;
    setup.memory_bytes = 16 * kMiB;
    start(setup);
    {
      const auto data = pattern(8 * kMiB, 1);
      const auto buffer = filled(data);
      const auto filler = make();
      ASSERT_OK(filler->allocate(0, 8 * kMiB, true));
      ASSERT_OK(buffer->punch(kGranule, kGranule));  // with no room for moving the rest, it stays where it is
      ASSERT_OK(filler->resize(0));
      std::atomic<bool> end{false};
      std::thread reading([&] {
        while (!end) EXPECT_TRUE(contents(*buffer, 2 * kGranule, kGranule / 8)[0] == data[2 * kGranule]);
      });
      EXPECT_EQ(buffer->allocate(0, 18 * kMiB, true).error(), ENOSPC);
      end = true;
      reading.join();
      EXPECT_EQ(buffer->bytes_held(), 6 * kMiB);
      EXPECT_EQ(buffer->seek_hole(0).value(), kGranule);
      ASSERT_OK(buffer->allocate(0, 16 * kMiB, true));
      EXPECT_TRUE(contents(*buffer, 2 * kGranule, 4 * kMiB) ==
                  std::vector<std::byte>(data.begin() + 2 * kGranule, data.end()));
    }
    stop();
  }
}

// Preallocated memory shares a piece with the file's end, and is released all the same: also when the device is full.
TEST_F(BufferGpuTest, PreallocatedMemoryIsReleasedFromAFullDevice) {
  FakeGpuSetup setup;
  setup.memory_bytes = 1024 * kMiB;
  start(setup);
  const auto data = pattern(kMiB, 1);
  const auto buffer = make(0, /*preallocates=*/true);
  for (std::uint64_t at = 0; at < 70 * kMiB; at += kMiB) ASSERT_EQ(must(buffer->write(at, data)), data.size());
  ASSERT_GT(buffer->bytes_held(), 70 * kMiB);
  EXPECT_EQ(fake_state().bytes_used, buffer->bytes_held());
  EXPECT_LT(fake().calls("cuMemCreate"), 12);
  const auto other = make();
  ASSERT_OK(other->allocate(0, 954 * kMiB, true));
  EXPECT_EQ(buffer->bytes_held(), 70 * kMiB);
  EXPECT_EQ(fake_state().bytes_used, 1024 * kMiB);
  for (std::uint64_t at = 0; at < 70 * kMiB; at += kMiB)
    ASSERT_TRUE(testing::same_bytes(contents(*buffer, at, kMiB), data)) << at;
}

TEST_F(BufferGpuTest, ACopyBetweenDevicesThatEndsEarlyReleasesMemoryThatItDidNotUse) {
  FakeGpuSetup setup;
  setup.devices = 2;
  start(setup);
  const auto data = pattern(8 * kGranule, 1);
  const auto from = filled(data, 0);
  const auto to = make(1);
  const std::atomic<bool> cancelled{true};
  EXPECT_EQ(to->copy_from(*from, 0, 0, data.size(), &cancelled).error(), ECANCELED);
  EXPECT_EQ(to->bytes_held(), 0U);
  // The fifth chunk fails, when memory for the sixth has been taken.
  fake().fail("cuMemcpyPeerAsync", 5, kInvalidValue, 1);
  EXPECT_EQ(must(to->copy_from(*from, 0, 0, data.size(), nullptr)), 4 * kChunk);
  EXPECT_EQ(to->size(), 4 * kChunk);
  EXPECT_EQ(to->bytes_held(), 4 * kChunk);
  EXPECT_TRUE(contents(*to) == front(data, 4 * kChunk));
}

TEST_F(BufferGpuTest, ACopyToAFullDeviceCopiesWhatFits) {
  FakeGpuSetup setup;
  setup.devices = 2;
  setup.memory_bytes = 16 * kMiB;
  start(setup);
  const auto data = pattern(5 * kGranule, 1);
  const auto from = filled(data, 0);
  const auto filler = make(1);
  ASSERT_OK(filler->allocate(0, 10 * kMiB, true));
  const auto to = make(1);
  const std::uint64_t copied = must(to->copy_from(*from, 0, 0, data.size(), nullptr));
  EXPECT_EQ(copied, 3 * kGranule);
  EXPECT_TRUE(contents(*to) == front(data, copied));
  EXPECT_EQ(to->bytes_held(), copied);
}

}  // namespace
}  // namespace gpufs::cuda_test
