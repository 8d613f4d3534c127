// The pools under the transfers: bounce slots and worker threads.

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <memory>
#include <thread>

#include "device/device_context.h"
#include "io/backing_file.h"
#include "io/bounce_pool.h"
#include "io/worker_pool.h"
#include "io_fakes.h"

namespace gpufs {
namespace {

using std::chrono::milliseconds;
using testing::FakeDriver;
using testing::FakePlan;

constexpr std::size_t kSlot = 1 << 16;

struct PoolRig {
  explicit PoolRig(std::uint64_t slots) : plan(std::make_shared<FakePlan>()) {
    Result<std::shared_ptr<DeviceContext>> made = DeviceContext::create(std::make_shared<FakeDriver>(plan), 0);
    device = made.take();
    pool = BouncePool::create(kSlot, slots * kSlot);
  }
  std::shared_ptr<FakePlan> plan;
  std::shared_ptr<DeviceContext> device;
  std::shared_ptr<BouncePool> pool;
};

TEST(BouncePool, PinsLazilyOnceAndWithinItsCap) {
  PoolRig rig(2);
  EXPECT_EQ(rig.plan->pins, 0);
  {
    Result<BounceLease> first = rig.pool->acquire(rig.device, milliseconds(0));
    ASSERT_TRUE(first.ok());
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(first.value().data()) % 4096, 0U);
    EXPECT_EQ(first.value().bytes(), kSlot);
    EXPECT_EQ(rig.plan->pins, 1);
    EXPECT_EQ(rig.pool->statistics().used_bytes, kSlot);
    Result<BounceLease> second = rig.pool->acquire(rig.device, milliseconds(0));
    ASSERT_TRUE(second.ok());
    EXPECT_EQ(rig.pool->acquire(rig.device, milliseconds(10)).error(), ETIMEDOUT);
    EXPECT_FALSE(rig.pool->try_acquire(rig.device, 0).valid());
  }
  for (int round = 0; round < 10; ++round) EXPECT_TRUE(rig.pool->acquire(rig.device, milliseconds(0)).ok());
  EXPECT_EQ(rig.plan->pins, 2);
  EXPECT_EQ(rig.pool->statistics().pinned_bytes, 2 * kSlot);
  EXPECT_EQ(rig.pool->statistics().used_bytes, 0U);
  EXPECT_EQ(rig.pool->statistics().waits, 1U);
  rig.pool->close();
  EXPECT_EQ(rig.plan->pinned, 0);
}

TEST(BouncePool, ExtraSlotsLeaveTheReserve) {
  PoolRig rig(3);
  BounceLease first = rig.pool->acquire(rig.device, milliseconds(0)).take();
  EXPECT_FALSE(rig.pool->try_acquire(rig.device, 2).valid());
  EXPECT_TRUE(rig.pool->try_acquire(rig.device, 1).valid());
}

TEST(BouncePool, ServesInTheOrderOfArrival) {
  PoolRig rig(1);
  BounceLease held = rig.pool->acquire(rig.device, milliseconds(0)).take();
  std::mutex mutex;
  std::vector<int> order;
  std::vector<std::thread> threads;
  for (int number = 0; number < 4; ++number) {
    threads.emplace_back([&, number] {
      Result<BounceLease> mine = rig.pool->acquire(rig.device, milliseconds(60000));
      ASSERT_TRUE(mine.ok());
      const std::lock_guard lock(mutex);
      order.push_back(number);
    });
    while (rig.pool->statistics().waits < static_cast<std::uint64_t>(number) + 1) std::this_thread::yield();
  }
  held.reset();
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3}));
}

TEST(BouncePool, WaitingCanBeCancelledAndEndsWithThePool) {
  PoolRig rig(1);
  BounceLease held = rig.pool->acquire(rig.device, milliseconds(0)).take();
  std::atomic<bool> cancelled{false};
  std::thread canceller([&] {
    while (rig.pool->statistics().waits < 1) std::this_thread::yield();
    cancelled = true;
  });
  EXPECT_EQ(rig.pool->acquire(rig.device, milliseconds(60000), &cancelled).error(), ECANCELED);
  canceller.join();
  std::thread closer([&] {
    while (rig.pool->statistics().waits < 2) std::this_thread::yield();
    rig.pool->close();
  });
  EXPECT_EQ(rig.pool->acquire(rig.device, milliseconds(60000)).error(), ESHUTDOWN);
  closer.join();
  held.reset();
  EXPECT_EQ(rig.plan->pinned, 0);
  EXPECT_EQ(rig.pool->acquire(rig.device, milliseconds(0)).error(), ESHUTDOWN);
}

TEST(BouncePool, WhenNoMoreCanBePinnedTheExistingOnesServe) {
  PoolRig rig(4);
  rig.plan->pins_possible = 1;
  BounceLease held = rig.pool->acquire(rig.device, milliseconds(0)).take();
  std::thread giver([&] {
    while (rig.pool->statistics().waits < 1) std::this_thread::yield();
    held.reset();
  });
  EXPECT_TRUE(rig.pool->acquire(rig.device, milliseconds(60000)).ok());
  giver.join();
  EXPECT_EQ(rig.pool->statistics().pinned_bytes, kSlot);
  EXPECT_GE(rig.pool->statistics().pin_failures, 1U);
}

TEST(BouncePool, ManyThreads) {
  PoolRig rig(3);
  std::vector<std::thread> threads;
  std::atomic<int> inside{0};
  for (int number = 0; number < 8; ++number) {
    threads.emplace_back([&] {
      for (int round = 0; round < 200; ++round) {
        Result<BounceLease> mine = rig.pool->acquire(rig.device, milliseconds(60000));
        ASSERT_TRUE(mine.ok());
        EXPECT_LE(++inside, 3);
        mine.value().data()[0] = std::byte{1};
        BounceLease more = rig.pool->try_acquire(rig.device, 1);
        --inside;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(rig.pool->statistics().used_bytes, 0U);
}

// ---- workers ----

class CountedWork final : public Work {
 public:
  CountedWork(std::uint64_t client, int pieces) : left(pieces), client_(client) {}
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

TEST(WorkerPool, ClientsShareTheThreads) {
  const std::shared_ptr<WorkerPool> pool = WorkerPool::create(-1, 2, 1);
  const auto first = std::make_shared<CountedWork>(1, 300);
  const auto second = std::make_shared<CountedWork>(2, 100);
  ASSERT_TRUE(pool->submit(first).ok());
  ASSERT_TRUE(pool->submit(second).ok());
  while (first->left > 0 || second->left > 0) std::this_thread::sleep_for(milliseconds(1));
  EXPECT_LE(first->most, 2);
  EXPECT_LE(second->most, 2);
  EXPECT_EQ(pool->shutdown(milliseconds(60000), milliseconds(50)), 0);
  EXPECT_EQ(pool->submit(first).error(), ESHUTDOWN);
}

// Serves until it is let go.
class HeldWork final : public Work {
 public:
  explicit HeldWork(std::uint64_t client) : client_(client) {}
  [[nodiscard]] std::uint64_t client() const override { return client_; }
  [[nodiscard]] std::uint64_t group() const override { return kNeverStalls; }
  [[nodiscard]] int wanted() const override { return over ? 0 : 1; }
  void serve(Turn&) override {
    inside = true;
    while (!let_go) std::this_thread::sleep_for(milliseconds(1));
    over = true;
  }
  std::atomic<bool> inside{false};
  std::atomic<bool> let_go{false};
  std::atomic<bool> over{false};

 private:
  const std::uint64_t client_;
};

TEST(WorkerPool, AThreadThatIsBeingWokenIsTakenForOneWorkAlone) {
  for (int round = 0; round < 30; ++round) {
    const std::shared_ptr<WorkerPool> pool = WorkerPool::create(-1, 2, 1);
    const auto before = std::make_shared<HeldWork>(1);
    before->let_go = true;
    ASSERT_TRUE(pool->submit(before).ok());
    while (before.use_count() > 1) std::this_thread::sleep_for(milliseconds(1));
    // Its thread sleeps by now, or is about to. The second work comes before it is awake.
    const auto first = std::make_shared<HeldWork>(1);
    const auto second = std::make_shared<HeldWork>(2);
    ASSERT_TRUE(pool->submit(first).ok());
    ASSERT_TRUE(pool->submit(second).ok());
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!(first->inside && second->inside) && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    const bool both = first->inside && second->inside;
    first->let_go = second->let_go = true;
    EXPECT_EQ(pool->shutdown(milliseconds(60000), milliseconds(50)), 0);
    ASSERT_TRUE(both) << "one waits for the other's end, in round " << round;
  }
}

TEST(WorkerPool, CountsTheProcessorsOfANode) {
  EXPECT_GE(usable_cpus(-1), 1);
  EXPECT_GE(usable_cpus(0), 1);
  EXPECT_EQ(usable_cpus(100000), usable_cpus(-1));
}

}  // namespace
}  // namespace gpufs
