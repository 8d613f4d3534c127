// Which jobs get a thread: shares of clients and groups, turns, and threads that are left behind.
#include "io/scheduler.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include "waiting.h"

namespace gpufs {
namespace {

using std::chrono::milliseconds;
using testing::kPatience;
using testing::soon;

constexpr int kShare = 2;
constexpr int kSpare = 1;
constexpr std::uint64_t kDisk = 42;  // a group

// Occupies its threads until it is released.
class FakeJob final : public Scheduler::Job {
 public:
  FakeJob(std::uint64_t client, std::uint64_t group, int threads = 1) : Job(client, group) {
    set_useful_threads(threads);
  }
  void serve(const Scheduler::Turn& turn) override {
    ++serving;
    ++served;
    while (!released && (stays || !turn.over())) std::this_thread::sleep_for(milliseconds(1));
    if (released) set_useful_threads(0);
    --serving;
  }

  std::atomic<int> serving{0};
  std::atomic<int> served{0};
  std::atomic<bool> released{false};
  bool stays = true;  // although its turn is over, as a thread that hangs in a file
};

class SchedulerTest : public ::testing::Test {
 protected:
  ~SchedulerTest() override {
    for (const auto& job : jobs) job->released = true;
    EXPECT_EQ(scheduler->shutdown(kPatience, kPatience), 0);
  }
  FakeJob& add(std::uint64_t client, std::uint64_t group = Scheduler::Job::kNeverStalls, int threads = 1,
               bool stays = true) {
    jobs.push_back(std::make_shared<FakeJob>(client, group, threads));
    jobs.back()->stays = stays;
    EXPECT_TRUE(scheduler->submit(jobs.back()).ok());
    return *jobs.back();
  }
  [[nodiscard]] int serving() const {
    int sum = 0;
    for (const auto& job : jobs) sum += job->serving;
    return sum;
  }
  // The number of threads that serve anything, once it has settled.
  int settled(int expected) {
    EXPECT_TRUE(soon([&] { return serving() == expected; })) << serving();
    std::this_thread::sleep_for(milliseconds(20));
    return serving();
  }

  const std::shared_ptr<Scheduler> scheduler = Scheduler::create(-1, kShare, kSpare);
  std::vector<std::shared_ptr<FakeJob>> jobs;
};

TEST_F(SchedulerTest, AClientGetsItsShareAndOthersTheSpareThreads) {
  const FakeJob& large = add(1, Scheduler::Job::kNeverStalls, 8);
  EXPECT_EQ(settled(kShare), kShare);
  EXPECT_EQ(large.serving, kShare);
  const FakeJob& next = add(1);
  EXPECT_EQ(settled(kShare), kShare);
  EXPECT_EQ(next.serving, 0);
  const FakeJob& other = add(2);
  EXPECT_EQ(settled(kShare + kSpare), kShare + kSpare);
  EXPECT_EQ(other.serving, 1);
}

TEST_F(SchedulerTest, AGroupGetsAsManyThreadsAsOneClient) {
  for (const std::uint64_t group : {kDisk, Scheduler::Job::kMayHang}) {
    for (std::uint64_t client = 1; client <= 4; ++client) add(client, group);
    EXPECT_EQ(settled(kShare), kShare);
    const FakeJob& elsewhere = add(9, kDisk + 1);
    EXPECT_TRUE(soon([&] { return elsewhere.serving == 1; }));
    for (const auto& job : jobs) job->released = true;
    EXPECT_TRUE(soon([&] { return serving() == 0; }));
    jobs.clear();
  }
}

TEST_F(SchedulerTest, ManyJobsTakeTurns) {
  for (std::uint64_t client = 1; client <= 6; ++client) add(client, Scheduler::Job::kNeverStalls, 1, /*stays=*/false);
  for (const auto& job : jobs) EXPECT_TRUE(soon([&] { return job->served > 0; }));
}

TEST_F(SchedulerTest, WhatIsReleasedIsDestroyedByItsThreads) {
  auto job = std::make_shared<FakeJob>(1, Scheduler::Job::kMayHang);
  const std::weak_ptr<FakeJob> watched = job;
  job->released = true;
  ASSERT_TRUE(scheduler->submit(job).ok());
  scheduler->release(std::move(job));
  EXPECT_TRUE(soon([&] { return watched.expired(); }));
}

TEST(SchedulerEnds, ThreadsThatHangAreLeftBehind) {
  const std::shared_ptr<Scheduler> scheduler = Scheduler::create(-1, kShare, kSpare);
  const auto hangs = std::make_shared<FakeJob>(1, Scheduler::Job::kMayHang);
  const auto ends = std::make_shared<FakeJob>(2, kDisk);
  ends->stays = false;
  ASSERT_TRUE(scheduler->submit(hangs).ok());
  ASSERT_TRUE(scheduler->submit(ends).ok());
  EXPECT_TRUE(soon([&] { return hangs->serving == 1 && ends->serving == 1; }));
  EXPECT_EQ(scheduler->shutdown(kPatience, milliseconds(20)), 1);
  EXPECT_EQ(scheduler->submit(ends).error(), ESHUTDOWN);
  const std::weak_ptr<Scheduler> watched = scheduler;
  hangs->released = true;
  EXPECT_TRUE(soon([&] { return watched.use_count() == 1; }));  // that of this test
}

}  // namespace
}  // namespace gpufs
