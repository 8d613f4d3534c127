// Which descriptors of memory the keeper gets, from a process and from the one that takes over.
#include "memory/kept_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <set>
#include <utility>
#include <vector>

#include "base/unique_fd.h"
#include "gpu_test_support.h"
#include "journal/journal.h"
#include "journal/keeper_link.h"

namespace gpufs {
namespace {

using gpu_test::must;

constexpr std::uint32_t kHold = 1;
constexpr std::uint32_t kDrop = 2;

UniqueFd copy_of(int descriptor) { return UniqueFd(::fcntl(descriptor, F_DUPFD_CLOEXEC, 3)); }

class KeptMemoryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::shared_ptr<journal::Journal> created = must(journal::Journal::create());
    journal_ = copy_of(created->fd());
    kept_ = std::make_unique<KeptMemory>(std::move(created), link());
    memory_ = kept_->new_memory();
  }
  std::uint64_t hold(std::uint64_t offset) { return kept_->hold(memory_, offset, 4096, file_.get()); }
  // The process dies, and another one finds what is held.
  void die() {
    std::vector<KeeperLink::Held> found;
    for (const std::uint64_t key : held()) found.push_back({key, copy_of(file_.get()).release()});
    kept_.reset();
    std::shared_ptr<journal::Journal> restored = must(journal::Journal::restore(copy_of(journal_.get())));
    kept_ = std::make_unique<KeptMemory>(std::move(restored), link(found));
  }
  // Of a process that this test, as the keeper, has started.
  std::shared_ptr<KeeperLink> link(std::span<const KeeperLink::Held> found = {}) {
    int ends[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
    keeper_ = UniqueFd(ends[1]);
    return must(KeeperLink::open("/bin/false", "", UniqueFd(ends[0]), found));
  }
  // The keys of memory that the keeper holds.
  const std::set<std::uint64_t>& held() {
    struct {
      std::uint32_t kind;
      std::uint32_t count;
      std::uint64_t key;
    } message{};
    while (::recv(keeper_.get(), &message, sizeof message, 0) == sizeof message) {
      if (message.kind == kHold && message.key >= KeeperLink::kFirstMemory) held_.insert(message.key);
      if (message.kind == kDrop) held_.erase(message.key);
    }
    return held_;
  }

  const UniqueFd file_{::memfd_create("memory", MFD_CLOEXEC)};
  UniqueFd keeper_;
  UniqueFd journal_;
  std::unique_ptr<KeptMemory> kept_;
  std::uint64_t memory_ = 0;
  std::set<std::uint64_t> held_;
};

TEST_F(KeptMemoryTest, WhatIsHeldIsTakenOnce) {
  hold(4096);
  hold(0);
  kept_->drop(hold(8192));
  EXPECT_EQ(held().size(), 2U);
  die();
  const std::vector<MemoryKeeper::KeptPiece> pieces = kept_->take(memory_);
  ASSERT_EQ(pieces.size(), 2U);
  EXPECT_EQ(pieces[0].offset, 0U);
  EXPECT_EQ(pieces[1].offset, 4096U);
  EXPECT_TRUE(kept_->take(memory_).empty());
  kept_->drop_untaken();
  EXPECT_EQ(held().size(), 2U);
}

TEST_F(KeptMemoryTest, WhatNothingTakesIsDropped) {
  hold(0);
  die();
  kept_->drop_untaken();
  EXPECT_TRUE(held().empty());
}

TEST_F(KeptMemoryTest, NothingIsSentAfterTheEnd) {
  const std::uint64_t key = hold(0);
  EXPECT_EQ(held().size(), 1U);
  kept_->end();
  kept_->drop(key);
  hold(4096);
  kept_->settle();
  char message[64];
  EXPECT_EQ(::recv(keeper_.get(), message, sizeof message, MSG_DONTWAIT), -1);
}

TEST_F(KeptMemoryTest, MemoryWithoutADescriptorIsAnObstacleUntilItIsDropped) {
  const std::uint64_t first = kept_->lose(Status(EMFILE, "no descriptor"));
  const std::uint64_t second = kept_->lose(Status(EMFILE, "no descriptor"));
  kept_->drop(first);
  EXPECT_EQ(kept_->health().error(), EMFILE);
  kept_->drop(second);
  EXPECT_OK(kept_->health());
  EXPECT_TRUE(held().empty());
}

TEST_F(KeptMemoryTest, ARestoreThatFailsDropsNothing) {
  hold(0);
  for (int attempt = 0; attempt < 3; ++attempt) {
    die();
    const std::vector<MemoryKeeper::KeptPiece> pieces = kept_->take(memory_);
    ASSERT_EQ(pieces.size(), 1U);
    kept_->drop(pieces[0].key);  // by what had been restored
    EXPECT_EQ(held().size(), 1U);
  }
  kept_->drop_untaken();  // all is restored
  EXPECT_TRUE(held().empty());
  const std::uint64_t later = hold(0);
  EXPECT_EQ(held().size(), 1U);
  kept_->drop(later);
  EXPECT_TRUE(held().empty());
}

}  // namespace
}  // namespace gpufs
