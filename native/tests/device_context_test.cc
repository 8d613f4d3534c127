// A device's pools of events and streams: reuse, capacity, failures, leases that outlive the context.

#include "device/device_context.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <memory>
#include <vector>

#include "device/pools.h"
#include "faulty_driver.h"
#include "streams.h"

namespace gpufs::testing {
namespace {

class DeviceContextTest : public ::testing::Test {
 protected:
  std::shared_ptr<FaultPlan> plan = std::make_shared<FaultPlan>();
  std::shared_ptr<Driver> driver = make_faulty_driver(plan, std::uint64_t{8} << 20);
};

TEST_F(DeviceContextTest, RefusesADeviceThatDoesNotExist) {
  EXPECT_TRUE(DeviceContext::create(driver, 0).ok());
  EXPECT_EQ(DeviceContext::create(driver, 1).error(), EINVAL);
}

TEST_F(DeviceContextTest, APoolReusesItsObjectsAndKeepsNoMoreThanItsCapacity) {
  DevicePool<Event> pool(driver, *driver->devices()[0], &Device::create_event, 2);
  EXPECT_EQ(pool.existing(), 0U);  // nothing is created before it is needed
  std::vector<std::shared_ptr<Event>> held;
  for (int count = 0; count < 3; ++count) held.push_back(pool.acquire().take());
  EXPECT_EQ(pool.existing(), 3U);
  EXPECT_EQ(pool.idle(), 0U);
  const Event* const last = held.back().get();
  {
    const std::shared_ptr<Event> copy = held.back();
    held.pop_back();
    EXPECT_EQ(pool.idle(), 0U);  // a copy of the pointer keeps the event in use
  }
  EXPECT_EQ(pool.acquire().value().get(), last);
  held.clear();
  EXPECT_EQ(pool.idle(), 2U);
  EXPECT_EQ(pool.existing(), 2U);
  EXPECT_EQ(plan->create_event.calls(), 3);
}

TEST_F(DeviceContextTest, APoolReportsAFailedCreationAndReplacesAFailedStream) {
  const auto context = DeviceContext::create(driver, 0).take();
  plan->create_event.at(1, 1, ENOMEM);
  EXPECT_EQ(context->events().acquire().error(), ENOMEM);
  EXPECT_EQ(context->events().existing(), 0U);
  EXPECT_TRUE(context->events().acquire().ok());
  ASSERT_TRUE(context->streams().acquire().ok());
  plan->synchronize.at(1);
  ASSERT_TRUE(context->streams().acquire().ok());
  EXPECT_EQ(plan->create_stream.calls(), 2);
  EXPECT_EQ(context->streams().existing(), 1U);
}

TEST_F(DeviceContextTest, ObjectsInUseOutliveTheContextAndTheDriver) {
  auto context = DeviceContext::create(driver, 0).take();
  std::shared_ptr<Event> event = context->events().acquire().take();
  std::shared_ptr<Stream> stream = context->streams().acquire().take();
  ASSERT_TRUE(stream->record(*event).ok());
  driver.reset();
  context.reset();
  EXPECT_TRUE(finished(*event).ok());
}

}  // namespace
}  // namespace gpufs::testing
