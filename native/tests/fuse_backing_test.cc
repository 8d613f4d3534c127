// The host's files below backing/: passed through, copied to and from buffers by the transfer engine, and stopped.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/falloc.h>
#include <sys/stat.h>
#include <unistd.h>

#include "device/device_context.h"
#include "drivers/host/host_driver.h"
#include "fuse_fakes.h"
#include "io/direct_path.h"
#include "io/transfer_engine.h"
#include "temporary_file.h"

namespace gpufs::fuse {
namespace {

constexpr std::uint64_t kMiB = 1 << 20;

// Real buffers of the host driver.
class HostSource final : public BufferSource {
 public:
  HostSource() {
    DriverOptions options;
    options.devices = 1;
    options.memory_bytes = 64 * kMiB;
    std::shared_ptr<Driver> driver = open_host_driver(options).take();
    device_ = DeviceContext::create(driver, 0).take();
  }
  [[nodiscard]] std::int32_t device_count() const override { return 1; }
  Result<std::shared_ptr<Buffer>> create(std::int32_t) override { return Buffer::create(device_); }
  Result<MemoryInfo> memory(std::int32_t) override { return device_->device().memory(); }
  std::uint64_t granule(std::int32_t) override { return device_->info().granule; }
  [[nodiscard]] const std::shared_ptr<DeviceContext>& device() const { return device_; }

 private:
  std::shared_ptr<DeviceContext> device_;
};

class BackingTest : public SessionTest {
 protected:
  void SetUp() override {
    IoOptions io;
    io.chunk_bytes = 1 << 18;
    Result<std::shared_ptr<TransferEngine>> made = TransferEngine::create(io, make_direct_path("host"));
    ASSERT_TRUE(made.ok());
    transfers = made.take();
    SessionOptions options;
    options.transfers = transfers;
    table = std::make_unique<InodeTable>(host);
    ASSERT_TRUE(table->start().ok());
    Result<RelayPair> device = make_relay_pair();
    Result<RelayPair> relay = make_relay_pair();
    ASSERT_TRUE(device.ok() && relay.ok());
    kernel.emplace(std::move(device.value().control));
    control.emplace(std::move(relay.value().control));
    Result<std::unique_ptr<Session>> created =
        Session::create(std::move(device.value().native), std::move(relay.value().native), *table, options);
    ASSERT_TRUE(created.ok()) << created.status().message();
    session = created.take();
    ASSERT_TRUE(session->start().ok());
    initialize();
    fd = testing::temporary_file();
    ASSERT_TRUE(fd.valid());
  }
  void TearDown() override {
    SessionTest::TearDown();
    transfers->shutdown();
  }

  std::uint64_t open_backing(int flags = O_RDWR) {
    const UniqueFd opened = testing::reopen(fd.get(), flags);
    Result<std::uint64_t> fh = session->backing_files().open(50, opened.get());
    EXPECT_TRUE(fh.ok()) << fh.status().message();
    return fh.ok() ? fh.value() : 0;
  }
  static Bytes copy_body(std::uint64_t from, std::uint64_t to, std::uint64_t bytes, std::uint64_t from_offset = 0,
                         std::uint64_t to_offset = 0) {
    fuse_copy_file_range_in in{};
    in.fh_in = from;
    in.off_in = from_offset;
    in.fh_out = to;
    in.off_out = to_offset;
    in.len = bytes;
    return bytes_of(in);
  }
  std::uint32_t copied(const Bytes& body) {
    const Reply reply = kernel->call(FUSE_COPY_FILE_RANGE, 50, body);
    EXPECT_EQ(reply.error(), 0);
    return reply.as<fuse_write_out>().size;
  }
  Bytes file_contents() const {
    struct stat status {};
    EXPECT_EQ(::fstat(fd.get(), &status), 0);
    Bytes data(static_cast<std::size_t>(status.st_size));
    EXPECT_EQ(::pread(fd.get(), data.data(), data.size(), 0), static_cast<ssize_t>(data.size()));
    return data;
  }
  void fill_file(const Bytes& data) {
    ASSERT_EQ(::pwrite(fd.get(), data.data(), data.size(), 0), static_cast<ssize_t>(data.size()));
  }
  Bytes buffer_contents(std::uint64_t ino) const {
    Buffer& contents = *table->find(ino)->buffer();
    Bytes data(contents.size());
    EXPECT_EQ(contents.read(0, data).value(), data.size());
    return data;
  }

  std::shared_ptr<HostSource> host = std::make_shared<HostSource>();
  std::shared_ptr<TransferEngine> transfers;
  UniqueFd fd;

 private:
};

TEST_F(BackingTest, ReadsAndWritesReachTheFile) {
  const std::uint64_t fh = open_backing();
  EXPECT_TRUE(BackingTable::is_backing(fh));
  const Bytes data = pattern(kMiB, 1);
  EXPECT_EQ(kernel->write(50, fh, 100, data).as<fuse_write_out>().size, data.size());
  EXPECT_EQ(kernel->read(50, fh, 100, kMiB).body, data);
  EXPECT_EQ(kernel->read(50, fh, kMiB, 4096).body.size(), 100U);
  EXPECT_EQ(kernel->read(50, fh, 2 * kMiB, 4096).body.size(), 0U);
  EXPECT_EQ(file_contents().size(), kMiB + 100);
  EXPECT_EQ(kernel->call(FUSE_FLUSH, 50, bytes_of(fuse_flush_in{fh, 0, 0, 0})).error(), 0);
  EXPECT_EQ(kernel->call(FUSE_FSYNC, 50, bytes_of(fuse_fsync_in{fh, 1, 0})).error(), 0);
  EXPECT_TRUE(session->backing_files().release(fh).ok());
  EXPECT_EQ(kernel->read(50, fh, 0, 100).error(), EBADF);
  EXPECT_EQ(kernel->write(50, fh, 0, data).error(), EBADF);
  EXPECT_EQ(session->backing_files().release(fh).error(), EBADF);
}

TEST_F(BackingTest, TheModeOfTheOpeningCounts) {
  fill_file(pattern(1000, 1));
  const std::uint64_t reading = open_backing(O_RDONLY);
  EXPECT_EQ(kernel->write(50, reading, 0, pattern(10, 1)).error(), EBADF);
  const std::uint64_t writing = open_backing(O_WRONLY);
  EXPECT_EQ(kernel->read(50, writing, 0, 10).error(), EBADF);
  const std::uint64_t appending = open_backing(O_WRONLY | O_APPEND);
  EXPECT_EQ(kernel->write(50, appending, 0, pattern(10, 2)).as<fuse_write_out>().size, 10U);
  EXPECT_EQ(file_contents().size(), 1010U);
}

TEST_F(BackingTest, SetIdBitsAreDropped) {
  const std::uint64_t fh = open_backing();
  ASSERT_EQ(::fchmod(fd.get(), 06775), 0);
  kernel->write(50, fh, 0, pattern(10, 1));
  struct stat status {};
  ASSERT_EQ(::fstat(fd.get(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777U, 06775U);
  kernel->write(50, fh, 0, pattern(10, 1), kWriteKillSetId);
  ASSERT_EQ(::fstat(fd.get(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777U, 00775U);
}

TEST_F(BackingTest, HolesAndAllocation) {
  const std::uint64_t fh = open_backing();
  fuse_fallocate_in in{};
  in.fh = fh;
  in.length = 3 * kMiB;
  EXPECT_EQ(kernel->call(FUSE_FALLOCATE, 50, bytes_of(in)).error(), 0);
  EXPECT_EQ(file_contents().size(), 3 * kMiB);
  in.mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
  in.offset = kMiB;
  in.length = kMiB;
  fill_file(pattern(3 * kMiB, 4));
  EXPECT_EQ(kernel->call(FUSE_FALLOCATE, 50, bytes_of(in)).error(), 0);
  fuse_lseek_in seek{};
  seek.fh = fh;
  seek.whence = SEEK_HOLE;
  EXPECT_EQ(kernel->call(FUSE_LSEEK, 50, bytes_of(seek)).as<fuse_lseek_out>().offset, kMiB);
  seek.whence = SEEK_DATA;
  seek.offset = kMiB;
  EXPECT_EQ(kernel->call(FUSE_LSEEK, 50, bytes_of(seek)).as<fuse_lseek_out>().offset, 2 * kMiB);
  seek.offset = 4 * kMiB;
  EXPECT_EQ(kernel->call(FUSE_LSEEK, 50, bytes_of(seek)).error(), ENXIO);
}

TEST_F(BackingTest, CopiesToAndFromBuffers) {
  const Bytes data = pattern(5 * kMiB + 77, 9);
  fill_file(data);
  const std::uint64_t file = open_backing();
  const std::uint64_t memory = add_file(2);
  EXPECT_EQ(copied(copy_body(file, memory, data.size() + 1000)), data.size());
  EXPECT_EQ(buffer_contents(2), data);
  const observe::Region& counted = *host->device()->counters().region();
  const auto loaded = [&](observe::Backend backend) {
    return counted.sum(0, backend, observe::Flow::kIn, &observe::Block::bytes);
  };
  EXPECT_EQ(loaded(observe::Backend::kFastpath) + loaded(observe::Backend::kFallback), data.size());
  EXPECT_EQ(loaded(observe::Backend::kTransfer), data.size());

  EXPECT_EQ(copied(copy_body(memory, file, kMiB, 5, data.size())), kMiB);
  Bytes expected = data;
  expected.insert(expected.end(), data.begin() + 5, data.begin() + 5 + kMiB);
  EXPECT_EQ(file_contents(), expected);
  EXPECT_EQ(copied(copy_body(memory, file, 100, data.size())), 0U);
  EXPECT_GT(table->find(2)->attributes().mtime, 1'000'000);
}

TEST_F(BackingTest, CopiesBetweenFilesOfTheHost) {
  const Bytes data = pattern(kMiB, 3);
  fill_file(data);
  const std::uint64_t from = open_backing(O_RDONLY);
  const std::uint64_t to = open_backing(O_RDWR);
  EXPECT_EQ(copied(copy_body(from, to, kMiB, 0, kMiB)), kMiB);
  EXPECT_EQ(file_contents().size(), 2 * kMiB);
  EXPECT_EQ(kernel->call(FUSE_COPY_FILE_RANGE, 50, copy_body(from, to, kMiB, 0, 100)).error(), EINVAL);  // overlap
}

TEST_F(BackingTest, CopiesThatCannotBe) {
  fill_file(pattern(1000, 1));
  const std::uint64_t reading = open_backing(O_RDONLY);
  const std::uint64_t memory = add_file(2);
  kernel->write(2, memory, 0, pattern(100, 1));
  EXPECT_EQ(kernel->call(FUSE_COPY_FILE_RANGE, 50, copy_body(memory, reading, 100)).error(), EBADF);
  EXPECT_EQ(kernel->call(FUSE_COPY_FILE_RANGE, 50, copy_body(reading, 7, 100)).error(), EXDEV);
  EXPECT_EQ(kernel->call(FUSE_COPY_FILE_RANGE, 50, copy_body(7, reading, 100)).error(), EXDEV);
  const std::uint64_t stale = BackingTable::kHandleBit | 999;
  EXPECT_EQ(kernel->call(FUSE_COPY_FILE_RANGE, 50, copy_body(stale, memory, 100)).error(), EBADF);
  EXPECT_EQ(kernel->call(FUSE_COPY_FILE_RANGE, 50, copy_body(reading, memory, 100, ~0ULL >> 1)).error(), EINVAL);
}

TEST_F(BackingTest, InterruptEndsACopyWithTheBytesDone) {
  ASSERT_EQ(::posix_fallocate(fd.get(), 0, static_cast<off_t>(48 * kMiB)), 0);
  const std::uint64_t file = open_backing(O_RDONLY);
  const std::uint64_t memory = add_file(2);
  const std::uint64_t unique = kernel->send(FUSE_COPY_FILE_RANGE, 50, copy_body(file, memory, 48 * kMiB));
  // Under way, or over already.
  EXPECT_TRUE(eventually([&] { return transfers->active() > 0 || readable(kernel->fd(), 0ms); }));
  kernel->interrupt(unique);
  const Reply reply = kernel->wait(unique);
  if (reply.error() == 0) {
    EXPECT_EQ(table->find(2)->buffer()->size(), reply.as<fuse_write_out>().size);
  } else {
    EXPECT_EQ(reply.error(), EINTR);
    EXPECT_EQ(table->find(2)->buffer()->size(), 0U);
  }
}

TEST_F(BackingTest, AFullDevice) {
  ASSERT_EQ(::posix_fallocate(fd.get(), 0, static_cast<off_t>(100 * kMiB)), 0);
  const std::uint64_t file = open_backing(O_RDONLY);
  const std::uint64_t memory = add_file(2);
  const std::uint32_t count = copied(copy_body(file, memory, 100 * kMiB));
  EXPECT_LE(count, 64 * kMiB);
  EXPECT_EQ(table->find(2)->buffer()->size(), count);
}

TEST_F(BackingTest, OpeningsAreAmended) {
  const std::uint64_t fh = open_backing();
  const std::uint64_t unique = kernel->send(FUSE_OPEN, 50, bytes_of(fuse_open_in{}));
  control->expect(FUSE_OPEN);
  fuse_open_out out{};
  out.fh = fh;
  out.open_flags = kOpenKeepCache;
  control->reply(unique, 0, bytes_of(out));
  EXPECT_EQ(kernel->wait(unique).as<fuse_open_out>().open_flags, kOpenDirectIo | kOpenParallelDirectWrites);
}

}  // namespace
}  // namespace gpufs::fuse
