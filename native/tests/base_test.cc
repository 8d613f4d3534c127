// Status, log lines, threads, workers.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <latch>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "base/log.h"
#include "base/status.h"
#include "base/thread.h"
#include "base/worker.h"
#include "memory/account.h"
#include "no_more_threads.h"

namespace gpufs {
namespace {

TEST(StatusTest, KeepsErrnoAndDeviceCodeApart) {
  const Status status(EIO, "copying", 719);
  EXPECT_FALSE(status.ok());
  const Status seen = status.with_context("reading file 7");
  EXPECT_EQ(seen.error(), EIO);
  EXPECT_EQ(seen.device_code(), 719);
  EXPECT_EQ(seen.message(), "reading file 7: copying");
  EXPECT_TRUE(Status().with_context("anything").ok());
  EXPECT_EQ(Status::from_errno(ENOENT, "opening x").message(), "opening x: No such file or directory");
}

class LogTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(::pipe2(pipe_, O_CLOEXEC | O_NONBLOCK), 0); }
  void TearDown() override {
    log_configure(-1, LogLevel::kInfo);
    ::close(pipe_[0]);
    ::close(pipe_[1]);
  }
  std::string written() {
    char text[32'768] = {};
    const ssize_t count = ::read(pipe_[0], text, sizeof text);
    return count < 0 ? "" : std::string(text, static_cast<std::size_t>(count));
  }
  int pipe_[2] = {-1, -1};
};

TEST_F(LogTest, LinesHaveTheFormatOfPythonsLogging) {
  log_configure(pipe_[1], LogLevel::kInfo);
  ::pthread_setname_np(::pthread_self(), "tester");
  errno = EDOM;
  log_warning("two\nlines\x1b[31m");
  EXPECT_EQ(errno, EDOM);
  const std::string line = written();
  std::string shape = line.substr(0, 23);
  for (char& c : shape) {
    if (c >= '0' && c <= '9') c = '9';
  }
  EXPECT_EQ(shape, "9999-99-99 99:99:99.999");
  EXPECT_EQ(line.substr(23), " WARNING gpufs.native: [tester] two lines [31m\n");
}

TEST_F(LogTest, LinesBelowTheLevelAreDropped) {
  log_warning("nowhere yet");
  log_configure(pipe_[1], LogLevel::kWarning);
  EXPECT_FALSE(log_enabled(LogLevel::kInfo));
  log_info("too low");
  EXPECT_EQ(written(), "");
  log_error(std::string(10'000, 'x'));
  const std::string line = written();
  EXPECT_LT(line.size(), 4096U);  // one write, never torn
  EXPECT_EQ(line.back(), '\n');
}

TEST_F(LogTest, RepeatedTextsAreCounted) {
  log_configure(pipe_[1], LogLevel::kInfo);
  for (int i = 0; i < 4; ++i) log_warning("again");
  log_warning("other");
  log_warning("again");
  std::istringstream lines(written());
  std::vector<std::string> texts;
  for (std::string line; std::getline(lines, line);) texts.push_back(line.substr(line.find("] ") + 2));
  EXPECT_EQ(texts, (std::vector<std::string>{"again", "the line before was repeated 3 times", "other", "again"}));
}

TEST_F(LogTest, AUserCausesALimitedNumberOfLines) {
  log_configure(pipe_[1], LogLevel::kInfo);
  const auto count = [this](uid_t user) {
    for (int i = 0; i < 200; ++i) log_user_warning(user, "line ", i);
    const std::string text = written();
    return std::count(text.begin(), text.end(), '\n');
  };
  EXPECT_EQ(count(12'345), 50);
  EXPECT_EQ(count(12'346), 50);  // each user has its own limit
  EXPECT_EQ(count(0), 200);
}

TEST_F(LogTest, AUserWhoIsRefusedAddressesCausesALimitedNumberOfLines) {
  log_configure(pipe_[1], LogLevel::kInfo);
  const auto share = std::make_shared<AddressSpace>()->share(12'347, /*plain=*/true);
  for (std::uint64_t i = 1; i <= 200; ++i) {
    ASSERT_TRUE(share->take(i, 0).ok());
    EXPECT_EQ(share->take(AddressSpace::kBytes, 0).error(), EDQUOT);
    share->release(i, 0);
  }
  const std::string text = written();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 50);
}

TEST(ThreadTest, WorkApartHasDescriptorsOfItsOwn) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const Status status = run_apart("apart", [&]() -> Status {
    EXPECT_EQ(::fcntl(ends[0], F_GETFD), -1);
    return Status(EDOM, "what it returns");
  });
  EXPECT_EQ(status.error(), EDOM);
  for (const int end : ends) EXPECT_EQ(::close(end), 0);
}

TEST(ThreadTest, IsNamedAndTakesNoSignals) {
  char name[16] = {};
  sigset_t mask;
  ::sigemptyset(&mask);
  Result<std::thread> thread = start_thread("a-name-that-is-too-long", [&] {
    ::pthread_getname_np(::pthread_self(), name, sizeof name);
    ::pthread_sigmask(SIG_BLOCK, nullptr, &mask);
  });
  ASSERT_TRUE(thread.ok());
  thread.value().join();
  EXPECT_STREQ(name, "a-name-that-is-");
  EXPECT_EQ(::sigismember(&mask, SIGTERM), 1);
  EXPECT_EQ(::sigismember(&mask, SIGUSR1), 1);
  sigset_t mine;
  ::pthread_sigmask(SIG_BLOCK, nullptr, &mine);
  EXPECT_EQ(::sigismember(&mine, SIGTERM), 0);
}

TEST(WorkerTest, RunsAllTasksInOrderBeforeItEnds) {
  std::vector<int> ran;
  Worker worker("tasks");
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(worker.post([&ran, i] { ran.push_back(i); }));
  EXPECT_TRUE(worker.stop());
  ASSERT_EQ(ran.size(), 100U);
  EXPECT_TRUE(std::is_sorted(ran.begin(), ran.end()));
  EXPECT_FALSE(worker.post([&ran] { ran.clear(); }));
  EXPECT_TRUE(worker.stop());
  EXPECT_EQ(ran.size(), 100U);
}

TEST(WorkerTest, ChecksWhenItIsDueAndWhenItIsWoken) {
  int checks = 0;
  std::latch by_time(3);
  std::latch woken(1);
  Worker worker("checks", [&] {
    ++checks;
    if (checks == 4) woken.count_down();
    if (checks > 3) return Worker::kNever;
    by_time.count_down();
    return checks == 3 ? Worker::kNever : Worker::Clock::now() + std::chrono::milliseconds(1);
  });
  ASSERT_TRUE(worker.start().ok());
  by_time.wait();
  worker.wake();
  woken.wait();
  worker.stop();
  EXPECT_EQ(checks, 4);
  worker.wake();
  EXPECT_EQ(worker.start().error(), ESHUTDOWN);
}

TEST(WorkerTest, AThreadThatHangsIsLeftBehind) {
  const auto release = std::make_shared<std::latch>(1);
  const auto held = std::make_shared<int>();
  {
    Worker worker("hangs");
    worker.post([release] { release->wait(); });
    worker.post([held] {});
    EXPECT_FALSE(worker.stop(std::chrono::milliseconds(1)));
  }
  EXPECT_EQ(held.use_count(), 2);  // no other thread drops what a task holds
  release->count_down();
  while (held.use_count() > 1) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

TEST(WorkerTest, RunsItsTasksWithoutAThread) {
  bool ran = false;
  Worker worker("none");
  {
    const testing::NoMoreThreads none;
    EXPECT_EQ(worker.start().error(), EAGAIN);
    EXPECT_TRUE(worker.post([&ran] { ran = true; }));
  }
  EXPECT_FALSE(ran);
  EXPECT_TRUE(worker.stop());
  EXPECT_TRUE(ran);
}

}  // namespace
}  // namespace gpufs
