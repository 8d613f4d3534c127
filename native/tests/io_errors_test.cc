// Transfers whose file or buffer fails or changes under them: what is reported, and what is left behind. Every driver
// with every fault: io_faults_test.cc.

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "fake_transfer_rig.h"

namespace gpufs {
namespace {

using namespace testing;

class TransferErrors : public EitherWay {};
INSTANTIATE_TEST_SUITE_P(, TransferErrors, ::testing::Bool(), EitherWay::name);

TEST_P(TransferErrors, ReadErrorInTheMiddleReportsThePrefix) {
  FakeRig rig(GetParam(), FakeRig::without_fastpath());
  const auto data = pattern(4 * kMiB);
  rig.make_file(data);
  rig.make_buffer(16 * kMiB);
  constexpr std::uint64_t kBad = 5 * kChunk + 1000;
  rig.operations.on_read = [&](int fd, void* memory, std::size_t bytes, std::uint64_t offset, ssize_t* result) {
    if (offset + bytes <= kBad) return false;
    if (offset >= kBad) {
      errno = EIO;
      *result = -1;
    } else {
      *result = ::pread(fd, memory, kBad - offset, static_cast<off_t>(offset));
    }
    return true;
  };
  TransferRequest wanted = rig.load();
  const TransferProgress done = rig.finish(wanted);
  EXPECT_EQ(done.status.error(), EIO);
  EXPECT_EQ(done.status.device_code(), 0);
  EXPECT_EQ(done.prefix, kBad);
  EXPECT_EQ(rig.buffer->size(), kBad);
  EXPECT_EQ(std::memcmp(rig.buffer->contents(), data.data(), kBad), 0);
  // What was moved beyond the failure is gone again.
  for (std::uint64_t at = kBad; at < data.size(); ++at) ASSERT_EQ(rig.buffer->contents()[at], std::byte{0}) << at;
  EXPECT_GE(rig.counted(Direction::kLoad, Path::kFallback, &observe::Block::errors), 1U);
  wanted.file_offset = kBad;
  const TransferProgress rest = rig.finish(wanted);
  EXPECT_EQ(rest.status.error(), EIO);
  EXPECT_EQ(rest.prefix, 0U);
}

TEST_P(TransferErrors, FileTruncatedUnderTheCopyIsAShortCount) {
  FakeRig rig(GetParam(), FakeRig::without_fastpath());
  const auto data = pattern(4 * kMiB);
  rig.make_file(data);
  rig.make_buffer(16 * kMiB);
  std::atomic<bool> cut{false};
  rig.operations.on_read = [&](int, void*, std::size_t, std::uint64_t, ssize_t*) {
    if (!cut.exchange(true)) {
      EXPECT_EQ(::ftruncate(rig.fd(), static_cast<off_t>(kMiB + 17)), 0);
    }
    return false;
  };
  const TransferProgress done = rig.finish(rig.load());
  EXPECT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_EQ(done.prefix, kMiB + 17);
  EXPECT_EQ(rig.buffer->size(), kMiB + 17);
}

TEST_P(TransferErrors, BufferTruncatedUnderTheCopyIsAShortCount) {
  FakeRig rig(GetParam(), FakeRig::without_fastpath());
  rig.make_buffer(16 * kMiB);
  rig.buffer->fill(pattern(4 * kMiB));
  rig.open_file();
  std::atomic<bool> cut{false};
  rig.operations.on_write = [&](int, const void*, std::size_t, std::uint64_t, ssize_t*) {
    if (!cut.exchange(true)) (void)rig.buffer->resize(kChunk / 2);
    return false;
  };
  const TransferProgress done = rig.finish_in_order(rig.store());
  EXPECT_TRUE(done.status.ok()) << done.status.message();
  // Through slots the memory is pinned in large windows, in which this buffer shows what it held when it was pinned.
  if (GetParam()) {
    EXPECT_LT(done.prefix, 4 * kMiB);
  }
  EXPECT_EQ(rig.file_size(), done.prefix);
}

TEST_P(TransferErrors, BufferThatIsTruncatedDuringALoadStaysSo) {
  FakeRig rig(GetParam(), FakeRig::without_fastpath());
  rig.make_buffer(16 * kMiB);
  rig.make_file(pattern(4 * kMiB));
  std::atomic<int> reads{0};
  rig.operations.on_read = [&](int, void*, std::size_t, std::uint64_t, ssize_t*) {
    // The pieces before are in place, and what they were pinned by may be gone.
    if (++reads == 8) (void)rig.buffer->resize(0);
    return false;
  };
  const TransferProgress done = rig.finish_in_order(rig.load());
  EXPECT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_EQ(done.prefix, 4 * kMiB);
  EXPECT_EQ(rig.buffer->size(), 0U);
  // Nothing is left above the size that a later growth would show.
  EXPECT_EQ(std::count(rig.buffer->contents(), rig.buffer->contents() + 4 * kMiB, std::byte{0}), 4 * kMiB);
  rig.operations.on_read = nullptr;
  EXPECT_EQ(rig.finish(rig.load()).prefix, 4 * kMiB);
  EXPECT_EQ(rig.buffer->size(), 4 * kMiB);
}

TEST_P(TransferErrors, FullDiskOnStore) {
  for (const bool fresh : {true, false}) {
    FakeRig rig(GetParam(), FakeRig::without_fastpath());
    const auto data = pattern(4 * kMiB);
    rig.make_buffer(16 * kMiB);
    rig.buffer->fill(data);
    const std::uint64_t before = fresh ? 0 : 6 * kMiB;
    rig.make_file(pattern(before, 5));
    constexpr std::uint64_t kRoom = 6 * kChunk + 8192;
    rig.operations.on_write = [&](int fd, const void* memory, std::size_t bytes, std::uint64_t offset,
                                  ssize_t* result) {
      if (offset + bytes <= kRoom) return false;
      if (offset >= kRoom) {
        errno = ENOSPC;
        *result = -1;
      } else {
        *result = ::pwrite(fd, memory, kRoom - offset, static_cast<off_t>(offset));
      }
      return true;
    };
    rig.operations.on_allocate = [](int, std::uint64_t, std::uint64_t) {
      errno = EOPNOTSUPP;
      return -1;
    };
    const TransferProgress done = rig.finish(rig.store());
    EXPECT_EQ(done.status.error(), ENOSPC);
    EXPECT_EQ(done.prefix, kRoom);
    EXPECT_EQ(rig.file_size(), fresh ? kRoom : before);
    EXPECT_EQ(std::memcmp(rig.file_contents().data(), data.data(), kRoom), 0);
  }
}

TEST_P(TransferErrors, FullDiskFoundBeforeTheWorkLeavesTheFileAsItWas) {
  FakeRig rig(GetParam(), FakeRig::without_fastpath());
  rig.make_buffer(16 * kMiB);
  rig.buffer->fill(pattern(4 * kMiB));
  const auto old = pattern(10000, 4);
  rig.make_file(old);
  rig.operations.on_allocate = [&](int, std::uint64_t, std::uint64_t) {
    EXPECT_EQ(::ftruncate(rig.fd(), 3 * kMiB), 0);  // as much as there was room for
    errno = ENOSPC;
    return -1;
  };
  const TransferProgress done = rig.finish(rig.store());
  EXPECT_EQ(done.status.error(), ENOSPC);
  EXPECT_EQ(done.prefix, 0U);
  EXPECT_EQ(rig.file_contents(), old);
}

TEST_P(TransferErrors, FailedSyncIsAnErrorAlthoughBytesMoved) {
  FakeRig rig(GetParam(), FakeRig::without_fastpath());
  rig.make_buffer(4 * kMiB);
  rig.buffer->fill(pattern(kMiB));
  rig.open_file();
  bool data_only = false;
  rig.operations.on_sync = [&](bool data) {
    data_only = data;
    errno = EIO;
    return -1;
  };
  TransferRequest wanted = rig.store();
  wanted.sync = SyncMode::kData;
  const TransferProgress done = rig.finish(wanted);
  EXPECT_EQ(done.status.error(), EIO);
  EXPECT_TRUE(data_only);
  EXPECT_TRUE(done.sync_failed);
  EXPECT_EQ(done.prefix, kMiB);
}

TEST(Faults, PinnedMemoryStaysWithinItsCap) {
  IoOptions options = FakeRig::without_fastpath();
  options.workers = 8;
  options.slots = 8;
  options.pinned_bytes = 5 * kChunk + 17;
  FakeRig rig(false, options);
  const auto data = pattern(16 * kMiB);
  rig.make_file(data);
  rig.make_buffer(32 * kMiB);
  EXPECT_TRUE(rig.finish(rig.load()).status.ok());
  EXPECT_LE(rig.plan->pins, 5);
  EXPECT_TRUE(rig.buffer_has(data));
}

TEST(Faults, OneSlotMoreIsPinnedOnlyWhereTheDeviceLags) {
  for (const bool lags : {false, true}) {
    IoOptions options = FakeRig::without_fastpath();
    options.workers = 1;
    options.slots = 4;
    FakeRig rig(false, options);
    rig.plan->lags = lags;
    const auto data = pattern(16 * kMiB);
    rig.make_file(data);
    rig.make_buffer(32 * kMiB);
    EXPECT_TRUE(rig.finish(rig.load()).status.ok());
    EXPECT_EQ(rig.plan->pins, lags ? 4 : 1);
    EXPECT_TRUE(rig.buffer_has(data));
  }
}

}  // namespace
}  // namespace gpufs
