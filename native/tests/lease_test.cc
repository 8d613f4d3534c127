// Leases: memory that stays in place for those who map it, and what that forbids to others.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "buffer_fixture.h"
#include "bytes.h"
#include "drivers/driver.h"
#include "memory/buffer.h"

namespace gpufs {
namespace {

using testing::kGranule;
using testing::kMiB;

using testing::contents;
using testing::pattern;
using testing::write;

class LeaseTest : public testing::BufferFixture {
 protected:
  static std::shared_ptr<Buffer::Lease> lease(Buffer& buffer, bool writable = true) {
    Result<std::shared_ptr<Buffer::Lease>> made = buffer.lease(writable, true, "a test");
    EXPECT_TRUE(made.ok()) << made.status().message();
    return made.ok() ? made.take() : nullptr;
  }
  static std::unique_ptr<ImportedRange> import(std::uint64_t capacity, bool writable = true) {
    Result<std::shared_ptr<Device>> device = open_device("host", "");
    EXPECT_TRUE(device.ok());
    Result<std::unique_ptr<ImportedRange>> made = device.value()->create_import(capacity, writable);
    EXPECT_TRUE(made.ok()) << made.status().message();
    return made.take();
  }
};

TEST_F(LeaseTest, AfterTheLeaseTheFileIsAsOthers) {
  start(64 * kMiB, 65536);
  const auto buffer = make();
  write(*buffer, 0, pattern(5 * kMiB, 1));
  EXPECT_EQ(lease(*buffer)->bytes(), 5 * kMiB);
  EXPECT_TRUE(buffer->punch(kGranule, kGranule).ok());
  EXPECT_EQ(buffer->bytes_held(), 2 * kGranule);
  EXPECT_TRUE(buffer->resize(0).ok());
  EXPECT_EQ(buffer->bytes_held(), 0U);
  write(*buffer, 0, pattern(100, 1));
  EXPECT_EQ(buffer->bytes_held(), 512U);
}

TEST_F(LeaseTest, AnEmptyFileHasNoPieces) {
  start(16 * kMiB);
  const auto buffer = make();
  const auto held = lease(*buffer, false);
  EXPECT_EQ(held->bytes(), 0U);
  EXPECT_EQ(held->address(), 0U);
  EXPECT_TRUE(held->pieces(0, 10).value().empty());
  write(*buffer, 0, pattern(10, 1));
  ASSERT_TRUE(held->refresh().ok());
  EXPECT_EQ(held->pieces(0, 10).value().size(), 1U);
  EXPECT_TRUE(held->pieces(kGranule, 10).value().empty());
}

TEST_F(LeaseTest, ReadersGetDescriptorsThatCannotBeWrittenTo) {
  start(16 * kMiB);
  const auto buffer = make();
  write(*buffer, 0, pattern(10, 1));
  const auto held = lease(*buffer, false);
  const std::vector<ExportedMemory> pieces = held->pieces(0, 10).take();
  ASSERT_EQ(pieces.size(), 1U);
  const int fd = pieces[0].descriptor.get();
  EXPECT_EQ(::fcntl(fd, F_GETFD), FD_CLOEXEC);
  EXPECT_EQ(::fcntl(fd, F_GETFL) & O_ACCMODE, O_RDONLY);
  EXPECT_EQ(::mmap(nullptr, kGranule, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
  EXPECT_EQ(::ftruncate(fd, 0), -1);
  const auto writable = import(kGranule, true);
  EXPECT_EQ(writable->add(pieces[0]).error(), EACCES);
  const auto read_only = import(kGranule, false);
  EXPECT_TRUE(read_only->add(pieces[0]).ok());
  struct stat file {};
  ASSERT_EQ(::fstat(fd, &file), 0);
  EXPECT_EQ(file.st_mode & 0777, 0400U);  // other users cannot open it for writing
}

TEST_F(LeaseTest, WritersCannotShrinkTheMemoryOfOthers) {
  start(16 * kMiB);
  const auto buffer = make();
  write(*buffer, 0, pattern(10, 1));
  const auto held = lease(*buffer);
  const std::vector<ExportedMemory> pieces = held->pieces(0, 10).take();
  EXPECT_EQ(::ftruncate(pieces.at(0).descriptor.get(), 0), -1);
  EXPECT_EQ(::fcntl(pieces.at(0).descriptor.get(), F_ADD_SEALS, F_SEAL_GROW), -1);
  EXPECT_TRUE(contents(*buffer) == pattern(10, 1));
}

}  // namespace
}  // namespace gpufs
