// What transfers share: pinned bounce buffers and threads.

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "device/device_context.h"
#include "faulty_driver.h"
#include "gpu_test_support.h"
#include "io/bounce_pool.h"
#include "io/transfer_threads.h"

namespace gpufs {
namespace {

using std::chrono::milliseconds;

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

TEST_F(BouncePoolTest, ServesInTheOrderOfArrival) {
  make_pool(1);
  BounceBuffer held = acquire().take();
  std::mutex mutex;
  std::vector<int> order;
  std::vector<std::thread> threads;
  for (int number = 0; number < 4; ++number) {
    threads.emplace_back([&, number] {
      const BounceBuffer mine = acquire().take();
      const std::lock_guard lock(mutex);
      order.push_back(number);
    });
    await_waits(static_cast<std::uint64_t>(number) + 1);
  }
  held.reset();
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3}));
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

// ---- threads ----

// Steps of a millisecond, of which up to four threads do one at a time.
class SteppedWork final : public TransferWork {
 public:
  SteppedWork(std::uint64_t client, int steps) : left(steps), client_(client) {}
  [[nodiscard]] std::uint64_t client() const override { return client_; }
  [[nodiscard]] std::uint64_t group() const override { return kNeverStalls; }
  [[nodiscard]] int wanted() const override { return left > 0 ? 4 : 0; }
  void serve(Turn& turn) override {
    const int inside = ++inside_;
    int before = most;
    while (before < inside && !most.compare_exchange_weak(before, inside)) {
    }
    do {
      std::this_thread::sleep_for(milliseconds(1));
      if (--left <= 0) break;
    } while (!turn.over());
    --inside_;
  }
  std::atomic<int> most{0};
  std::atomic<int> left;

 private:
  const std::uint64_t client_;
  std::atomic<int> inside_{0};
};

TEST(TransferThreads, ClientsShareThem) {
  const std::shared_ptr<TransferThreads> threads = TransferThreads::create(-1, 2, 1);
  const auto first = std::make_shared<SteppedWork>(1, 300);
  const auto second = std::make_shared<SteppedWork>(2, 100);
  ASSERT_TRUE(threads->submit(first).ok());
  ASSERT_TRUE(threads->submit(second).ok());
  while (first->left > 0 || second->left > 0) std::this_thread::sleep_for(milliseconds(1));
  EXPECT_LE(first->most, 2);
  EXPECT_LE(second->most, 2);
  EXPECT_EQ(threads->shutdown(milliseconds(60000), milliseconds(50)), 0);
  EXPECT_EQ(threads->submit(first).error(), ESHUTDOWN);
}

// Serves until it is released.
class HeldWork final : public TransferWork {
 public:
  explicit HeldWork(std::uint64_t client) : client_(client) {}
  [[nodiscard]] std::uint64_t client() const override { return client_; }
  [[nodiscard]] std::uint64_t group() const override { return kNeverStalls; }
  [[nodiscard]] int wanted() const override { return over ? 0 : 1; }
  void serve(Turn&) override {
    inside = true;
    while (!released) std::this_thread::sleep_for(milliseconds(1));
    over = true;
  }
  std::atomic<bool> inside{false};
  std::atomic<bool> released{false};
  std::atomic<bool> over{false};

 private:
  const std::uint64_t client_;
};

TEST(TransferThreads, AThreadThatWakesUpCountsForOneWorkOnly) {
  for (int round = 0; round < 30; ++round) {
    const std::shared_ptr<TransferThreads> threads = TransferThreads::create(-1, 2, 1);
    const auto before = std::make_shared<HeldWork>(1);
    before->released = true;
    ASSERT_TRUE(threads->submit(before).ok());
    while (before.use_count() > 1) std::this_thread::sleep_for(milliseconds(1));
    // Its thread sleeps by now, or is about to. The second work comes before it is awake.
    const auto first = std::make_shared<HeldWork>(1);
    const auto second = std::make_shared<HeldWork>(2);
    ASSERT_TRUE(threads->submit(first).ok());
    ASSERT_TRUE(threads->submit(second).ok());
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!(first->inside && second->inside) && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    const bool both = first->inside && second->inside;
    first->released = second->released = true;
    EXPECT_EQ(threads->shutdown(milliseconds(60000), milliseconds(50)), 0);
    ASSERT_TRUE(both) << "one waits for the other's end, in round " << round;
  }
}

}  // namespace
}  // namespace gpufs
