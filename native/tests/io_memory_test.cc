// Loads into real buffers: memory that is taken ahead of the pieces, and what is left of it when a load ends early.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <functional>
#include <string>
#include <thread>

#include "buffer_fixture.h"
#include "io/fastpath.h"
#include "io/transfer_engine.h"
#include "io_fakes.h"
#include "waiting.h"

namespace gpufs::testing {
namespace {

constexpr std::uint64_t kFileBytes = 140 * kMiB + 12345;
constexpr std::uint64_t kChunkBytes = std::uint64_t{1} << 20;

class LoadMemoryTest : public BufferFixture {
 protected:
  void begin(std::uint64_t memory_bytes) {
    plan->cpu_addressable = false;  // so that loads go through slots and streams
    start(memory_bytes);
    IoOptions options;
    options.chunk_bytes = kChunkBytes;
    options.workers = 3;
    options.slots = 2;
    options.fastpath = FastpathMode::kOff;
    engine = must(TransferEngine::create(options, make_fastpath("none")));
    // Sparse: a mark in each granule is enough to distinguish them.
    std::string path = "/tmp/gpufs-load-memory-XXXXXX";
    fd = UniqueFd(::mkostemp(path.data(), O_CLOEXEC));
    ASSERT_TRUE(fd.valid());
    ::unlink(path.c_str());
    ASSERT_EQ(::ftruncate(fd.get(), kFileBytes), 0);
    for (std::uint64_t at = 0; at < kFileBytes; at += kGranule) {
      ASSERT_EQ(::pwrite(fd.get(), &at, sizeof at, static_cast<off_t>(at)), static_cast<ssize_t>(sizeof at));
    }
    file = must(BackingFile::open(fd.get(), operations));
    buffer = make();
  }
  void TearDown() override {
    if (engine) engine->shutdown();
    engine.reset();
    file.reset();
    buffer.reset();
    expect_nothing_left();
  }

  TransferProgress load(const std::function<void(Transfer&)>& meanwhile = {}) {
    TransferRequest wanted;
    wanted.direction = Direction::kLoad;
    wanted.file = file;
    wanted.target = buffer;
    const auto started = must(engine->start(wanted));
    if (meanwhile) meanwhile(*started);
    started->wait();
    return started->progress();
  }
  // The file's first bytes, and nothing of memory beyond them.
  void expect_front(std::uint64_t bytes) {
    EXPECT_EQ(buffer->size(), bytes);
    EXPECT_EQ(buffer->bytes_held(), (bytes + kGranule - 1) / kGranule * kGranule);
    EXPECT_EQ(used(), buffer->bytes_held());
    for (std::uint64_t at = 0; at + sizeof at <= bytes; at += kGranule) {
      std::uint64_t mark = ~std::uint64_t{0};
      ASSERT_EQ(buffer->read(at, std::as_writable_bytes(std::span(&mark, 1))).value(), sizeof mark);
      ASSERT_EQ(mark, at);
    }
    // What is above the end is zeros, also in the last granule.
    if (bytes == kFileBytes) return;
    const std::uint64_t end = (bytes / kGranule + 2) * kGranule;
    ASSERT_TRUE(buffer->resize(end).ok());
    EXPECT_TRUE(all_zero(contents(*buffer, bytes, end - bytes)));
    ASSERT_TRUE(buffer->resize(bytes).ok());
  }

  PlannedFileOps operations;
  UniqueFd fd;
  std::shared_ptr<TransferEngine> engine;
  std::shared_ptr<BackingFile> file;
  std::shared_ptr<ExtentBuffer> buffer;
};

TEST_F(LoadMemoryTest, TakesItInAFewStepsInOneRange) {
  begin(512 * kMiB);
  const TransferProgress done = load();
  EXPECT_TRUE(done.status.ok()) << done.status.message();
  expect_front(kFileBytes);
  EXPECT_EQ(plan->reserve.calls(), 1);
  EXPECT_LE(plan->populate.calls(), 3);  // 64, 64, and the rest of 140 MiB
}

TEST_F(LoadMemoryTest, CancelledInTheMiddleItLeavesNothingBehind) {
  begin(512 * kMiB);
  for (const std::uint64_t until : {std::uint64_t{0}, 10 * kMiB, 130 * kMiB}) {
    std::atomic<Transfer*> transfer{nullptr};
    operations.on_read = [&](int, void*, std::size_t, std::uint64_t offset, ssize_t*) {
      if (offset >= until) {
        while (transfer == nullptr) std::this_thread::yield();
        transfer.load()->cancel();
      }
      return false;
    };
    const TransferProgress done = load([&](Transfer& started) { transfer = &started; });
    operations.on_read = nullptr;
    EXPECT_EQ(done.status.error(), ECANCELED);
    EXPECT_LT(done.prefix, kFileBytes);
    expect_front(done.prefix);
    ASSERT_TRUE(buffer->resize(0).ok());
  }
}

TEST_F(LoadMemoryTest, WhatWasAllocatedBeforeStays) {
  begin(512 * kMiB);
  ASSERT_TRUE(buffer->allocate(0, 20 * kMiB, true).ok());
  ASSERT_TRUE(buffer->allocate(110 * kMiB, 20 * kMiB, true).ok());
  operations.on_read = [](int, void*, std::size_t, std::uint64_t offset, ssize_t* result) {
    if (offset < 60 * kMiB) return false;
    errno = EIO;
    *result = -1;
    return true;
  };
  const TransferProgress done = load();
  operations.on_read = nullptr;
  EXPECT_EQ(done.status.error(), EIO);
  EXPECT_EQ(done.prefix, 60 * kMiB);
  EXPECT_EQ(buffer->size(), 60 * kMiB);
  EXPECT_EQ(buffer->bytes_held(), 80 * kMiB);
}

TEST_F(LoadMemoryTest, AFullDeviceGetsAllThatFits) {
  for (const std::uint64_t room : {2 * kMiB, 30 * kMiB, 138 * kMiB}) {
    contexts.clear();
    begin(room);
    const TransferProgress done = load();
    EXPECT_EQ(done.status.error(), ENOSPC);
    EXPECT_EQ(done.prefix, room);
    EXPECT_EQ(buffer->size(), room);
    EXPECT_EQ(used(), room);
    TearDown();
  }
}

TEST_F(LoadMemoryTest, NoRoomAtEachStep) {
  begin(512 * kMiB);
  struct Plan {
    int step;
    int times;
    int code;
    int error;
  };
  for (const auto& [step, times, code, error] :
       {Plan{1, 1, ENOSPC, 0}, Plan{3, 1, ENOSPC, 0}, Plan{2, 1000, ENOSPC, ENOSPC}, Plan{2, 1000, EIO, EIO}}) {
    SCOPED_TRACE(std::to_string(step) + ": " + std::to_string(code) + " " + std::to_string(times) + " times");
    plan->populate.at(step, times, code);
    const TransferProgress done = load();
    plan->populate.clear();
    EXPECT_EQ(done.status.error(), error) << done.status.message();
    expect_front(error == 0 ? kFileBytes : done.prefix);
    ASSERT_TRUE(buffer->resize(0).ok());
  }
}

TEST_F(LoadMemoryTest, ATruncationBesideItCountsAsLater) {
  begin(512 * kMiB);
  for (const int round : {0, 2}) {
    std::atomic<bool> end{false};
    std::atomic<int> reads{0};
    operations.on_read = [&](int, void*, std::size_t, std::uint64_t, ssize_t*) {
      ++reads;
      return false;
    };
    std::thread truncating([&] {
      while (reads < 10 * round && !end) std::this_thread::yield();
      EXPECT_TRUE(buffer->resize(0).ok());
      EXPECT_TRUE(buffer->punch(50 * kMiB, 60 * kMiB).ok());
    });
    const TransferProgress done = load();
    end = true;
    truncating.join();
    operations.on_read = nullptr;
    EXPECT_TRUE(done.status.ok()) << done.status.message();
    // If the load came first, all of the file is there except the hole; otherwise the buffer has only zeros.
    const std::uint64_t size = buffer->size();
    EXPECT_TRUE(size == 0 || size == kFileBytes) << size;
    if (size == 0) {
      EXPECT_EQ(buffer->bytes_held(), 0U);  // nor is memory kept for what is not there
    }
    ASSERT_TRUE(buffer->resize(kFileBytes).ok());
    if (size == 0) {
      for (std::uint64_t at = 0; at < kFileBytes; at += kGranule) {
        ASSERT_TRUE(all_zero(contents(*buffer, at, 64))) << at;
      }
    }
    ASSERT_TRUE(buffer->resize(0).ok());
    EXPECT_EQ(used(), 0U);
  }
}

TEST_F(LoadMemoryTest, AnotherFilesPreallocationMakesRoom) {
  begin(320 * kMiB);
  const auto growing = make(0, /*preallocates=*/true);
  for (std::uint64_t at = 0; at < 34 * kMiB; at += kMiB) write(*growing, at, pattern(kMiB, 1));
  ASSERT_GT(growing->bytes_held(), 34 * kMiB);
  const auto filler = make();
  ASSERT_TRUE(filler->allocate(0, 320 * kMiB - used() - 140 * kMiB, true).ok());
  const TransferProgress done = load();  // needs 142 MiB
  EXPECT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_EQ(growing->bytes_held(), 34 * kMiB);
  EXPECT_EQ(buffer->size(), kFileBytes);
}

TEST_F(LoadMemoryTest, ALoadThatHangsInItsFileHoldsUpNobodyWhoNeedsRoom) {
  plan->span = 128 * kMiB;  // what is ahead shares its memory with what is loaded into
  begin(256 * kMiB);
  buffer = make(0, /*preallocates=*/true);
  for (std::uint64_t at = 0; at < 34 * kMiB; at += kMiB) write(*buffer, at, pattern(kMiB, 1));
  const std::uint64_t held = buffer->bytes_held();
  ASSERT_GT(held, 34 * kMiB);
  const auto filler = make();
  ASSERT_TRUE(filler->allocate(0, 256 * kMiB - used(), true).ok());
  std::atomic<int> hanging{0};
  std::atomic<bool> over{false};
  operations.on_read = [&](int, void*, std::size_t, std::uint64_t offset, ssize_t*) {
    if (offset < 16 * kMiB) return false;
    ++hanging;
    while (!over) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return false;
  };
  TransferRequest wanted;
  wanted.direction = Direction::kLoad;
  wanted.file = file;
  wanted.target = buffer;
  wanted.bytes = 32 * kMiB;
  const auto transfer = must(engine->start(wanted));
  while (hanging < 3) std::this_thread::yield();  // all who serve it, with what they copied before still pinned
  const auto late = make();
  std::atomic<bool> answered{false};
  std::thread writing([&] {
    EXPECT_EQ(late->write(0, pattern(kMiB, 2)).error(), ENOSPC);
    (void)buffer->trim(std::chrono::milliseconds(0));  // as the end of a writer does
    answered = true;
  });
  EXPECT_TRUE(soon([&] { return answered.load(); }));
  EXPECT_EQ(buffer->bytes_held(), held);
  over = true;
  writing.join();
  transfer->wait();
  EXPECT_TRUE(transfer->progress().status.ok());
  operations.on_read = nullptr;
  write(*late, 0, pattern(kMiB, 2));
  EXPECT_EQ(buffer->bytes_held(), 34 * kMiB);
  EXPECT_EQ(buffer->size(), 34 * kMiB);
  EXPECT_TRUE(contents(*buffer, 33 * kMiB, kMiB) == pattern(kMiB, 1));
}

}  // namespace
}  // namespace gpufs::testing
