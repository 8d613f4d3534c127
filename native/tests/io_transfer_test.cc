// Transfers from end to end over the host's memory and real files: what is moved, by which calls, and what is refused.
// Faults: io_faults_test.cc.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <span>
#include <thread>

#include "device/device_context.h"
#include "fake_transfer_rig.h"
#include "io/bounce_pool.h"
#include "no_more_threads.h"

namespace gpufs {
namespace {

using namespace testing;

class Transfers : public EitherWay {};
INSTANTIATE_TEST_SUITE_P(, Transfers, ::testing::Bool(), EitherWay::name);

TEST_P(Transfers, UnalignedRanges) {
  FakeRig rig(GetParam(), FakeRig::without_fastpath());
  const auto data = pattern(3 * kMiB);
  rig.make_file(data);
  for (const std::uint64_t file_offset : {0ULL, 511ULL, 4096ULL, 262145ULL}) {
    for (const std::uint64_t buffer_offset : {0ULL, 3ULL, 65536ULL}) {
      for (const std::uint64_t bytes : {1ULL, 4097ULL, 600000ULL}) {
        rig.make_buffer();
        TransferRequest wanted = rig.load();
        wanted.file_offset = file_offset;
        wanted.target_offset = buffer_offset;
        wanted.bytes = bytes;
        const TransferProgress done = rig.finish(wanted);
        ASSERT_TRUE(done.status.ok()) << done.status.message();
        ASSERT_EQ(done.prefix, bytes);
        const std::span<const std::byte> expected = std::span(data).subspan(file_offset, bytes);
        ASSERT_TRUE(same_bytes(std::span<const std::byte>(rig.buffer_contents()).subspan(buffer_offset), expected));

        wanted.direction = Direction::kStore;
        wanted.file_offset = file_offset + 7;
        ASSERT_EQ(rig.finish(wanted).prefix, bytes);
        ASSERT_TRUE(
            same_bytes(std::span<const std::byte>(rig.file_contents()).subspan(file_offset + 7, bytes), expected));
        ASSERT_EQ(::pwrite(rig.fd(), data.data(), data.size(), 0), static_cast<ssize_t>(data.size()));
      }
    }
  }
}

TEST_P(Transfers, ContentsThatGoToAnotherDeviceAndBack) {
  FakeRig rig(GetParam(), FakeRig::without_fastpath());
  const auto other = std::make_shared<FaultPlan>();
  other->cpu_addressable = GetParam();
  const auto host = must(DeviceContext::create(make_faulty_driver(other, 64 * kMiB), 0));
  const auto data = pattern(8 * kMiB + 5);
  rig.make_ends(Direction::kStore, data);
  std::atomic<bool> end{false};
  std::atomic<int> moves{0};
  std::thread mover([&] {
    while (!end) {
      ASSERT_TRUE(must(rig.buffer->park(host, nullptr)));
      ASSERT_OK(rig.buffer->bring_back(Wait::kAllowed));
      ++moves;
    }
    ASSERT_TRUE(must(rig.buffer->park(host, nullptr)));
  });
  for (int round = 0; round < 20 || moves < 5; ++round) {
    ASSERT_EQ(::ftruncate(rig.fd(), 0), 0);
    ASSERT_EQ(rig.finish(rig.store()).prefix, data.size());
    ASSERT_TRUE(same_bytes(rig.file_contents(), data));
  }
  end = true;
  mover.join();
  EXPECT_EQ(rig.device->held_bytes(), 0U);
  EXPECT_EQ(rig.buffer->bytes_parked(), host->held_bytes());
  ASSERT_EQ(::ftruncate(rig.fd(), 0), 0);
  ASSERT_EQ(rig.finish(rig.store()).prefix, data.size());
  ASSERT_TRUE(same_bytes(rig.file_contents(), data));
  // A load brings them back first.
  ASSERT_EQ(rig.finish(rig.load()).prefix, data.size());
  EXPECT_EQ(rig.buffer->bytes_parked(), 0U);
  EXPECT_TRUE(same_bytes(rig.buffer_contents(), data));
  rig.buffer.reset();
  EXPECT_EQ(host->held_bytes(), 0U);
}

TEST_P(Transfers, DirectAndBufferedAgree) {
  for (const Switch direct : {Switch::kOn, Switch::kOff}) {
    IoOptions options = FakeRig::without_fastpath();
    options.direct = direct;
    FakeRig rig(GetParam(), options);
    const auto data = pattern(4 * kMiB + 77);
    rig.make_ends(Direction::kStore, data);
    TransferRequest wanted = rig.store();
    wanted.file_offset = 4096 + 100;
    wanted.target_offset = 100;
    ASSERT_EQ(rig.finish(wanted).prefix, data.size() - 100);
    rig.make_buffer();
    wanted.direction = Direction::kLoad;
    wanted.target = rig.buffer;
    ASSERT_TRUE(rig.finish(wanted).status.ok());
    EXPECT_TRUE(
        same_bytes(std::span<const std::byte>(rig.buffer_contents()).subspan(100), std::span(data).subspan(100)));
    EXPECT_EQ(rig.details(Direction::kLoad).direct_bytes > 0, direct == Switch::kOn);
    EXPECT_EQ(rig.details(Direction::kStore).direct_bytes > 0, direct == Switch::kOn);
  }
}

TEST_P(Transfers, UncachedChunksAreReadDirect) {
  FakeRig rig(GetParam(), FakeRig::without_fastpath());
  const auto data = pattern(8 * kChunk);
  rig.make_file(data);
  std::atomic<int> asked{0};
  rig.operations.on_cached = [&](std::uint64_t bytes, std::uint64_t* cached) {
    *cached = asked++ % 2 == 0 ? bytes : bytes / 2;
    return 0;
  };
  ASSERT_TRUE(rig.finish(rig.load()).status.ok());
  EXPECT_EQ(asked, 8);
  EXPECT_EQ(rig.details(Direction::kLoad).buffered_bytes, data.size() / 2);
  EXPECT_EQ(rig.details(Direction::kLoad).direct_bytes, data.size() / 2);
  EXPECT_TRUE(rig.buffer_contents() == data);

  rig.operations.on_cached = [](std::uint64_t, std::uint64_t*) {
    errno = EPERM;
    return -1;
  };
  ASSERT_TRUE(rig.finish(rig.load()).status.ok());
  EXPECT_EQ(rig.details(Direction::kLoad).direct_bytes, data.size() / 2) << "it must use the page cache if in doubt";
}

IoOptions with_pages() {
  IoOptions options = FakeRig::small_options();
  options.write_pages = Switch::kOn;
  return options;
}

TEST_P(Transfers, FilesInMemory) {
  FakeRig rig(GetParam(), with_pages(), "/dev/shm");
  auto data = pattern(4 * kMiB + 1234);
  const auto old = pattern(kMiB, 8);
  rig.make_file(old);
  const TransferProgress loaded = rig.finish(rig.load());
  EXPECT_EQ(loaded.path_bytes[0], 0U);
  EXPECT_NE(loaded.refusals & mask_of(Refusal::kFileSystem), 0U);
  EXPECT_EQ(rig.details(Direction::kLoad).direct_bytes, 0U);

  rig.fill_buffer(data);
  timespec long_ago[2] = {{1000, 0}, {1000, 0}};
  ASSERT_EQ(::futimens(rig.fd(), long_ago), 0);
  TransferRequest wanted = rig.store();
  wanted.file_offset = 777;
  ASSERT_TRUE(rig.finish(wanted).status.ok());
  EXPECT_GE(rig.operations.page_writes, 16);
  data.insert(data.begin(), old.begin(), old.begin() + 777);
  EXPECT_TRUE(rig.file_contents() == data);
  struct stat status = {};
  ASSERT_EQ(::fstat(rig.fd(), &status), 0);
  EXPECT_GT(status.st_mtime, 1000) << "writing pages must update the modification time";

  // A file that is truncated during the store is extended again, as by any other write.
  rig.operations.on_write = [&](int, const void*, std::size_t, std::uint64_t offset, ssize_t*) {
    if (offset > 2 * kMiB) {
      EXPECT_EQ(::ftruncate(rig.fd(), static_cast<off_t>(kMiB)), 0);
    }
    return false;
  };
  wanted.file_offset = 4096 + 777;
  EXPECT_TRUE(rig.finish(wanted).status.ok());
  EXPECT_EQ(rig.file_size(), 4096 + 777 + 4 * kMiB + 1234);
}

TEST_P(Transfers, HolesOfABufferBecomeHolesOfTheFile) {
  for (const bool sparse : {true, false}) {
    for (const bool supported : {true, false}) {
      FakeRig rig(GetParam(), FakeRig::without_fastpath());
      auto data = pattern(6 * kGranule + 100);
      rig.make_ends(Direction::kStore, data);
      for (const std::uint64_t granule : {0U, 2U, 3U, 5U}) {
        ASSERT_TRUE(rig.buffer->punch(granule * kGranule, kGranule).ok());
        std::memset(data.data() + granule * kGranule, 0, kGranule);
      }
      rig.make_file(pattern(data.size() - 1000, 2));
      if (!supported) {
        rig.operations.on_allocate = [](int, std::uint64_t, std::uint64_t) {
          errno = EOPNOTSUPP;
          return -1;
        };
      }
      TransferRequest wanted = rig.store();
      wanted.sparse = sparse;
      const TransferProgress done = rig.finish(wanted);
      ASSERT_TRUE(done.status.ok()) << done.status.message();
      ASSERT_EQ(done.prefix, data.size());
      EXPECT_TRUE(rig.file_contents() == data);
      EXPECT_EQ(rig.details(Direction::kStore).hole_bytes, 4 * kGranule);
      struct stat status = {};
      ASSERT_EQ(::fstat(rig.fd(), &status), 0);
      EXPECT_EQ(static_cast<std::uint64_t>(status.st_blocks) * 512 < data.size(), sparse && supported);
    }
  }
}

TEST_P(Transfers, AFileThatReportsNoSize) {
  FakeRig rig(GetParam());
  const UniqueFd status(::open("/proc/self/status", O_RDONLY | O_CLOEXEC));
  rig.file = must(BackingFile::open(status.get()));
  const TransferProgress done = rig.finish(rig.load());
  EXPECT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_GT(done.prefix, 100U);
  EXPECT_EQ(rig.buffer->size(), done.prefix);
  EXPECT_EQ(std::memcmp(rig.buffer_contents().data(), "Name:", 5), 0);
}

TEST(BouncePools, WaitingEndsWithACancellationOrThePool) {
  constexpr std::size_t kBytes = 1 << 16;
  const auto plan = std::make_shared<FaultPlan>();
  plan->cpu_addressable = false;
  const std::shared_ptr<DeviceContext> device = must(DeviceContext::create(make_faulty_driver(plan, 64 * kMiB), 0));
  const std::shared_ptr<BouncePool> pool = BouncePool::create(kBytes, kBytes);
  const auto await_waits = [&](std::uint64_t count) {
    while (pool->statistics().waits < count) std::this_thread::yield();
  };
  const std::atomic<bool> never{false};
  BounceBuffer held = pool->acquire(device, never).take();
  std::atomic<bool> cancelled{false};
  std::thread canceller([&] {
    await_waits(1);
    cancelled = true;
  });
  EXPECT_EQ(pool->acquire(device, cancelled).error(), ECANCELED);
  canceller.join();
  std::thread closer([&] {
    await_waits(2);
    pool->close();
  });
  EXPECT_EQ(pool->acquire(device, never).error(), ESHUTDOWN);
  closer.join();
  held.reset();
  EXPECT_EQ(plan->unpin.calls(), 1);
}

// ---- requests that are refused ----

TEST(Requests, OverflowsAndWrongModes) {
  FakeRig rig(true);
  rig.make_file(pattern(100));
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
  wanted = rig.load();
  wanted.file = BackingFile::adopt(UniqueFd(::fcntl(rig.fd(), F_DUPFD_CLOEXEC, 3)), UniqueFd(), facts, rig.operations);
  EXPECT_EQ(rig.engine->start(wanted).error(), EBADF);
  wanted.direction = Direction::kStore;
  EXPECT_EQ(rig.engine->start(wanted).error(), EBADF);

  EXPECT_EQ(rig.engine->start(TransferRequest{}).error(), EINVAL);
}

TEST(Requests, TheOutcomeIsReportedOnceUnlessTheStartFailed) {
  FakeRig rig(true);
  rig.make_file(pattern(100));
  std::atomic<int> reports{0};
  TransferRequest request = rig.load();
  request.done = [&](const TransferProgress&) { ++reports; };
  {
    const NoMoreThreads none;
    EXPECT_EQ(rig.engine->start(request).error(), EAGAIN);
    EXPECT_EQ(reports, 0);
  }
  (void)rig.finish(request);
  rig.engine->shutdown();
  EXPECT_EQ(reports, 1);
  EXPECT_EQ(rig.engine->start(request).error(), ESHUTDOWN);
  EXPECT_EQ(reports, 1);
}

// ---- pinned memory ----

TEST(BounceBuffers, StayWithinTheirCapacity) {
  IoOptions options = FakeRig::without_fastpath();
  options.workers = 8;
  options.slots = 8;
  options.pinned_bytes = 5 * kChunk + 17;
  FakeRig rig(false, options);
  const auto data = pattern(16 * kMiB);
  rig.make_file(data);
  EXPECT_TRUE(rig.finish(rig.load()).status.ok());
  EXPECT_LE(rig.plan->pin.calls(), 5);
  EXPECT_TRUE(rig.buffer_contents() == data);
}

TEST(BounceBuffers, OneMoreIsPinnedOnlyIfTheDeviceLags) {
  for (const bool lags : {false, true}) {
    IoOptions options = FakeRig::without_fastpath();
    options.workers = 1;
    options.slots = 4;
    FakeRig rig(false, options);
    (lags ? rig.plan->lags : rig.plan->prompt) = true;
    const auto data = pattern(16 * kMiB);
    rig.make_file(data);
    EXPECT_TRUE(rig.finish(rig.load()).status.ok());
    EXPECT_EQ(rig.plan->pin.calls(), lags ? 4 : 1);
    EXPECT_TRUE(rig.buffer_contents() == data);
  }
}

}  // namespace
}  // namespace gpufs
