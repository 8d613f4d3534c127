// Locked host memory: every rule of HostLocks by itself, and 100,000 random steps of eight threads with a driver that
// fails at random, against a plain model.

#include "memory/host_locks.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace gpufs {
namespace {

// A device that knows only pins: which there are, what the next calls answer, and whether they wait.
class PinDevice : public Device {
 public:
  PinDevice() { info_.cpu_addressable = false; }

  std::function<Status()> on_pin = [] { return Status(); };
  std::function<Status()> on_unpin = [] { return Status(); };
  bool tells_ranges = true;
  std::int64_t seen_at = 0;  // how far from their own addresses the device sees pinned ranges; below 0: nowhere
  std::atomic<int> pins{0};
  std::atomic<int> unpins{0};
  std::atomic<int> read_only_pins{0};
  std::atomic<bool> can_read_only{true};

  // As another library does, with no regard to plans.
  void pin_elsewhere(void* address, std::size_t bytes) { ASSERT_TRUE(take(address, bytes).ok()); }
  std::size_t pinned() const {
    const std::lock_guard lock(mutex_);
    return ranges_.size();
  }

  [[nodiscard]] const DeviceInfo& info() const override { return info_; }
  Result<MemoryInfo> memory() override { return MemoryInfo{}; }
  Status bind_thread() override { return {}; }
  Status health() override { return {}; }
  Result<std::unique_ptr<DeviceMemory>> create_memory() override { return Status(ENOSYS, ""); }
  Result<std::unique_ptr<Stream>> create_stream() override { return Status(ENOSYS, ""); }
  Result<std::unique_ptr<Stream>> adopt_stream(NativeStream, bool) override { return Status(ENOSYS, ""); }
  Result<std::unique_ptr<Event>> create_event() override { return Status(ENOSYS, ""); }
  Status copy_in(DeviceAddress, const void*, std::size_t) override { return Status(ENOSYS, ""); }
  Status copy_out(void*, DeviceAddress, std::size_t) override { return Status(ENOSYS, ""); }
  Status copy_within(DeviceAddress, DeviceAddress, std::size_t) override { return Status(ENOSYS, ""); }
  Status zero(DeviceAddress, std::size_t) override { return Status(ENOSYS, ""); }
  Status copy_to_peer(Device&, DeviceAddress, DeviceAddress, std::size_t) override { return Status(ENOSYS, ""); }
  Status pin(void* address, std::size_t bytes) override {
    if (Status planned = on_pin(); !planned.ok()) return planned;
    Status status = take(address, bytes);
    if (status.ok()) ++pins;
    return status;
  }
  Status pin_read_only(const void* address, std::size_t bytes) override {
    if (!can_read_only) return Status(EOPNOTSUPP, "not here");
    ++read_only_pins;
    return pin(const_cast<void*>(address), bytes);
  }
  Status unpin(void* address) override {
    if (Status planned = on_unpin(); !planned.ok()) return planned;
    const std::lock_guard lock(mutex_);
    if (ranges_.erase(reinterpret_cast<std::uintptr_t>(address)) == 0) return Status(ENOENT, "not pinned");
    ++unpins;
    return {};
  }
  Result<DeviceAddress> address_of_pinned(void* address) override {
    if (seen_at < 0) return Status(EOPNOTSUPP, "nowhere");
    return reinterpret_cast<DeviceAddress>(address) + static_cast<DeviceAddress>(seen_at);
  }
  Result<PinnedHostRange> pinned_range(const void* address) override {
    if (!tells_ranges) return Status(EOPNOTSUPP, "it does not tell");
    const auto at = reinterpret_cast<std::uintptr_t>(address);
    const std::lock_guard lock(mutex_);
    for (const auto& [start, end] : ranges_) {
      if (start <= at && at < end) return PinnedHostRange{start, end};
    }
    return Status(ENOENT, "nothing there");
  }

 private:
  Status take(void* address, std::size_t bytes) {
    const auto start = reinterpret_cast<std::uintptr_t>(address);
    const std::lock_guard lock(mutex_);
    for (const auto& [other, end] : ranges_) {
      if (other < start + bytes && start < end) return Status(EEXIST, "pinned already", 712);
    }
    ranges_[start] = start + bytes;
    return {};
  }

  DeviceInfo info_;
  mutable std::mutex mutex_;
  std::map<std::uintptr_t, std::uintptr_t> ranges_;
};

class PinDriver : public Driver {
 public:
  PinDriver() { devices_.push_back(std::make_unique<PinDevice>()); }
  [[nodiscard]] const char* name() const override { return "pins"; }
  [[nodiscard]] const std::vector<std::shared_ptr<Device>>& devices() const override { return devices_; }
  PinDevice& device() { return static_cast<PinDevice&>(*devices_.front()); }

 private:
  std::vector<std::shared_ptr<Device>> devices_;
};

constexpr std::size_t kPage = 4096;
constexpr std::size_t kPages = 64;

class HostLocksTest : public ::testing::Test {
 protected:
  HostLocksTest()
      : base_(static_cast<std::byte*>(
            ::mmap(nullptr, kPages * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {}
  ~HostLocksTest() override { ::munmap(base_, kPages * kPage); }

  Status lock(std::size_t page, std::size_t pages, HostLocks::Access access = HostLocks::Access::kBoth) {
    return locks_.lock(at(page), pages * kPage, access);
  }
  Status unlock(std::size_t page, std::size_t pages) { return locks_.unlock(at(page), pages * kPage); }
  std::byte* at(std::size_t page) { return base_ + page * kPage; }
  std::string text(std::size_t page, std::size_t pages) {
    const auto start = reinterpret_cast<std::uintptr_t>(at(page));
    return to_text({start, start + pages * kPage});
  }
  PinDevice& device() { return driver_->device(); }

  const std::shared_ptr<PinDriver> driver_ = std::make_shared<PinDriver>();
  HostLocks locks_{driver_, LockPolicy::kAuto};
  std::byte* const base_;
};

bool names(const Status& status, const std::string& text) { return status.message().find(text) != std::string::npos; }

TEST_F(HostLocksTest, WhatIsInsideAddsAReferenceAndTheLastOneUnlocks) {
  ASSERT_TRUE(lock(0, 8).ok());
  ASSERT_TRUE(lock(2, 2).ok());
  ASSERT_TRUE(lock(2, 2).ok());
  EXPECT_EQ(device().pins, 1);
  EXPECT_EQ(locks_.statistics().references, 3U);
  EXPECT_EQ(locks_.statistics().bytes, 8 * kPage);
  EXPECT_EQ(locks_.statistics().ranges, 1U);
  EXPECT_TRUE(unlock(0, 8).ok());  // the whole stays for those inside
  EXPECT_EQ(locks_.info(at(7), 1).value().whole.bytes(), 8 * kPage);
  EXPECT_TRUE(unlock(2, 2).ok());
  EXPECT_EQ(device().unpins, 0);
  EXPECT_TRUE(unlock(2, 2).ok());
  EXPECT_EQ(device().unpins, 1);
  EXPECT_EQ(locks_.statistics().bytes, 0U);
  EXPECT_EQ(locks_.info(at(0), 1).error(), ENOENT);
}

TEST_F(HostLocksTest, OverlapsNameBothRangesAndChangeNothing) {
  ASSERT_TRUE(lock(4, 4).ok());
  for (const auto& [page, pages] : {std::pair{2, 3}, {7, 2}, {3, 6}, {0, 64}}) {
    const Status refused = lock(static_cast<std::size_t>(page), static_cast<std::size_t>(pages));
    EXPECT_EQ(refused.error(), EEXIST);
    EXPECT_TRUE(names(refused, text(4, 4))) << refused.message();
    EXPECT_TRUE(names(refused, text(static_cast<std::size_t>(page), static_cast<std::size_t>(pages))));
  }
  EXPECT_EQ(device().pins, 1);
  EXPECT_EQ(locks_.statistics().references, 1U);
  EXPECT_TRUE(lock(8, 1).ok());  // neighbours do not overlap
  EXPECT_TRUE(lock(3, 1).ok());
  EXPECT_EQ(locks_.statistics().ranges, 3U);
}

TEST_F(HostLocksTest, RangesThatShareAPageAreTwo) {
  ASSERT_TRUE(locks_.lock(base_ + 10, 100).ok());
  ASSERT_TRUE(locks_.lock(base_ + 110, 50).ok());
  EXPECT_EQ(device().pins, 2);
  EXPECT_TRUE(locks_.unlock(base_ + 10, 100).ok());
  EXPECT_EQ(device().pinned(), 1U);
}

TEST_F(HostLocksTest, RangesThatCannotBe) {
  EXPECT_EQ(locks_.lock(base_, 0).error(), EINVAL);
  EXPECT_EQ(locks_.lock(nullptr, kPage).error(), EINVAL);
  EXPECT_EQ(locks_.lock(base_, ~std::size_t{0}).error(), EINVAL);
  EXPECT_EQ(locks_.lock(reinterpret_cast<void*>(~std::uintptr_t{0} - 10), 10).error(), EINVAL);
  EXPECT_EQ(locks_.unlock(base_, ~std::size_t{0}).error(), EINVAL);
  ASSERT_EQ(::munmap(at(60), kPage), 0);
  const Status unmapped = lock(58, 4);
  EXPECT_EQ(unmapped.error(), EFAULT);
  EXPECT_TRUE(names(unmapped, text(58, 4))) << unmapped.message();
  EXPECT_EQ(device().pins, 0);
  EXPECT_EQ(locks_.statistics().ranges, 0U);
}

TEST_F(HostLocksTest, UnlockingWhatIsNotLockedNamesIt) {
  Status refused = unlock(1, 2);
  EXPECT_EQ(refused.error(), ENOENT);
  EXPECT_TRUE(names(refused, text(1, 2)));
  ASSERT_TRUE(lock(0, 8).ok());
  refused = unlock(1, 2);  // inside, but never locked as such
  EXPECT_EQ(refused.error(), ENOENT);
  EXPECT_TRUE(names(refused, text(1, 2)));
  EXPECT_TRUE(names(refused, text(0, 8)));
  EXPECT_TRUE(unlock(0, 8).ok());
  EXPECT_EQ(unlock(0, 8).error(), ENOENT);
}

TEST_F(HostLocksTest, DevicesSeeARangeAtAnAddressOfTheirOwn) {
  device().seen_at = 1 << 30;
  ASSERT_TRUE(lock(0, 8).ok());
  ASSERT_TRUE(lock(2, 2).ok());
  const auto start = reinterpret_cast<DeviceAddress>(at(0));
  EXPECT_EQ(locks_.info(at(0), 8 * kPage).value().device_address, start + (1 << 30));
  EXPECT_EQ(locks_.info(at(2), kPage).value().device_address, start + 2 * kPage + (1 << 30));
  // Of memory that somebody else pinned, too.
  device().pin_elsewhere(at(16), 8 * kPage);
  ASSERT_TRUE(lock(18, 2).ok());
  EXPECT_EQ(locks_.info(at(18), 2 * kPage).value().device_address, start + 18 * kPage + (1 << 30));
  // A driver that gives none.
  device().seen_at = -1;
  ASSERT_TRUE(lock(10, 2).ok());
  EXPECT_EQ(locks_.info(at(10), 2 * kPage).value().device_address, 0U);
}

TEST_F(HostLocksTest, ForeignMemoryIsRecordedWholeAndNeverUnlocked) {
  device().pin_elsewhere(at(8), 16 * kPage);
  ASSERT_TRUE(lock(10, 2).ok());
  const HostLocks::Info info = locks_.info(at(8), 16 * kPage).value();
  EXPECT_TRUE(info.foreign);
  EXPECT_EQ(info.whole.bytes(), 16 * kPage);
  ASSERT_TRUE(lock(20, 4).ok());  // inside the whole
  EXPECT_EQ(locks_.statistics().ranges, 1U);
  EXPECT_TRUE(unlock(10, 2).ok());
  EXPECT_TRUE(unlock(20, 4).ok());
  EXPECT_EQ(device().unpins, 0);
  EXPECT_EQ(device().pinned(), 1U);
  EXPECT_EQ(locks_.statistics().ranges, 0U);
  // Only a part of it is pinned by others.
  for (const std::size_t page : {22, 6}) {
    const Status refused = lock(page, 4);
    EXPECT_EQ(refused.error(), EEXIST);
    EXPECT_TRUE(names(refused, text(8, 16))) << refused.message();
  }
  EXPECT_EQ(locks_.statistics().ranges, 0U);
  // Where the driver does not tell, the range itself is all that is known.
  device().tells_ranges = false;
  ASSERT_TRUE(lock(10, 2).ok());
  EXPECT_EQ(locks_.info(at(10), 1).value().whole.bytes(), 2 * kPage);
  EXPECT_TRUE(unlock(10, 2).ok());
  EXPECT_EQ(device().unpins, 0);
}

TEST_F(HostLocksTest, WhatSomebodyElseUnlockedIsGone) {
  ASSERT_TRUE(lock(0, 1).ok());
  ASSERT_TRUE(device().unpin(at(0)).ok());
  EXPECT_TRUE(unlock(0, 1).ok());
  EXPECT_EQ(locks_.statistics().ranges, 0U);
}

TEST_F(HostLocksTest, MemoryForDevicesToReadOnly) {
  ASSERT_EQ(::mprotect(at(0), 4 * kPage, PROT_READ), 0);
  ASSERT_TRUE(lock(0, 4, HostLocks::Access::kSource).ok());
  EXPECT_EQ(device().read_only_pins, 1);
  EXPECT_TRUE(locks_.info(at(0), 1).value().source_only);
  EXPECT_EQ(lock(1, 1).error(), EACCES);
  EXPECT_TRUE(lock(1, 1, HostLocks::Access::kSource).ok());
  EXPECT_EQ(locks_.use(at(0), kPage, HostLocks::Access::kBoth).error(), EACCES);
  EXPECT_TRUE(locks_.use(at(0), kPage, HostLocks::Access::kSource).value().parts().front().locked);
  EXPECT_TRUE(unlock(0, 4).ok());
  EXPECT_TRUE(unlock(1, 1).ok());
  // Without a way for such memory it is locked as any other.
  device().can_read_only = false;
  ASSERT_TRUE(lock(8, 1, HostLocks::Access::kSource).ok());
  EXPECT_FALSE(locks_.info(at(8), 1).value().source_only);
  EXPECT_TRUE(lock(8, 1).ok());
}

TEST_F(HostLocksTest, FailuresOfTheDriverLeaveCountsRight) {
  device().on_pin = [] { return Status(ENOMEM, "planned: no more", 2); };
  const Status refused = lock(0, 4);
  EXPECT_EQ(refused.error(), ENOMEM);
  EXPECT_EQ(refused.device_code(), 2);
  EXPECT_TRUE(names(refused, text(0, 4)) && names(refused, "planned: no more") && names(refused, "lock less"))
      << refused.message();
  EXPECT_EQ(locks_.statistics().references, 0U);
  device().on_pin = [] { return Status(); };
  ASSERT_TRUE(lock(0, 4).ok());
  device().on_unpin = [] { return Status(EIO, "planned", 999); };
  const Status stuck = unlock(0, 4);
  EXPECT_EQ(stuck.error(), EIO);
  EXPECT_EQ(stuck.device_code(), 999);
  EXPECT_EQ(locks_.statistics().references, 1U);  // still locked, and can be unlocked later
  device().on_unpin = [] { return Status(); };
  EXPECT_TRUE(unlock(0, 4).ok());
  EXPECT_EQ(device().pinned(), 0U);
}

TEST_F(HostLocksTest, WhatIsInUseIsUnlockedWhenThatEnds) {
  ASSERT_TRUE(lock(2, 2).ok());
  ASSERT_TRUE(lock(6, 1).ok());
  std::optional<HostLocks::Use> use(locks_.use(at(0), 8 * kPage, HostLocks::Access::kBoth).take());
  const std::vector<HostLocks::Part>& parts = use->parts();
  ASSERT_EQ(parts.size(), 5U);
  const std::array<std::size_t, 5> pages = {2, 2, 2, 1, 1};
  std::size_t offset = 0;
  for (std::size_t place = 0; place < parts.size(); ++place) {
    EXPECT_EQ(parts[place].offset, offset);
    EXPECT_EQ(parts[place].bytes, pages[place] * kPage);
    EXPECT_EQ(parts[place].locked, place % 2 == 1);
    offset += parts[place].bytes;
  }
  EXPECT_TRUE(unlock(2, 2).ok());
  EXPECT_EQ(device().unpins, 0);
  EXPECT_TRUE(lock(2, 1).ok());  // and meanwhile it is still there for others
  EXPECT_TRUE(unlock(2, 1).ok());
  EXPECT_EQ(device().pins, 2);
  use.reset();
  EXPECT_EQ(device().unpins, 1);
  EXPECT_EQ(locks_.statistics().ranges, 1U);
}

TEST_F(HostLocksTest, NobodyElseWaitsForTheDriver) {
  std::mutex mutex;
  std::condition_variable changed;
  bool inside = false;
  bool go = false;
  device().on_pin = [&] {
    std::unique_lock held(mutex);
    inside = true;
    changed.notify_all();
    changed.wait(held, [&] { return go; });
    return Status();
  };
  std::thread slow([&] { EXPECT_TRUE(lock(0, 4).ok()); });
  {
    std::unique_lock held(mutex);
    changed.wait(held, [&] { return inside; });
  }
  device().on_pin = [] { return Status(); };
  EXPECT_TRUE(lock(10, 4).ok());  // another range
  EXPECT_TRUE(unlock(10, 4).ok());
  std::atomic<bool> second{false};
  std::thread waiting([&] {
    EXPECT_TRUE(lock(1, 1).ok());  // inside the one that is being pinned
    second = true;
  });
  EXPECT_FALSE(second);
  {
    const std::lock_guard held(mutex);
    go = true;
  }
  changed.notify_all();
  slow.join();
  waiting.join();
  EXPECT_EQ(locks_.statistics().references, 2U);
  EXPECT_EQ(locks_.statistics().ranges, 1U);
}

TEST_F(HostLocksTest, ClosingUnlocksEverything) {
  ASSERT_TRUE(lock(0, 4).ok());
  ASSERT_TRUE(lock(1, 1).ok());
  ASSERT_TRUE(lock(8, 4).ok());
  {
    const HostLocks::Use use = locks_.use(at(8), kPage, HostLocks::Access::kBoth).take();
    locks_.close();
    EXPECT_EQ(device().pinned(), 1U);
    EXPECT_EQ(lock(20, 1).error(), ESHUTDOWN);
  }
  EXPECT_EQ(device().pinned(), 0U);
  EXPECT_EQ(locks_.statistics().ranges, 0U);
  locks_.close();
}

TEST_F(HostLocksTest, AForkedChildHasNoLocks) {
  ASSERT_TRUE(lock(0, 4).ok());
  const pid_t child = ::fork();
  if (child == 0) {
    const bool refused = lock(8, 1).error() == EPERM && unlock(0, 4).error() == EPERM;
    locks_.close();  // does nothing there
    ::_exit(refused && device().unpins == 0 ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(device().pinned(), 1U);
  EXPECT_TRUE(unlock(0, 4).ok());
}

// Each thread has its own area, which it locks and unlocks in all ways; all of them share another one. What a thread's
// own calls must answer is known from a plain list of what is locked there; for the shared area only what must add up.
TEST_F(HostLocksTest, RandomStepsOfManyThreadsAgainstAPlainModel) {
  constexpr int kThreads = 8;
  constexpr int kSteps = 100000 / kThreads;
  constexpr std::size_t kOwn = 6;  // pages of each thread; the rest is shared
  constexpr std::size_t kShared = kPages - kThreads * kOwn;
  struct Generator {
    std::mutex mutex;
    std::mt19937 engine{12345};
    bool one_in(unsigned many) {
      const std::lock_guard held(mutex);
      return engine() % many == 0;
    }
  } luck;
  thread_local bool failed = false;  // the driver failed in this thread's last call
  device().on_pin = [&] {
    failed = luck.one_in(4);
    return failed ? Status(ENOMEM, "planned", 2) : Status();
  };
  device().on_unpin = [&] {
    failed = luck.one_in(4);
    return failed ? Status(EIO, "planned", 999) : Status();
  };
  std::atomic<std::uint64_t> held_shared{0};
  std::atomic<std::uint64_t> driver_failures{0};
  std::vector<std::thread> threads;
  std::array<std::multiset<std::pair<std::size_t, std::size_t>>, kThreads> own_held;
  for (int number = 0; number < kThreads; ++number) {
    threads.emplace_back([&, number] {
      std::mt19937 random(static_cast<unsigned>(number) + 1);
      const std::size_t first = kShared + static_cast<std::size_t>(number) * kOwn;
      auto& held = own_held[static_cast<std::size_t>(number)];
      // The model: what the entry of this thread's area is made of. Entries: first and last page, and their locks.
      std::map<std::pair<std::size_t, std::size_t>, std::multiset<std::pair<std::size_t, std::size_t>>> entries;
      std::multiset<std::pair<std::size_t, std::size_t>> shared;
      for (int step = 0; step < kSteps; ++step) {
        failed = false;
        if (random() % 3 == 0) {
          const std::size_t page = random() % kShared;
          const std::pair range{page, 1 + random() % (kShared - page)};
          if (random() % 2 == 0) {
            if (lock(range.first, range.second).ok()) shared.insert(range);
          } else if (!shared.empty()) {
            const auto some = std::next(shared.begin(), static_cast<std::ptrdiff_t>(random() % shared.size()));
            const Status status = unlock(some->first, some->second);
            ASSERT_TRUE(status.ok() || (status.error() == EIO && failed)) << status.message();
            if (status.ok()) shared.erase(some);
          }
          if (failed) ++driver_failures;
          continue;
        }
        const std::size_t page = first + random() % kOwn;
        const std::pair range{page, 1 + random() % (first + kOwn - page)};
        const auto last = range.first + range.second;
        const auto touching = std::find_if(entries.begin(), entries.end(), [&](const auto& entry) {
          return entry.first.first < last && range.first < entry.first.first + entry.first.second;
        });
        const bool inside = touching != entries.end() && touching->first.first <= range.first &&
                            last <= touching->first.first + touching->first.second;
        if (random() % 2 == 0) {
          const Status status = lock(range.first, range.second);
          if (touching == entries.end()) {
            ASSERT_EQ(status.error(), failed ? ENOMEM : 0) << status.message();
            if (status.ok()) entries[range].insert(range);
          } else {
            ASSERT_EQ(status.error(), inside ? 0 : EEXIST) << status.message();
            if (inside) touching->second.insert(range);
          }
        } else {
          const Status status = unlock(range.first, range.second);
          const bool there = inside && touching->second.contains(range);
          if (!there) {
            ASSERT_EQ(status.error(), ENOENT) << status.message();
          } else if (touching->second.size() == 1) {
            ASSERT_EQ(status.error(), failed ? EIO : 0) << status.message();
            if (status.ok()) entries.erase(touching);
          } else {
            ASSERT_TRUE(status.ok()) << status.message();
            touching->second.erase(touching->second.find(range));
          }
        }
        if (failed) ++driver_failures;
        if (random() % 16 == 0) {
          const Result<HostLocks::Use> use = locks_.use(at(first), kOwn * kPage, HostLocks::Access::kBoth);
          ASSERT_TRUE(use.ok());
          std::size_t locked_bytes = 0;
          std::size_t expected = 0;
          for (const HostLocks::Part& part : use.value().parts()) locked_bytes += part.locked ? part.bytes : 0;
          for (const auto& [whole, locks_of_it] : entries) expected += whole.second * kPage;
          ASSERT_EQ(locked_bytes, expected);
        }
      }
      held_shared += shared.size();
      for (const auto& [whole, locks_of_it] : entries) held.insert(locks_of_it.begin(), locks_of_it.end());
      // What is left is given back, however often the driver fails.
      for (const auto& range : shared) {
        while (unlock(range.first, range.second).error() == EIO) {
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(driver_failures, 50U);  // some hundreds: how many depends on how the threads take turns
  std::uint64_t own = 0;
  for (const auto& held : own_held) own += held.size();
  EXPECT_EQ(locks_.statistics().references, own);
  for (const auto& held : own_held) {
    for (const auto& range : held) {
      while (unlock(range.first, range.second).error() == EIO) {
      }
    }
  }
  EXPECT_EQ(locks_.statistics().references, 0U);
  EXPECT_EQ(locks_.statistics().ranges, 0U);
  EXPECT_EQ(device().pins.load(), device().unpins.load());
  EXPECT_EQ(device().pinned(), 0U);
}

}  // namespace
}  // namespace gpufs
