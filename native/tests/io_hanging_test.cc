// Transfers that are cancelled, that hang in their files, or that are many: which of them wait for others.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/scope_guard.h"
#include "fake_transfer_rig.h"
#include "results.h"
#include "waiting.h"

namespace gpufs {
namespace {

using namespace testing;
using std::chrono::milliseconds;

// Threads that hung in its file and go on have left it. Before the engine ends, which waits no longer for such threads
// than it must.
void await_last(const std::shared_ptr<Transfer>& transfer) {
  while (transfer.use_count() > 1) std::this_thread::sleep_for(milliseconds(1));
}

class TransferEnds : public EitherWay {};
INSTANTIATE_TEST_SUITE_P(, TransferEnds, ::testing::Bool(), EitherWay::name);

TEST_P(TransferEnds, CancelEndsAtTheNextPiece) {
  for (const Direction direction : {Direction::kLoad, Direction::kStore}) {
    FakeRig rig(GetParam(), FakeRig::without_fastpath());
    const auto data = pattern(16 * kMiB);
    rig.make_ends(direction, data);
    std::atomic<bool> cancelled{false};
    const auto slow = [&](int, auto, std::size_t, std::uint64_t offset, ssize_t*) {
      do {
        std::this_thread::sleep_for(milliseconds(5));
      } while (offset >= 12 * kChunk && !cancelled);
      return false;
    };
    rig.operations.on_read = slow;
    rig.operations.on_write = slow;
    auto started = must(rig.engine->start(rig.request(direction)));
    while (started->progress().prefix < kChunk) std::this_thread::sleep_for(milliseconds(1));
    started->cancel();
    started->cancel();
    cancelled = true;
    started->wait();
    const TransferProgress done = started->progress();
    EXPECT_EQ(done.status.error(), ECANCELED);
    EXPECT_GE(done.prefix, kChunk);
    EXPECT_LT(done.prefix, data.size());
    EXPECT_TRUE(same_bytes(rig.destination(direction), std::span(data).first(done.prefix)));
    EXPECT_EQ(rig.details(direction).cancelled, 1U);
  }
}

TEST_P(TransferEnds, HungFileIsLeftBehind) {
  for (const Direction direction : {Direction::kLoad, Direction::kStore}) {
    FakeRig rig(GetParam(), FakeRig::without_fastpath());
    const auto data = pattern(4 * kMiB);
    rig.make_ends(direction, data, /*may_hang=*/true);
    Door door;
    const auto hang = [&](int, auto, std::size_t, std::uint64_t offset, ssize_t*) {
      if (offset >= 2 * kChunk) door.pass();
      return false;
    };
    rig.operations.on_read = hang;
    rig.operations.on_write = hang;
    auto started = must(rig.engine->start(rig.request(direction)));
    door.await(3);
    started->cancel();
    ASSERT_TRUE(started->wait(kPatience));
    const TransferProgress done = started->progress();
    EXPECT_EQ(done.status.error(), ECANCELED);
    EXPECT_EQ(done.prefix, 2 * kChunk);
    EXPECT_EQ(rig.details(direction).abandoned, 1U);
    // The memory is free although the threads still hang, and they do not reach it any more.
    if (direction == Direction::kLoad) {
      EXPECT_EQ(rig.buffer->size(), 2 * kChunk);
      EXPECT_EQ(rig.buffer.use_count(), 1);
      const std::vector<std::byte> own(data.size(), std::byte{0x11});
      rig.fill_buffer(own);
      door.open();
      await_last(started);
      rig.engine->shutdown();
      EXPECT_TRUE(rig.buffer_contents() == own);
    } else {
      ASSERT_TRUE(rig.buffer->resize(0).ok());
      door.open();
      await_last(started);
    }
  }
}

TEST(Hanging, ShutdownLeavesThreadsBehind) {
  std::thread([] {}).join();  // with the first thread the thread sanitizer starts one of its own
  const std::set<std::string> before = names_in("/proc/self/task");
  IoOptions options = FakeRig::without_fastpath();
  options.shutdown_grace = milliseconds(200);
  Door door;
  std::shared_ptr<Transfer> transfer;
  auto operations = std::make_shared<PlannedFileOps>();
  {
    const auto device = must(DeviceContext::create(make_faulty_driver(std::make_shared<FaultPlan>(), 64 * kMiB), 0));
    const auto engine = must(TransferEngine::create(options, make_fastpath("none")));
    const UniqueFd fd = temporary_file();
    ASSERT_EQ(::posix_fallocate(fd.get(), 0, kMiB), 0);
    operations->on_read = [&](int, void*, std::size_t, std::uint64_t, ssize_t*) {
      door.pass();
      return false;
    };
    BackingFacts facts = must(BackingFile::open(fd.get(), *operations))->facts();
    facts.may_hang = true;
    TransferRequest wanted;
    wanted.file = BackingFile::adopt(UniqueFd(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 3)), UniqueFd(), facts, *operations);
    wanted.target = std::make_shared<ExtentBuffer>(device);
    transfer = must(engine->start(wanted));
    door.await(1);
    engine->shutdown();
    EXPECT_TRUE(transfer->wait(milliseconds(0)));
    EXPECT_EQ(transfer->progress().status.error(), ECANCELED);
  }
  door.open();
  // The threads end by themselves; the last things they hold go with them.
  const std::weak_ptr<Transfer> watch = transfer;
  transfer.reset();
  const auto all_ended = [&] {
    const std::set<std::string> now = names_in("/proc/self/task");
    return std::includes(before.begin(), before.end(), now.begin(), now.end());
  };
  EXPECT_TRUE(soon(all_ended));
  EXPECT_TRUE(watch.expired());
}

// Loads of a file whose server does not answer, one by each of these clients; cancelled at the end.
class HungLoads {
 public:
  HungLoads(FakeRig& rig, const std::vector<std::byte>& data, const std::vector<std::uint64_t>& clients) {
    rig.make_ends(Direction::kLoad, data, /*may_hang=*/true);
    file_ = rig.file;  // so that no other gets its descriptor
    rig.operations.on_read = [this](int fd, void*, std::size_t, std::uint64_t, ssize_t*) {
      if (fd == file_->buffered_fd()) door_.pass();
      return false;
    };
    for (const std::uint64_t client : clients) {
      TransferRequest wanted = rig.load();
      wanted.client = client;
      transfers_.push_back(must(rig.engine->start(wanted)));
    }
    door_.await(2);
    std::this_thread::sleep_for(milliseconds(20));
    EXPECT_EQ(door_.waiting(), 2);  // of the threads that there are, as many as one client may have
  }
  ~HungLoads() {
    for (const auto& transfer : transfers_) transfer->cancel();
    for (const auto& transfer : transfers_) EXPECT_TRUE(transfer->wait(kPatience));
    door_.open();
    for (const auto& transfer : transfers_) await_last(transfer);
  }
  HungLoads(const HungLoads&) = delete;
  HungLoads& operator=(const HungLoads&) = delete;

 private:
  Door door_;
  std::shared_ptr<BackingFile> file_;
  std::vector<std::shared_ptr<Transfer>> transfers_;
};

// Other clients load the file that now answers.
void expect_served(FakeRig& rig, std::uint64_t bytes) {
  rig.open_file();
  for (std::uint64_t client = 0; client < 3; ++client) {
    TransferRequest wanted = rig.load();
    wanted.client = client;
    const std::shared_ptr<Transfer> transfer = must(rig.engine->start(wanted));
    ASSERT_TRUE(transfer->wait(kPatience));
    EXPECT_EQ(transfer->progress().prefix, bytes);
  }
}

TEST(Hanging, NeitherOneClientNorManyServersStopTheOthers) {
  const std::vector<std::uint64_t> one_client(5, 1000);
  const std::vector<std::uint64_t> many_servers = {1000, 1001, 1002, 1003, 1004, 1005};
  for (const auto& clients : {one_client, many_servers}) {
    IoOptions options = FakeRig::without_fastpath();
    options.workers = 2;
    FakeRig rig(false, options);
    const auto data = pattern(2 * kMiB);
    const HungLoads hung(rig, data, clients);
    expect_served(rig, data.size());
    EXPECT_TRUE(rig.buffer_contents() == data);
  }
}

// Transfers with the last reference to a file whose close hangs, as a server of a client's can make it.
TEST(Hanging, ClosingFilesStopsNoOtherClient) {
  IoOptions options = FakeRig::without_fastpath();
  options.workers = 2;
  FakeRig rig(false, options);
  const auto data = pattern(kChunk);
  rig.make_file(data, /*may_hang=*/true);
  const auto door = std::make_shared<Door>();  // a thread may still leave it when the test ends
  const auto start = [&](std::uint64_t client) {
    TransferRequest wanted = rig.load();
    wanted.client = client;
    wanted.file = std::shared_ptr<BackingFile>(wanted.file.get(), [door, file = wanted.file](BackingFile*) mutable {
      door->pass();
      file.reset();
    });
    return must(rig.engine->start(wanted));
  };
  const ScopeGuard opener([&] { door->open(); });
  // As many as there are threads, whose last references are the threads'.
  for (int count = 0; count < 3; ++count) Transfer::release(start(1000));
  door->await(2);
  // These find no thread. They end because they are cancelled, and none keeps the next one from that.
  for (const std::uint64_t client : {1000, 1001, 1002}) {
    std::shared_ptr<Transfer> transfer = start(client);
    transfer->cancel();
    ASSERT_TRUE(transfer->wait(kPatience));
    Transfer::release(std::move(transfer));
  }
  EXPECT_EQ(door->waiting(), 2);
  expect_served(rig, data.size());
}

TEST(Sharing, ManyTransfersTakeTurns) {
  IoOptions options = FakeRig::without_fastpath();
  options.workers = 2;
  FakeRig rig(true, options);
  rig.make_file(pattern(64 * kChunk));
  std::atomic<bool> looked{false};
  rig.operations.on_read = [&](int, void*, std::size_t, std::uint64_t offset, ssize_t*) {
    do {
      std::this_thread::sleep_for(milliseconds(5));
    } while (offset >= 63 * kChunk && !looked);
    return false;
  };
  std::vector<std::shared_ptr<Transfer>> transfers;
  for (std::uint64_t client = 0; client < 6; ++client) {
    TransferRequest wanted = rig.load();
    wanted.client = client;
    wanted.target_offset = client * 16 * kMiB;
    transfers.push_back(rig.engine->start(wanted).take());
  }
  // Three threads and six clients: all have moved something long before the first comes to its last piece.
  const auto moved = [](const std::shared_ptr<Transfer>& transfer) { return transfer->progress().moved > 0; };
  EXPECT_TRUE(soon([&] { return std::all_of(transfers.begin(), transfers.end(), moved); }));
  const auto done = [](const std::shared_ptr<Transfer>& transfer) {
    return transfer->progress().state == TransferState::kDone;
  };
  EXPECT_TRUE(std::none_of(transfers.begin(), transfers.end(), done));
  for (const auto& transfer : transfers) transfer->cancel();
  looked = true;
  for (const auto& transfer : transfers) transfer->wait();
}

}  // namespace
}  // namespace gpufs
