// Memory of GPUs whose process dies: what a keeper holds of it, and how the next process finds it again.
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "bytes.h"
#include "device/device_context.h"
#include "fake_keeper.h"
#include "fake_vendors.h"
#include "memory/account.h"
#include "memory/extent_buffer.h"

namespace gpufs::gpu_test {
namespace {

using testing::FakeKeeper;

constexpr Names kMemoryImport{"cuMemImportFromShareableHandle", "hipMemImportFromShareableHandle"};

class KeptGpuMemory : public FakeVendorTest {
 protected:
  void open_kept(const DriverOptions& options = {}) {
    open({}, options);
    keeper_ = std::make_shared<FakeKeeper>();
    device().set_keeper(keeper_);
  }
  // Another process, with a driver of its own.
  void die(Filled& filled, const DriverOptions& options = {}) {
    number_ = filled.memory->number();
    keeper_ = keeper_->next();
    filled.memory.reset();
    filled.range.reset();
    driver_ = must(open_driver(options));
    device().set_keeper(keeper_);
  }
  Status restore(Filled& filled, std::span<const Extent> populated) {
    Result<std::unique_ptr<DeviceMemory>> restored = device().restore_memory(number_, populated);
    if (!restored.ok()) return restored.status();
    filled.memory = restored.take();
    filled.range = must(filled.memory->reserve(filled.data.size(), populated));
    return {};
  }
  void expect_zeros(const Filled& filled, std::uint64_t offset, std::uint64_t bytes) {
    std::vector<std::byte> back(bytes, std::byte{1});
    EXPECT_OK(device().copy_out(back.data(), filled.range->base() + offset, bytes));
    EXPECT_TRUE(std::ranges::all_of(back, [](std::byte one) { return one == std::byte{}; }));
  }

  std::shared_ptr<FakeKeeper> keeper_;
  std::uint64_t number_ = 0;  // of the memory of the process that has died
};

TEST_P(KeptGpuMemory, ContentsSurvive) {
  open_kept();
  Filled filled = fill(8);
  const std::uint64_t number = filled.memory->number();
  EXPECT_NE(number, 0U);
  EXPECT_EQ(keeper_->bytes(), 8 * kGranule);
  const Extent all{0, 8 * kGranule};
  for (int death = 0; death < 3; ++death) {
    die(filled);
    ASSERT_OK(restore(filled, {&all, 1}));
    EXPECT_EQ(filled.memory->number(), number);
    expect_content(filled, 0, 8 * kGranule);
    EXPECT_EQ(keeper_->bytes(), 8 * kGranule);
  }
  filled.memory->release(0, 8 * kGranule);
  EXPECT_EQ(keeper_->bytes(), 0U);
}

TEST_P(KeptGpuMemory, HostMemoryIsKeptThatIsTakenAfterADeath) {
  if (vendor().open != cuda_test::open_fake) return;  // HIP has no host memory as a device
  const Extent all{0, 128 * kMiB};
  DriverOptions options;
  options.host_memory_bytes = all.bytes;
  open({}, options);
  keeper_ = std::make_shared<FakeKeeper>();
  device(1).set_keeper(keeper_);
  Taken taken = take(device(1), all.bytes);
  for (int death = 0; death < 3; ++death) {
    const std::uint64_t number = taken.memory->number();
    keeper_ = keeper_->next();
    taken = {};
    driver_.reset();
    driver_ = must(open_driver(options));
    device(1).set_keeper(keeper_);
    must(device(1).restore_memory(number, {&all, 1}));  // and is released
    taken = take(device(1), all.bytes);
    EXPECT_EQ(keeper_->bytes(), all.bytes);
    EXPECT_OK(keeper_->lost);
  }
}

TEST_P(KeptGpuMemory, WhatWasNotPopulatedIsNotReadableAgain) {
  open_kept();
  Filled filled = fill(8);
  ASSERT_OK(filled.memory->populate(8 * kGranule, 8 * kGranule));  // a piece that no record has
  const Extent rest{2 * kGranule, 3 * kGranule};
  die(filled);
  ASSERT_OK(restore(filled, {&rest, 1}));
  EXPECT_EQ(keeper_->bytes(), 8 * kGranule);
  expect_content(filled, rest.offset, rest.bytes);
  ASSERT_OK(filled.memory->populate(0, 2 * kGranule));
  ASSERT_OK(filled.memory->populate(5 * kGranule, 3 * kGranule));
  expect_zeros(filled, 0, 2 * kGranule);
  expect_zeros(filled, 5 * kGranule, 3 * kGranule);
  expect_content(filled, rest.offset, rest.bytes);
}

TEST_P(KeptGpuMemory, ADeathAtAnyPointOfASplitLosesNothing) {
  const Extent parts[] = {{0, kGranule}, {2 * kGranule, kGranule}, {4 * kGranule, 4 * kGranule}};
  const Extent released[] = {{kGranule, kGranule}, {3 * kGranule, kGranule}};
  bool completed = false;
  for (int calls = 0; !completed; ++calls) {
    SCOPED_TRACE(calls);
    ASSERT_LT(calls, 20);
    open_kept();
    Filled filled = fill(8);
    keeper_->die_after(calls);
    filled.memory->release_all(released);
    completed = !keeper_->died();
    die(filled);
    ASSERT_OK(restore(filled, parts));
    for (const Extent& part : parts) expect_content(filled, part.offset, part.bytes);
    EXPECT_LE(keeper_->bytes(), 8 * kGranule);
    filled.memory->release_all(filled.memory->surplus());
    filled.memory->release_all(parts);
    EXPECT_EQ(keeper_->bytes(), 0U);
    filled = {};
    driver_.reset();
  }
}

TEST_P(KeptGpuMemory, APartOfRestoredMemoryCanBeReleased) {
  open_kept();
  Filled filled = fill(8);
  const Extent all{0, 8 * kGranule};
  die(filled);
  ASSERT_OK(restore(filled, {&all, 1}));
  filled.memory->fix_in_place();  // as a lease does: the programs that have it map the pieces as they are
  filled.memory->release(6 * kGranule, 2 * kGranule);
  EXPECT_EQ(keeper_->bytes(), 8 * kGranule);
  filled.memory->allow_moves();
  filled.memory->release(4 * kGranule, 2 * kGranule);
  EXPECT_EQ(keeper_->bytes(), 4 * kGranule);
  expect_content(filled, 0, 4 * kGranule);
}

TEST_P(KeptGpuMemory, RestoredMemoryCountsTowardsTheCap) {
  DriverOptions options;
  options.memory_bytes = 10 * kGranule;
  open_kept(options);
  Filled filled = fill(8);
  const Extent all{0, 8 * kGranule};
  die(filled, options);
  ASSERT_OK(restore(filled, {&all, 1}));
  EXPECT_EQ(must(device().memory()).free_bytes, 2 * kGranule);
  EXPECT_EQ(take(device(), 0, kGranule).memory->populate(0, 3 * kGranule).error(), ENOSPC);
  options.memory_bytes = 4 * kGranule;  // less than there is
  die(filled, options);
  ASSERT_OK(restore(filled, {&all, 1}));
  EXPECT_EQ(must(device().memory()).free_bytes, 0U);
  options.memory_bytes = 10 * kGranule;
  die(filled, options);
  ASSERT_OK(restore(filled, {&all, 1}));
  filled.memory->release(0, 8 * kGranule);
  EXPECT_EQ(must(device().memory()).free_bytes, 10 * kGranule);
}

TEST_P(KeptGpuMemory, MemoryAheadIsCountedAndComesBack) {
  open_kept();
  std::shared_ptr<Driver> driver = std::move(driver_);
  std::shared_ptr<DeviceContext> context = must(DeviceContext::create(driver, 0));
  std::shared_ptr<ExtentBuffer> buffer = std::make_shared<ExtentBuffer>(context, /*preallocates=*/true);
  const std::vector<std::byte> data = pattern(kGranule, 3);
  for (std::uint64_t at = 0; at < 9 * kGranule; at += kGranule) ASSERT_EQ(must(buffer->write(at, data)), data.size());
  const std::uint64_t held = buffer->bytes_held();
  ASSERT_GT(held, 9 * kGranule);
  const KeptContents kept = buffer->kept();
  keeper_ = keeper_->next();
  buffer.reset();
  context.reset();
  driver = must(open_driver());
  driver->devices().at(0)->set_keeper(keeper_);
  context = must(DeviceContext::create(driver, 0));
  buffer = std::make_shared<ExtentBuffer>(context, /*preallocates=*/true);
  ASSERT_OK(buffer->restore(kept, buffer->device()));
  EXPECT_EQ(buffer->bytes_held(), held);
  EXPECT_EQ(context->held_bytes(), held);
  std::vector<std::byte> back(kGranule);
  const auto expect = [&](std::uint64_t at, const std::vector<std::byte>& expected) {
    ASSERT_EQ(must(buffer->read(at, back, Wait::kAllowed)), back.size());
    EXPECT_TRUE(back == expected);
  };
  ASSERT_OK(buffer->resize(held));
  expect(held - kGranule, std::vector<std::byte>(kGranule));
  ASSERT_OK(buffer->resize(9 * kGranule));
  ASSERT_TRUE(buffer->trim(std::chrono::milliseconds(100)));
  EXPECT_EQ(buffer->bytes_held(), 9 * kGranule);
  EXPECT_EQ(keeper_->bytes(), 9 * kGranule);
  for (std::uint64_t at = 0; at < 9 * kGranule; at += kGranule) expect(at, data);
  buffer.reset();
  context.reset();
  EXPECT_EQ(keeper_->bytes(), 0U);
}

TEST_P(KeptGpuMemory, EachPieceCountsAsADescriptor) {
  open_kept();
  const auto share = std::make_shared<AddressSpace>(12)->share(7, /*plain=*/true);  // which has a third of them
  const auto account = std::make_shared<Account>("user 7", Account::kNoLimit, share);
  const std::shared_ptr<Driver> driver = std::move(driver_);
  const std::shared_ptr<DeviceContext> context = must(DeviceContext::create(driver, 0));
  const auto make = [&] {
    std::shared_ptr<ExtentBuffer> made = std::make_shared<ExtentBuffer>(context);
    made->charge().move(Charge::kOwner, account);
    return made;
  };
  const std::shared_ptr<ExtentBuffer> sparse = make();
  for (std::uint64_t at = 0; at < 4; ++at) ASSERT_OK(sparse->allocate(4 * at * kGranule, kGranule, false));
  EXPECT_EQ(sparse->allocate(16 * kGranule, kGranule, false).error(), EDQUOT);
  const std::shared_ptr<ExtentBuffer> other = make();
  EXPECT_EQ(other->allocate(0, kGranule, false).error(), EDQUOT);
  ASSERT_OK(sparse->resize(5 * kGranule));
  ASSERT_OK(other->allocate(0, 8 * kGranule, false));
  ASSERT_OK(other->punch(2 * kGranule, kGranule));
  EXPECT_EQ(other->punch(4 * kGranule, kGranule).error(), EDQUOT);
  ASSERT_OK(sparse->resize(0));
  EXPECT_OK(other->punch(4 * kGranule, kGranule));
}

TEST_P(KeptGpuMemory, MemoryThatIsMissingIsAnError) {
  open_kept();
  Filled filled = fill(4);
  const Extent more{0, 5 * kGranule};
  die(filled);
  EXPECT_EQ(restore(filled, {&more, 1}).error(), ENOENT);
  const Extent all{0, 4 * kGranule};
  ++number_;
  EXPECT_EQ(restore(filled, {&all, 1}).error(), ENOENT);
}

TEST_P(KeptGpuMemory, AFullDeviceWaitsForTheKeeper) {
  open_kept();
  fake().fail(symbol(kMemoryCreate), 1, api::kOutOfMemory, 1);
  const Filled filled = fill(2);
  EXPECT_EQ(keeper_->settled, 1);
  expect_content(filled, 0, 2 * kGranule);
}

TEST_P(KeptGpuMemory, AFailedExportIsReported) {
  open_kept();
  fake().fail(symbol(kMemoryExport), 1, api::kOutOfMemory, 1);
  const Filled filled = fill(2);
  EXPECT_FALSE(keeper_->lost.ok());
  expect_content(filled, 0, 2 * kGranule);
}

TEST_P(KeptGpuMemory, AFailedImportIsReported) {
  open_kept();
  Filled filled = fill(4);
  const Extent all{0, 4 * kGranule};
  die(filled);
  fake().fail(symbol(kMemoryImport), 1, api::kOutOfMemory, 1);
  EXPECT_FALSE(restore(filled, {&all, 1}).ok());
  EXPECT_OK(device().health());
  EXPECT_EQ(must(device().memory()).free_bytes, must(device().memory()).total_bytes);
}

TEST_P(KeptGpuMemory, PlainMemoryCannotBeKept) {
  FakeGpuSetup setup;
  setup.virtual_memory = false;
  open(setup);
  const Status keeping = device().check_keeping();
  EXPECT_EQ(keeping.error(), EOPNOTSUPP);
  EXPECT_FALSE(keeping.message().empty());
  EXPECT_EQ(device().restore_memory(1, {}).error(), EOPNOTSUPP);
}

INSTANTIATE_TEST_SUITE_P(EachVendor, KeptGpuMemory, kEachVendor, vendor_name);

}  // namespace
}  // namespace gpufs::gpu_test
