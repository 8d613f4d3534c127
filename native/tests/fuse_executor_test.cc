// The executor: lanes, waiting for memory, timers and cancellation.

#include "fuse/executor.h"

#include <gtest/gtest.h>

#include <atomic>

#include "fuse_fakes.h"
#include "no_more_threads.h"

namespace gpufs::fuse {
namespace {

const Executor::Lane kFirst{Executor::Lane::Kind::kBuffers, 0, 0};

TEST(ExecutorTest, ThrowingJobsDoNotEndTheWorker) {
  Executor executor(Executor::Limits{.buffers = 1});
  std::atomic<bool> after{false};
  executor.submit(kFirst, nullptr, 1, [](int, Cancellation&) { throw std::bad_alloc(); });
  executor.submit(kFirst, nullptr, 2, [&](int, Cancellation&) { after = true; });
  EXPECT_TRUE(soon([&] { return after.load(); }));
}

TEST(ExecutorTest, JobsOnOneSubjectDoNotFillTheirLane) {
  Door door;
  Executor executor(Executor::Limits{.buffers = 3, .same_subject = 2});
  const int subject = 0;
  for (std::uint64_t i = 0; i < 10; ++i) executor.submit(kFirst, &subject, i, [&](int, Cancellation&) { door.pass(); });
  ASSERT_TRUE(door.await(2));
  std::atomic<bool> other{false};
  executor.submit(kFirst, &other, 10, [&](int, Cancellation&) { other = true; });
  EXPECT_TRUE(soon([&] { return other.load(); }));
  door.open();
}

TEST(ExecutorTest, AJobThatIsCancelledWhileItRunsIsNotParked) {
  Door door;
  Executor executor(Executor::Limits{});
  std::atomic<int> refused{0};
  executor.submit(kFirst, nullptr, 1, [&](int refusal, Cancellation&) -> std::optional<Executor::TimePoint> {
    refused = refusal;
    if (refusal != 0) return std::nullopt;
    door.pass();
    return std::chrono::steady_clock::now() + kPatience;
  });
  ASSERT_TRUE(door.await(1));
  EXPECT_EQ(executor.cancel(1), Executor::Cancelled::kRunning);
  door.open();
  EXPECT_TRUE(soon([&] { return refused == EINTR; }));
}

TEST(ExecutorTest, JobsThatHangLeaveAThreadToOthers) {
  Door door;
  Executor executor(Executor::Limits{});
  ASSERT_TRUE(executor.start().ok());
  const testing::NoMoreThreads none;
  for (std::uint64_t i = 1; i <= 4; ++i) {
    executor.submit({Executor::Lane::Kind::kFiles, -1, i}, nullptr, i, [&](int refusal, Cancellation&) {
      if (refusal == 0) door.pass();
    });
  }
  ASSERT_TRUE(door.await(1));
  std::atomic<bool> other{false};
  executor.submit(kFirst, nullptr, 9, [&](int, Cancellation&) { other = true; });
  EXPECT_TRUE(soon([&] { return other.load(); }));
  door.open();
  EXPECT_EQ(executor.stop(kPatience), 0U);
}

TEST(ExecutorTest, TimersRunAtTheirTimesUntilTheyEnd) {
  Executor executor(Executor::Limits{});
  std::atomic<int> runs{0};
  const auto start = std::chrono::steady_clock::now();
  executor.submit_at(start + 20ms, [&](int refusal, Cancellation&) -> std::optional<Executor::TimePoint> {
    EXPECT_EQ(refusal, 0);
    EXPECT_GE(std::chrono::steady_clock::now(), start + 20ms);
    if (++runs == 3) return std::nullopt;
    return std::chrono::steady_clock::now() + 1ms;
  });
  EXPECT_TRUE(soon([&] { return runs == 3; }));
  std::atomic<int> refused{0};
  executor.submit_at(start + kPatience, [&](int refusal, Cancellation&) { refused = refusal; });
  executor.stop(0ms);
  EXPECT_EQ(refused, EINTR);
}

}  // namespace
}  // namespace gpufs::fuse
