// Operations on streams: their order, their late numbers, how they end, and what becomes of those that are outstanding.

#include <gtest/gtest.h>

#include <array>
#include <random>

#include "async_fixture.h"

namespace gpufs::async_test {
namespace {

class AsyncOperations : public ::testing::TestWithParam<Kind> {};
INSTANTIATE_TEST_SUITE_P(Drivers, AsyncOperations,
                         ::testing::Values(Kind::kHost, Kind::kHostCalls, Kind::kCuda, Kind::kCudaCalls, Kind::kHip),
                         name_of);

TEST_P(AsyncOperations, RunBetweenWorkQueuedBeforeAndAfter) {
  Rig rig(GetParam());
  const std::vector<std::byte> bytes = pattern(100'000, 1);
  rig.fill_file(bytes);
  const std::shared_ptr<Buffer> buffer = rig.buffer();
  ProgramStream own = rig.program_stream();
  Gate gate(rig.device());
  struct Seen {
    std::int64_t count = 77;
    std::int64_t count_before = 0;
    std::int64_t count_after = 0;
    std::atomic<bool> ran{false};
  } seen;
  gate.hold(*own.program);
  ASSERT_OK(own.program->call(
      [](void* argument) { static_cast<Seen*>(argument)->count_before = static_cast<Seen*>(argument)->count; }, &seen));
  ASSERT_OK(rig.load(buffer, bytes.size(), own.stream, {.cookie = 42, .count = &seen.count}));
  ASSERT_OK(own.program->call(
      [](void* argument) {
        auto* const what = static_cast<Seen*>(argument);
        what->count_after = what->count;
        what->ran = true;
      },
      &seen));
  EXPECT_TRUE(rig.queue->collect(1, 1, 30ms).empty());
  EXPECT_EQ(buffer->size(), 0U);
  EXPECT_EQ(own.stream->outstanding(), 1U);
  gate.open();
  const Completion over = rig.next();
  EXPECT_OK(over.status);
  EXPECT_EQ(over.cookie, 42U);
  EXPECT_EQ(over.prefix, bytes.size());
  EXPECT_EQ(over.path_bytes[static_cast<std::size_t>(Path::kFallback)], bytes.size());
  EXPECT_OK(own.program->synchronize());
  EXPECT_TRUE(seen.ran);
  EXPECT_EQ(seen.count_before, 77);
  EXPECT_EQ(seen.count_after, static_cast<std::int64_t>(bytes.size()));
  EXPECT_EQ(contents(*buffer), bytes);
}

TEST_P(AsyncOperations, OnOneStreamKeepTheOrderOfEachThread) {
  constexpr std::uint64_t kCount = 60;  // of each thread
  constexpr std::size_t kBlock = 4'096;
  Rig rig(GetParam());
  const std::vector<std::byte> bytes = pattern(2 * kCount * kBlock, 31);
  rig.fill_file(bytes);
  const std::shared_ptr<OperationStream> stream = must(rig.engine->create_stream(0, {}));
  const std::shared_ptr<Buffer> buffer = rig.buffer();
  const auto submit_all = [&](std::uint64_t first) {
    for (std::uint64_t number = first; number < first + kCount; ++number) {
      EXPECT_OK(rig.load(buffer, kBlock, stream, {.offset = number * kBlock, .cookie = number}));
    }
  };
  std::thread first([&] { submit_all(0); });
  std::thread second([&] { submit_all(kCount); });
  first.join();
  second.join();
  // Those of a stream end in its order, and the last one's block is what all of them leave.
  std::array<std::uint64_t, 2> expected = {0, kCount};
  std::uint64_t last = 0;
  for (std::uint64_t count = 0; count < 2 * kCount; ++count) {
    const Completion over = rig.next();
    EXPECT_OK(over.status);
    last = over.cookie;
    EXPECT_EQ(last, expected[last / kCount]++);
  }
  EXPECT_TRUE(testing::same_bytes(contents(*buffer), std::span(bytes).subspan(last * kBlock, kBlock)));
}

TEST_P(AsyncOperations, OnSeveralStreamsDoNotWaitForEachOther) {
  Rig rig(GetParam());
  rig.fill_file(pattern(20'000, 3));
  std::atomic<bool> release{false};
  std::atomic<int> waiting{0};
  rig.operations.on_read = [&](int, void*, std::size_t, std::uint64_t offset, ssize_t*) {
    if (offset >= 10'000) return false;
    ++waiting;
    while (!release) std::this_thread::sleep_for(1ms);
    return false;
  };
  ProgramStream slow = rig.program_stream();
  ProgramStream quick = rig.program_stream();
  ASSERT_OK(rig.load(rig.buffer(), 5'000, slow.stream, {.cookie = 1}));
  ASSERT_TRUE(soon([&] { return waiting > 0; }));
  ASSERT_OK(rig.load(rig.buffer(), 5'000, quick.stream, {.offset = 10'000, .cookie = 2}));
  if (slow.stream->waits_for_values() || GetParam() == Kind::kHostCalls) {
    EXPECT_EQ(rig.next().cookie, 2U);
    release = true;
    EXPECT_EQ(rig.next().cookie, 1U);
  } else {
    // Drivers call the host for one stream after the other: late, but not locked up.
    release = true;
    EXPECT_EQ(rig.next().cookie + rig.next().cookie, 3U);
  }
}

TEST_P(AsyncOperations, EndWithTheirErrorAndTheStreamGoesOn) {
  Rig rig(GetParam());
  rig.fill_file(pattern(20'000, 4));
  ProgramStream own = rig.program_stream();
  ProgramStream aligned = rig.program_stream({false, false, false, true});
  Gate gate(rig.device());
  const std::shared_ptr<Buffer> buffer = rig.buffer();
  std::uint64_t size = 4096;
  std::uint64_t offset = 0;
  std::int64_t count = 0;
  const auto end_with = [&](const ProgramStream& stream, std::uint64_t late_size, std::uint64_t late_offset) {
    size = 4096;
    offset = 0;
    gate.hold(*stream.program);
    EXPECT_OK(rig.load(buffer, 0, stream.stream, {.count = &count, .late_bytes = &size, .late_offset = &offset}));
    size = late_size;
    offset = late_offset;
    gate.open();
    const Completion over = rig.next();
    EXPECT_OK(stream.program->synchronize());
    if (!over.status.ok()) {
      EXPECT_EQ(count, -over.status.error());
    }
    return over.status.error();
  };
  EXPECT_EQ(end_with(own, 4097, 0), EINVAL);  // a size that has grown
  EXPECT_EQ(end_with(own, 4096, static_cast<std::uint64_t>(-1)), EINVAL);
  EXPECT_EQ(end_with(own, 100, 0), 0);
  EXPECT_EQ(count, 100);
  EXPECT_EQ(end_with(aligned, 100, 0), EINVAL);
  EXPECT_EQ(end_with(aligned, 4096, 512), EINVAL);
  EXPECT_EQ(end_with(aligned, 4096, 4096), 0);

  // What is known is refused when it is submitted.
  EXPECT_EQ(rig.load(buffer, 100, aligned.stream).error(), EINVAL);
  EXPECT_EQ(rig.load(buffer, 100, own.stream, {.offset = static_cast<std::uint64_t>(-5)}).error(), EINVAL);
  const UniqueFd reading(::open(("/proc/self/fd/" + std::to_string(rig.fd())).c_str(), O_RDONLY | O_CLOEXEC));
  AsyncEngine::Submission unwritable = rig.entry(Direction::kStore, buffer, 100, own.stream);
  unwritable.request.transfer.file = must(BackingFile::open(reading.get()));
  EXPECT_EQ(rig.submit(std::move(unwritable)).error(), EBADF);
  EXPECT_TRUE(soon([&] { return own.stream->outstanding() == 0; }));

  // A read that fails does so after what it had moved.
  rig.operations.on_read = [](int, void*, std::size_t, std::uint64_t at, ssize_t* result) {
    if (at < 8192) return false;
    errno = EIO;
    *result = -1;
    return true;
  };
  ASSERT_OK(rig.load(buffer, 4096, own.stream, {.offset = 8192, .count = &count}));
  EXPECT_EQ(rig.next().status.error(), EIO);
  EXPECT_EQ(count, -EIO);
}

TEST_P(AsyncOperations, UseFilesAndBuffersAsTheyAreWhenReached) {
  Rig rig(GetParam());
  rig.fill_file(pattern(1'000, 5));
  ProgramStream own = rig.program_stream();
  Gate gate(rig.device());
  const std::shared_ptr<Buffer> loaded = rig.buffer();
  const std::shared_ptr<Buffer> stored = rig.buffer(pattern(100, 6));
  gate.hold(*own.program);
  ASSERT_OK(rig.load(loaded, 4'000'000, own.stream));
  ASSERT_OK(rig.submit(rig.entry(Direction::kStore, stored, 3'000, own.stream, {.offset = 5'000'000})));
  ASSERT_OK(rig.load(loaded, 0, own.stream));
  const std::vector<std::byte> grown = pattern(3'000'000, 7);
  rig.fill_file(grown);
  const std::vector<std::byte> more = pattern(2'000, 8);
  ASSERT_EQ(must(stored->write(0, more)), more.size());
  gate.open();
  Completion over = rig.next();
  EXPECT_OK(over.status);
  EXPECT_EQ(over.prefix, grown.size());  // to the end that the file has by then
  over = rig.next();
  EXPECT_OK(over.status);
  EXPECT_EQ(over.prefix, more.size());
  over = rig.next();
  EXPECT_OK(over.status);
  EXPECT_EQ(over.prefix, 0U);
  EXPECT_EQ(contents(*loaded), grown);
}

// Some held by waits in the device's queues, the rest by calls of the host.
TEST_P(AsyncOperations, OnOneStreamMayExceedTheHardwareQueue) {
  constexpr std::size_t kCount = 200;
  Rig rig(GetParam());
  const std::vector<std::byte> bytes = pattern(kCount * 333, 12);
  rig.fill_file(bytes);
  const std::shared_ptr<Buffer> buffer = rig.buffer();
  ProgramStream own = rig.program_stream();
  Gate gate(rig.device());
  gate.hold(*own.program);
  if (GetParam() == Kind::kCuda || GetParam() == Kind::kCudaCalls) cuda_test::fake().share_queues();
  for (std::size_t piece = 0; piece < kCount; ++piece) {
    AsyncEngine::Submission entry = rig.entry(Direction::kLoad, buffer, 333, own.stream);
    entry.request.transfer.file_offset = entry.request.transfer.target_offset = piece * 333;
    entry.request.cookie = piece;
    ASSERT_OK(rig.submit(std::move(entry)));
  }
  if (GetParam() == Kind::kCuda) {
    EXPECT_EQ(cuda_test::fake().calls("cuStreamWaitValue32_v2"), OperationStream::kMostWaits + 2);  // gate, probe
  }
  gate.open();
  for (std::size_t piece = 0; piece < kCount; ++piece) {
    const Completion over = rig.next();
    ASSERT_OK(over.status);
    EXPECT_EQ(over.cookie, piece);
  }
  EXPECT_EQ(contents(*buffer), bytes);
}

TEST_P(AsyncOperations, BlockAtMostFourStreamsOfADevice) {
  AsyncOptions options;
  options.timeout = 50ms;
  Rig rig(GetParam(), options);
  const std::vector<std::byte> bytes = pattern(10'000, 9);
  rig.fill_file(bytes);
  Gate gate(rig.device());
  std::vector<ProgramStream> streams;
  std::vector<std::shared_ptr<Buffer>> buffers;
  for (int number = 0; number <= BlockedStreams::kMost; ++number) {
    streams.push_back(rig.program_stream());
    buffers.push_back(rig.buffer());
    gate.hold(*streams.back().program);
  }
  const auto submit = [&](int number) { return rig.load(buffers[number], bytes.size(), streams[number].stream); };
  for (int number = 0; number < BlockedStreams::kMost; ++number) ASSERT_OK(submit(number));
  ASSERT_OK(submit(0));
  const Status refused = submit(BlockedStreams::kMost);
  EXPECT_EQ(refused.error(), EAGAIN);
  EXPECT_NE(refused.message().find("4 other streams of the device have outstanding operations"), std::string::npos);
  EXPECT_EQ(streams.back().stream->outstanding(), 0U);
  if (GetParam() == Kind::kCuda || GetParam() == Kind::kCudaCalls) cuda_test::fake().share_queues();
  gate.open();
  EXPECT_TRUE(soon([&] { return submit(BlockedStreams::kMost).ok(); }));
  for (int count = 0; count < BlockedStreams::kMost + 2; ++count) ASSERT_OK(rig.next().status);
  for (const std::shared_ptr<Buffer>& buffer : buffers) EXPECT_EQ(contents(*buffer), bytes);
}

TEST_P(AsyncOperations, EndSoonWhenCancelled) {
  Rig rig(GetParam());
  rig.fill_file(pattern(2 * kMiB, 11));
  const std::shared_ptr<Buffer> buffer = rig.buffer();
  ProgramStream own = rig.program_stream();
  Gate gate(rig.device());
  std::uint64_t cell = 100;
  std::int64_t count = 0;
  gate.hold(*own.program);
  AsyncEngine::Submission entry = rig.entry(Direction::kLoad, buffer, 100, own.stream);
  entry.request.file_offset_cell = &cell;
  entry.request.count = &count;
  std::uint64_t id = 0;
  ASSERT_OK(rig.submit(std::move(entry), &id));
  ASSERT_OK(rig.queue->cancel(id));
  Completion over = rig.next();
  EXPECT_EQ(over.status.error(), ECANCELED);
  EXPECT_EQ(over.id, id);
  EXPECT_EQ(count, -ECANCELED);
  EXPECT_EQ(rig.queue->cancel(id).error(), ENOENT);
  count = 5;
  gate.open();
  ASSERT_OK(rig.load(buffer, 100, own.stream));
  EXPECT_OK(rig.next().status);  // the stream has passed what was cancelled
  EXPECT_EQ(count, 5);           // and nobody writes there any more

  std::atomic<bool> reading{false};
  rig.operations.on_read = [&](int, void*, std::size_t, std::uint64_t, ssize_t*) {
    reading = true;
    std::this_thread::sleep_for(5ms);
    return false;
  };
  ASSERT_OK(rig.load(buffer, 2 * kMiB, own.stream, {}, &id));
  ASSERT_TRUE(soon([&] { return reading.load(); }));
  (void)rig.queue->cancel(0);
  over = rig.next();
  EXPECT_TRUE(over.status.error() == ECANCELED || over.prefix == 2 * kMiB);
  EXPECT_OK(own.program->synchronize());
}

TEST_P(AsyncOperations, KeepTheirFileMemoryAndStreamAlive) {
  Rig rig(GetParam());
  const std::vector<std::byte> bytes = pattern(30'000, 12);
  rig.fill_file(bytes);
  std::shared_ptr<Buffer> buffer = rig.buffer();
  const std::weak_ptr<Buffer> watched = buffer;
  ProgramStream own = rig.program_stream();
  Gate gate(rig.device());
  gate.hold(*own.program);
  ASSERT_OK(rig.load(buffer, bytes.size(), own.stream));
  own.stream->close();
  EXPECT_EQ(rig.load(buffer, 1, own.stream).error(), EBADF);
  own.stream.reset();
  buffer.reset();
  rig.file.reset();
  EXPECT_FALSE(watched.expired());
  gate.open();
  const Completion over = rig.next();
  EXPECT_OK(over.status);
  EXPECT_EQ(over.prefix, bytes.size());
  EXPECT_TRUE(soon([&] { return watched.expired(); }));
}

TEST_P(AsyncOperations, AreCancelledWhenTheEngineCloses) {
  std::unique_ptr<Stream> program;
  std::int64_t count = 0;
  {
    Rig rig(GetParam());
    rig.fill_file(pattern(5'000, 14));
    ProgramStream own = rig.program_stream();
    Gate gate(rig.device());
    gate.hold(*own.program);
    ASSERT_OK(rig.load(rig.buffer(), 5'000, own.stream, {.count = &count}));
    ASSERT_OK(rig.load(rig.buffer(), 5'000));
    std::thread opener([&] {
      // shutdown() does not wait for the stream before it has ended the operations.
      EXPECT_TRUE(soon([&] { return rig.engine->outstanding() == 0; }));
      gate.open();
    });
    rig.engine->shutdown();
    opener.join();
    EXPECT_EQ(count, -ECANCELED);
    EXPECT_EQ(rig.load(rig.buffer(), 1).error(), ESHUTDOWN);
    EXPECT_EQ(rig.engine->create_stream(0, {}).error(), ESHUTDOWN);
    EXPECT_OK(own.program->synchronize());
  }
}

// ---- batches ----

TEST_P(AsyncOperations, WithoutAStreamRunInParallel) {
  Rig rig(GetParam());
  const std::vector<std::byte> bytes = pattern(40'000, 15);
  rig.fill_file(bytes);
  // Each read waits for another one.
  std::atomic<int> reading{0};
  rig.operations.on_read = [&](int, void*, std::size_t, std::uint64_t, ssize_t*) {
    ++reading;
    EXPECT_TRUE(soon([&] { return reading >= 2; }));
    return false;
  };
  std::vector<std::shared_ptr<Buffer>> buffers;
  for (std::uint64_t at = 0; at < bytes.size(); at += 10'000) {
    buffers.push_back(rig.buffer());
    ASSERT_OK(rig.load(buffers.back(), 10'000, nullptr, {.offset = at}));
  }
  for (std::size_t number = 0; number < buffers.size(); ++number) EXPECT_OK(rig.next().status);
  for (std::size_t number = 0; number < buffers.size(); ++number) {
    EXPECT_TRUE(testing::same_bytes(contents(*buffers[number]), std::span(bytes).subspan(number * 10'000, 10'000)));
  }
  // Nothing is under way: asking for more does not wait.
  EXPECT_TRUE(rig.queue->collect(1, 1, kPatience).empty());
}

// ---- many threads ----

TEST_P(AsyncOperations, SurviveConcurrentSubmitCancelAndCollect) {
  AsyncOptions options;
  options.stream_depth = 16;
  Rig rig(GetParam(), options);
  const std::vector<std::byte> bytes = pattern(64 << 10, 17);
  rig.fill_file(bytes);
  std::vector<ProgramStream> streams;
  for (int number = 0; number < 4; ++number) streams.push_back(rig.program_stream());
  constexpr int kEach = 150;
  std::atomic<int> submitted{0};
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937 random(seed);
      const std::shared_ptr<Buffer> buffer = rig.buffer();
      for (int count = 0; count < kEach; ++count) {
        const std::size_t which = random() % 5;
        AsyncEngine::Submission entry =
            rig.entry(Direction::kLoad, buffer, random() % 4096, which < 4 ? streams[which].stream : nullptr);
        entry.request.transfer.file_offset = random() % 60'000;
        entry.request.transfer.target_offset = static_cast<std::uint64_t>(count) * 4096;  // nothing orders the streams
        std::uint64_t id = 0;
        if (!rig.submit(std::move(entry), &id).ok()) ++wrong;
        ++submitted;
        if (random() % 4 == 0) (void)rig.queue->cancel(id);
      }
    });
  }
  int collected = 0;
  while (collected < 4 * kEach) {
    const bool all_submitted = submitted == 4 * kEach;  // before the look into the queue
    const std::vector<Completion> over = rig.queue->collect(1, 16, kPatience);
    if (over.empty() && all_submitted) break;
    for (const Completion& each : over) {
      if (!each.status.ok() && each.status.error() != ECANCELED) ++wrong;
    }
    collected += static_cast<int>(over.size());
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(collected, 4 * kEach);
  EXPECT_EQ(wrong, 0);
  for (ProgramStream& own : streams) EXPECT_OK(own.program->synchronize());
}

// ---- what fails ----

TEST(AsyncFaults, AnOperationThatItsStreamRefusesIsNotQueued) {
  Rig rig(Kind::kHost);
  rig.fill_file(pattern(1'000, 18));
  ProgramStream own = rig.program_stream();
  const std::shared_ptr<Buffer> buffer = rig.buffer();
  rig.plan->call.at(1);
  const Status refused = rig.load(buffer, 1'000, own.stream);
  EXPECT_EQ(refused.error(), EIO);
  EXPECT_EQ(refused.device_code(), 700);
  EXPECT_EQ(own.stream->outstanding(), 0U);
  EXPECT_EQ(rig.engine->outstanding(), 0U);
  EXPECT_EQ(rig.queue->under_way().size(), 0U);
  EXPECT_EQ(buffer->size(), 0U);

  // In a batch the others are queued: this one ends with the failure.
  rig.plan->call.at(2);
  std::vector<AsyncEngine::Submission> entries(3, rig.entry(Direction::kLoad, buffer, 1'000, own.stream));
  for (std::uint64_t number = 0; number < 3; ++number) entries[number].request.cookie = number;
  std::vector<std::uint64_t> ids;
  std::size_t bad = 0;
  ASSERT_OK(rig.engine->submit(rig.queue, entries, &ids, &bad));
  for (int count = 0; count < 3; ++count) {
    const Completion over = rig.next();
    EXPECT_EQ(over.status.error(), over.cookie == 1 ? EIO : 0);
  }
}

TEST(AsyncFaults, ARefusedAndCancelledOperationIsCountedOnce) {
  Rig rig(Kind::kHost);
  rig.fill_file(pattern(1'000, 18));
  ProgramStream own = rig.program_stream();
  const std::shared_ptr<Buffer> buffer = rig.buffer();
  std::atomic<bool> over{false};
  std::thread cancelling([&] {
    while (!over) EXPECT_TRUE(rig.queue->cancel(0).ok());
  });
  rig.plan->call.at(1, 2'000);
  for (int count = 0; count < 2'000; ++count) {
    EXPECT_EQ(rig.load(buffer, 1'000, own.stream).error(), EIO);
  }
  over = true;
  cancelling.join();
  rig.plan->call.clear();
  EXPECT_EQ(rig.queue->under_way().size(), 0U);
  EXPECT_EQ(rig.engine->outstanding(), 0U);
  EXPECT_EQ(own.stream->outstanding(), 0U);
}

TEST(AsyncFaults, AnOperationThatCannotBlockItsStreamIsCancelled) {
  Rig rig(Kind::kHost);
  rig.fill_file(pattern(1'000, 19));
  ProgramStream own = rig.program_stream();
  Gate gate(rig.device());
  const std::shared_ptr<Buffer> buffer = rig.buffer();
  gate.hold(*own.program);
  rig.plan->wait_for_value.at(1);
  ASSERT_OK(rig.load(buffer, 1'000, own.stream));
  const Completion over = rig.next();
  EXPECT_EQ(over.status.error(), EIO);
  EXPECT_EQ(over.prefix, 0U);
  gate.open();
  ASSERT_OK(rig.load(buffer, 1'000, own.stream));
  EXPECT_OK(rig.next().status);
  // Without an event behind it an operation runs all the same.
  rig.plan->record.at(1);
  ASSERT_OK(rig.load(buffer, 1'000, own.stream));
  EXPECT_OK(rig.next().status);
  ASSERT_OK(rig.load(buffer, 1'000, own.stream));
  EXPECT_OK(rig.next().status);
}

TEST(AsyncFaults, HostCallsBlockStreamsOfDevicesThatCannotWait) {
  for (const Kind kind : {Kind::kHost, Kind::kCuda, Kind::kHip}) {
    Rig rig(kind);
    rig.plan->waits_for_values = false;
    if (kind == Kind::kCuda) {
      const FakeGpuSetup setup{.stream_waits = false};
      cuda_test::fake().reset(&setup);
    }
    if (kind == Kind::kHip) {
      const FakeGpuSetup setup{.stream_waits = false};
      hip_test::fake().reset(&setup);
    }
    rig.fill_file(pattern(1'000, 21));
    const std::shared_ptr<OperationStream> one = must(rig.engine->create_stream(0, {}));
    const std::shared_ptr<OperationStream> other = must(rig.engine->create_stream(0, {}));
    EXPECT_FALSE(one->waits_for_values());
    // Two streams over a driver that may have one thread for the calls of both.
    for (int count = 0; count < 20; ++count) {
      ASSERT_OK(rig.load(rig.buffer(), 1'000, count % 2 == 0 ? one : other));
    }
    for (int count = 0; count < 20; ++count) EXPECT_OK(rig.next().status);
  }
}

// Neither a stream that the engine knows nor a new one gets work that the graph would repeat.
TEST(AsyncFaults, StreamsBeingCapturedIntoAGraphAreRefused) {
  for (const Kind kind : {Kind::kCuda, Kind::kCudaCalls, Kind::kHip}) {
    Rig rig(kind);
    const FakeGpuControl& fake = kind == Kind::kHip ? static_cast<const FakeGpuControl&>(hip_test::fake())
                                                    : static_cast<const FakeGpuControl&>(cuda_test::fake());
    rig.fill_file(pattern(1'000, 21));
    const std::shared_ptr<OperationStream> known = must(rig.engine->create_stream(0, {}));
    ASSERT_OK(rig.load(rig.buffer(), 10, known));
    EXPECT_OK(rig.next().status);
    const std::unique_ptr<Stream> fresh = must(rig.device()->device().create_stream());
    const FakeGpuSetup capturing{.capturing = true};
    fake.reset(&capturing);
    EXPECT_EQ(rig.load(rig.buffer(), 10, known).error(), EBUSY);
    EXPECT_EQ(rig.engine->imply_stream(fresh->native(), -1).status().error(), EBUSY);
    EXPECT_EQ(fake.calls("captured"), 0);
    // Calls that end a capture.
    for (const char* symbol : {"cuMemHostRegister_v2", "hipHostRegister"}) EXPECT_EQ(fake.calls(symbol), 0);
    const FakeGpuSetup ordinary;
    fake.reset(&ordinary);
    ASSERT_OK(rig.load(rig.buffer(), 10, known));
    EXPECT_OK(rig.next().status);
  }
}

TEST(AsyncFaults, OperationsDoNotEndTheProgramsCaptures) {
  for (const Kind kind : {Kind::kCuda, Kind::kCudaCalls, Kind::kHip}) {
    const FakeGpuControl& fake = kind == Kind::kHip ? static_cast<const FakeGpuControl&>(hip_test::fake())
                                                    : static_cast<const FakeGpuControl&>(cuda_test::fake());
    Rig rig(kind);
    rig.fill_file(pattern(10'000, 21));
    const FakeGpuSetup capturing{.program_captures = true};
    fake.reset(&capturing);
    const std::shared_ptr<OperationStream> stream = must(rig.engine->create_stream(0, {}));
    for (int count = 0; count < 4; ++count) ASSERT_OK(rig.load(rig.buffer(), 10'000, stream));
    for (int count = 0; count < 4; ++count) EXPECT_OK(rig.next().status);
    EXPECT_EQ(fake.calls("captures ended"), 0);
    const FakeGpuSetup ordinary;
    fake.reset(&ordinary);
  }
}

TEST(AsyncFaults, AStreamKeepsItsMemoryUntilTheDeviceHasPassedARefusedOperation) {
  Rig rig(Kind::kCuda);
  ProgramStream own = rig.program_stream();
  cuda_test::fake().fail("cuLaunchHostFunc", 1, 801, 1);
  EXPECT_FALSE(rig.load(rig.buffer(), 10, own.stream).ok());
  EXPECT_EQ(cuda_test::fake().calls("cuEventRecord"), 1);
}

TEST(AsyncFaults, TheDefaultStreamBelongsToTheCurrentDevice) {
  Rig rig(Kind::kCuda, {}, 2);
  const std::vector<std::byte> bytes = pattern(3'000, 22);
  rig.fill_file(bytes);
  ASSERT_OK(rig.device(1)->device().bind_thread());
  const std::shared_ptr<Buffer> buffer = rig.buffer({}, 1);
  const std::shared_ptr<OperationStream> implied = must(rig.engine->imply_stream(0, -1));
  EXPECT_EQ(implied->device(), rig.device(1));
  ASSERT_OK(rig.load(buffer, 3'000, implied));
  EXPECT_OK(rig.next().status);
  EXPECT_EQ(contents(*buffer), bytes);
  EXPECT_EQ(must(rig.engine->imply_stream(0, 0))->device(), rig.device(0));
}

// The memory of an operation is freed when the program holds it no more, and that waits for all streams of a device.
TEST(AsyncFaults, FreeingMemoryStopsNoOtherOperation) {
  Rig rig(Kind::kCuda, {}, 1, {}, /*virtual_memory=*/false);
  rig.fill_file(pattern(1'000, 25));
  ProgramStream own = rig.program_stream();
  Gate gate(rig.device());
  std::atomic<bool> reached{false};
  cuda_test::fake().share_queues();
  ASSERT_OK(own.program->call([](void* at) { static_cast<std::atomic<bool>*>(at)->store(true); }, &reached));
  gate.hold(*own.program);
  ASSERT_TRUE(soon([&] { return reached.load(); }));
  std::this_thread::sleep_for(10ms);
  std::vector<std::weak_ptr<Buffer>> freed;
  std::vector<std::thread> releases;
  // More than there are threads; each kind of end.
  for (int count = 0; count < 40; ++count) {
    std::shared_ptr<Buffer> buffer = rig.buffer(pattern(100, 26));
    freed.emplace_back(buffer);
    ASSERT_OK(rig.load(buffer, count % 2 == 0 ? 0 : 1'000));
    // On a thread of its own: the operation may have ended, and then this frees the memory, which waits for the gate.
    releases.emplace_back([released = std::move(buffer)]() mutable { released.reset(); });
    const std::vector<Completion> over = rig.queue->collect(1, 1, kPatience);
    if (over.empty()) gate.open();
    ASSERT_EQ(over.size(), 1U);
    EXPECT_OK(over[0].status);
  }
  EXPECT_FALSE(freed.front().expired() && freed.back().expired());
  gate.open();
  for (std::thread& release : releases) release.join();
  EXPECT_TRUE(soon([&] { return freed.front().expired() && freed.back().expired(); }));
}

TEST(AsyncFaults, OperationsEndWhenTheirDeviceFails) {
  Rig rig(Kind::kCuda);
  rig.fill_file(pattern(1'000, 23));
  ProgramStream own = rig.program_stream();
  Gate gate(rig.device());
  gate.hold(*own.program);
  std::int64_t count = 0;
  ASSERT_OK(rig.load(rig.buffer(), 1'000, own.stream, {.count = &count}));
  cuda_test::fake().fail("cuEventQuery", 1, 719, 1);  // a kernel of the program's has crashed
  const Completion over = rig.next();
  EXPECT_EQ(over.status.error(), EIO);
  EXPECT_EQ(over.status.device_code(), 719);
  EXPECT_EQ(count, -EIO);
  EXPECT_EQ(rig.load(rig.buffer(), 1'000).error(), EIO);
}

TEST(AsyncFaults, AStreamThatNeverReachesItsOperationsIsAbandoned) {
  // Both outlive the engine, as the program's do.
  std::unique_ptr<Gate> gate;
  std::unique_ptr<Stream> program;
  std::int64_t count = 0;
  {
    Rig rig(Kind::kHost);
    rig.fill_file(pattern(1'000, 24));
    gate = std::make_unique<Gate>(rig.device());
    ProgramStream own = rig.program_stream();
    gate->hold(*own.program);
    ASSERT_OK(rig.load(rig.buffer(), 1'000, own.stream, {.count = &count}));
    program = std::move(own.program);
  }
  EXPECT_EQ(count, -ECANCELED);
  count = 3;
  gate->open();
  EXPECT_OK(program->synchronize());
  EXPECT_EQ(count, 3);
}

}  // namespace
}  // namespace gpufs::async_test
