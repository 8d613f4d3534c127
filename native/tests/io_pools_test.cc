// Pinned bounce buffers, which transfers share.

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <memory>
#include <thread>

#include "device/device_context.h"
#include "faulty_driver.h"
#include "gpu_test_support.h"
#include "io/bounce_pool.h"

namespace gpufs {
namespace {

constexpr std::size_t kBytes = 1 << 16;

class BouncePoolTest : public ::testing::Test {
 protected:
  void make_pool(std::uint64_t buffers) {
    plan->cpu_addressable = false;
    device = gpu_test::must(DeviceContext::create(testing::make_faulty_driver(plan, 64 * gpu_test::kMiB), 0));
    pool = BouncePool::create(kBytes, buffers * kBytes);
  }
  Result<BounceBuffer> acquire() { return pool->acquire(device, never); }
  void await_waits(std::uint64_t count) {
    while (pool->statistics().waits < count) std::this_thread::yield();
  }

  const std::shared_ptr<testing::FaultPlan> plan = std::make_shared<testing::FaultPlan>();
  std::shared_ptr<DeviceContext> device;
  std::shared_ptr<BouncePool> pool;
  const std::atomic<bool> never{false};
};

TEST_F(BouncePoolTest, PinsOnDemandAndUpToItsCapacity) {
  make_pool(3);
  {
    const BounceBuffer first = acquire().take();
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(first->data) % 4096, 0U);
    EXPECT_EQ(first->bytes, kBytes);
    EXPECT_EQ(plan->pin.calls(), 1);
    EXPECT_EQ(pool->statistics().used_bytes, kBytes);
    EXPECT_EQ(pool->try_acquire(device, 2), nullptr) << "it leaves the reserve";
    const BounceBuffer second = pool->try_acquire(device, 1);
    EXPECT_NE(second, nullptr);
    const BounceBuffer third = acquire().take();
    EXPECT_EQ(pool->try_acquire(device, 0), nullptr);
  }
  for (int round = 0; round < 10; ++round) EXPECT_TRUE(acquire().ok());
  EXPECT_EQ(plan->pin.calls(), 3);
  EXPECT_EQ(pool->statistics().pinned_bytes, 3 * kBytes);
  EXPECT_EQ(pool->statistics().used_bytes, 0U);
  EXPECT_EQ(pool->statistics().waits, 0U);
  pool->close();
  EXPECT_EQ(plan->unpin.calls(), 3);
}

TEST_F(BouncePoolTest, WaitingEndsWithACancellationOrThePool) {
  make_pool(1);
  BounceBuffer held = acquire().take();
  std::atomic<bool> cancelled{false};
  std::thread canceller([&] {
    await_waits(1);
    cancelled = true;
  });
  EXPECT_EQ(pool->acquire(device, cancelled).error(), ECANCELED);
  canceller.join();
  std::thread closer([&] {
    await_waits(2);
    pool->close();
  });
  EXPECT_EQ(acquire().error(), ESHUTDOWN);
  closer.join();
  held.reset();
  EXPECT_EQ(plan->unpin.calls(), 1);
}

TEST_F(BouncePoolTest, IfNoMoreCanBePinnedTheExistingOnesServe) {
  make_pool(4);
  plan->pin.at(2, 1000, ENOMEM);
  BounceBuffer held = acquire().take();
  std::thread giver([&] {
    await_waits(1);
    held.reset();
  });
  EXPECT_TRUE(acquire().ok());
  giver.join();
  EXPECT_EQ(pool->statistics().pinned_bytes, kBytes);
  EXPECT_GE(pool->statistics().pin_failures, 1U);
}

}  // namespace
}  // namespace gpufs
