// What opening a backing file finds out.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/loop.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io/backing_file.h"
#include "io/file_io.h"
#include "io_fakes.h"
#include "results.h"
#include "temporary_file.h"

namespace gpufs {
namespace {

TEST(FileSystems, OnlyOrderedExt4AndXfsTakeTheFastpath) {
  const auto refusals = [](const char* type, const char* options, bool block = false) {
    BackingFacts facts;
    facts.block_device = block;
    judge_file_system(type, options, facts);
    return facts.fastpath_refusals;
  };
  EXPECT_EQ(refusals("ext4", "rw"), 0U);
  EXPECT_EQ(refusals("ext4", "rw,data=ordered"), 0U);
  EXPECT_EQ(refusals("ext4", "rw,data=journal"), mask_of(Refusal::kMountOptions));
  EXPECT_EQ(refusals("ext4", "rw,data=writeback"), mask_of(Refusal::kMountOptions));
  EXPECT_EQ(refusals("xfs", "rw"), 0U);
  EXPECT_EQ(refusals("btrfs", "rw"), mask_of(Refusal::kFileSystem));
  EXPECT_EQ(refusals("devtmpfs", "rw", true), 0U);
  EXPECT_EQ(refusals("", ""), mask_of(Refusal::kFileSystem));

  BackingFacts remote;
  judge_file_system("nfs4", "rw", remote);
  EXPECT_TRUE(remote.may_hang);
  BackingFacts user;
  judge_file_system("fuse.sshfs", "rw", user);
  EXPECT_TRUE(user.may_hang);
}

TEST(BackingFile, KeepsTheModeAndNeverWidensIt) {
  const UniqueFd readable = testing::temporary_file("/tmp", O_RDONLY);
  auto file = testing::must(BackingFile::open(readable.get()));
  EXPECT_TRUE(file->facts().readable);
  EXPECT_FALSE(file->facts().writable);
  EXPECT_EQ(::fcntl(file->buffered_fd(), F_GETFL) & O_ACCMODE, O_RDONLY);
  EXPECT_NE(::fcntl(file->buffered_fd(), F_GETFD) & FD_CLOEXEC, 0);
  if (file->direct_fd() >= 0) {
    EXPECT_EQ(::fcntl(file->direct_fd(), F_GETFL) & O_ACCMODE, O_RDONLY);
    EXPECT_NE(::fcntl(file->direct_fd(), F_GETFL) & O_DIRECT, 0);
    EXPECT_NE(::fcntl(file->direct_fd(), F_GETFD) & FD_CLOEXEC, 0);
  }
  const UniqueFd writable = testing::temporary_file("/tmp", O_WRONLY);
  file = testing::must(BackingFile::open(writable.get()));
  EXPECT_FALSE(file->facts().readable);
  EXPECT_TRUE(file->facts().writable);
}

TEST(BackingFile, FlagsOfTheCallersDescriptorDoNotReachOurs) {
  const UniqueFd file = testing::temporary_file();
  auto backing = testing::must(BackingFile::open(file.get()));
  ASSERT_EQ(::fcntl(file.get(), F_SETFL, O_APPEND | O_DIRECT), 0);
  EXPECT_EQ(::fcntl(backing->buffered_fd(), F_GETFL) & (O_APPEND | O_DIRECT | O_NONBLOCK), 0);
}

TEST(BackingFile, FileOnTmpfsIsHotAndHasNoDirectDescriptor) {
  const UniqueFd file = testing::temporary_file("/dev/shm");
  auto backing = testing::must(BackingFile::open(file.get()));
  EXPECT_TRUE(backing->facts().always_hot);
  EXPECT_EQ(backing->direct_fd(), -1);
  EXPECT_NE(backing->facts().fastpath_refusals & mask_of(Refusal::kFileSystem), 0U);
}

TEST(BackingFile, FilesThatCheckTheirOpenerAreNotOpenedAgain) {
  const UniqueFd memory(::open("/proc/self/mem", O_RDWR | O_CLOEXEC));
  ASSERT_TRUE(memory.valid());
  auto backing = testing::must(BackingFile::open(memory.get()));
  EXPECT_EQ(backing->direct_fd(), -1);
  EXPECT_TRUE(backing->facts().may_hang);
  // The caller's own description, not another one.
  ASSERT_EQ(::fcntl(memory.get(), F_SETFL, O_NONBLOCK), 0);
  EXPECT_NE(::fcntl(backing->buffered_fd(), F_GETFL) & O_NONBLOCK, 0);
}

TEST(BackingFile, BlockDevice) {
  const UniqueFd control(::open("/dev/loop-control", O_RDWR | O_CLOEXEC));
  if (!control.valid()) GTEST_SKIP() << "no loop devices here";
  const UniqueFd file = testing::temporary_file();
  ASSERT_EQ(::ftruncate(file.get(), 1 << 20), 0);
  const int number = ::ioctl(control.get(), LOOP_CTL_GET_FREE);
  if (number < 0) GTEST_SKIP() << "no free loop device";
  const UniqueFd device(::open(("/dev/loop" + std::to_string(number)).c_str(), O_RDWR | O_CLOEXEC));
  if (!device.valid() || ::ioctl(device.get(), LOOP_SET_FD, file.get()) != 0) GTEST_SKIP() << "no loop device";
  {
    Result<std::shared_ptr<BackingFile>> backing = BackingFile::open(device.get());
    EXPECT_TRUE(backing.ok()) << backing.status().message();
    if (backing.ok()) {
      EXPECT_TRUE(backing.value()->facts().block_device);
      EXPECT_FALSE(backing.value()->facts().always_hot);
      EXPECT_EQ(backing.value()->facts().fastpath_refusals, 0U)
          << describe_refusals(backing.value()->facts().fastpath_refusals);
      std::uint64_t size = 0;
      EXPECT_EQ(FileOps::system().size(backing.value()->buffered_fd(), &size), 0);
      EXPECT_EQ(size, 1U << 20);
    }
  }
  EXPECT_EQ(::ioctl(device.get(), LOOP_CLR_FD, 0), 0);
}

TEST(FileMoves, WriteWithoutProgressIsAnError) {
  const UniqueFd anonymous(::memfd_create("gpufs-io-test", MFD_CLOEXEC));
  testing::PlannedFileOps operations;
  operations.on_write = [](int, const void*, std::size_t, std::uint64_t, ssize_t* result) {
    *result = 0;
    return true;
  };
  auto backing = testing::must(BackingFile::open(anonymous.get(), operations));
  const std::byte byte{};
  EXPECT_EQ(write_range(*backing, IoMode::kBuffered, &byte, 1, 0).status.error(), EIO);
}

}  // namespace
}  // namespace gpufs
