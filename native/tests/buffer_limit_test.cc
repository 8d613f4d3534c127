// Buffers whose memory is charged to accounts with limits: what fails at a limit, and what is charged when.

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "buffer_fixture.h"
#include "memory/account.h"

namespace gpufs::testing {
namespace {

class BufferLimitTest : public BufferFixture {
 protected:
  void TearDown() override {
    EXPECT_EQ(account->used(), 0U);
    expect_nothing_left();
  }

  std::shared_ptr<Buffer> charged(const std::shared_ptr<Account>& to, Charge::Payer payer = Charge::kOwner) {
    std::shared_ptr<Buffer> buffer = make();
    buffer->charge().move(payer, to);
    return buffer;
  }
  // Grows a buffer that preallocates.
  static void grow(Buffer& buffer, std::uint64_t granules) {
    buffer.preallocate_on_growth();
    while (buffer.size() < granules * kGranule) write(buffer, buffer.size(), pattern(kMiB, 1));
  }

  std::shared_ptr<Account> account = std::make_shared<Account>("somebody", 4 * kGranule);
};

TEST_F(BufferLimitTest, WhatTakesMemoryFailsAtTheLimitAndChangesNothing) {
  using Call = std::function<Status(Buffer&)>;
  const std::vector<std::byte> data = pattern(kGranule, 2);
  const std::vector<Call> calls{
      [&](Buffer& late) { return late.write(5, data).status(); },
      [&](Buffer& late) { return late.write(0, std::span(data).first(100)).status(); },
      [&](Buffer& late) { return late.pin_for_write(0, kMiB).status(); },
      [&](Buffer& late) { return late.populate(0, kMiB); },
      [&](Buffer& late) { return late.allocate(0, kMiB, false); },
      [&](Buffer& late) { return late.zero_range(0, kMiB, true); },
      [&](Buffer& late) {
        EXPECT_TRUE(late.resize(kMiB).ok());
        const Status status = late.lease(true, true, "").status();
        EXPECT_TRUE(late.resize(0).ok());
        return status;
      },
  };
  start(64 * kGranule, /*slab_file_bytes=*/65536);
  const auto source = make();
  write(*source, 0, data);
  for (const Charge::Payer payer : {Charge::kOwner, Charge::kDirectory}) {
    const auto filler = charged(account, payer);
    ASSERT_TRUE(filler->allocate(0, 4 * kGranule, false).ok());
    const auto other = std::make_shared<Account>("somebody else");
    const auto late = charged(account, payer);
    late->charge().move(payer == Charge::kOwner ? Charge::kDirectory : Charge::kOwner, other);
    for (const Call& call : calls) {
      EXPECT_EQ(call(*late).error(), EDQUOT);
      EXPECT_EQ(late->size(), 0U);
      EXPECT_EQ(late->bytes_held(), 0U);
      EXPECT_EQ(other->used(), 0U);
      EXPECT_EQ(account->used(), 4 * kGranule);
    }
    EXPECT_EQ(late->copy_from(*source, 0, 0, kGranule, nullptr).error(), EDQUOT);
    write(*filler, kGranule - 5, data);  // memory that exists
    ASSERT_TRUE(filler->punch(0, kGranule).ok());
    write(*late, 0, data);
    EXPECT_EQ(other->used(), kGranule);
  }
}

TEST_F(BufferLimitTest, SmallFilesAreChargedTheirSlots) {
  start(64 * kGranule, /*slab_file_bytes=*/65536);
  account->set_limit(65536 + 512);
  const auto one = charged(account);
  write(*one, 0, pattern(512, 1));
  const auto other = charged(account);
  write(*other, 0, pattern(32768, 2));
  EXPECT_EQ(account->used(), 512U + 32768U);
  write(*other, 0, pattern(65536, 2));
  EXPECT_EQ(account->used(), 512U + 65536U);
  EXPECT_EQ(one->write(512, pattern(1, 1)).error(), EDQUOT);
  EXPECT_EQ(other->write(65536, pattern(1, 1)).error(), EDQUOT);
  EXPECT_EQ(account->used(), one->bytes_held() + other->bytes_held());
  EXPECT_TRUE(contents(*other) == pattern(65536, 2));
  account->set_limit(kGranule + 512);
  write(*other, 65536, pattern(1, 1));
  EXPECT_EQ(account->used(), kGranule + 512);
}

TEST_F(BufferLimitTest, AnUnboundedAllocationIsCutByTheLimitAlone) {
  start(64 * kGranule);
  const auto buffer = charged(account);
  EXPECT_EQ(buffer->charge().room(), 4 * kGranule);
  EXPECT_EQ(buffer->allocate(0, 5 * kGranule, false).error(), EDQUOT);
  EXPECT_EQ(buffer->bytes_held(), 0U);
  ASSERT_TRUE(buffer->allocate(0, 4 * kGranule, false).ok());
  EXPECT_EQ(buffer->charge().room(), 0U);
  account->set_limit(kGranule);  // takes nothing away
  EXPECT_EQ(account->used(), 4 * kGranule);
  EXPECT_EQ(buffer->charge().room(), 0U);
  ASSERT_TRUE(buffer->resize(kGranule).ok());
  EXPECT_EQ(account->used(), kGranule);
}

TEST_F(BufferLimitTest, PreallocationShrinksInsteadOfFailing) {
  plan->cpu_addressable = false;
  start(512 * kGranule);
  account->set_limit(64 * kGranule);
  const auto first = charged(account);
  grow(*first, 33);
  EXPECT_GT(first->bytes_held(), 33 * kGranule);
  EXPECT_EQ(account->used(), first->bytes_held());
  const auto stranger = make();
  grow(*stranger, 33);
  const std::uint64_t strangers = stranger->bytes_held();
  ASSERT_GT(strangers, 33 * kGranule);
  const auto second = charged(account);
  grow(*second, 31);  // with what the first one had preallocated
  EXPECT_EQ(account->used(), 64 * kGranule);
  EXPECT_EQ(second->write(31 * kGranule, pattern(1, 1)).error(), EDQUOT);
  EXPECT_EQ(stranger->bytes_held(), strangers);
}

TEST_F(BufferLimitTest, ADriversFailureIsNotCharged) {
  start(64 * kGranule);
  const auto buffer = charged(account);
  write(*buffer, 0, pattern(kMiB, 1));
  plan->populate.at(1, 1);
  EXPECT_EQ(buffer->allocate(kGranule, kGranule, false).error(), EIO);
  EXPECT_EQ(account->used(), kGranule);
  plan->populate.clear();
}

TEST_F(BufferLimitTest, ALeaseKeepsTheCharge) {
  start(64 * kGranule);
  auto buffer = charged(account);
  write(*buffer, 0, pattern(kGranule, 1));
  auto lease = buffer->lease(false, true, "").take();
  buffer.reset();
  EXPECT_EQ(account->used(), kGranule);
  lease.reset();
  EXPECT_EQ(account->used(), 0U);
}

TEST_F(BufferLimitTest, ThreadsNeverExceedALimitTogether) {
  start(256 * kGranule);
  account->set_limit(20 * kGranule);
  std::atomic<bool> exceeded{false};
  std::vector<std::shared_ptr<Buffer>> buffers;
  for (int number = 0; number < 6; ++number) buffers.push_back(charged(account));
  std::vector<std::jthread> threads;
  for (const auto& buffer : buffers) {
    threads.emplace_back([&] {
      for (unsigned round = 0; round < 300; ++round) {
        const Status status = buffer->allocate((round % 7) * kGranule, 2 * kGranule, true);
        if (!status.ok() && status.error() != EDQUOT) exceeded = true;
        if (account->used() > account->limit()) exceeded = true;
        if (round % 3 == 0 && !buffer->punch(0, 5 * kGranule).ok()) exceeded = true;
      }
    });
  }
  threads.clear();
  EXPECT_FALSE(exceeded);
  std::uint64_t held = 0;
  for (const auto& buffer : buffers) held += buffer->bytes_held();
  EXPECT_EQ(account->used(), held);
}

}  // namespace
}  // namespace gpufs::testing
