// Devices that get nothing done: the program's copies keep all queues of copies, behind streams that stand, and the
// engine's own stand behind those. Over the fakes of both vendors.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <vector>

#include "async_fixture.h"
#include "base/log.h"
#include "memory/host_locks.h"

namespace gpufs::async_test {
namespace {

constexpr std::size_t kQueues = 8;
constexpr std::size_t kBytes = std::size_t{300} << 10;
constexpr std::size_t kTheirs = std::size_t{64} << 10;

IoOptions hasty() {
  IoOptions io;
  io.shutdown_grace = 1500ms;
  io.workers = kQueues;
  return io;
}

// Operations beside copies of the program's, one in each queue, that stand.
class Standstill : public ::testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    rig = std::make_unique<Rig>(GetParam(), AsyncOptions{}, 1, hasty());
    rig->device()->device().waits()->set_patience(1200ms);
    rig->fill_file(pattern(kBytes, 31));
    gate = std::make_unique<Gate>(rig->device());
    memory = must(rig->device()->device().create_memory());
    range = must(memory->reserve(kGranule));
    ASSERT_OK(memory->populate(0, kGranule));
    host = must(PinnedBlock::create(rig->device(), kQueues * kTheirs));
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

  const FakeGpuControl& fake() {
    const bool cuda = GetParam() == Kind::kCuda || GetParam() == Kind::kCudaCalls;
    return cuda ? static_cast<const FakeGpuControl&>(cuda_test::fake()) : hip_test::fake();
  }
  void queue_copy(std::size_t number) {
    EXPECT_OK(
        programs[number]->copy_to_device(range->base() + number * kTheirs, host->data() + number * kTheirs, kTheirs));
  }
  // Copies behind streams that the program itself holds, until gate is opened; and an operation on one more stream.
  void stand_behind_the_program(CompletionQueue& queue) {
    for (std::size_t number = 0; number < kQueues; ++number) {
      gate->hold(*programs[number]);
      queue_copy(number);
    }
    submit(queue, streams[kQueues]);
  }
  // Copies behind operations that these hold up.
  void stand_behind_operations(CompletionQueue& queue) {
    counts.resize(kQueues, 7);
    for (std::size_t number = 0; number < kQueues; ++number) {
      gate->hold(*programs[number]);
      submit(queue, streams[number], &counts[number]);
      queue_copy(number);
    }
    gate->open();
  }
  void submit(CompletionQueue& queue, std::shared_ptr<OperationStream> stream, std::int64_t* count = nullptr) {
    buffers.push_back(rig->buffer());
    std::vector<CompletionQueue::Entry> entries;
    entries.push_back(rig->entry(Direction::kLoad, buffers.back(), kBytes, std::move(stream)));
    entries.back().request.count = count;
    std::size_t bad = 0;
    ASSERT_OK(queue.submit(std::move(entries), nullptr, &bad));
  }
  bool stands() { return rig->device()->stands_still(); }

  std::unique_ptr<Rig> rig;
  std::unique_ptr<DeviceMemory> memory;
  std::shared_ptr<AddressRange> range;
  std::unique_ptr<PinnedBlock> host;
  std::unique_ptr<Gate> gate;
  std::vector<std::unique_ptr<Stream>> programs;
  std::vector<std::shared_ptr<OperationStream>> streams;
  std::vector<std::shared_ptr<Buffer>> buffers;
  std::vector<std::int64_t> counts;
};
INSTANTIATE_TEST_SUITE_P(Drivers, Standstill, ::testing::Values(Kind::kCuda, Kind::kCudaCalls, Kind::kHip), name_of);

// What is logged while it lives.
class Logged {
 public:
  Logged() : fd_(::memfd_create("log", MFD_CLOEXEC)) { log_configure(fd_.get(), LogLevel::kWarning); }
  ~Logged() { log_configure(-1, LogLevel::kWarning); }
  Logged(const Logged&) = delete;
  Logged& operator=(const Logged&) = delete;
  [[nodiscard]] std::string text() const {
    std::string all(1 << 16, '\0');
    const ssize_t bytes = ::pread(fd_.get(), all.data(), all.size(), 0);
    all.resize(bytes < 0 ? 0 : static_cast<std::size_t>(bytes));
    return all;
  }
  [[nodiscard]] int count(const std::string& part) const {
    const std::string all = text();
    int found = 0;
    for (std::size_t at = all.find(part); at != std::string::npos; at = all.find(part, at + 1)) ++found;
    return found;
  }

 private:
  UniqueFd fd_;
};

TEST_P(Standstill, IsToldOnceEachTime) {
  const Logged log;
  for (int time = 1; time <= 2; ++time) {
    auto queue = rig->engine->open_queue(0);
    stand_behind_the_program(*queue);
    // A text that comes again within seconds is counted only.
    if (time == 2) submit(*queue, nullptr);
    const std::string line = "s of what was queued there, and " + std::to_string(time) + " operations stand";
    EXPECT_TRUE(soon([&] { return log.count(line) == 1; })) << log.text();
    std::this_thread::sleep_for(300ms);  // some looks of the keeper
    EXPECT_EQ(log.count("has done nothing for"), time) << log.text();
    EXPECT_EQ(log.count("CUDA_DEVICE_MAX_COPY_CONNECTIONS=32"), GetParam() == Kind::kHip ? 0 : time);
    gate->open();
    const std::size_t ended = static_cast<std::size_t>(time);
    for (const Completion& over : queue->collect(ended, ended, kPatience)) EXPECT_EQ(over.bytes, kBytes);
    EXPECT_OK(queue->close());
    EXPECT_TRUE(soon([&] { return rig->device()->awaited() == 0ms; }));
    std::this_thread::sleep_for(150ms);
  }
}

TEST_P(Standstill, ABatchThatIsClosedIsLeftUntilTheDeviceGoesOn) {
  auto batch = rig->engine->open_queue(0);
  stand_behind_the_program(*batch);
  ASSERT_TRUE(soon([&] { return stands(); }));
  const Status closed = batch->close();
  EXPECT_EQ(closed.error(), ETIMEDOUT);
  EXPECT_NE(closed.message().find("1 operations use their memory until it goes on"), std::string::npos)
      << closed.message();
  EXPECT_EQ(batch->counts().under_way, 1U);
  EXPECT_EQ(must(buffers.back()->read(0, {})), 0U);
  gate->open();
  EXPECT_EQ(batch->collect(1, 1, kPatience).size(), 1U);
  EXPECT_OK(batch->close());
}

TEST_P(Standstill, ATransferThatIsClosedIsLeftUntilTheDeviceGoesOn) {
  stand_behind_the_program(*rig->queue);
  TransferRequest request;
  request.file = rig->file;
  request.target = Target::of_buffer(rig->buffer());
  const std::shared_ptr<Transfer> transfer = must(rig->transfers->start(request));
  ASSERT_TRUE(soon([&] { return stands(); }));
  EXPECT_EQ(transfer->close().error(), ETIMEDOUT);
  gate->open();
  EXPECT_OK(transfer->close());
}

TEST_P(Standstill, PinnedMemoryIsGivenBackOnceNothingStands) {
  std::shared_ptr<PinnedBlock> block = must(PinnedBlock::create(rig->device(), 64));
  HostLocks locks(rig->driver, LockPolicy::kOff);
  std::vector<std::byte> theirs(1 << 16);
  ASSERT_OK(locks.lock(theirs.data(), theirs.size(), HostLocks::Access::kBoth));
  stand_behind_the_program(*rig->queue);
  ASSERT_TRUE(soon([&] { return stands(); }));
  const int pinned = state_of(fake()).pinned;
  const std::weak_ptr<PinnedBlock> known = block;
  give_back(std::move(block));
  // It serves whoever wants another one meanwhile.
  block = must(take_block(rig->device(), 64));
  EXPECT_EQ(block, known.lock());
  give_back(std::move(block));
  EXPECT_EQ(locks.unlock(theirs.data(), theirs.size()).error(), ETIMEDOUT);
  EXPECT_EQ(state_of(fake()).pinned, pinned);
  gate->open();
  EXPECT_TRUE(soon([&] { return known.expired(); }));
  EXPECT_EQ(rig->next().bytes, kBytes);
  EXPECT_OK(locks.unlock(theirs.data(), theirs.size()));
}

TEST_P(Standstill, StreamsGoOnWhenTheEngineEnds) {
  stand_behind_operations(*rig->queue);
  ASSERT_TRUE(soon([&] { return stands(); }));
  rig->engine->shutdown();
  // Those that no thread had come to ended when they were cancelled.
  EXPECT_GE(rig->engine->let_go(), 1U);
  EXPECT_EQ(rig->transfers->left_in_use(), 0U);
  EXPECT_EQ(rig->engine->outstanding(), 0U);
  std::size_t told = 0;
  for (const std::int64_t count : counts) told += count == -ETIMEDOUT ? 1 : 0;
  EXPECT_EQ(told, rig->engine->let_go());
  for (const auto& program : programs) EXPECT_OK(program->synchronize());
  EXPECT_EQ(rig->queue->collect(kQueues, kQueues, 0ms).size(), kQueues);
  EXPECT_EQ(rig->device()->awaited(), 0ms);
}

TEST_P(Standstill, WhatADeviceMayStillUseIsKeptWhenTheEngineEnds) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "a detached thread's end and the reuse of its stack, in the C library, look like a race";
#endif
  stand_behind_the_program(*rig->queue);
  ASSERT_TRUE(soon([&] { return stands(); }));
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
}

}  // namespace
}  // namespace gpufs::async_test
