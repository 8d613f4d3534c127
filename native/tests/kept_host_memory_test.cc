// Host memory whose process dies: the next process knows which of it other programs may write to.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cerrno>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "drivers/host/host_memory.h"
#include "drivers/ledger.h"
#include "fake_keeper.h"
#include "results.h"

namespace gpufs {
namespace {

class KeptHostMemoryTest : public ::testing::Test {
 protected:
  static constexpr Extent kFirst{0, kHostGranule};

  void SetUp() override {
    memory_ = HostMemory::create({limit_, shared_, keeper_}).take();
    range_ = memory_->reserve(8 * kHostGranule).take();
    ASSERT_TRUE(memory_->populate(0, kHostGranule).ok());
  }
  // A descriptor as another program gets it.
  UniqueFd exported(bool writable) {
    std::vector<ExportedMemory> pieces = memory_->export_memory(0, kHostGranule, 1, writable).take();
    return std::move(pieces.front().descriptor);
  }
  // The process ends, a program allocates memory beside that of the buffer, and the next process looks for such memory.
  // Returns how much the file has then.
  std::int64_t bytes_after_takeover(int descriptor) {
    const std::shared_ptr<testing::FakeKeeper> keeper = keeper_->next();
    const auto limit = std::make_shared<Ledger>(8 * kHostGranule);
    const auto shared = std::make_shared<SharedHostFiles>();
    const auto restored =
        testing::must(HostMemory::restore({limit, shared, keeper}, memory_->number(), std::span(&kFirst, 1)));
    EXPECT_EQ(keeper->pieces(memory_->number()), 1U);
    EXPECT_EQ(::fallocate(descriptor, 0, 4 * kHostGranule, kHostGranule), 0);
    shared->release_foreign();
    struct stat found {};
    EXPECT_EQ(::fstat(descriptor, &found), 0);
    return found.st_blocks * 512;
  }

  const std::shared_ptr<Ledger> limit_ = std::make_shared<Ledger>(8 * kHostGranule);
  const std::shared_ptr<SharedHostFiles> shared_ = std::make_shared<SharedHostFiles>();
  const std::shared_ptr<testing::FakeKeeper> keeper_ = std::make_shared<testing::FakeKeeper>();
  std::unique_ptr<DeviceMemory> memory_;
  std::shared_ptr<AddressRange> range_;
};

TEST_F(KeptHostMemoryTest, WhatProgramsMayWriteToIsWatchedByTheNextProcess) {
  const UniqueFd program = exported(true);
  EXPECT_EQ(bytes_after_takeover(program.get()), static_cast<std::int64_t>(kHostGranule));
}

TEST_F(KeptHostMemoryTest, OtherFilesCostTheNextProcessNothing) {
  const std::vector<MemoryKeeper::KeptPiece> own = keeper_->take(memory_->number());
  ASSERT_EQ(own.size(), 1U);
  EXPECT_EQ(bytes_after_takeover(own.front().descriptor.get()), static_cast<std::int64_t>(2 * kHostGranule));
}

TEST_F(KeptHostMemoryTest, WhatNoRecordHasGoesBack) {
  const std::vector<MemoryKeeper::KeptPiece> own = keeper_->take(memory_->number());
  ASSERT_TRUE(memory_->populate(2 * kHostGranule, 3 * kHostGranule).ok());  // ahead, or about to be released
  const auto restore = [&](const Extent& populated) {
    return HostMemory::restore({std::make_shared<Ledger>(0), std::make_shared<SharedHostFiles>(), keeper_->next()},
                               memory_->number(), std::span(&populated, 1));
  };
  const auto restored = restore(kFirst);  // although the device has become smaller than that
  EXPECT_TRUE(restored.ok());
  struct stat found {};
  EXPECT_EQ(::fstat(own.front().descriptor.get(), &found), 0);
  EXPECT_EQ(found.st_blocks * 512, static_cast<std::int64_t>(kHostGranule));
  EXPECT_EQ(restore({0, 64 * kHostGranule}).error(), EPROTO);
}

TEST_F(KeptHostMemoryTest, ADeathWhileItIsSharedLosesNothing) {
  keeper_->hold(memory_->number(), 0, 1, keeper_->take(memory_->number()).front().descriptor.get());
  const std::vector<MemoryKeeper::KeptPiece> own = keeper_->take(memory_->number());
  EXPECT_EQ(bytes_after_takeover(own.front().descriptor.get()), static_cast<std::int64_t>(kHostGranule));
}

}  // namespace
}  // namespace gpufs
