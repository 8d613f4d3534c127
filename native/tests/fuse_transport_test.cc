// The transport's readers, and the duty to reply.

#include <gtest/gtest.h>

#include "base/cpus.h"
#include "fuse/transport.h"
#include "fuse_fakes.h"

namespace gpufs::fuse {
namespace {

// Notes which threads serve, and may hold them up.
class CountingHandler : public RequestHandler {
 public:
  void handle(Request& request) override {
    {
      const std::lock_guard lock(mutex);
      threads.insert(std::this_thread::get_id());
    }
    door.pass();
    Responder(*transport, request.header.unique, request.header.opcode).ok();
  }
  void connection_ended() override { ++ends; }

  std::size_t served_by() {
    const std::lock_guard lock(mutex);
    return std::exchange(threads, {}).size();
  }

  std::mutex mutex;
  std::set<std::thread::id> threads;
  Door door{/*open=*/true};
  std::atomic<int> ends{0};
  Transport* transport = nullptr;
  observe::EngineCounters counters;
};

class TransportTest : public ::testing::Test {
 protected:
  void start(std::size_t readers, std::chrono::nanoseconds spin = {}) {
    Result<RelayPair> pair = make_relay_pair();
    kernel.emplace(std::move(pair.value().control));
    TransportOptions options;
    options.reader_threads = readers;
    options.spin = spin;
    transport.emplace(std::move(pair.value().native), options, handler.counters);
    handler.transport = &*transport;
    ASSERT_TRUE(transport->start(handler).ok());
    transport->initialized();
  }
  void TearDown() override {
    handler.door.open();
    if (transport) transport->stop();
  }

  CountingHandler handler;
  std::optional<FakeKernel> kernel;
  std::optional<Transport> transport;
};

TEST_F(TransportTest, WithoutTrafficNoReaderSpins) {
  if (usable_cpus(-1) < 2) GTEST_SKIP() << "readers spin only with two CPUs";
  start(8, std::chrono::milliseconds(20));
  for (int i = 0; i < 20; ++i) kernel->call(FUSE_LOOKUP, 1, Bytes(10));
  EXPECT_TRUE(soon([&] {
    const std::uint64_t spins = handler.counters.reader_spins;
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    return handler.counters.reader_spins == spins;
  }));
  EXPECT_EQ(kernel->call(FUSE_LOOKUP, 1, Bytes(10)).error(), 0);
}

TEST_F(TransportTest, StopsWhileAReaderSpins) {
  start(4, std::chrono::seconds(100));
  for (int i = 0; i < 10; ++i) kernel->call(FUSE_LOOKUP, 1, Bytes(10));
  const auto begin = std::chrono::steady_clock::now();
  transport->stop();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(50));
}

TEST_F(TransportTest, ABusyReaderDelaysNoOtherRequest) {
  start(4);
  handler.door.close();
  std::vector<std::uint64_t> uniques;
  for (int i = 0; i < 4; ++i) uniques.push_back(kernel->send(FUSE_LOOKUP, 1, Bytes(10)));
  EXPECT_TRUE(handler.door.await(4));
  EXPECT_EQ(handler.served_by(), 4U);
  uniques.push_back(kernel->send(FUSE_LOOKUP, 1, Bytes(10)));  // beyond the limit: has to wait
  EXPECT_FALSE(kernel->receive(kQuiet));
  handler.door.open();
  for (const std::uint64_t unique : uniques) EXPECT_EQ(kernel->wait(unique).error(), 0);
}

TEST_F(TransportTest, StopsWhileReadersWait) {
  start(4);
  transport->stop();
  transport->stop();
  EXPECT_EQ(handler.ends, 0);
  transport->close();
  EXPECT_EQ(transport->send(2, 0, {}), ENODEV);
}

TEST_F(TransportTest, EachRequestIsAnsweredOnce) {
  start(1);
  {
    Responder answered(*transport, 10, FUSE_READ);
    answered.error(ENOENT);
    answered.error(EIO);
    answered.ok();
    Responder first(*transport, 12, FUSE_READ);
    Responder second(std::move(first));
    Responder third(*transport, 14, FUSE_READ);
    third = std::move(second);  // 14 loses its owner
  }
  EXPECT_EQ(kernel->wait(10).error(), ENOENT);
  EXPECT_EQ(kernel->wait(14).error(), EIO);
  EXPECT_EQ(kernel->wait(12).error(), EIO);
  // The kernel refuses these numbers.
  Responder(*transport, 16, FUSE_READ).error(5000);
  Responder(*transport, 18, FUSE_READ).error(0);
  EXPECT_EQ(kernel->wait(16).error(), EIO);
  EXPECT_EQ(kernel->wait(18).error(), EIO);
  EXPECT_FALSE(kernel->receive(kQuiet));
}

}  // namespace
}  // namespace gpufs::fuse
