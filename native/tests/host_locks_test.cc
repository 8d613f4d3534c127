// Locked host memory: each rule of HostLocks, and random calls of eight threads beside a plain model, with a driver
// that fails at random.

#include "memory/host_locks.h"
#include "base/pages.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "faulty_driver.h"

namespace gpufs {
namespace {

constexpr std::size_t kPages = 64;

class HostLocksTest : public ::testing::Test {
 protected:
  HostLocksTest()
      : base_(static_cast<std::byte*>(
            ::mmap(nullptr, kPages * kPageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {
    plan->cpu_addressable = false;
    driver_ = testing::make_faulty_driver(plan, std::uint64_t{8} << 20);
    locks_ = std::make_unique<HostLocks>(driver_, LockPolicy::kAuto);
  }
  ~HostLocksTest() override { ::munmap(base_, kPages * kPageBytes); }

  Status lock(std::size_t page, std::size_t pages, HostLocks::Access access = HostLocks::Access::kBoth) {
    return locks_->lock(at(page), pages * kPageBytes, access);
  }
  Status unlock(std::size_t page, std::size_t pages) { return locks_->unlock(at(page), pages * kPageBytes); }
  std::byte* at(std::size_t page) { return base_ + page * kPageBytes; }
  std::string text(std::size_t page, std::size_t pages) {
    const auto start = reinterpret_cast<std::uintptr_t>(at(page));
    return to_text({start, start + pages * kPageBytes});
  }
  // Without the registry: as another library does it, and what is pinned by either.
  Device& device() { return *driver_->devices()[0]; }
  bool pinned(std::size_t page) { return device().pinned_range(at(page)).ok(); }
  bool nothing_pinned() {
    for (std::size_t page = 0; page < kPages; ++page) {
      if (pinned(page)) return false;
    }
    return true;
  }

  const std::shared_ptr<testing::FaultPlan> plan = std::make_shared<testing::FaultPlan>();
  std::shared_ptr<Driver> driver_;
  std::unique_ptr<HostLocks> locks_;
  std::byte* const base_;
};

bool names(const Status& status, const std::string& text) { return status.message().find(text) != std::string::npos; }

TEST_F(HostLocksTest, InvalidRanges) {
  EXPECT_EQ(locks_->lock(base_, 0).error(), EINVAL);
  EXPECT_EQ(locks_->lock(nullptr, kPageBytes).error(), EINVAL);
  EXPECT_EQ(locks_->lock(base_, ~std::size_t{0}).error(), EINVAL);
  EXPECT_EQ(locks_->lock(reinterpret_cast<void*>(~std::uintptr_t{0} - 10), 10).error(), EINVAL);
  EXPECT_EQ(locks_->unlock(base_, ~std::size_t{0}).error(), EINVAL);
  ASSERT_EQ(::munmap(at(60), kPageBytes), 0);
  const Status unmapped = lock(58, 4);
  EXPECT_EQ(unmapped.error(), EFAULT);
  EXPECT_TRUE(names(unmapped, text(58, 4))) << unmapped.message();
  EXPECT_EQ(plan->pin.calls(), 0);
  EXPECT_EQ(locks_->statistics().ranges, 0U);
}

TEST_F(HostLocksTest, DeviceAddresses) {
  plan->seen_at = 1 << 30;
  ASSERT_TRUE(lock(0, 8).ok());
  ASSERT_TRUE(lock(2, 2).ok());
  const auto start = reinterpret_cast<DeviceAddress>(at(0));
  EXPECT_EQ(locks_->info(at(0), 8 * kPageBytes).value().device_address, start + (1 << 30));
  EXPECT_EQ(locks_->info(at(2), kPageBytes).value().device_address, start + 2 * kPageBytes + (1 << 30));
  // Also of memory that another library pinned.
  ASSERT_TRUE(device().pin(at(16), 8 * kPageBytes).ok());
  ASSERT_TRUE(lock(18, 2).ok());
  EXPECT_EQ(locks_->info(at(18), 2 * kPageBytes).value().device_address, start + 18 * kPageBytes + (1 << 30));
  // The driver has none.
  plan->seen_at = -1;
  ASSERT_TRUE(lock(10, 2).ok());
  EXPECT_EQ(locks_->info(at(10), 2 * kPageBytes).value().device_address, 0U);
}

TEST_F(HostLocksTest, ForeignMemoryIsRecordedWholeAndNeverUnlocked) {
  ASSERT_TRUE(device().pin(at(8), 16 * kPageBytes).ok());
  ASSERT_TRUE(lock(10, 2).ok());
  const HostLocks::Info info = locks_->info(at(8), 16 * kPageBytes).value();
  EXPECT_TRUE(info.foreign);
  EXPECT_EQ(info.whole.bytes(), 16 * kPageBytes);
  ASSERT_TRUE(lock(20, 4).ok());  // inside the whole
  EXPECT_EQ(locks_->statistics().ranges, 1U);
  EXPECT_TRUE(unlock(10, 2).ok());
  EXPECT_TRUE(unlock(20, 4).ok());
  EXPECT_TRUE(pinned(8));
  EXPECT_EQ(locks_->statistics().ranges, 0U);
  // Only a part of it is pinned by others.
  for (const std::size_t page : {22, 6}) {
    const Status refused = lock(page, 4);
    EXPECT_EQ(refused.error(), EEXIST);
    EXPECT_TRUE(names(refused, text(8, 16))) << refused.message();
  }
  EXPECT_EQ(locks_->statistics().ranges, 0U);
  // If the driver does not report it, only the range itself is known.
  plan->reports_pinned_ranges = false;
  ASSERT_TRUE(lock(10, 2).ok());
  EXPECT_EQ(locks_->info(at(10), 1).value().whole.bytes(), 2 * kPageBytes);
  EXPECT_TRUE(unlock(10, 2).ok());
  EXPECT_EQ(plan->unpin.calls(), 0);
  // Another library unlocks a range of this one's.
  ASSERT_TRUE(lock(0, 1).ok());
  ASSERT_TRUE(device().unpin(at(0)).ok());
  EXPECT_TRUE(unlock(0, 1).ok());
  EXPECT_EQ(locks_->statistics().ranges, 0U);
}

TEST_F(HostLocksTest, MemoryThatDevicesOnlyRead) {
  ASSERT_EQ(::mprotect(at(0), 4 * kPageBytes, PROT_READ), 0);
  ASSERT_TRUE(lock(0, 4, HostLocks::Access::kSource).ok());
  EXPECT_TRUE(locks_->info(at(0), 1).value().source_only);
  EXPECT_EQ(lock(1, 1).error(), EACCES);
  EXPECT_TRUE(lock(1, 1, HostLocks::Access::kSource).ok());
  EXPECT_EQ(locks_->use(at(0), kPageBytes, HostLocks::Access::kBoth).error(), EACCES);
  EXPECT_TRUE(locks_->use(at(0), kPageBytes, HostLocks::Access::kSource).value().parts().front().locked);
  EXPECT_TRUE(unlock(0, 4).ok());
  EXPECT_TRUE(unlock(1, 1).ok());
  // A device that has no such lock locks it as any other memory.
  plan->pins_read_only = false;
  ASSERT_TRUE(lock(8, 1, HostLocks::Access::kSource).ok());
  EXPECT_FALSE(locks_->info(at(8), 1).value().source_only);
  EXPECT_TRUE(lock(8, 1).ok());
}

TEST_F(HostLocksTest, ADriverFailureChangesNothing) {
  plan->on_pin = [] { return Status(ENOMEM, "planned"); };
  const Status refused = lock(0, 4);
  EXPECT_EQ(refused.error(), ENOMEM);
  EXPECT_TRUE(names(refused, text(0, 4))) << refused.message();
  EXPECT_EQ(locks_->statistics().ranges, 0U);
  plan->on_pin = nullptr;
  ASSERT_TRUE(lock(0, 4).ok());
  plan->on_unpin = [] { return Status(EIO, "planned"); };
  const Status stuck = unlock(0, 4);
  EXPECT_EQ(stuck.error(), EIO);
  EXPECT_EQ(locks_->statistics().ranges, 1U);  // still locked, and can be unlocked later
  plan->on_unpin = nullptr;
  EXPECT_TRUE(unlock(0, 4).ok());
  EXPECT_TRUE(nothing_pinned());
}

TEST_F(HostLocksTest, ARangeInUseIsUnlockedWhenTheUseEnds) {
  ASSERT_TRUE(lock(2, 2).ok());
  ASSERT_TRUE(lock(6, 1).ok());
  std::optional<HostLocks::LockUse> use(locks_->use(at(0), 8 * kPageBytes, HostLocks::Access::kBoth).take());
  const std::vector<HostLocks::Part>& parts = use->parts();
  ASSERT_EQ(parts.size(), 5U);
  const std::array<std::size_t, 5> pages = {2, 2, 2, 1, 1};
  std::size_t offset = 0;
  for (std::size_t place = 0; place < parts.size(); ++place) {
    EXPECT_EQ(parts[place].offset, offset);
    EXPECT_EQ(parts[place].bytes, pages[place] * kPageBytes);
    EXPECT_EQ(parts[place].locked, place % 2 == 1);
    offset += parts[place].bytes;
  }
  EXPECT_TRUE(unlock(2, 2).ok());
  EXPECT_EQ(plan->unpin.calls(), 0);
  EXPECT_TRUE(lock(2, 1).ok());  // until then it is still locked
  EXPECT_TRUE(unlock(2, 1).ok());
  EXPECT_EQ(plan->pin.calls(), 2);
  use.reset();
  EXPECT_EQ(plan->unpin.calls(), 1);
  EXPECT_EQ(locks_->statistics().ranges, 1U);
}

TEST_F(HostLocksTest, OnlyUsersOfTheSameRangeWaitForTheDriver) {
  std::promise<void> inside;
  std::promise<void> go;
  std::atomic<int> calls{0};
  plan->on_pin = [&] {
    if (calls++ == 0) {
      inside.set_value();
      go.get_future().wait();
    }
    return Status();
  };
  std::thread slow([&] { EXPECT_TRUE(lock(0, 4).ok()); });
  inside.get_future().wait();
  EXPECT_TRUE(lock(10, 4).ok());  // another range
  EXPECT_TRUE(unlock(10, 4).ok());
  std::thread waiting([&] { EXPECT_TRUE(lock(1, 1).ok()); });  // inside the range that is being pinned
  go.set_value();
  slow.join();
  waiting.join();
  EXPECT_EQ(locks_->info(at(0), 1).value().references, 2U);
  EXPECT_EQ(locks_->statistics().ranges, 1U);
}

TEST_F(HostLocksTest, AForkedChildHasNoLocks) {
  ASSERT_TRUE(lock(0, 4).ok());
  const pid_t child = ::fork();
  if (child == 0) {
    const bool refused = lock(8, 1).error() == EPERM && unlock(0, 4).error() == EPERM;
    locks_->close();  // does nothing there
    ::_exit(refused && plan->unpin.calls() == 0 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(unlock(0, 4).ok());
}

// Each thread locks and unlocks ranges of an area of its own, where it knows what each call must return, and of an area
// that all share, where only the sums must be right.
TEST_F(HostLocksTest, RandomStepsOfManyThreadsAgainstAPlainModel) {
  constexpr int kThreads = 8;
  constexpr int kSteps = 10'000;
  constexpr std::size_t kOwn = 6;  // pages of each thread; the rest is shared
  constexpr std::size_t kShared = kPages - kThreads * kOwn;
  using Pages = std::pair<std::size_t, std::size_t>;  // the first one, and how many
  thread_local std::mt19937 random;
  thread_local bool failed = false;  // the driver failed in this thread's last call
  const auto at_random = [&](int error) {
    failed = random() % 4 == 0;
    return failed ? Status(error, "planned", 2) : Status();
  };
  plan->on_pin = [&] { return at_random(ENOMEM); };
  plan->on_unpin = [&] { return at_random(EIO); };
  std::vector<std::thread> threads;
  for (unsigned number = 0; number < kThreads; ++number) {
    threads.emplace_back([&, number] {
      random.seed(number + 1);
      const std::size_t first = kShared + number * kOwn;
      std::map<Pages, std::multiset<Pages>> entries;  // of its own area: what is pinned, and the locks of that
      std::multiset<Pages> shared;
      const auto unlock_all = [&](const std::multiset<Pages>& ranges) {
        for (const auto& [page, pages] : ranges) {
          while (unlock(page, pages).error() == EIO) {
          }
        }
      };
      for (int step = 0; step < kSteps; ++step) {
        failed = false;
        if (random() % 3 == 0) {
          const std::size_t page = random() % kShared;
          const Pages range{page, 1 + random() % (kShared - page)};
          if (lock(range.first, range.second).ok()) shared.insert(range);
          if (shared.size() > 3) {
            unlock_all(shared);
            shared.clear();
          }
          continue;
        }
        const std::size_t page = first + random() % kOwn;
        const Pages range{page, 1 + random() % (first + kOwn - page)};
        const std::size_t last = range.first + range.second;
        const auto entry = std::find_if(entries.begin(), entries.end(), [&](const auto& one) {
          return one.first.first < last && range.first < one.first.first + one.first.second;
        });
        const bool inside = entry != entries.end() && entry->first.first <= range.first &&
                            last <= entry->first.first + entry->first.second;
        if (random() % 2 == 0) {
          const int error = lock(range.first, range.second).error();
          ASSERT_EQ(error, entry == entries.end() ? (failed ? ENOMEM : 0) : (inside ? 0 : EEXIST));
          if (error == 0) (inside ? entry->second : entries[range]).insert(range);
        } else {
          const int error = unlock(range.first, range.second).error();
          const bool there = inside && entry->second.contains(range);
          ASSERT_EQ(error, !there ? ENOENT : failed ? EIO : 0);
          if (error == 0) entry->second.erase(entry->second.find(range));
          if (error == 0 && entry->second.empty()) entries.erase(entry);
        }
      }
      unlock_all(shared);
      for (const auto& [whole, locks_of_it] : entries) unlock_all(locks_of_it);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(locks_->statistics().ranges, 0U);
  EXPECT_TRUE(nothing_pinned());
}

}  // namespace
}  // namespace gpufs
