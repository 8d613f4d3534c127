// The worker of a device and its pools: order, exactly one callback, shutdown, bounds, planned failures.

#include "device/device_context.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <future>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "device/event_pool.h"
#include "device/stream_pool.h"
#include "faulty_driver.h"

namespace gpufs::testing {
namespace {

using std::chrono::milliseconds;

class DeviceContextTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    plan->binds_threads = GetParam();
    driver = make_faulty_driver(plan, std::uint64_t{8} << 20);
    ASSERT_NE(driver, nullptr);
  }
  std::shared_ptr<DeviceContext> make(const DeviceContextOptions& options = {}) {
    Result<std::shared_ptr<DeviceContext>> made = DeviceContext::create(driver, 0, options);
    EXPECT_TRUE(made.ok());
    return made.take();
  }
  std::shared_ptr<FaultPlan> plan = std::make_shared<FaultPlan>();
  std::shared_ptr<Driver> driver;
};

TEST_P(DeviceContextTest, WorkRunsInOrderOnOneThread) {
  const auto context = make();
  std::vector<int> order;
  std::vector<std::thread::id> threads;
  std::promise<void> end;
  for (int index = 0; index < 100; ++index) {
    context->submit(
        [&, index](Device&) {
          order.push_back(index);
          threads.push_back(std::this_thread::get_id());
          return index % 3 == 0 ? Status(EIO, "x") : Status();
        },
        [&, index](const Status& outcome) {
          EXPECT_EQ(outcome.ok(), index % 3 != 0);
          order.push_back(1000 + index);
          if (index == 99) end.set_value();
        });
  }
  end.get_future().wait();
  ASSERT_EQ(order.size(), 200U);
  for (int index = 0; index < 100; ++index) {
    EXPECT_EQ(order[static_cast<std::size_t>(index) * 2], index);
    EXPECT_EQ(order[static_cast<std::size_t>(index) * 2 + 1], 1000 + index);
    EXPECT_EQ(threads[static_cast<std::size_t>(index)], threads[0]);
  }
  EXPECT_NE(threads[0], std::this_thread::get_id());
  EXPECT_EQ(plan->bind.calls(), 1);  // current for life
}

TEST_P(DeviceContextTest, RunGivesTheOutcomeWhereItCan) {
  const auto context = make();
  std::thread::id where;
  const Status status = context->run([&](Device&) {
    where = std::this_thread::get_id();
    return context->run([&](Device&) {  // on the worker already: no waiting for itself
      EXPECT_EQ(where, std::this_thread::get_id());
      return Status(ENOSPC, "full", 3);
    });
  });
  EXPECT_EQ(status.error(), ENOSPC);
  EXPECT_EQ(status.device_code(), 3);
  EXPECT_EQ(where == std::this_thread::get_id(), !GetParam());
  EXPECT_EQ(context->run([](Device&) -> Status { throw std::runtime_error("odd"); }).error(), EIO);
  EXPECT_EQ(context->run([](Device&) -> Status { throw std::bad_alloc(); }).error(), ENOMEM);
}

TEST_P(DeviceContextTest, EveryCallbackOnceAlsoAroundShutdown) {
  for (int round = 0; round < 20; ++round) {
    const auto context = make();
    std::atomic<int> callbacks{0};
    std::atomic<int> refused{0};
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 3; ++thread) {
      threads.emplace_back([&] {
        for (int index = 0; index < 50; ++index) {
          context->submit([](Device&) -> Status { throw 5; },
                          [&](const Status& outcome) {
                            ++callbacks;
                            if (outcome.error() == ESHUTDOWN) ++refused;
                            if (outcome.error() == EIO)
                              throw std::runtime_error("callbacks may not, but must not kill");
                          });
        }
      });
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    context->shutdown();
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(callbacks, 150);
    context->shutdown();  // a second time
    // The last destructors still get their work done.
    EXPECT_EQ(context->run([](Device&) { return Status(EXDEV, ""); }).error(), EXDEV);
  }
}

TEST_P(DeviceContextTest, TheLastReferenceMayGoOnTheWorker) {
  auto context = make();
  DeviceContext& raw = *context;
  std::promise<void> released;
  std::promise<void> later;
  raw.submit(
      [&](Device&) {
        released.get_future().wait();
        return Status();
      },
      [keep = context](const Status&) {});
  raw.submit([](Device&) { return Status(); }, [&](const Status&) { later.set_value(); });
  context.reset();
  released.set_value();
  later.get_future().wait();
}

TEST_P(DeviceContextTest, AWorkerThatCannotStartIsAFailure) {
  plan->bind.at(1, 1, ENODEV);
  const Result<std::shared_ptr<DeviceContext>> made = DeviceContext::create(driver, 0);
  EXPECT_EQ(made.error(), ENODEV);
  EXPECT_EQ(made.status().device_code(), 700);
  EXPECT_EQ(DeviceContext::create(driver, 1).error(), EINVAL);
}

TEST_P(DeviceContextTest, PoolsAreFilledInBatchesAndBounded) {
  DeviceContextOptions options;
  options.event_batch = 4;
  options.event_limit = 6;
  const auto context = make(options);
  EventPool& pool = context->events();
  EXPECT_EQ(pool.existing(), 0U);  // nothing before it is needed
  std::vector<std::shared_ptr<Event>> held;
  held.push_back(pool.acquire().take());
  EXPECT_EQ(pool.existing(), 4U);
  EXPECT_EQ(pool.idle(), 3U);
  for (int index = 1; index < 6; ++index) held.push_back(pool.acquire().take());
  EXPECT_EQ(pool.existing(), 6U);
  EXPECT_EQ(pool.acquire_for(milliseconds(20)).error(), EAGAIN);
  // A copy of the pointer keeps the event out of the pool.
  const std::shared_ptr<Event> copy = held.back();
  held.pop_back();
  EXPECT_EQ(pool.acquire_for(milliseconds(20)).error(), EAGAIN);
  std::thread waiting([&] { EXPECT_TRUE(pool.acquire().ok()); });
  std::this_thread::sleep_for(milliseconds(10));
  Event* const expected = held.back().get();
  held.pop_back();
  waiting.join();
  EXPECT_EQ(pool.acquire().value().get(), expected);  // used again, not created again
  EXPECT_EQ(plan->create_event.calls(), 6);
}

TEST_P(DeviceContextTest, PoolsSurviveFailures) {
  DeviceContextOptions options;
  options.event_batch = 4;
  const auto context = make(options);
  plan->create_event.at(1, 1, ENOMEM);
  EXPECT_EQ(context->events().acquire().error(), ENOMEM);
  EXPECT_EQ(context->events().existing(), 0U);
  plan->create_event.at(3);  // two were made before it: enough for now
  EXPECT_TRUE(context->events().acquire().ok());
  EXPECT_EQ(context->events().existing(), 2U);
}

TEST_P(DeviceContextTest, AStreamThatFailedIsReplaced) {
  DeviceContextOptions options;
  options.stream_batch = 1;
  options.stream_limit = 1;
  const auto context = make(options);
  ASSERT_TRUE(context->streams().acquire().ok());
  plan->synchronize.at(1);
  ASSERT_TRUE(context->streams().acquire().ok());
  EXPECT_EQ(plan->create_stream.calls(), 2);
  EXPECT_EQ(context->streams().existing(), 1U);
}

TEST_P(DeviceContextTest, ManyShareABoundedPool) {
  DeviceContextOptions options;
  options.event_batch = 2;
  options.event_limit = 3;
  const auto context = make(options);
  std::atomic<int> in_use{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 6; ++thread) {
    threads.emplace_back([&] {
      for (int index = 0; index < 200; ++index) {
        const Result<std::shared_ptr<Event>> event = context->events().acquire();
        ASSERT_TRUE(event.ok());
        ASSERT_LE(++in_use, 3);
        --in_use;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(context->events().existing(), context->events().idle());
}

TEST_P(DeviceContextTest, LeasesOutliveThePool) {
  auto context = make();
  std::shared_ptr<Event> event = context->events().acquire().take();
  std::shared_ptr<Stream> stream = context->streams().acquire().take();
  ASSERT_TRUE(stream->record(*event).ok());
  driver.reset();
  context.reset();
  EXPECT_TRUE(event->synchronize().ok());
  event.reset();
  stream.reset();
}

TEST_P(DeviceContextTest, WaitersAreToldOfTheEnd) {
  DeviceContextOptions options;
  options.event_batch = 1;
  options.event_limit = 1;
  const auto context = make(options);
  const std::shared_ptr<Event> only = context->events().acquire().take();
  std::thread waiting([&] { EXPECT_EQ(context->events().acquire().error(), ESHUTDOWN); });
  std::this_thread::sleep_for(milliseconds(10));
  context->events().close();
  waiting.join();
}

INSTANTIATE_TEST_SUITE_P(Binding, DeviceContextTest, ::testing::Bool(),
                         [](const ::testing::TestParamInfo<bool>& binds) { return binds.param ? "bound" : "free"; });

}  // namespace
}  // namespace gpufs::testing
