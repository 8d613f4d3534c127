// Pinned host memory as a device: what comes back stays mapped for the next memory of that size, and is never seen.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "base/extents.h"
#include "base/math.h"
#include "drivers/gpu/gpu_device.h"
#include "drivers/gpu/host_tier_pool.h"
#include "drivers/gpu/virtual_memory.h"
#include "fake_vendors.h"

namespace gpufs::cuda_test {
namespace {

constexpr std::uint64_t kPiece = gpu::HostTierPool::kPieceBytes;

class HostTierPoolTest : public FakeCuda {
 protected:
  void start(std::uint64_t bytes, const FakeGpuSetup& setup = {}) {
    DriverOptions options;
    options.host_memory_bytes = bytes;
    open(setup, options);
  }
  // The same, once the pool has made all pieces: its thread calls nothing until one comes back.
  void start_full(std::uint64_t bytes, const FakeGpuSetup& setup = {}) {
    start(bytes, setup);
    while (fake().calls("cuMemAddressFree") < static_cast<int>(bytes / kPiece)) std::this_thread::yield();
  }
  void TearDown() override {
    driver_.reset();
    // A mapping that could not be undone keeps its addresses and its memory. Other tests count what is open.
    using Call = int (*)(DeviceAddress, std::size_t);
    void* const library = ::dlopen(GPUFS_FAKE_CUDA, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    for (const auto& [range, mapped] : stuck_) {
      EXPECT_EQ(reinterpret_cast<Call>(::dlsym(library, "cuMemUnmap"))(mapped.offset, mapped.bytes), 0);
      EXPECT_EQ(reinterpret_cast<Call>(::dlsym(library, "cuMemAddressFree"))(range.offset, range.bytes), 0);
    }
    FakeCuda::TearDown();
  }
  Device& host() { return device(1); }
  // Memory whose contents the caller is about to write, as a parked file's.
  Taken take_undefined(std::uint64_t bytes) {
    Taken taken{must(host().create_memory()), nullptr};
    taken.memory->leave_undefined(true);
    taken.range = must(taken.memory->reserve(bytes));
    EXPECT_OK(taken.memory->populate(0, bytes));
    return taken;
  }
  // Of each MiB the first bytes.
  static constexpr std::uint64_t kSample = 64;
  void fill(const Taken& taken, std::uint64_t bytes, std::byte value) {
    const std::vector<std::byte> data(kSample, value);
    for (std::uint64_t at = 0; at < bytes; at += kMiB) {
      ASSERT_OK(host().copy_in(taken.range->base() + at, data.data(), kSample));
    }
  }
  void expect_all(const Taken& taken, std::uint64_t offset, std::uint64_t bytes, std::byte value) {
    const std::vector<std::byte> expected(kSample, value);
    std::vector<std::byte> found(kSample);
    for (std::uint64_t at = offset; at < offset + bytes; at += kMiB) {
      ASSERT_OK(host().copy_out(found.data(), taken.range->base() + at, kSample));
      EXPECT_EQ(found, expected) << at;
    }
  }

  struct Stuck {
    Extent range;
    Extent mapped;  // addresses in it that could not be unmapped
  };
  std::vector<Stuck> stuck_;
};

TEST_F(HostTierPoolTest, MemoryOfTheSameSizeIsMappedOnce) {
  start(4 * kPiece);
  take_undefined(3 * kPiece + 2 * kMiB);
  // The pool's thread maps pieces, too, while it makes them.
  int fewest = 3;
  for (int round = 0; round < 100 && fewest > 0; ++round) {
    const int before = fake().calls("cuMemMap") + fake().calls("cuMemAddressReserve");
    const Taken again = take_undefined(3 * kPiece);
    fill(again, 3 * kPiece, std::byte{1});
    fewest = std::min(fewest, fake().calls("cuMemMap") + fake().calls("cuMemAddressReserve") - before);
  }
  EXPECT_EQ(fewest, 0);
}

TEST_F(HostTierPoolTest, NobodySeesWhatTheLastUserLeft) {
  start(4 * kPiece);
  fill(take_undefined(3 * kPiece), 3 * kPiece, std::byte{7});
  const Taken same = take(host(), 3 * kPiece);
  expect_all(same, 0, 3 * kPiece, std::byte{0});
}

TEST_F(HostTierPoolTest, MappedPiecesServeMemoryOfAnySize) {
  start(4 * kPiece);
  fill(take_undefined(4 * kPiece), 4 * kPiece, std::byte{7});
  // Each is zeros, wherever its pieces come from: a range that is too long, the middle of one, less than a piece.
  {
    const Taken one = take(host(), kPiece);
    const Taken two = take(host(), 2 * kPiece + 2 * kMiB);
    expect_all(one, 0, kPiece, std::byte{0});
    expect_all(two, 0, 2 * kPiece + 2 * kMiB, std::byte{0});
    EXPECT_EQ(take(host(), 0, kPiece).memory->populate(0, kPiece).error(), ENOSPC);
    fill(one, kPiece, std::byte{1});
    expect_all(two, 0, 2 * kPiece, std::byte{0});
  }
  Taken sparse = take(host(), 0, 3 * kPiece);
  ASSERT_OK(sparse.memory->populate(10 * kMiB, kPiece));
  ASSERT_OK(sparse.memory->populate(10 * kMiB + kPiece, kPiece));
  expect_all(sparse, 10 * kMiB, 2 * kPiece, std::byte{0});
  EXPECT_EQ(must(host().memory()).free_bytes, 2 * kPiece);
}

TEST_F(HostTierPoolTest, MappedPiecesAreFree) {
  start(4 * kPiece);
  take_undefined(4 * kPiece);
  EXPECT_EQ(must(host().memory()).free_bytes, 4 * kPiece);
}

TEST_F(HostTierPoolTest, APieceThatCannotBeUnmappedIsNotLost) {
  start(2 * kPiece);
  take_undefined(2 * kPiece);
  fake().fail("cuMemUnmap", 1, 1, 1);
  Taken other = take(host(), 0, 4 * kPiece);  // no range that is there is as long
  (void)other.memory->populate(0, 2 * kPiece);
  other = {};
  const Taken again = take(host(), 2 * kPiece);
  expect_all(again, 0, 2 * kPiece, std::byte{0});
}

TEST_F(HostTierPoolTest, ThreadsNeverShareAPiece) {
  start(8 * kPiece);
  std::vector<std::thread> threads;
  for (int number = 1; number <= 4; ++number) {
    threads.emplace_back([&, number] {
      std::mt19937 random(static_cast<unsigned>(number));
      for (int round = 0; round < 12; ++round) {
        const std::uint64_t bytes = kPiece * (1 + random() % 2) + (random() % 3) * 2 * kMiB;
        const bool undefined = random() % 2 == 0;
        Taken mine{must(host().create_memory()), nullptr};
        if (undefined) mine.memory->leave_undefined(true);
        mine.range = must(mine.memory->reserve(bytes));
        if (!mine.memory->populate(0, bytes).ok()) continue;
        if (!undefined) expect_all(mine, bytes - 2 * kMiB, 2 * kMiB, std::byte{0});
        fill(mine, bytes, static_cast<std::byte>(number));
        std::this_thread::yield();
        expect_all(mine, 0, bytes, static_cast<std::byte>(number));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Access to memory that is mapped without it would end the device's context.
TEST_F(HostTierPoolTest, APieceWithoutAccessIsNotLeftMapped) {
  start_full(2 * kPiece);
  {
    Taken broken = take(host(), 0, 2 * kPiece);
    fake().fail("cuMemSetAccess", 1, api::kOutOfMemory, 1);
    fake().fail("cuMemUnmap", 1, api::kOutOfMemory, 1);
    EXPECT_EQ(broken.memory->populate(0, 2 * kPiece).error(), ENOSPC);
  }
  const Taken again = take_undefined(2 * kPiece);
  fill(again, 2 * kPiece, std::byte{1});
  expect_all(again, 0, 2 * kPiece, std::byte{1});
}

TEST_F(HostTierPoolTest, ARangeWithSomethingElseInItIsNotUsedAgain) {
  start_full(4 * kPiece);
  constexpr std::uint64_t kBytes = 2 * kPiece + 2 * kMiB;
  {
    const Taken one = take_undefined(kBytes);
    fake().fail("cuMemUnmap", 1, 1, 2);  // of the last part, which the pool does not take
    stuck_.push_back({{one.range->base(), one.range->bytes()}, {one.range->base() + 2 * kPiece, 2 * kMiB}});
  }
  for (int round = 0; round < 3; ++round) fill(take_undefined(kBytes), kBytes, std::byte{1});
  const Taken all = take(host(), 4 * kPiece);
  expect_all(all, 0, 4 * kPiece, std::byte{0});
}

TEST_F(HostTierPoolTest, AllIsReleasedAtTheEndWhateverFails) {
  start_full(4 * kPiece);
  {
    const Taken all = take_undefined(4 * kPiece);
    stuck_.push_back({{all.range->base(), all.range->bytes()}, {all.range->base(), kPiece}});
  }
  fake().fail("cuMemUnmap", 1, 1, 1);
}

// Nobody is charged for the addresses that the pool has.
TEST_F(HostTierPoolTest, SparseMemoryLeavesNoAddressesBehind) {
  FakeGpuSetup setup;
  setup.address_space_bytes = std::uint64_t{8} << 30;
  start_full(4 * kPiece, setup);
  for (const std::uint64_t bytes : {setup.address_space_bytes / 8, setup.address_space_bytes / 2}) {
    const Taken sparse = take(host(), kPiece, bytes);
    fill(sparse, kPiece, std::byte{7});
  }
  const Taken on_gpu = take(device(), 0, setup.address_space_bytes / 4 * 3);
  const Taken all = take(host(), 4 * kPiece);
  expect_all(all, 0, 4 * kPiece, std::byte{0});
}

// The pool may have all that the host has left. The end of a file is smaller than its pieces.
TEST_F(HostTierPoolTest, AFullHostReleasesPieces) {
  start_full(4 * kPiece);
  fill(take_undefined(2 * kPiece), 2 * kPiece, std::byte{7});
  fake().fail("cuMemCreate", 1, api::kOutOfMemory, 3);
  const Taken small = take(host(), 2 * kMiB);
  expect_all(small, 0, 2 * kMiB, std::byte{0});
}

TEST_F(HostTierPoolTest, RestoredMemoryCountsTowardsTheCap) {
  start_full(2 * kPiece);
  const Taken kept = take(device(), kPiece);  // any memory will do
  std::vector<ExportedMemory> exported = must(kept.memory->export_memory(0, kPiece, 1, true));
  const int before = fake_state().handles;
  const auto restored =
      must(gpu::PhysicalMemory::adopt(std::dynamic_pointer_cast<gpu::GpuDevice>(driver_->devices().at(1)),
                                      {{0, kPiece}, 0, std::move(exported.at(0).descriptor)}));
  EXPECT_EQ(fake_state().handles, before);
  EXPECT_EQ(must(host().memory()).free_bytes, kPiece);
}

// Memory that a program may have mapped, or that the last process had, never returns to the pool.
TEST_F(HostTierPoolTest, MemoryThatWasSharedIsMadeAnew) {
  start_full(2 * kPiece);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // until the thread has seen that all are made
  {
    const Taken shared = take_undefined(2 * kPiece);
    shared.memory->fix_in_place();
    must(shared.memory->export_memory(0, 2 * kPiece, 2, true));
  }
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (fake_state().handles < 2 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  EXPECT_EQ(fake_state().handles, 2);
}

// 2 TiB of memory that was parked in small files.
TEST(HostTierPool, ManyRangesComeAndGo) {
  constexpr std::uint64_t kRanges = 32768;
  std::uint64_t ranges = kRanges;
  std::uint64_t pieces = kRanges;
  gpu::HostTierPool pool({.create = [](gpu::PhysicalHandle*) { return Status(ENOSPC, "no more"); },
                          .zero = [](gpu::PhysicalHandle, DeviceAddress) { return Status(); },
                          .release = [&](gpu::PhysicalHandle) { --pieces; },
                          .unmap = [](DeviceAddress) { return Status(); },
                          .free_addresses = [&](const Extent&) { --ranges; },
                          .wanted = [] { return std::uint64_t{0}; }});
  const auto start = std::chrono::steady_clock::now();
  for (std::uint64_t number = 1; number <= kRanges; ++number) {
    pool.give(number, number * kPiece);
    pool.give_range({number * kPiece, kPiece});
  }
  pool.trim();
  EXPECT_EQ(pieces, 0U);
  EXPECT_EQ(ranges, 0U);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

// Random memory beside a model of it: what is populated, and what each granule holds. Calls of the driver fail at
// random. GPUFS_TEST_SEEDS in the environment sets how many seeds to run, GPUFS_TEST_SEED the first one.
class HostTierPoolRandomTest : public HostTierPoolTest {
 protected:
  static constexpr std::uint64_t kTier = 8 * kPiece;
  static constexpr int kUndefined = -1;

  struct Memory : Taken {
    bool undefined = false;
    bool fixed = false;
    std::vector<std::shared_ptr<AddressRange>> earlier;  // as readers have them
    std::map<std::uint64_t, int> granules;               // what is populated, by offset, and what it holds
  };
  // Memory that another program may have mapped: nobody else may ever get it.
  struct Shared {
    ExportedMemory exported;
    std::map<std::uint64_t, int> granules;
  };

  std::uint64_t below(std::uint64_t limit) { return random_() % limit; }

  void plan_faults(bool any) {
    constexpr std::array<const char*, 7> kFunctions{
        "cuMemAddressReserve",          "cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemsetD8Async",
        "cuMemExportToShareableHandle", "cuMemUnmap"};
    for (const char* function : kFunctions) fake().fail(function, 1 << 30, 1, 1);
    faults_ = any;
    if (!faults_) return;
    const int code = below(2) == 0 ? api::kOutOfMemory : api::kInvalidValue;
    fake().fail(kFunctions.at(below(6)), 1 + static_cast<int>(below(5)), code, 1 + static_cast<int>(below(3)));
    // One at most: what cannot be unmapped twice in a row is lost.
    if (below(2) == 0) fake().fail("cuMemUnmap", 1 + static_cast<int>(below(4)), code, 1);
  }

  void expect_granule(DeviceAddress address, int value) {
    if (value == kUndefined) return;
    std::array<std::byte, kSample> found{};
    for (const std::uint64_t at : {std::uint64_t{0}, kGranule - kSample}) {
      ASSERT_OK(host().copy_out(found.data(), address + at, kSample));
      std::array<std::byte, kSample> expected{};
      expected.fill(static_cast<std::byte>(value));
      ASSERT_EQ(found, expected);
    }
  }
  void check(const Memory& memory) {
    for (const auto& [offset, value] : memory.granules) {
      SCOPED_TRACE(offset);
      expect_granule(memory.range->base() + offset, value);
      if (HasFatalFailure()) return;
    }
  }
  static void check(const Shared& shared) {
    for (const auto& [offset, value] : shared.granules) {
      if (value == kUndefined) continue;
      std::array<std::byte, kSample> found{};
      const auto at = static_cast<off_t>(offset - shared.exported.offset);
      ASSERT_EQ(::pread(shared.exported.descriptor.get(), found.data(), kSample, at), static_cast<ssize_t>(kSample));
      ASSERT_TRUE(std::ranges::all_of(found, [&](std::byte one) { return one == static_cast<std::byte>(value); }));
    }
  }

  // Some granules of the first `bytes`, that are populated or not.
  Extents some(const Memory& memory, std::uint64_t bytes, bool populated) {
    Extents spans;
    const std::uint64_t from = below(2) == 0 ? below(bytes / kPiece) * kPiece : below(bytes / kGranule) * kGranule;
    const std::uint64_t length = below(2) == 0 ? (1 + below(3)) * kPiece : (1 + below(kPiece / kGranule)) * kGranule;
    for (std::uint64_t at = from; at < std::min(from + length, bytes); at += kGranule) {
      if (memory.granules.contains(at) == populated) spans = joined(spans, {{at, kGranule}});
    }
    return spans;
  }

  void make() {
    Memory& memory = memories_.emplace_back();
    memory.memory = must(host().create_memory());
    memory.undefined = below(3) == 0;
    if (memory.undefined) memory.memory->leave_undefined(true);
    reserve(memory);
    if (memory.range == nullptr) {
      memories_.pop_back();
      return;
    }
    if (below(2) == 0) populate(memory, {{0, round_down(memory.range->bytes(), kPiece)}});
  }

  void reserve(Memory& memory) {
    Extents populated;
    for (const auto& [offset, value] : memory.granules) populated = joined(populated, {{offset, kGranule}});
    const std::uint64_t most = (1 + below(6)) * kPiece + below(2) * 2 * kGranule;
    const std::uint64_t bytes = std::max(most, memory.range == nullptr ? 0 : memory.range->bytes());
    Result<std::shared_ptr<AddressRange>> range = memory.memory->reserve(bytes, populated);
    if (!range.ok()) {
      EXPECT_TRUE(faults_) << range.status().message();
      return;
    }
    ASSERT_GE(range.value()->bytes(), bytes);
    if (memory.range != nullptr && below(2) == 0) memory.earlier.push_back(memory.range);
    memory.range = range.take();
  }

  void populate(Memory& memory, const Extents& spans) {
    std::uint64_t bytes = 0;
    for (const Extent& span : spans) bytes += span.bytes;
    const std::uint64_t free = must(host().memory()).free_bytes;
    const Status status = memory.memory->populate_all(spans, Wait::kAllowed);
    if (!status.ok()) {
      EXPECT_TRUE(faults_ || free < bytes) << status.message();
      return;
    }
    for (const Extent& span : spans) {
      for (std::uint64_t at = span.offset; at < span.end(); at += kGranule) {
        memory.granules[at] = memory.undefined ? kUndefined : 0;
      }
    }
  }

  void write(Memory& memory, const Extents& spans) {
    const int value = 1 + static_cast<int>(below(200));
    std::array<std::byte, kSample> data{};
    data.fill(static_cast<std::byte>(value));
    for (const Extent& span : spans) {
      for (std::uint64_t at = span.offset; at < span.end(); at += kGranule) {
        ASSERT_OK(host().copy_in(memory.range->base() + at, data.data(), kSample));
        ASSERT_OK(host().copy_in(memory.range->base() + at + kGranule - kSample, data.data(), kSample));
        memory.granules[at] = value;
      }
    }
  }

  void release(Memory& memory, const Extents& spans) {
    memory.memory->release_all(spans);
    for (const Extent& span : spans) {
      for (std::uint64_t at = span.offset; at < span.end(); at += kGranule) memory.granules.erase(at);
    }
  }

  void share(Memory& memory) {
    memory.memory->fix_in_place();
    Result<std::vector<ExportedMemory>> exported = memory.memory->export_memory(0, UINT64_MAX, 100, true);
    if (!exported.ok()) {
      EXPECT_TRUE(faults_) << exported.status().message();
      return;
    }
    for (ExportedMemory& piece : exported.value()) {
      Shared shared{std::move(piece), {}};
      for (std::uint64_t at = shared.exported.offset; at < shared.exported.end(); at += kGranule) {
        if (memory.granules.contains(at)) shared.granules[at] = memory.granules[at];
      }
      shared_.push_back(std::move(shared));
    }
    memories_.erase(memories_.begin() + (&memory - memories_.data()));
    if (shared_.size() > 12) shared_.erase(shared_.begin(), shared_.begin() + 6);
  }

  void step() {
    plan_faults(below(3) == 0);
    if (memories_.empty() || (memories_.size() < 5 && below(4) == 0)) {
      make();
      return;
    }
    Memory& memory = memories_[below(memories_.size())];
    switch (below(9)) {
      case 0:
      case 1:
        populate(memory, some(memory, memory.range->bytes(), false));
        break;
      case 2:
      case 3:
        write(memory, some(memory, memory.range->bytes(), true));
        break;
      case 4:
        release(memory, some(memory, memory.range->bytes(), true));
        break;
      case 5:
        reserve(memory);
        break;
      case 6:
        if (!memory.earlier.empty()) memory.earlier.erase(memory.earlier.begin());
        check(memory);
        break;
      case 7:
        if (below(3) == 0) {
          share(memory);
          break;
        }
        [[fallthrough]];
      default:
        check(memory);
        memories_.erase(memories_.begin() + (&memory - memories_.data()));
    }
  }

  void run(unsigned seed) {
    random_.seed(seed);
    start(kTier);
    for (int number = 0; number < 200 && !HasFailure(); ++number) {
      SCOPED_TRACE("step " + std::to_string(number));
      step();
      EXPECT_OK(host().health());
      // Some pieces more: the thread has one in its hands, and an unmapping may have failed. It must not become more.
      EXPECT_LE(fake_state().bytes_used, kTier + 3 * kPiece);
      if (number % 16 != 0) continue;
      for (const Memory& memory : memories_) check(memory);
      for (const Shared& shared : shared_) check(shared);
    }
    plan_faults(false);
    for (const Shared& shared : shared_) check(shared);
    shared_.clear();
    memories_.clear();
    EXPECT_EQ(must(host().memory()).free_bytes, kTier);
    const Taken all = take(host(), kTier);
    expect_all(all, 0, kTier, std::byte{0});
  }

  std::mt19937_64 random_;
  std::vector<Memory> memories_;
  std::vector<Shared> shared_;
  bool faults_ = false;
};

TEST_F(HostTierPoolRandomTest, MatchesAPlainModel) {
  const auto number = [](const char* name, int otherwise) {
    const char* const text = std::getenv(name);
    return text == nullptr ? otherwise : std::atoi(text);
  };
  const int first = number("GPUFS_TEST_SEED", 1);
  for (int seed = first; seed < first + number("GPUFS_TEST_SEEDS", 1) && !HasFailure(); ++seed) {
    SCOPED_TRACE("GPUFS_TEST_SEED=" + std::to_string(seed));
    run(static_cast<unsigned>(seed));
    driver_.reset();
    EXPECT_EQ(control_.reset(&setup_), 0) << "something was left open";
  }
}

}  // namespace
}  // namespace gpufs::cuda_test
