// Requests on open buffers.

#include <gtest/gtest.h>
#include <linux/falloc.h>

#include "fuse_fakes.h"

namespace gpufs::fuse {
namespace {

class BufferOperationsTest : public MountTest {
 protected:
  void SetUp() override { open_and_initialize(options()); }
  static MountOptions options() {
    MountOptions options;
    options.attribute_timeout = 1.5;
    options.space_patience = kPatience;
    return options;
  }

  Reply fallocate(std::uint64_t fh, std::uint32_t mode, std::uint64_t offset, std::uint64_t length) {
    fuse_fallocate_in in{};
    in.fh = fh;
    in.mode = mode;
    in.offset = offset;
    in.length = length;
    return kernel->call(FUSE_FALLOCATE, 2, bytes_of(in));
  }
  Reply lseek(std::uint64_t ino, std::uint64_t fh, std::uint32_t whence, std::uint64_t offset) {
    fuse_lseek_in in{};
    in.fh = fh;
    in.offset = offset;
    in.whence = whence;
    return kernel->call(FUSE_LSEEK, ino, bytes_of(in));
  }
  void fill_device(std::int32_t device) {
    const std::lock_guard lock(source->device(device)->mutex);
    source->device(device)->total = source->device(device)->used;
  }
};

TEST_F(BufferOperationsTest, ReadsReturnWhatWasWritten) {
  const std::uint64_t fh = add_file(2);
  for (const std::size_t bytes : {1UL, 4096UL, 12345UL, 1UL << 20}) {
    const Bytes data = pattern(bytes, static_cast<unsigned>(bytes));
    EXPECT_EQ(kernel->write(2, fh, 777, data).as<fuse_write_out>().size, bytes);
    EXPECT_EQ(kernel->read(2, fh, 777, static_cast<std::uint32_t>(bytes)).body, data);
  }
  EXPECT_EQ(kernel->write(2, fh, 0, {}).as<fuse_write_out>().size, 0U);
}

TEST_F(BufferOperationsTest, DevicesThatTheCpuCannotAddress) {
  source->device(1)->addressable = false;
  const std::uint64_t fh = add_file(3, S_IFREG | 0644, 1);
  const Bytes data = pattern(1 << 20, 3);
  kernel->write(3, fh, 5, data);
  EXPECT_EQ(kernel->read(3, fh, 5, 1 << 20).body, data);
}

TEST_F(BufferOperationsTest, MorePiecesThanAReplyMayHave) {
  const std::uint64_t fh = add_file(2);
  buffer(2).piece_bytes = 100;
  const Bytes data = pattern(1 << 20, 4);
  kernel->write(2, fh, 0, data);
  EXPECT_EQ(kernel->read(2, fh, 0, 1 << 20).body, data);
}

TEST_F(BufferOperationsTest, HandlesAreChecked) {
  add_file(2);
  const std::uint64_t stale = kBufferHandle | 12345;
  EXPECT_EQ(kernel->read(2, stale, 0, 100).error(), EBADF);
  EXPECT_EQ(kernel->write(2, stale, 0, pattern(10, 1)).error(), EBADF);
  EXPECT_EQ(lseek(2, stale, SEEK_DATA, 0).error(), EBADF);
  EXPECT_EQ(fallocate(stale, 0, 0, 10).error(), EBADF);
  EXPECT_EQ(kernel->call(FUSE_COPY_FILE_RANGE, 2, copy_body(stale, stale, 10)).error(), EBADF);
  fuse_fsync_in fsync{};
  fsync.fh = stale;
  EXPECT_EQ(kernel->call(FUSE_FSYNC, 2, bytes_of(fsync)).error(), EBADF);
}

TEST_F(BufferOperationsTest, RangesThatOverflow) {
  const std::uint64_t fh = add_file(2);
  EXPECT_EQ(kernel->read(2, fh, UINT64_MAX - 10, 100).error(), EINVAL);
  EXPECT_EQ(kernel->read(2, fh, INT64_MAX, 100).error(), EINVAL);
  EXPECT_EQ(kernel->write(2, fh, UINT64_MAX - 10, pattern(100, 1)).error(), EFBIG);
  EXPECT_EQ(kernel->write(2, fh, FakeBuffer::kMaximum, pattern(100, 1)).error(), EFBIG);
  EXPECT_EQ(fallocate(fh, 0, UINT64_MAX, 2).error(), EFBIG);
  EXPECT_EQ(lseek(2, fh, SEEK_DATA, UINT64_MAX).error(), ENXIO);
  EXPECT_EQ(kernel->call(FUSE_COPY_FILE_RANGE, 2, copy_body(fh, fh, 100, UINT64_MAX)).error(), EINVAL);
  EXPECT_EQ(table->find(2)->attributes().size, 0U);
}

TEST_F(BufferOperationsTest, MessagesThatAreTooShort) {
  const std::uint64_t fh = add_file(2);
  for (const std::uint32_t opcode :
       {FUSE_READ, FUSE_WRITE, FUSE_LSEEK, FUSE_FALLOCATE, FUSE_COPY_FILE_RANGE, FUSE_FSYNC}) {
    EXPECT_EQ(kernel->call(opcode, 2, Bytes(4)).error(), EINVAL) << opcode_name(opcode);
  }
  Bytes body = FakeKernel::write_body(fh, 0, pattern(100, 1));
  body.resize(body.size() - 1);  // says 100 bytes and brings 99
  EXPECT_EQ(kernel->call(FUSE_WRITE, 2, body).error(), EINVAL);
}

TEST_F(BufferOperationsTest, AHeaderWithAWrongLength) {
  Bytes message = FakeKernel::message(FUSE_GETATTR, 100, 2, Bytes(16));
  message.resize(message.size() - 8);
  kernel->send_raw(message);
  EXPECT_EQ(kernel->wait(100).error(), EIO);
  kernel->send_raw(Bytes(10));  // not even a header: nobody to answer
  EXPECT_FALSE(kernel->receive(kQuiet));
}

TEST_F(BufferOperationsTest, RequestsThatAreNeverRelayed) {
  add_file(2);
  // An ENOSYS from the control plane would switch these off for the whole mount.
  EXPECT_EQ(kernel->call(FUSE_IOCTL, 2, Bytes(sizeof(fuse_ioctl_in))).error(), ENOTTY);
  EXPECT_EQ(fallocate(7, 0, 0, 10).error(), EOPNOTSUPP);
  EXPECT_EQ(kernel->call(FUSE_COPY_FILE_RANGE, 2, copy_body(7, 8, 10)).error(), EXDEV);
  EXPECT_FALSE(control->receive(kQuiet));
}

TEST_F(BufferOperationsTest, LseekOnControlFiles) {
  gpufs_attributes attributes = file_attributes(5, S_IFREG | 0444, -1);
  attributes.size = 100;
  ASSERT_TRUE(table->add(attributes).ok());
  EXPECT_EQ(lseek(5, 17, SEEK_DATA, 10).as<fuse_lseek_out>().offset, 10U);
  EXPECT_EQ(lseek(5, 17, SEEK_HOLE, 10).as<fuse_lseek_out>().offset, 100U);
  EXPECT_EQ(lseek(5, 17, SEEK_HOLE, 100).error(), ENXIO);
  EXPECT_EQ(lseek(99, 17, SEEK_HOLE, 0).error(), EBADF);
}

TEST_F(BufferOperationsTest, Fsync) {
  const std::uint64_t fh = add_file(2);
  fuse_fsync_in fsync{};
  fsync.fh = fh;
  EXPECT_EQ(kernel->call(FUSE_FSYNC, 2, bytes_of(fsync)).error(), 0);
  fsync.fh = 17;  // a control file's: not ours to know
  const std::uint64_t unique = kernel->send(FUSE_FSYNC, 5, bytes_of(fsync));
  control->expect(FUSE_FSYNC);
  control->reply(unique, 0);
  EXPECT_EQ(kernel->wait(unique).error(), 0);
}

TEST_F(BufferOperationsTest, AFileWithoutAWriterIsTrimmedAtEachClose) {
  const std::uint64_t first = add_file(2);
  const std::uint64_t second = open_file(2, O_WRONLY);
  const std::uint64_t reader = open_file(2, O_RDONLY);
  FakeBuffer& written = buffer(2);
  written.preallocated = true;
  const auto release = [&](std::uint64_t fh) {
    fuse_release_in in{};
    in.fh = fh;
    EXPECT_EQ(kernel->call(FUSE_RELEASE, 2, bytes_of(in)).error(), 0);
  };
  release(first);
  EXPECT_EQ(written.trims, 0);
  release(second);
  EXPECT_TRUE(eventually([&] { return written.trims == 1; }));
  release(open_file(2, O_RDWR));
  written.preallocated = true;
  release(reader);
  EXPECT_TRUE(eventually([&] { return written.trims == 2; }));
}

TEST_F(BufferOperationsTest, FallocateWithoutSpaceLeavesTheFileAsItWas) {
  const std::uint64_t fh = add_file(2);
  kernel->write(2, fh, 0, pattern(10, 1));
  fill_device(0);
  EXPECT_EQ(fallocate(fh, 0, 0, 10 << 20).error(), ENOSPC);
  EXPECT_EQ(table->find(2)->attributes().size, 10U);
  EXPECT_EQ(table->find(2)->attributes().blocks, FakeDevice::kGranule / 512);
}

TEST_F(BufferOperationsTest, CopyFileRange) {
  const std::uint64_t from = add_file(2);
  const std::uint64_t to = add_file(3, S_IFREG | 0644, 1);
  const Bytes data = pattern(1 << 20, 9);
  kernel->write(2, from, 0, data);
  EXPECT_EQ(kernel->call(FUSE_COPY_FILE_RANGE, 2, copy_body(from, to, 1 << 20)).as<fuse_write_out>().size, 1U << 20);
  EXPECT_EQ(kernel->read(3, to, 0, 1 << 20).body, data);
  // The whole file and more: the count says where it ended.
  const Reply wide = kernel->call(kOpcodeCopyFileRange64, 2, copy_body(from, to, std::uint64_t{1} << 40, 1000));
  EXPECT_EQ(wide.as<CopyFileRangeOut>().bytes_copied, (1U << 20) - 1000U);
  EXPECT_EQ(wide.body.size(), 8U);
  EXPECT_GT(table->find(3)->attributes().mtime, 1'000'000);
  Bytes flagged = copy_body(from, to, 10);
  flagged.back() = std::byte{1};
  EXPECT_EQ(kernel->call(FUSE_COPY_FILE_RANGE, 2, flagged).error(), EINVAL);
}

TEST_F(BufferOperationsTest, ACopyDoesNotDelayOtherRequests) {
  const std::uint64_t from = add_file(2);
  const std::uint64_t to = add_file(3);
  kernel->write(2, from, 0, pattern(1 << 20, 9));
  source->device(0)->copies.close();
  const std::uint64_t copy = kernel->send(FUSE_COPY_FILE_RANGE, 2, copy_body(from, to, 1 << 20));
  ASSERT_TRUE(source->device(0)->copies.wait_for_visitors(1));
  EXPECT_EQ(kernel->read(2, from, 0, 10).body.size(), 10U);
  source->device(0)->copies.open();
  EXPECT_EQ(kernel->wait(copy).as<fuse_write_out>().size, 1U << 20);
}

TEST_F(BufferOperationsTest, ABriefCopyNeedsNoOtherThread) {
  const std::uint64_t from = add_file(2);
  const std::uint64_t to = add_file(3);
  const Bytes data = pattern(1 << 20, 9);
  kernel->write(2, from, 0, data);
  buffer(3).brief = true;
  source->device(0)->copies.close();
  const std::uint64_t copy = kernel->send(FUSE_COPY_FILE_RANGE, 2, copy_body(from, to, 1 << 20));
  ASSERT_TRUE(source->device(0)->copies.wait_for_visitors(1));
  kernel->interrupt(copy);  // finds nothing to stop
  source->device(0)->copies.open();
  EXPECT_EQ(kernel->wait(copy).as<fuse_write_out>().size, 1U << 20);
  EXPECT_EQ(kernel->read(3, to, 0, 1 << 20).body, data);
  EXPECT_TRUE(counted("\"copied\": 1048576"));
}

TEST_F(BufferOperationsTest, ABriefCopyToAFullDeviceWaitsForSpace) {
  const std::uint64_t from = add_file(2);
  const std::uint64_t to = add_file(3);
  const std::uint64_t other = add_file(4);
  const Bytes data = pattern(1 << 20, 9);
  kernel->write(2, from, 0, data);
  kernel->write(4, other, 0, data);
  fill_device(0);
  ASSERT_TRUE(table->release(other).ok());
  gpufs_attributes gone{};
  ASSERT_TRUE(table->set(4, GPUFS_SET_NLINK, &gone).ok());
  buffer(3).brief = true;
  const std::uint64_t copy = kernel->send(FUSE_COPY_FILE_RANGE, 2, copy_body(from, to, 1 << 20));
  ASSERT_TRUE(eventually([&] { return counted("\"space_waits\": 1"); }));
  EXPECT_EQ(kernel->read(2, from, 0, 1 << 20).body, data);  // nobody is held up
  ASSERT_TRUE(table->remove(4).ok());
  EXPECT_EQ(kernel->wait(copy).as<fuse_write_out>().size, 1U << 20);
  EXPECT_EQ(kernel->read(3, to, 0, 1 << 20).body, data);
}

TEST_F(BufferOperationsTest, ReleaseDuringACopy) {
  const std::uint64_t from = add_file(2);
  const std::uint64_t to = add_file(3);
  kernel->write(2, from, 0, pattern(1 << 20, 9));
  source->device(0)->copies.close();
  const std::uint64_t copy = kernel->send(FUSE_COPY_FILE_RANGE, 2, copy_body(from, to, 1 << 20));
  ASSERT_TRUE(source->device(0)->copies.wait_for_visitors(1));
  for (const std::uint64_t fh : {from, to}) ASSERT_TRUE(table->release(fh).ok());
  for (const std::uint64_t ino : {2, 3}) ASSERT_TRUE(table->remove(ino).ok());
  EXPECT_EQ(source->device(0)->alive, 2);  // what is being used is not freed
  source->device(0)->copies.open();
  EXPECT_EQ(kernel->wait(copy).as<fuse_write_out>().size, 1U << 20);
  EXPECT_TRUE(eventually([&] { return source->device(0)->alive == 0; }));
}

TEST_F(BufferOperationsTest, InterruptOfARunningCopyGivesTheBytesDone) {
  const std::uint64_t from = add_file(2);
  const std::uint64_t to = add_file(3);
  buffer(3).first_chunk_free = true;
  kernel->write(2, from, 0, pattern(1 << 20, 9));
  source->device(0)->copies.close();
  const std::uint64_t copy = kernel->send(FUSE_COPY_FILE_RANGE, 2, copy_body(from, to, 1 << 20));
  ASSERT_TRUE(source->device(0)->copies.wait_for_visitors(1));
  kernel->interrupt(copy);
  EXPECT_EQ(kernel->wait(copy).as<fuse_write_out>().size, 256U * 1024);
  EXPECT_FALSE(kernel->receive(kQuiet));  // an INTERRUPT has no reply
}

TEST_F(BufferOperationsTest, AnInterruptThatComesBeforeItsRequestIsRemembered) {
  const std::uint64_t from = add_file(2);
  const std::uint64_t to = add_file(3);
  kernel->write(2, from, 0, pattern(1 << 20, 9));
  const std::uint64_t unique = kernel->next_unique();
  kernel->interrupt(unique);
  ASSERT_TRUE(eventually([&] { return counted("\"remembered\": 1"); }));
  kernel->send_raw(FakeKernel::message(FUSE_COPY_FILE_RANGE, unique, 2, copy_body(from, to, 1 << 20)));
  EXPECT_EQ(kernel->wait(unique).error(), EINTR);
  // Only that one.
  EXPECT_EQ(kernel->call(FUSE_COPY_FILE_RANGE, 2, copy_body(from, to, 1 << 20)).as<fuse_write_out>().size, 1U << 20);
}

TEST_F(BufferOperationsTest, AnInterruptEndsAQueuedRequest) {
  const std::uint64_t from = add_file(2);
  const std::uint64_t to = add_file(3);
  kernel->write(2, from, 0, pattern(1 << 20, 9));
  source->device(0)->copies.close();
  std::vector<std::uint64_t> copies;
  for (int i = 0; i < 6; ++i) copies.push_back(kernel->send(FUSE_COPY_FILE_RANGE, 2, copy_body(from, to, 1 << 20)));
  ASSERT_TRUE(source->device(0)->copies.wait_for_visitors(4));  // all workers
  kernel->interrupt(copies.back());
  EXPECT_EQ(kernel->wait(copies.back()).error(), EINTR);
  source->device(0)->copies.open();
  copies.pop_back();
  for (const std::uint64_t copy : copies) EXPECT_EQ(kernel->wait(copy).as<fuse_write_out>().size, 1U << 20);
}

TEST_F(BufferOperationsTest, AFullDevice) {
  const std::uint64_t fh = add_file(2);
  kernel->write(2, fh, 0, pattern(FakeDevice::kGranule, 1));
  fill_device(0);
  EXPECT_EQ(kernel->write(2, fh, FakeDevice::kGranule, pattern(10, 1)).error(), ENOSPC);
  EXPECT_EQ(table->find(2)->attributes().size, FakeDevice::kGranule);
  // What fits is written.
  const Bytes data = pattern(1000, 5);
  EXPECT_EQ(kernel->write(2, fh, FakeDevice::kGranule - 100, data).as<fuse_write_out>().size, 100U);
  EXPECT_EQ(kernel->read(2, fh, FakeDevice::kGranule - 100, 1000).body, Bytes(data.begin(), data.begin() + 100));
}

TEST_F(BufferOperationsTest, AWriteWaitsForTheMemoryOfRemovedFiles) {
  const std::uint64_t old = add_file(2);
  const std::uint64_t fresh = add_file(3);
  kernel->write(2, old, 0, pattern(1 << 20, 1));
  fill_device(0);
  ASSERT_TRUE(table->release(old).ok());
  gpufs_attributes gone{};
  ASSERT_TRUE(table->set(2, GPUFS_SET_NLINK, &gone).ok());
  const Bytes data = pattern(1 << 20, 2);
  const std::uint64_t write = kernel->send(FUSE_WRITE, 3, FakeKernel::write_body(fresh, 0, data));
  EXPECT_FALSE(kernel->receive(kQuiet));
  ASSERT_TRUE(table->remove(2).ok());  // the kernel's FORGET has come
  EXPECT_EQ(kernel->wait(write).as<fuse_write_out>().size, 1U << 20);
  EXPECT_EQ(kernel->read(3, fresh, 0, 1 << 20).body, data);
}

TEST_F(BufferOperationsTest, AWriteThatWaitsCanBeInterrupted) {
  const std::uint64_t old = add_file(2);
  const std::uint64_t fresh = add_file(3);
  kernel->write(2, old, 0, pattern(1 << 20, 1));
  fill_device(0);
  ASSERT_TRUE(table->release(old).ok());
  gpufs_attributes gone{};
  ASSERT_TRUE(table->set(2, GPUFS_SET_NLINK, &gone).ok());
  const std::uint64_t write = kernel->send(FUSE_WRITE, 3, FakeKernel::write_body(fresh, 0, pattern(10, 1)));
  EXPECT_FALSE(kernel->receive(kQuiet));
  kernel->interrupt(write);
  EXPECT_EQ(kernel->wait(write).error(), EINTR);
}

TEST_F(BufferOperationsTest, WaitingForMemoryEnds) {
  TearDown();
  MountOptions brief = options();
  brief.space_patience = 200ms;
  open_and_initialize(brief);
  const std::uint64_t old = add_file(2);
  const std::uint64_t fresh = add_file(3);
  kernel->write(2, old, 0, pattern(1 << 20, 1));
  fill_device(0);
  ASSERT_TRUE(table->release(old).ok());
  gpufs_attributes gone{};
  ASSERT_TRUE(table->set(2, GPUFS_SET_NLINK, &gone).ok());
  EXPECT_EQ(kernel->write(3, fresh, 0, pattern(10, 1)).error(), ENOSPC);
  EXPECT_TRUE(counted("\"space_waits\": 1"));
}

TEST_F(BufferOperationsTest, AUserAtALimit) {
  const std::uint64_t fh = add_file(2);
  ASSERT_TRUE(table->limit_user(0, table->find(2)->attributes().uid, 2 * FakeDevice::kGranule).ok());
  // What fits is written.
  const Bytes data = pattern(3 * FakeDevice::kGranule, 5);
  EXPECT_EQ(kernel->write(2, fh, 0, data).as<fuse_write_out>().size, 2 * FakeDevice::kGranule);
  EXPECT_EQ(kernel->write(2, fh, 2 * FakeDevice::kGranule, data).error(), EDQUOT);
  EXPECT_EQ(fallocate(fh, 0, 0, 3 * FakeDevice::kGranule).error(), EDQUOT);
  EXPECT_EQ(table->find(2)->attributes().size, 2 * FakeDevice::kGranule);
}

TEST_F(BufferOperationsTest, WaitingAtALimitEndsWithItsError) {
  TearDown();
  MountOptions brief = options();
  brief.space_patience = 200ms;
  open_and_initialize(brief);
  const std::uint64_t old = add_file(2);
  const std::uint64_t fresh = add_file(3);
  ASSERT_TRUE(table->limit_user(0, table->find(2)->attributes().uid, 1 << 20).ok());
  kernel->write(2, old, 0, pattern(1 << 20, 1));
  ASSERT_TRUE(table->release(old).ok());
  gpufs_attributes gone{};
  ASSERT_TRUE(table->set(2, GPUFS_SET_NLINK, &gone).ok());
  EXPECT_EQ(kernel->write(3, fresh, 0, pattern(10, 1)).error(), EDQUOT);
  const std::uint64_t write = kernel->send(FUSE_WRITE, 3, FakeKernel::write_body(fresh, 0, pattern(10, 1)));
  ASSERT_TRUE(table->remove(2).ok());
  EXPECT_EQ(kernel->wait(write).as<fuse_write_out>().size, 10U);
}

}  // namespace
}  // namespace gpufs::fuse
