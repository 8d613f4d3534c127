// The device transport's readers, the duty to reply, and notifications.

#include <gtest/gtest.h>

#include "base/cpus.h"
#include "fuse/device_transport.h"
#include "fuse/executor.h"
#include "fuse/notifier.h"
#include "fuse_fakes.h"
#include "io/transfer_threads.h"

namespace gpufs::fuse {
namespace {

// Records messages and returns planned outcomes.
class FakeTransport : public Transport {
 public:
  struct Sent {
    std::uint64_t unique;
    int error;
    std::size_t pieces;
  };
  [[nodiscard]] const char* name() const override { return "fake"; }
  Status start(RequestHandler&) override { return {}; }
  void initialized() override {}
  void stop() override {}
  void close() override {}
  int send(std::uint64_t unique, int error, std::span<const iovec> body) override {
    const std::lock_guard lock(mutex);
    sent.push_back({unique, error, body.size()});
    if (outcomes.empty()) return 0;
    const int outcome = outcomes.front();
    outcomes.erase(outcomes.begin());
    return outcome;
  }
  int notify(std::int32_t code, std::span<const std::byte>) override {
    gate.pass();
    const std::lock_guard lock(mutex);
    sent.push_back({0, code, 0});
    if (outcomes.empty()) return 0;
    const int outcome = outcomes.front();
    outcomes.erase(outcomes.begin());
    return outcome;
  }
  void write_statistics(JsonWriter&) const override {}

  std::mutex mutex;
  std::vector<Sent> sent;
  std::vector<int> outcomes;
  Gate gate;
};

TEST(ResponderTest, RepliesOnce) {
  FakeTransport transport;
  Statistics statistics;
  {
    Responder responder(transport, statistics, 10, FUSE_READ);
    responder.error(ENOENT);
    responder.error(EIO);
    responder.ok();
  }
  ASSERT_EQ(transport.sent.size(), 1U);
  EXPECT_EQ(transport.sent[0].error, ENOENT);
  EXPECT_EQ(statistics.of(FUSE_READ).errors.get(), 1U);
}

TEST(ResponderTest, AnswersEioIfDestroyedWithoutAReply) {
  FakeTransport transport;
  Statistics statistics;
  {
    Responder first(transport, statistics, 10, FUSE_READ);
    Responder second(std::move(first));
    Responder third(transport, statistics, 12, FUSE_READ);
    third = std::move(second);  // 12 loses its owner
  }
  ASSERT_EQ(transport.sent.size(), 2U);
  EXPECT_EQ(transport.sent[0].unique, 12U);
  EXPECT_EQ(transport.sent[0].error, EIO);
  EXPECT_EQ(transport.sent[1].unique, 10U);
  EXPECT_EQ(statistics.unanswered.get(), 2U);
}

TEST(ResponderTest, ReplacesRepliesThatTheKernelRefuses) {
  FakeTransport transport;
  Statistics statistics;
  transport.outcomes = {EINVAL, 0};
  Responder(transport, statistics, 10, FUSE_READ).ok();
  ASSERT_EQ(transport.sent.size(), 2U);
  EXPECT_EQ(transport.sent[1].error, EIO);
  EXPECT_EQ(statistics.rejected_replies.get(), 1U);
  transport.outcomes = {ENOENT};
  Responder(transport, statistics, 12, FUSE_READ).ok();
  EXPECT_EQ(transport.sent.size(), 3U);
  EXPECT_EQ(statistics.lost_replies.get(), 1U);
  // Numbers that the kernel refuses are not even tried.
  Responder(transport, statistics, 14, FUSE_READ).error(5000);
  EXPECT_EQ(transport.sent.back().error, EIO);
  Responder(transport, statistics, 16, FUSE_READ).error(0);
  EXPECT_EQ(transport.sent.back().error, EIO);
}

TEST(NotifierTest, ABlockedNotificationBlocksNoOtherThread) {
  FakeTransport transport;
  Statistics statistics;
  Executor executor{Executor::Limits{}};
  Notifier notifier(transport, executor, statistics);
  transport.gate.close();
  transport.outcomes = {ENOENT, EINVAL, ENODEV};
  ASSERT_TRUE(notifier.invalidate_inode(1).ok());
  ASSERT_TRUE(transport.gate.wait_for_visitors(1));
  ASSERT_TRUE(notifier.invalidate_inode(2).ok());
  ASSERT_TRUE(notifier.invalidate_inode(3).ok());
  EXPECT_EQ(executor.counts().queued, 2U);  // one thread at a time, so they keep their order
  transport.gate.open();
  EXPECT_TRUE(eventually([&] { return statistics.notifications.get() == 3; }));
  EXPECT_EQ(statistics.notification_errors.get(), 1U);  // EINVAL alone is one
  executor.stop(0ms);
  EXPECT_EQ(notifier.invalidate_inode(4).error(), ESHUTDOWN);
}

TEST(JsonWriterTest, EscapesAndNests) {
  JsonWriter json;
  json.number("a", 1);
  json.open("b");
  json.string("c", "x\"\\\n");
  json.close();
  json.open("empty");
  json.close();
  json.boolean("d", true);
  EXPECT_EQ(json.finish(), R"({"a": 1, "b": {"c": "x\"\\\u000a"}, "empty": {}, "d": true})");
}

// Notes which threads serve, and may hold them up.
class CountingHandler : public RequestHandler {
 public:
  void handle(Request& request) override {
    {
      const std::lock_guard lock(mutex);
      threads.insert(std::this_thread::get_id());
      if (reinterpret_cast<std::uintptr_t>(request.payload.data()) % 4096 != 0) ++unaligned;
    }
    gate.pass();
    Responder(*transport, statistics, request.header.unique, request.header.opcode).ok();
  }
  void connection_ended() override { ++ends; }

  std::size_t served_by() {
    const std::lock_guard lock(mutex);
    return std::exchange(threads, {}).size();
  }

  std::mutex mutex;
  std::set<std::thread::id> threads;
  int unaligned = 0;
  Gate gate;
  std::atomic<int> ends{0};
  Transport* transport = nullptr;
  Statistics statistics;
};

class DeviceTransportTest : public ::testing::Test {
 protected:
  void start(std::size_t readers, std::chrono::nanoseconds spin = {}) {
    Result<RelayPair> pair = make_relay_pair();
    kernel.emplace(std::move(pair.value().control));
    DeviceTransportOptions options;
    options.reader_threads = readers;
    options.spin = spin;
    transport.emplace(std::move(pair.value().native), options, handler.statistics);
    handler.transport = &*transport;
    ASSERT_TRUE(transport->start(handler).ok());
    transport->initialized();
  }
  void TearDown() override {
    handler.gate.open();
    if (transport) transport->stop();
  }
  std::size_t allowed() {
    JsonWriter json;
    transport->write_statistics(json);
    const std::string text = json.finish();
    const std::string key = "\"readers_allowed\": ";
    return std::stoul(text.substr(text.find(key) + key.size()));
  }

  CountingHandler handler;
  std::optional<FakeKernel> kernel;
  std::optional<DeviceTransport> transport;
};

TEST_F(DeviceTransportTest, OneClientIsServedByOneThread) {
  start(8);
  EXPECT_TRUE(eventually([&] {
    handler.served_by();
    // More than there are readers, but few: one that has to wait for its CPU counts as busy, and another one is woken.
    for (int i = 0; i < 50; ++i) kernel->call(FUSE_LOOKUP, 1, Bytes(10));
    return handler.served_by() == 1;
  }));
  EXPECT_EQ(handler.unaligned, 0);
}

// With a long spin time every request except the first is found by spinning. One reader: while another one sleeps, no
// reader spins.
TEST_F(DeviceTransportTest, ASpinningReaderGetsTheNextRequest) {
  if (usable_cpus(-1) < 2) GTEST_SKIP() << "readers spin only with two CPUs";
  start(1, std::chrono::seconds(100));
  for (int i = 0; i < 200; ++i) kernel->call(FUSE_LOOKUP, 1, Bytes(10));
  EXPECT_GE(handler.statistics.spins_won.get(), 198U);
}

TEST_F(DeviceTransportTest, WithoutTrafficNoReaderSpins) {
  if (usable_cpus(-1) < 2) GTEST_SKIP() << "readers spin only with two CPUs";
  start(8, std::chrono::milliseconds(20));
  for (int i = 0; i < 20; ++i) kernel->call(FUSE_LOOKUP, 1, Bytes(10));
  EXPECT_TRUE(eventually([&] {
    const std::uint64_t spins = handler.statistics.spins.get();
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    return handler.statistics.spins.get() == spins;
  }));
  EXPECT_EQ(kernel->call(FUSE_LOOKUP, 1, Bytes(10)).error(), 0);
}

TEST_F(DeviceTransportTest, StopsWhileAReaderSpins) {
  start(4, std::chrono::seconds(100));
  for (int i = 0; i < 10; ++i) kernel->call(FUSE_LOOKUP, 1, Bytes(10));
  const auto begin = std::chrono::steady_clock::now();
  transport->stop();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(50));
}

TEST_F(DeviceTransportTest, ABusyReaderDelaysNoOtherRequest) {
  start(4);
  handler.gate.close();
  std::vector<std::uint64_t> uniques;
  for (int i = 0; i < 4; ++i) uniques.push_back(kernel->send(FUSE_LOOKUP, 1, Bytes(10)));
  EXPECT_TRUE(handler.gate.wait_for_visitors(4));
  EXPECT_EQ(handler.served_by(), 4U);
  uniques.push_back(kernel->send(FUSE_LOOKUP, 1, Bytes(10)));  // beyond the limit: has to wait
  EXPECT_FALSE(kernel->receive(kQuiet));
  handler.gate.open();
  for (const std::uint64_t unique : uniques) EXPECT_EQ(kernel->wait(unique).error(), 0);
}

TEST_F(DeviceTransportTest, AfterAnIdleTimeABusyReaderIsStillNoticed) {
  start(4);
  ASSERT_EQ(kernel->call(FUSE_LOOKUP, 1, Bytes(10)).error(), 0);
  EXPECT_TRUE(eventually([&] {  // the watcher sleeps: nothing runs without traffic
    const std::uint64_t ticks = handler.statistics.watcher_ticks.get();
    std::this_thread::sleep_for(200ms);
    return handler.statistics.watcher_ticks.get() == ticks;
  }));
  handler.gate.close();
  const std::uint64_t first = kernel->send(FUSE_LOOKUP, 1, Bytes(10));
  const std::uint64_t second = kernel->send(FUSE_LOOKUP, 1, Bytes(10));
  EXPECT_TRUE(handler.gate.wait_for_visitors(2));
  handler.gate.open();
  kernel->wait(first);
  kernel->wait(second);
}

TEST_F(DeviceTransportTest, ReadersThatAreNotNeededGoToSleep) {
  start(4);
  handler.gate.close();
  std::vector<std::uint64_t> uniques;
  for (int i = 0; i < 4; ++i) uniques.push_back(kernel->send(FUSE_LOOKUP, 1, Bytes(10)));
  ASSERT_TRUE(handler.gate.wait_for_visitors(4));
  EXPECT_GT(allowed(), 1U);  // and stays so while they are busy
  handler.gate.open();
  for (const std::uint64_t unique : uniques) kernel->wait(unique);
  EXPECT_TRUE(eventually([&] {
    kernel->call(FUSE_LOOKUP, 1, Bytes(10));
    return allowed() == 1;
  }));
  EXPECT_TRUE(eventually([&] {
    handler.served_by();
    // Few, since a reader that has to wait for its CPU counts as busy, for which another one is woken.
    for (int i = 0; i < 8; ++i) kernel->call(FUSE_LOOKUP, 1, Bytes(10));  // each takes one surplus reader out
    return handler.served_by() == 1;
  }));
}

TEST_F(DeviceTransportTest, StopsWhileReadersWait) {
  start(4);
  transport->stop();
  transport->stop();
  EXPECT_EQ(handler.ends, 0);
  transport->close();
  EXPECT_EQ(transport->send(2, 0, {}), ENODEV);
}

TEST_F(DeviceTransportTest, StopsAfterTheEnd) {
  start(4);
  kernel->hang_up();
  EXPECT_TRUE(eventually([&] { return handler.ends == 1; }));
  transport->stop();
  EXPECT_EQ(handler.ends, 1);
}

TEST_F(DeviceTransportTest, TooManyPiecesAreRefused) {
  start(1);
  std::vector<iovec> pieces(Transport::kMaximumPieces + 1);
  EXPECT_EQ(transport->send(2, 0, pieces), EMSGSIZE);
}

}  // namespace
}  // namespace gpufs::fuse
