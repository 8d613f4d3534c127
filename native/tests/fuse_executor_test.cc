// The executor: lanes, waiting for memory, timers and cancellation.

#include "fuse/executor.h"

#include <dirent.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <utility>

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

TEST(ExecutorTest, JobsOfOneUserDoNotFillTheirLane) {
  Door door, first;
  Executor executor(Executor::Limits{.buffers = 8});
  std::atomic<int> of_others{0};
  const auto wait = [&](int, Cancellation&) { door.pass(); };
  executor.submit(kFirst, nullptr, {1, 0, 1000}, [&](int, Cancellation&) { first.pass(); });
  ASSERT_TRUE(first.await(1));
  for (std::uint64_t i = 2; i <= 20; ++i) executor.submit(kFirst, nullptr, {i, 0, 1000}, wait);
  ASSERT_TRUE(door.await(5));
  for (std::uint64_t i = 21; i <= 40; ++i) executor.submit(kFirst, nullptr, {i, 0, 1001}, wait);
  ASSERT_TRUE(door.await(7));  // the lane is full
  for (std::uint32_t user = 1002; user < 1006; ++user) {
    executor.submit(kFirst, nullptr, {user, 0, user}, [&](int, Cancellation&) { ++of_others; });
  }
  EXPECT_EQ(of_others, 0);
  first.open();
  EXPECT_TRUE(soon([&] { return of_others == 4; }));
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

std::size_t threads_of_process() {
  const std::unique_ptr<DIR, int (*)(DIR*)> threads(::opendir("/proc/self/task"), ::closedir);
  std::size_t count = 0;
  while (::readdir(threads.get()) != nullptr) ++count;
  return count;
}

// resumes: the device has released memory; else their time is over.
void run_many_at_once(bool resumes) {
  constexpr int kJobs = 300;
  std::atomic<int> parked{0};
  std::atomic<int> ended{0};
  const std::size_t before = threads_of_process();
  Executor executor(Executor::Limits{.buffers = 4});
  const auto time = std::chrono::steady_clock::now() + (resumes ? std::chrono::milliseconds(kPatience) : 500ms);
  for (std::uint64_t i = 1; i <= kJobs; ++i) {
    executor.submit(kFirst, nullptr, i,
                    [&, first = true](int, Cancellation&) mutable -> std::optional<Executor::TimePoint> {
                      if (std::exchange(first, false)) {
                        ++parked;
                        return time;
                      }
                      std::this_thread::sleep_for(1ms);
                      ++ended;
                      return std::nullopt;
                    });
  }
  ASSERT_TRUE(soon([&] { return parked == kJobs; }));
  if (resumes) executor.resume(0);
  std::size_t most = 0;
  EXPECT_TRUE(soon([&] {
    most = std::max(most, threads_of_process());
    return ended == kJobs;
  }));
  EXPECT_LE(most - before, 6U);
}

TEST(ExecutorTest, ThereAreOnlyAsManyThreadsAsJobsMayRun) {
  run_many_at_once(true);
  run_many_at_once(false);
}

TEST(ExecutorTest, NotificationsThatMakeNoProgressDelayTheirInodeAndOwnerAlone) {
  constexpr auto kNotifications = Executor::Lane::Kind::kNotifications;
  Door door;
  Executor executor(Executor::Limits{});
  ASSERT_TRUE(executor.start().ok());
  const int subjects[12] = {};
  for (std::uint64_t i = 0; i < 20; ++i) {
    executor.submit({kNotifications, -1, 1}, &subjects[0], i, [&](int, Cancellation&) { door.pass(); });
  }
  ASSERT_TRUE(door.await(1));
  std::atomic<int> others{0};
  executor.submit({kNotifications, -1, 1}, &subjects[11], 20, [&](int, Cancellation&) { ++others; });
  EXPECT_TRUE(soon([&] { return others == 1; }));
  for (std::uint64_t i = 1; i < 11; ++i) {
    executor.submit({kNotifications, -1, 1}, &subjects[i], 20 + i, [&](int, Cancellation&) { door.pass(); });
  }
  ASSERT_TRUE(door.await(4));
  executor.submit({kNotifications, -1, 2}, nullptr, 31, [&](int, Cancellation&) { ++others; });
  EXPECT_TRUE(soon([&] { return others == 2; }));
  EXPECT_EQ(door.waiting(), 4);
  door.open();
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
