// Host memory whose process dies: the next process knows which of it other programs may write to.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cerrno>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "drivers/host/host_memory.h"
#include "drivers/ledger.h"

namespace gpufs {
namespace {

UniqueFd duplicate(int descriptor) { return UniqueFd(::fcntl(descriptor, F_DUPFD_CLOEXEC, 3)); }

// A keeper, with the journal of what it holds.
class Holder final : public MemoryKeeper {
 public:
  std::uint64_t new_memory() override { return ++last_; }
  std::uint64_t hold(std::uint64_t memory, std::uint64_t offset, std::uint64_t bytes, int descriptor) override {
    KeptPiece piece;
    piece.offset = offset;
    piece.bytes = bytes;
    piece.key = ++last_;
    piece.descriptor = duplicate(descriptor);
    pieces_[memory].push_back(std::move(piece));
    return last_;
  }
  void drop(std::uint64_t key) override {
    for (auto& [memory, pieces] : pieces_)
      std::erase_if(pieces, [&](const KeptPiece& each) { return each.key == key; });
  }
  void settle() override {}
  void lose(const Status& /*reason*/) override {}
  std::vector<KeptPiece> take(std::uint64_t memory) override { return copies(pieces_.at(memory)); }

  // What another process finds after the death of this one.
  [[nodiscard]] std::shared_ptr<Holder> next() const {
    auto found = std::make_shared<Holder>();
    found->last_ = last_;
    for (const auto& [memory, pieces] : pieces_) found->pieces_[memory] = copies(pieces);
    return found;
  }
  [[nodiscard]] std::size_t count(std::uint64_t memory) const { return pieces_.at(memory).size(); }

 private:
  static std::vector<KeptPiece> copies(const std::vector<KeptPiece>& pieces) {
    std::vector<KeptPiece> copied;
    for (const KeptPiece& piece : pieces) {
      KeptPiece copy;
      copy.offset = piece.offset;
      copy.bytes = piece.bytes;
      copy.key = piece.key;
      copy.descriptor = duplicate(piece.descriptor.get());
      copied.push_back(std::move(copy));
    }
    return copied;
  }

  std::uint64_t last_ = 0;
  std::map<std::uint64_t, std::vector<KeptPiece>> pieces_;
};

class KeptHostMemoryTest : public ::testing::Test {
 protected:
  static constexpr Extent kFirst{0, kHostGranule};

  void SetUp() override {
    memory_ = HostMemory::create(limit_, shared_, keeper_).take();
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
    const std::shared_ptr<Holder> keeper = keeper_->next();
    const auto limit = std::make_shared<Ledger>(8 * kHostGranule);
    const auto shared = std::make_shared<SharedHostFiles>();
    const auto restored = HostMemory::restore(limit, shared, keeper, memory_->number(), std::span(&kFirst, 1));
    EXPECT_TRUE(restored.ok());
    EXPECT_EQ(keeper->count(memory_->number()), 1U);
    EXPECT_EQ(::fallocate(descriptor, 0, 4 * kHostGranule, kHostGranule), 0);
    shared->release_foreign();
    struct stat found {};
    EXPECT_EQ(::fstat(descriptor, &found), 0);
    return found.st_blocks * 512;
  }

  const std::shared_ptr<Ledger> limit_ = std::make_shared<Ledger>(8 * kHostGranule);
  const std::shared_ptr<SharedHostFiles> shared_ = std::make_shared<SharedHostFiles>();
  const std::shared_ptr<Holder> keeper_ = std::make_shared<Holder>();
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
    return HostMemory::restore(std::make_shared<Ledger>(0), std::make_shared<SharedHostFiles>(), keeper_->next(),
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
