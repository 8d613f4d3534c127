// Transfers from end to end over fake devices and real files: what is moved, by which calls, and what is refused.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "fake_transfer_rig.h"
#include "no_more_threads.h"

namespace gpufs {
namespace {

using namespace testing;

class Transfers : public EitherWay {};
INSTANTIATE_TEST_SUITE_P(, Transfers, ::testing::Bool(), EitherWay::name);

TEST_P(Transfers, LoadMovesTheWholeFile) {
  FakeRig rig(GetParam(), FakeRig::without_fastpath());
  const auto data = pattern(5 * kMiB + 123);
  rig.make_file(data);
  rig.make_buffer(16 * kMiB);
  const TransferProgress done = rig.finish(rig.load());
  EXPECT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_EQ(done.prefix, data.size());
  EXPECT_EQ(done.moved, data.size());
  EXPECT_EQ(done.total, data.size());
  EXPECT_EQ(rig.buffer->size(), data.size());
  EXPECT_TRUE(rig.buffer_has(data));
  EXPECT_EQ(done.path_bytes[1], data.size());
  EXPECT_EQ(rig.counted(Direction::kLoad, Path::kFallback, &observe::Block::bytes), data.size());
  EXPECT_EQ(rig.counted(Direction::kLoad, Path::kFastpath, &observe::Block::bytes), 0U);
  EXPECT_EQ(rig.refused(Direction::kLoad, Refusal::kDisabled), 1U);
}

TEST_P(Transfers, StoreMovesTheWholeBuffer) {
  FakeRig rig(GetParam(), FakeRig::without_fastpath());
  const auto data = pattern(5 * kMiB + 123);
  rig.make_buffer(16 * kMiB);
  rig.buffer->fill(data);
  rig.open_file();
  TransferRequest wanted = rig.store();
  wanted.sync = SyncMode::kFull;
  const TransferProgress done = rig.finish(wanted);
  EXPECT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_EQ(done.prefix, data.size());
  EXPECT_EQ(rig.file_contents(), data);
}

TEST_P(Transfers, UnalignedRangesEitherWay) {
  FakeRig rig(GetParam(), FakeRig::without_fastpath());
  const auto data = pattern(3 * kMiB);
  rig.make_file(data);
  rig.make_buffer(16 * kMiB);
  for (const std::uint64_t file_offset : {0ULL, 1ULL, 511ULL, 4096ULL, 262143ULL, 262145ULL}) {
    for (const std::uint64_t buffer_offset : {0ULL, 3ULL, 65536ULL}) {
      for (const std::uint64_t bytes : {1ULL, 4095ULL, 4097ULL, 600000ULL}) {
        rig.make_buffer(16 * kMiB);
        TransferRequest wanted = rig.load();
        wanted.file_offset = file_offset;
        wanted.target_offset = buffer_offset;
        wanted.bytes = bytes;
        const TransferProgress done = rig.finish(wanted);
        ASSERT_TRUE(done.status.ok()) << done.status.message();
        ASSERT_EQ(done.prefix, bytes);
        ASSERT_EQ(rig.buffer->size(), buffer_offset + bytes);
        ASSERT_EQ(std::memcmp(rig.buffer->contents() + buffer_offset, data.data() + file_offset, bytes), 0);

        TransferRequest back = wanted;
        back.direction = Direction::kStore;
        back.file_offset = file_offset + 7;
        ASSERT_EQ(rig.finish(back).prefix, bytes);
        std::vector<std::byte> found(bytes);
        ASSERT_EQ(::pread(rig.fd(), found.data(), bytes, static_cast<off_t>(file_offset + 7)),
                  static_cast<ssize_t>(bytes));
        ASSERT_EQ(std::memcmp(found.data(), data.data() + file_offset, bytes), 0);
        ASSERT_EQ(::pwrite(rig.fd(), data.data(), data.size(), 0), static_cast<ssize_t>(data.size()));
      }
    }
  }
}

TEST_P(Transfers, DirectAndBufferedAgree) {
  for (const Switch direct : {Switch::kOn, Switch::kOff}) {
    IoOptions options = FakeRig::without_fastpath();
    options.direct = direct;
    FakeRig rig(GetParam(), options);
    const auto data = pattern(4 * kMiB + 77);
    rig.make_buffer(16 * kMiB);
    rig.buffer->fill(data);
    rig.open_file();
    TransferRequest out = rig.store();
    out.file_offset = 4096 + 100;
    out.target_offset = 100;
    const TransferProgress stored = rig.finish(out);
    ASSERT_TRUE(stored.status.ok()) << stored.status.message();
    ASSERT_EQ(stored.prefix, data.size() - 100);
    rig.buffer = std::make_shared<FakeBuffer>(rig.device, 16 * kMiB);
    TransferRequest in = rig.load();
    in.file_offset = 4096 + 100;
    in.target_offset = 100;
    ASSERT_TRUE(rig.finish(in).status.ok());
    EXPECT_TRUE(rig.buffer_has(data, 100));
    const bool used = rig.details(Direction::kLoad).direct_bytes > 0;
    EXPECT_EQ(used, direct == Switch::kOn);
    EXPECT_EQ(rig.details(Direction::kStore).direct_bytes > 0, direct == Switch::kOn);
  }
}

TEST_P(Transfers, ColdPiecesGoDirectAndHotOnesBuffered) {
  FakeRig rig(GetParam(), FakeRig::without_fastpath());
  const auto data = pattern(8 * kChunk);
  rig.make_file(data);
  rig.make_buffer(16 * kMiB);
  std::atomic<int> asked{0};
  rig.operations.on_cached = [&](std::uint64_t bytes, std::uint64_t* cached) {
    *cached = asked++ % 2 == 0 ? bytes : bytes / 2;
    return 0;
  };
  ASSERT_TRUE(rig.finish(rig.load()).status.ok());
  EXPECT_EQ(asked, 8);
  EXPECT_EQ(rig.details(Direction::kLoad).buffered_bytes, data.size() / 2);
  EXPECT_EQ(rig.details(Direction::kLoad).direct_bytes, data.size() / 2);
  EXPECT_TRUE(rig.buffer_has(data));

  rig.operations.on_cached = [](std::uint64_t, std::uint64_t*) {
    errno = EPERM;
    return -1;
  };
  ASSERT_TRUE(rig.finish(rig.load()).status.ok());
  EXPECT_EQ(rig.details(Direction::kLoad).direct_bytes, data.size() / 2);
}

TEST_P(Transfers, TmpfsIsNeverReadDirect) {
  FakeRig rig(GetParam(), FakeRig::small_options(), "/dev/shm");
  const auto data = pattern(kMiB + 1);
  rig.make_file(data);
  rig.make_buffer(4 * kMiB);
  const TransferProgress done = rig.finish(rig.load());
  EXPECT_TRUE(done.status.ok());
  EXPECT_EQ(done.path_bytes[0], 0U);
  EXPECT_EQ(rig.details(Direction::kLoad).direct_bytes, 0U);
  EXPECT_NE(done.refusals & mask_of(Refusal::kFileSystem), 0U);
  EXPECT_EQ(rig.refused(Direction::kLoad, Refusal::kFileSystem), 1U);
}

IoOptions with_pages() {
  IoOptions options = FakeRig::small_options();
  options.write_pages = Switch::kOn;
  return options;
}

TEST_P(Transfers, StoreToTmpfsWritesPagesSideBySide) {
  FakeRig rig(GetParam(), with_pages(), "/dev/shm");
  auto data = pattern(4 * kMiB + 1234);
  rig.make_buffer(16 * kMiB);
  rig.buffer->fill(data);
  const auto old = pattern(kMiB, 8);
  rig.make_file(old);
  timespec long_ago[2] = {{1000, 0}, {1000, 0}};
  ASSERT_EQ(::futimens(rig.fd(), long_ago), 0);
  TransferRequest wanted = rig.store();
  wanted.file_offset = 777;
  ASSERT_TRUE(rig.finish(wanted).status.ok());
  EXPECT_GE(rig.operations.page_writes, 16);
  data.insert(data.begin(), old.begin(), old.begin() + 777);
  EXPECT_EQ(rig.file_contents(), data);
  struct stat status = {};
  ASSERT_EQ(::fstat(rig.fd(), &status), 0);
  EXPECT_GT(status.st_mtime, 1000);

  // A file that is cut off meanwhile is extended again, as by any other write.
  rig.operations.on_write = [&](int, const void*, std::size_t, std::uint64_t offset, ssize_t*) {
    if (offset > 2 * kMiB) {
      EXPECT_EQ(::ftruncate(rig.fd(), static_cast<off_t>(kMiB)), 0);
    }
    return false;
  };
  wanted.file_offset = 4096 + 777;
  const TransferProgress cut = rig.finish(wanted);
  EXPECT_TRUE(cut.status.ok()) << cut.status.message();
  EXPECT_EQ(rig.file_size(), 4096 + 777 + 4 * kMiB + 1234);
}

TEST_P(Transfers, FullTmpfsOnStore) {
  FakeRig rig(GetParam(), with_pages(), "/dev/shm");
  rig.make_buffer(16 * kMiB);
  rig.buffer->fill(pattern(4 * kMiB));
  rig.open_file();
  rig.operations.on_write = [&](int fd, const void* memory, std::size_t bytes, std::uint64_t offset, ssize_t* result) {
    if (offset + bytes <= 2 * kMiB) return false;
    errno = ENOSPC;
    *result = offset >= 2 * kMiB ? -1 : ::pwrite(fd, memory, 2 * kMiB - offset, static_cast<off_t>(offset));
    return true;
  };
  const TransferProgress done = rig.finish(rig.store());
  EXPECT_EQ(done.status.error(), ENOSPC);
  EXPECT_EQ(done.prefix, 2 * kMiB);
  EXPECT_EQ(rig.file_size(), 2 * kMiB);
}

TEST_P(Transfers, HolesAreNotReadFromTheDevice) {
  for (const bool sparse : {true, false}) {
    FakeRig rig(GetParam(), FakeRig::without_fastpath());
    auto data = pattern(24 * FakeBuffer::kGranule);
    rig.make_buffer(16 * kMiB);
    rig.buffer->fill(data);
    for (const std::uint64_t granule : {0U, 5U, 6U, 7U, 8U, 9U, 10U, 11U, 23U}) {
      rig.buffer->make_hole(granule);
      std::memset(data.data() + granule * FakeBuffer::kGranule, 0, FakeBuffer::kGranule);
    }
    const auto old = pattern(data.size() - 1000, 2);
    rig.make_file(old);
    TransferRequest wanted = rig.store();
    wanted.sparse = sparse;
    const TransferProgress done = rig.finish(wanted);
    ASSERT_TRUE(done.status.ok()) << done.status.message();
    ASSERT_EQ(done.prefix, data.size());
    EXPECT_EQ(rig.file_contents(), data) << sparse;
    EXPECT_EQ(rig.details(Direction::kStore).hole_bytes, 9 * FakeBuffer::kGranule);
    struct stat status = {};
    ASSERT_EQ(::fstat(rig.fd(), &status), 0);
    const bool holes = static_cast<std::uint64_t>(status.st_blocks) * 512 < data.size();
    EXPECT_EQ(holes, sparse);
  }
}

TEST_P(Transfers, HolesWhereTheFileSystemHasNone) {
  FakeRig rig(GetParam(), FakeRig::without_fastpath());
  auto data = pattern(8 * FakeBuffer::kGranule);
  rig.make_buffer(4 * kMiB);
  rig.buffer->fill(data);
  rig.buffer->make_hole(3);
  std::memset(data.data() + 3 * FakeBuffer::kGranule, 0, FakeBuffer::kGranule);
  rig.make_file(pattern(data.size(), 3));
  rig.operations.on_allocate = [](int, std::uint64_t, std::uint64_t) {
    errno = EOPNOTSUPP;
    return -1;
  };
  ASSERT_TRUE(rig.finish(rig.store()).status.ok());
  EXPECT_EQ(rig.file_contents(), data);
}

TEST_P(Transfers, StoreOfAHoleAtTheEndSetsTheSize) {
  FakeRig rig(GetParam(), FakeRig::without_fastpath());
  rig.make_buffer(4 * kMiB);
  ASSERT_TRUE(rig.buffer->resize(kMiB + 5).ok());
  rig.open_file();
  const TransferProgress done = rig.finish(rig.store());
  ASSERT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_EQ(rig.file_size(), kMiB + 5);
}

TEST_P(Transfers, NothingToMove) {
  FakeRig rig(GetParam());
  rig.make_file(pattern(100));
  rig.make_buffer(kMiB);
  TransferRequest none = rig.load();
  none.bytes = 0;
  TransferProgress done = rig.finish(none);
  EXPECT_EQ(done.state, TransferState::kDone);
  EXPECT_TRUE(done.status.ok());
  TransferRequest beyond = rig.load();
  beyond.file_offset = 100;
  done = rig.finish(beyond);
  EXPECT_TRUE(done.status.ok());
  EXPECT_EQ(done.prefix, 0U);
  EXPECT_EQ(rig.buffer->size(), 0U);
  TransferRequest empty = rig.store();
  done = rig.finish(empty);
  EXPECT_TRUE(done.status.ok());
  EXPECT_EQ(rig.file_size(), 100U);
  EXPECT_EQ(rig.direct->calls, 0);
  EXPECT_EQ(rig.counted(Direction::kLoad, Path::kFallback, &observe::Block::started), 0U);
}

TEST_P(Transfers, FileThatStatesNoSize) {
  FakeRig rig(GetParam());
  const UniqueFd status(::open("/proc/self/status", O_RDONLY | O_CLOEXEC));
  Result<std::shared_ptr<BackingFile>> opened = BackingFile::open(status.get());
  ASSERT_TRUE(opened.ok());
  rig.file = opened.take();
  rig.make_buffer(kMiB);
  const TransferProgress done = rig.finish(rig.load());
  EXPECT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_GT(done.prefix, 100U);
  EXPECT_EQ(std::memcmp(rig.buffer->contents(), "Name:", 5), 0);
  EXPECT_EQ(rig.buffer->size(), done.prefix);
}

TEST_P(Transfers, ForeignMemory) {
  FakeRig rig(GetParam(), FakeRig::without_fastpath());
  const auto data = pattern(2 * kMiB);
  rig.make_file(data);
  std::vector<std::byte> memory(kMiB + 10, std::byte{9});
  TransferRequest wanted;
  wanted.file = rig.file;
  wanted.target = Target::of_range(rig.device, reinterpret_cast<DeviceAddress>(memory.data()), memory.size() - 10, {});
  TransferProgress done = rig.finish(wanted);
  ASSERT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_EQ(done.prefix, kMiB);
  EXPECT_EQ(std::memcmp(memory.data(), data.data(), kMiB), 0);
  EXPECT_EQ(memory[kMiB], std::byte{9});

  wanted.direction = Direction::kStore;
  wanted.file_offset = kMiB + 3;
  wanted.target_offset = 1;
  wanted.bytes = 1000;
  EXPECT_EQ(rig.finish(wanted).prefix, 1000U);
  EXPECT_EQ(std::memcmp(rig.file_contents().data() + kMiB + 3, data.data() + 1, 1000), 0);

  wanted.bytes = kMiB;
  EXPECT_EQ(rig.engine->start(wanted).error(), EINVAL);
  wanted.target_offset = kMiB + 1;
  wanted.bytes = kToTheEnd;
  EXPECT_EQ(rig.engine->start(wanted).error(), EINVAL);
}

// ---- requests that are refused ----

TEST(Requests, OverflowsAndWrongModes) {
  FakeRig rig(true);
  rig.make_file(pattern(100));
  rig.make_buffer(kMiB);
  TransferRequest wanted = rig.load();
  wanted.file_offset = std::uint64_t{1} << 63;
  EXPECT_EQ(rig.engine->start(wanted).error(), EINVAL);
  wanted.file_offset = (std::uint64_t{1} << 63) - 10;
  wanted.bytes = 100;
  EXPECT_EQ(rig.engine->start(wanted).error(), EINVAL);
  wanted.file_offset = 0;
  wanted.target_offset = ~std::uint64_t{0} - 5;
  EXPECT_EQ(rig.engine->start(wanted).error(), EINVAL);
  wanted = rig.load();
  wanted.target_offset = Buffer::kMaximumBytes + 1;
  EXPECT_EQ(rig.engine->start(wanted).error(), EFBIG);

  BackingFacts facts = rig.file->facts();
  facts.readable = false;
  facts.append = true;
  const auto appending =
      BackingFile::adopt(UniqueFd(::fcntl(rig.fd(), F_DUPFD_CLOEXEC, 3)), UniqueFd(), facts, rig.operations);
  wanted = rig.load();
  wanted.file = appending;
  EXPECT_EQ(rig.engine->start(wanted).error(), EBADF);
  wanted.direction = Direction::kStore;
  EXPECT_EQ(rig.engine->start(wanted).error(), EBADF);

  EXPECT_EQ(rig.engine->start(TransferRequest{}).error(), EINVAL);
}

TEST(Requests, BadOptionsAreNamed) {
  IoOptions options;
  options.chunk_bytes = 3 * kMiB;
  EXPECT_NE(TransferEngine::create(options, {}, nullptr).status().message().find("chunk_bytes"), std::string::npos);
  options = {};
  options.pinned_bytes = 1;
  EXPECT_EQ(TransferEngine::create(options, {}, nullptr).error(), EINVAL);
  options = {};
  options.fastpath = FastpathMode::kOff;
  options.fallback = false;
  EXPECT_EQ(TransferEngine::create(options, {}, nullptr).error(), EINVAL);
}

TEST(Requests, NothingStartsAfterShutdown) {
  FakeRig rig(true);
  rig.make_file(pattern(100));
  rig.make_buffer(kMiB);
  rig.engine->shutdown();
  EXPECT_EQ(rig.engine->start(rig.load()).error(), ESHUTDOWN);
}

TEST(Requests, WhatDoesNotStartIsToldOnce) {
  FakeRig rig(true);
  rig.make_file(pattern(100));
  rig.make_buffer(kMiB);
  std::atomic<int> told{0};
  TransferRequest request = rig.load();
  request.done = [&](const TransferProgress&) { ++told; };
  {
    const NoMoreThreads none;
    EXPECT_EQ(rig.engine->start(request).error(), EAGAIN);
    EXPECT_EQ(told, 0);
  }
  Result<std::shared_ptr<Transfer>> started = rig.engine->start(request);
  ASSERT_TRUE(started.ok());
  started.value()->wait();
  rig.engine->shutdown();
  EXPECT_EQ(told, 1);
  EXPECT_EQ(rig.engine->start(request).error(), ESHUTDOWN);
  EXPECT_EQ(told, 1);
}

TEST(Completion, EventBecomesReadable) {
  FakeRig rig(true);
  rig.make_file(pattern(kMiB));
  rig.make_buffer(4 * kMiB);
  for (const bool early : {true, false}) {
    Result<std::shared_ptr<Transfer>> started = rig.engine->start(rig.load());
    ASSERT_TRUE(started.ok());
    if (!early) started.value()->wait();
    Result<int> event = started.value()->event_fd();
    ASSERT_TRUE(event.ok());
    pollfd watched = {event.value(), POLLIN, 0};
    EXPECT_EQ(::poll(&watched, 1, 60000), 1);
    EXPECT_EQ(started.value()->progress().state, TransferState::kDone);
  }
}

TEST(Statistics, AreJson) {
  FakeRig rig(false);
  rig.make_file(pattern(kMiB + 1));
  rig.make_buffer(4 * kMiB);
  (void)rig.finish(rig.load());
  const std::string text = rig.engine->statistics_json();
  EXPECT_NE(text.find("\"fastpath\": {\"bytes\": 1048576"), std::string::npos) << text;
  EXPECT_NE(text.find("\"size_unaligned\": 1"), std::string::npos) << text;
  EXPECT_NE(text.find("\"bounce_pool\": {\"slot_bytes\": 262144"), std::string::npos) << text;
  EXPECT_EQ(std::count(text.begin(), text.end(), '{'), std::count(text.begin(), text.end(), '}'));
}

}  // namespace
}  // namespace gpufs
