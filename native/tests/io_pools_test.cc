// The pools under the transfers: bounce slots, worker threads, and cuFile's adapter.

#include <gtest/gtest.h>

#include <cerrno>
#include <thread>

#include "device/event_pool.h"
#include "device/stream_pool.h"
#include "io/backing_file.h"
#include "io/bounce_pool.h"
#include "io/cufile.h"
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
      Result<BounceLease> mine = rig.pool->acquire(rig.device, milliseconds(10000));
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
  EXPECT_EQ(rig.pool->acquire(rig.device, milliseconds(10000), &cancelled).error(), ECANCELED);
  canceller.join();
  std::thread closer([&] {
    while (rig.pool->statistics().waits < 2) std::this_thread::yield();
    rig.pool->close();
  });
  EXPECT_EQ(rig.pool->acquire(rig.device, milliseconds(10000)).error(), ESHUTDOWN);
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
  EXPECT_TRUE(rig.pool->acquire(rig.device, milliseconds(10000)).ok());
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
  [[nodiscard]] bool may_hang() const override { return false; }
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
  EXPECT_EQ(pool->shutdown(milliseconds(5000), milliseconds(50)), 0);
  EXPECT_EQ(pool->submit(first).error(), ESHUTDOWN);
}

TEST(WorkerPool, CountsTheProcessorsOfANode) {
  EXPECT_GE(usable_cpus(-1), 1);
  EXPECT_GE(usable_cpus(0), 1);
  EXPECT_EQ(usable_cpus(100000), usable_cpus(-1));
}

// ---- cuFile ----

struct FakeCufile {
  static inline int open_result = 0;
  static inline unsigned supported = 0;
  static inline unsigned major = 0;
  static inline int register_result = 0;
  static inline ssize_t move_result = 0;
  static inline int registered = 0;
  static inline std::vector<off_t> offsets;

  static CufileCalls calls() {
    CufileCalls calls;
    calls.driver_open = [] { return CufileError{open_result, 0}; };
    calls.driver_properties = [](CufileProperties* properties) {
      properties->module.major_version = major;
      properties->module.supported = supported;
      return CufileError{0, 0};
    };
    calls.handle_register = [](void** handle, CufileDescriptor* descriptor) {
      *handle = &registered;
      EXPECT_EQ(descriptor->type, 1);
      if (register_result == 0) ++registered;
      return CufileError{register_result, 0};
    };
    calls.handle_deregister = [](void*) { --registered; };
    calls.read = [](void*, void*, std::size_t bytes, off_t file_offset, off_t device_offset) -> ssize_t {
      offsets.push_back(file_offset);
      EXPECT_EQ(file_offset - 4096, device_offset);
      if (move_result < 0) errno = EIO;
      return move_result > 0 ? std::min<ssize_t>(move_result, static_cast<ssize_t>(bytes)) : move_result;
    };
    calls.write = [](void*, const void*, std::size_t, off_t, off_t) -> ssize_t { return move_result; };
    return calls;
  }
  static void reset() {
    open_result = register_result = 0;
    supported = 1U << 4;
    major = 2;
    move_result = 0;
    offsets.clear();
  }
};

TEST(Cufile, OnlyWithTheKernelModuleAndItsWord) {
  FakeCufile::reset();
  EXPECT_EQ(make_cufile_path(FakeCufile::calls(), false)->refusals(), mask_of(Refusal::kNoGpuDirect));
  EXPECT_EQ(make_cufile_path(FakeCufile::calls(), true)->refusals(), 0U);
  FakeCufile::supported = 0;
  EXPECT_EQ(make_cufile_path(FakeCufile::calls(), true)->refusals(), mask_of(Refusal::kNoGpuDirect));
  FakeCufile::reset();
  FakeCufile::major = 0;
  EXPECT_EQ(make_cufile_path(FakeCufile::calls(), true)->refusals(), mask_of(Refusal::kNoGpuDirect));
  FakeCufile::reset();
  FakeCufile::open_result = 5007;
  EXPECT_EQ(make_cufile_path(FakeCufile::calls(), true)->refusals(), mask_of(Refusal::kNoGpuDirect));
  EXPECT_NE(open_cufile_path()->refusals(), 0U);  // no GPU where the unit tests run
  EXPECT_EQ(make_direct_path("none of these")->refusals(), mask_of(Refusal::kNoVendorCall));
}

TEST(Cufile, MovesAndReportsErrors) {
  FakeCufile::reset();
  const std::shared_ptr<DirectPath> path = make_cufile_path(FakeCufile::calls(), true);
  const auto backing = BackingFile::adopt(UniqueFd(), UniqueFd(), BackingFacts{}, FileOps::system());
  {
    Result<std::unique_ptr<DirectFile>> file = path->attach(*backing);
    ASSERT_TRUE(file.ok());
    EXPECT_EQ(FakeCufile::registered, 1);
    FakeCufile::move_result = 4096;
    Moved moved = file.value()->load(0x10000, 3 * 4096, 4096);
    EXPECT_TRUE(moved.status.ok());
    EXPECT_EQ(moved.bytes, 3U * 4096);
    EXPECT_EQ(FakeCufile::offsets, (std::vector<off_t>{4096, 8192, 12288}));
    FakeCufile::move_result = 0;
    moved = file.value()->load(0x10000, 4096, 4096);
    EXPECT_TRUE(moved.status.ok());
    EXPECT_EQ(moved.bytes, 0U);
    FakeCufile::move_result = -1;
    EXPECT_EQ(file.value()->load(0x10000, 4096, 4096).status.error(), EIO);
    FakeCufile::move_result = -5011;
    moved = file.value()->load(0x10000, 4096, 4096);
    EXPECT_EQ(moved.status.error(), EREMOTEIO);
    EXPECT_EQ(moved.status.device_code(), 5011);
    EXPECT_TRUE(rerun_on_fallback(moved.status.error()));
  }
  EXPECT_EQ(FakeCufile::registered, 0);
  FakeCufile::register_result = 5030;
  EXPECT_EQ(path->attach(*backing).error(), EREMOTEIO);
}

}  // namespace
}  // namespace gpufs
