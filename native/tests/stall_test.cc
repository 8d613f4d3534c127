// Stalled devices: copies of the program, behind blocked streams, occupy all queues for copies, and the engine's copies
// wait behind them. Over the fake of CUDA.

#include <gtest/gtest.h>

#include <cerrno>
#include <thread>

#include "async_fixture.h"
#include "memory/host_locks.h"
#include "streams.h"

namespace gpufs::async_test {
namespace {

constexpr std::size_t kQueues = 4;
// One chunk: a thread that has got two may wait for the copy of the first before it queues the second.
constexpr std::size_t kBytes = std::size_t{200} << 10;
constexpr std::size_t kTheirs = std::size_t{64} << 10;

IoOptions hasty() {
  IoOptions io;
  io.shutdown_grace = 300ms;
  io.workers = kQueues;
  return io;
}

// Operations beside blocked copies of the program's, one in each queue.
class Stall : public ::testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    rig = std::make_unique<Rig>(GetParam(), AsyncOptions{}, 1, hasty());
    rig->device()->device().blocked_streams().set_stall_timeout(300ms);
    rig->fill_file(pattern(kBytes, 31));
    gate = std::make_unique<Gate>(rig->device());
    passed = std::make_unique<Gate>(rig->device());
    memory = must(rig->device()->device().create_memory());
    range = must(memory->reserve(kGranule));
    ASSERT_OK(memory->populate(0, kGranule));
    host = must(rig->device()->pinned().take(kQueues * kTheirs));
    // One after the other, which puts each into a queue of its own; and one more for an operation.
    for (std::size_t number = 0; number <= kQueues; ++number) {
      programs.push_back(must(rig->device()->device().create_stream()));
    }
    for (const auto& program : programs) {
      streams.push_back(must(rig->engine->register_stream(program->native(), 0, {})));
    }
    fake().share_queues();
  }
  void TearDown() override {
    gate->open();
    for (const auto& program : programs) EXPECT_OK(program->synchronize());
    rig->engine->shutdown();
    streams.clear();
    programs.clear();
  }

  static const FakeGpuControl& fake() { return cuda_test::fake(); }
  void queue_copy(std::size_t number) {
    EXPECT_OK(
        testing::copy_in(*programs[number], range->base() + number * kTheirs, host.data + number * kTheirs, kTheirs));
  }
  // Copies behind streams that the program itself holds, until gate is opened; and an operation on one more stream.
  void block_behind_the_program(const std::shared_ptr<CompletionQueue>& queue) {
    for (std::size_t number = 0; number < kQueues; ++number) {
      gate->hold(*programs[number]);
      queue_copy(number);
    }
    submit(queue, streams[kQueues]);
  }
  // An operation, and behind it copies in all queues, which its own copies wait for.
  void block_behind_an_operation(const std::shared_ptr<CompletionQueue>& queue) {
    gate->hold(*programs[0]);
    submit(queue, streams[0], &count);
    EXPECT_OK(programs[0]->call([](void* behind) { static_cast<Gate*>(behind)->open(); }, passed.get()));
    for (std::size_t number = 0; number < kQueues; ++number) {
      if (number > 0) passed->hold(*programs[number]);
      queue_copy(number);
    }
    gate->open();
  }
  // Until the engine has queued so many copies, all behind the program's.
  void wait_for_copies(int copies) {
    ASSERT_TRUE(soon([&] { return fake().calls("copy, pinned") >= static_cast<int>(kQueues) + copies; }));
  }
  void submit(const std::shared_ptr<CompletionQueue>& queue, std::shared_ptr<OperationStream> stream,
              std::int64_t* moved = nullptr) {
    buffers.push_back(rig->buffer());
    std::vector<AsyncEngine::Submission> entries;
    entries.push_back(rig->entry(Direction::kLoad, buffers.back(), kBytes, std::move(stream)));
    entries.back().request.count = moved;
    std::size_t bad = 0;
    std::vector<std::uint64_t> ids;
    ASSERT_OK(rig->engine->submit(queue, std::move(entries), &ids, &bad));
  }

  std::unique_ptr<Rig> rig;
  std::unique_ptr<DeviceMemory> memory;
  std::shared_ptr<AddressRange> range;
  PinnedBlock host;
  std::unique_ptr<Gate> gate;
  std::vector<std::unique_ptr<Stream>> programs;
  std::vector<std::shared_ptr<OperationStream>> streams;
  std::vector<std::shared_ptr<Buffer>> buffers;
  std::unique_ptr<Gate> passed;  // opens when the first stream has passed its operation
  std::int64_t count = 0;
};
INSTANTIATE_TEST_SUITE_P(Drivers, Stall, ::testing::Values(Kind::kCuda, Kind::kCudaCalls), name_of);

TEST_P(Stall, ClosingATransferTimesOut) {
  block_behind_the_program(rig->queue);
  TransferRequest request;
  request.file = rig->file;
  request.target = rig->buffer();
  const std::shared_ptr<Transfer> transfer = must(rig->transfers->start(request));
  wait_for_copies(2);
  EXPECT_EQ(transfer->close().error(), ETIMEDOUT);
  gate->open();
  EXPECT_OK(transfer->close());
}

TEST_P(Stall, UnlockingMemoryTimesOut) {
  HostLocks locks(rig->driver, LockPolicy::kOff);
  std::vector<std::byte> theirs(1 << 16);
  ASSERT_OK(locks.lock(theirs.data(), theirs.size(), HostLocks::Access::kBoth));
  block_behind_the_program(rig->queue);
  ASSERT_TRUE(soon([&] { return rig->device()->device().blocked_streams().stalled_for() > 1s; }));
  EXPECT_EQ(locks.unlock(theirs.data(), theirs.size()).error(), ETIMEDOUT);
  gate->open();
  EXPECT_EQ(rig->next().prefix, kBytes);
  EXPECT_OK(locks.unlock(theirs.data(), theirs.size()));
}

TEST_P(Stall, StreamsGoOnWhenTheEngineCloses) {
  block_behind_an_operation(rig->queue);
  wait_for_copies(1);
  rig->engine->shutdown();
  EXPECT_EQ(rig->engine->released_early().error(), ETIMEDOUT);
  EXPECT_EQ(rig->transfers->left_in_use(), 0U);
  EXPECT_EQ(rig->engine->outstanding(), 0U);
  EXPECT_EQ(count, -ETIMEDOUT);
  for (const auto& program : programs) EXPECT_OK(program->synchronize());
  EXPECT_EQ(rig->queue->collect(1, 1, 0ms).size(), 1U);
}

TEST_P(Stall, MemoryInUseIsKeptWhenTheEngineCloses) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "a detached thread's end and the reuse of its stack, in the C library, look like a race";
#endif
  block_behind_the_program(rig->queue);
  wait_for_copies(1);
  const FakeGpuState before = state_of(fake());
  rig->engine->shutdown();
  rig->transfers->shutdown();
  EXPECT_EQ(rig->engine->outstanding(), 0U);
  EXPECT_EQ(rig->transfers->left_in_use(), 1U);
  EXPECT_EQ(rig->queue->collect(1, 1, 0ms).at(0).status.error(), ECANCELED);
  const std::weak_ptr<Buffer> buffer = buffers.back();
  buffers.clear();
  EXPECT_FALSE(buffer.expired());
  EXPECT_EQ(state_of(fake()).handles, before.handles);
  EXPECT_EQ(state_of(fake()).pinned, before.pinned);
  gate->open();
  EXPECT_TRUE(soon([&] { return buffer.expired(); }));
  // The thread that was left behind releases more, and the next test counts what is open.
  int open = -1;
  EXPECT_TRUE(soon([&] {
    std::this_thread::sleep_for(100ms);
    const FakeGpuState now = state_of(fake());
    const int sum = now.handles + now.mappings + now.reservations + now.streams + now.events + now.pinned;
    return std::exchange(open, sum) == sum;
  }));
}

}  // namespace
}  // namespace gpufs::async_test
