// Requests on open buffers: those that no program can cause on a mount, and the order of events that it cannot fix.

#include <gtest/gtest.h>
#include <linux/falloc.h>

#include "fuse_fakes.h"

namespace gpufs::fuse {
namespace {

class BufferOperationsTest : public MountTest {
 protected:
  void SetUp() override { start(kPatience); }
  void start(std::chrono::milliseconds space_timeout) {
    MountOptions options;
    options.space_timeout = space_timeout;
    open_and_initialize(options);
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
  // Two files, the first of which has some data.
  void add_two(std::size_t bytes) {
    from = add_file(2);
    to = add_file(3);
    ASSERT_TRUE(table->find(2)->buffer()->write(0, pattern(bytes, 9)).ok());
  }
  std::uint64_t send_copy(std::uint64_t bytes) {
    return kernel->send(FUSE_COPY_FILE_RANGE, 2, copy_body(from, to, bytes));
  }
  // A full device, on which a file has no name and no user, but has not been forgotten; and a new file.
  void fill_beside_an_unlinked_file() {
    const std::uint64_t old = add_file(2);
    to = add_file(3);
    kernel->write(2, old, 0, pattern(1 << 20, 1));
    filler = fill_device(0);
    ASSERT_TRUE(table->release(old).ok());
    unlink_file(2);
  }

  std::uint64_t from = 0;
  std::uint64_t to = 0;
  std::shared_ptr<Buffer> filler;
};

TEST_F(BufferOperationsTest, RangesThatOverflow) {
  const std::uint64_t fh = add_file(2);
  EXPECT_EQ(kernel->read(2, fh, UINT64_MAX - 10, 100).error(), EINVAL);
  EXPECT_EQ(kernel->read(2, fh, INT64_MAX, 100).error(), EINVAL);
  EXPECT_EQ(kernel->write(2, fh, UINT64_MAX - 10, pattern(100, 1)).error(), EFBIG);
  EXPECT_EQ(fallocate(fh, 0, UINT64_MAX, 2).error(), EFBIG);
  EXPECT_EQ(lseek(2, fh, SEEK_DATA, UINT64_MAX).error(), ENXIO);
  EXPECT_EQ(kernel->call(FUSE_COPY_FILE_RANGE, 2, copy_body(fh, fh, 100, UINT64_MAX)).error(), EINVAL);
  EXPECT_EQ(table->find(2)->attributes().size, 0U);
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
  ASSERT_TRUE(table->add({.attributes = attributes}).ok());
  EXPECT_EQ(lseek(5, 17, SEEK_DATA, 10).as<fuse_lseek_out>().offset, 10U);
  EXPECT_EQ(lseek(5, 17, SEEK_HOLE, 10).as<fuse_lseek_out>().offset, 100U);
  EXPECT_EQ(lseek(5, 17, SEEK_HOLE, 100).error(), ENXIO);
  EXPECT_EQ(lseek(99, 17, SEEK_HOLE, 0).error(), EBADF);
}

TEST_F(BufferOperationsTest, CopiesAreCountedInTheFormThatTheKernelAskedFor) {
  add_two(1 << 20);
  EXPECT_EQ(kernel->wait(send_copy(1 << 20)).as<fuse_write_out>().size, 1U << 20);
  const Reply wide = kernel->call(kOpcodeCopyFileRange64, 2, copy_body(from, to, std::uint64_t{1} << 40, 1000));
  EXPECT_EQ(wide.as<std::uint64_t>(), (1U << 20) - 1000U);
  EXPECT_EQ(wide.body.size(), 8U);
  Bytes flagged = copy_body(from, to, 10);
  flagged.back() = std::byte{1};
  EXPECT_EQ(kernel->call(FUSE_COPY_FILE_RANGE, 2, flagged).error(), EINVAL);
}

TEST_F(BufferOperationsTest, ACopyDelaysNoOtherRequestAndKeepsItsFiles) {
  add_two(1 << 20);
  copies.close();
  const std::uint64_t copy = send_copy(1 << 20);
  ASSERT_TRUE(copies.await(1));
  EXPECT_EQ(kernel->read(2, from, 0, 10).body.size(), 10U);
  for (const std::uint64_t fh : {from, to}) ASSERT_TRUE(table->release(fh).ok());
  for (const std::uint64_t ino : {2, 3}) {
    unlink_file(ino);
    ASSERT_TRUE(table->forget(ino, 1));
  }
  EXPECT_EQ(held(), 2 * kGranule);  // what is being used is not freed
  copies.open();
  EXPECT_EQ(kernel->wait(copy).as<fuse_write_out>().size, 1U << 20);
  EXPECT_TRUE(soon([&] { return held() == 0; }));
}

TEST_F(BufferOperationsTest, InterruptOfARunningCopyGivesTheBytesDone) {
  constexpr std::uint64_t kChunk = 64 << 20;  // after which it stops
  add_two(kChunk + 1000);
  copies.close();
  const std::uint64_t copy = send_copy(kChunk + 1000);
  ASSERT_TRUE(copies.await(1));
  kernel->interrupt(copy);
  EXPECT_TRUE(soon([&] { return counted().interrupts_cancelled == 1; }));
  copies.open();
  EXPECT_EQ(kernel->wait(copy).as<fuse_write_out>().size, kChunk);
  EXPECT_FALSE(kernel->receive(kQuiet));  // an INTERRUPT has no reply
}

TEST_F(BufferOperationsTest, AnInterruptThatComesBeforeItsRequestIsRepeated) {
  add_two(1 << 20);
  copies.close();
  // As many as one file may have: the next one is queued.
  std::vector<std::uint64_t> sent;
  for (std::uint64_t i = 0; i < 4; ++i)
    sent.push_back(kernel->send(FUSE_COPY_FILE_RANGE, 2, copy_body(from, to, 100, 0, i * 100)));
  ASSERT_TRUE(copies.await(4));
  const std::uint64_t unique = kernel->next_unique();
  kernel->interrupt(unique);
  ASSERT_TRUE(soon([&] { return counted().interrupts_early == 1; }));
  kernel->send_raw(FakeKernel::message(FUSE_COPY_FILE_RANGE, unique, 2, copy_body(from, to, 100, 0, 400)));
  EXPECT_EQ(kernel->wait(unique).error(), EINTR);
  copies.open();
  for (const std::uint64_t other : sent) EXPECT_EQ(kernel->wait(other).as<fuse_write_out>().size, 100U);
}

TEST_F(BufferOperationsTest, AnInterruptEndsAQueuedRequest) {
  add_two(1 << 20);
  copies.close();
  constexpr std::uint64_t kCopies = 6;
  constexpr std::uint64_t kBytes = 100;
  std::vector<std::uint64_t> sent;
  // Each has its own part of the file: what programs write to the same bytes at once is theirs to order.
  for (std::uint64_t i = 0; i < kCopies; ++i)
    sent.push_back(kernel->send(FUSE_COPY_FILE_RANGE, 2, copy_body(from, to, kBytes, 0, i * kBytes)));
  ASSERT_TRUE(copies.await(4));  // as many as one file may have
  kernel->interrupt(sent.back());
  EXPECT_EQ(kernel->wait(sent.back()).error(), EINTR);
  copies.open();
  sent.pop_back();
  for (const std::uint64_t copy : sent) EXPECT_EQ(kernel->wait(copy).as<fuse_write_out>().size, kBytes);
}

TEST_F(BufferOperationsTest, AWriteWaitsForTheMemoryOfRemovedFiles) {
  fill_beside_an_unlinked_file();
  const Bytes data = pattern(1 << 20, 2);
  const std::uint64_t write = kernel->send(FUSE_WRITE, 3, FakeKernel::write_body(to, 0, data));
  EXPECT_FALSE(kernel->receive(kQuiet));
  ASSERT_TRUE(table->forget(2, 1));  // the kernel's FORGET has come
  EXPECT_EQ(kernel->wait(write).as<fuse_write_out>().size, 1U << 20);
  EXPECT_EQ(kernel->read(3, to, 0, 1 << 20).body, data);
}

TEST_F(BufferOperationsTest, AFileThatSomebodyKeepsDelaysNobodyElse) {
  fill_beside_an_unlinked_file();
  const auto timed = [&] {
    const auto start = std::chrono::steady_clock::now();
    EXPECT_EQ(kernel->write(3, to, 0, pattern(10, 1)).error(), ENOSPC);
    return std::chrono::steady_clock::now() - start;
  };
  EXPECT_LT(timed(), kPatience / 2);  // the kernel may forget it soon
  EXPECT_LT(timed(), 500ms);
}

TEST_F(BufferOperationsTest, AWriteThatWaitsCanBeInterrupted) {
  fill_beside_an_unlinked_file();
  const std::uint64_t write = kernel->send(FUSE_WRITE, 3, FakeKernel::write_body(to, 0, pattern(10, 1)));
  EXPECT_FALSE(kernel->receive(kQuiet));
  kernel->interrupt(write);
  EXPECT_EQ(kernel->wait(write).error(), EINTR);
}

TEST_F(BufferOperationsTest, WaitingForMemoryEnds) {
  TearDown();
  start(200ms);
  fill_beside_an_unlinked_file();
  EXPECT_EQ(kernel->write(3, to, 0, pattern(10, 1)).error(), ENOSPC);
  EXPECT_EQ(counted().memory_waits, 1U);
}

}  // namespace
}  // namespace gpufs::fuse
