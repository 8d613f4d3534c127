// Failures of copies and fills under a Buffer: the file stays as it was, and nothing leaks. The random test has those
// of allocations.

#include <gtest/gtest.h>

#include <cerrno>
#include <future>
#include <memory>
#include <vector>

#include "buffer_fixture.h"

namespace gpufs::testing {
namespace {

class BufferFaultsTest : public BufferFixture, public ::testing::WithParamInterface<std::uint64_t> {
 protected:
  void SetUp() override { start(64 * kMiB, GetParam(), 2); }
  void TearDown() override {
    buffer.reset();
    other.reset();
    expect_nothing_left();
    // The slabs' own memory stays with the pool, empty.
    EXPECT_LE(plan->memories, 2);
  }
  void prepare(std::size_t bytes) {
    buffer = make();
    data = pattern(bytes, 1);
    write(*buffer, 0, data);
    held = buffer->bytes_held();
  }
  void expect_unchanged() {
    EXPECT_EQ(buffer->bytes_held(), held);
    EXPECT_TRUE(contents(*buffer) == data);
    // Nothing that a failure left shows up later.
    const std::uint64_t size = buffer->size();
    ASSERT_TRUE(buffer->resize(size + 20 * kMiB).ok());
    EXPECT_TRUE(all_zero(contents(*buffer, size, 20 * kMiB)));
    ASSERT_TRUE(buffer->resize(size).ok());
    EXPECT_TRUE(contents(*buffer) == data);
  }
  std::shared_ptr<ExtentBuffer> buffer;
  std::shared_ptr<ExtentBuffer> other;
  std::vector<std::byte> data;
  std::uint64_t held = 0;
};

TEST_P(BufferFaultsTest, AWriteFailsHalfWay) {
  prepare(100);
  plan->copy_in.at(1);
  const Result<std::size_t> count = buffer->write(100, pattern(kMiB, 2));
  EXPECT_EQ(count.error(), EIO);
  EXPECT_EQ(count.status().device_code(), 700);
  held = buffer->bytes_held();  // memory that was taken for it may stay until trim()
  expect_unchanged();
}

TEST_P(BufferFaultsTest, ZeroingFailsInAShrink) {
  prepare(5 * kMiB);
  plan->zero.at(1);
  EXPECT_EQ(buffer->resize(kMiB).error(), EIO);
  plan->zero.clear();
  expect_unchanged();
  plan->zero.at(1);
  EXPECT_EQ(buffer->punch(kMiB, 3 * kMiB).error(), EIO);
  plan->zero.clear();
  expect_unchanged();
}

TEST_P(BufferFaultsTest, WhatMayNotWaitDoesNotWaitForASlabThatIsReleased) {
  if (GetParam() == 0) return;
  SlabPool& slabs = *contexts[0]->slabs();
  std::vector<std::shared_ptr<const SlabPool::Slot>> slots;  // of two slabs, one of which is kept
  while (slots.size() * GetParam() <= contexts[0]->info().granule) slots.push_back(slabs.take(GetParam()).take());
  int error = 0;
  plan->on_release = [&] {
    error = std::async(std::launch::async, [&] { return slabs.take(1, {}, true, Wait::kForbidden).error(); }).get();
  };
  slots.clear();
  plan->on_release = nullptr;
  EXPECT_EQ(error, EAGAIN);
}

TEST_P(BufferFaultsTest, MovingOutOfASlotFails) {
  if (GetParam() == 0) return;
  prepare(300);
  plan->copy_within.at(1, 2);  // to a larger slot, and then to memory of its own
  EXPECT_EQ(buffer->write(300, pattern(1000, 2)).error(), EIO);
  EXPECT_EQ(buffer->bytes_held(), 512U);
  plan->copy_within.at(1);
  EXPECT_EQ(buffer->write(300, pattern(kMiB, 2)).error(), EIO);  // to memory of its own
  plan->copy_within.at(1);
  EXPECT_EQ(buffer->lease(true, false, "").error(), EIO);
  plan->populate.at(1, 10, ENOSPC);
  EXPECT_EQ(buffer->write(300, pattern(kMiB, 2)).error(), ENOSPC);
  plan->populate.clear();
  plan->sharing.at(1, 1, EOPNOTSUPP);
  EXPECT_EQ(buffer->lease(true, true, "").error(), EOPNOTSUPP);
  plan->populate.at(1, 10, ENOSPC);
  EXPECT_EQ(buffer->lease(true, true, "").error(), ENOSPC);
  plan->populate.clear();
  expect_unchanged();
}

TEST_P(BufferFaultsTest, ACopyFails) {
  prepare(3 * kMiB);
  other = make(1);
  write(*other, 0, data);
  plan->peer.at(1);
  EXPECT_EQ(buffer->copy_from(*other, 0, 3 * kMiB, 3 * kMiB, nullptr).error(), EIO);
  plan->peer.clear();
  held = buffer->bytes_held();
  EXPECT_TRUE(contents(*buffer) == data);
  ASSERT_TRUE(buffer->resize(6 * kMiB).ok());
  EXPECT_TRUE(all_zero(contents(*buffer, 3 * kMiB, 3 * kMiB)));
}

INSTANTIATE_TEST_SUITE_P(Slabs, BufferFaultsTest, ::testing::Values(0, 65536),
                         [](const ::testing::TestParamInfo<std::uint64_t>& slabs) {
                           return slabs.param == 0 ? "off" : "on";
                         });

}  // namespace
}  // namespace gpufs::testing
