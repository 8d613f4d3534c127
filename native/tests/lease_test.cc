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
  static Status add(ImportedRange& range, Buffer::Lease& from) {
    Result<std::vector<ExportedMemory>> pieces = from.pieces(range.bytes(), SIZE_MAX);
    EXPECT_TRUE(pieces.ok()) << pieces.status().message();
    for (const ExportedMemory& piece : pieces.value()) {
      if (Status status = range.add(piece); !status.ok()) return status;
    }
    return {};
  }
  static char* at(const ImportedRange& range, std::uint64_t offset) {
    return reinterpret_cast<char*>(range.base() + offset);
  }
};

TEST_F(LeaseTest, SharedMemoryIsTheFile) {
  start(64 * kMiB, 65536);
  const auto buffer = make();
  const auto data = pattern(100, 3);
  write(*buffer, 0, data);
  EXPECT_EQ(buffer->bytes_held(), 512U);  // in a slab until it is shared
  const auto held = lease(*buffer);
  EXPECT_EQ(buffer->bytes_held(), kGranule);
  EXPECT_EQ(held->bytes(), 100U);
  const auto range = import(16 * kMiB);
  ASSERT_TRUE(add(*range, *held).ok());
  EXPECT_EQ(range->bytes(), kGranule);
  EXPECT_EQ(std::memcmp(at(*range, 0), data.data(), data.size()), 0);
  *at(*range, 5) = 'x';
  EXPECT_EQ(contents(*buffer, 5, 1)[0], std::byte{'x'});
  write(*buffer, 6, pattern(1, 9));
  EXPECT_EQ(std::byte(*at(*range, 6)), pattern(1, 9)[0]);
}

TEST_F(LeaseTest, GrowthIsSharedAfterARefresh) {
  start(256 * kMiB);
  const auto buffer = make();
  write(*buffer, 0, pattern(kMiB, 1));
  const auto held = lease(*buffer);
  const auto range = import(100 * kMiB);
  ASSERT_TRUE(add(*range, *held).ok());
  *at(*range, 0) = 'a';
  // Past the addresses that the buffer has reserved, and with a hole.
  write(*buffer, 90 * kMiB, pattern(10, 2));
  EXPECT_EQ(held->bytes(), kMiB);
  ASSERT_TRUE(held->refresh().ok());
  EXPECT_EQ(held->bytes(), 90 * kMiB + 10);
  ASSERT_TRUE(add(*range, *held).ok());
  EXPECT_EQ(range->bytes(), 92 * kMiB);
  EXPECT_EQ(std::memcmp(at(*range, 90 * kMiB), pattern(10, 2).data(), 10), 0);
  *at(*range, 50 * kMiB) = 'b';
  EXPECT_EQ(contents(*buffer, 0, 1)[0], std::byte{'a'});
  EXPECT_EQ(contents(*buffer, 50 * kMiB, 1)[0], std::byte{'b'});
  write(*buffer, 101 * kMiB, pattern(10, 2));
  ASSERT_TRUE(held->refresh().ok());
  EXPECT_EQ(add(*range, *held).error(), EFBIG);
}

TEST_F(LeaseTest, LeasedMemoryCannotBeTakenAway) {
  start(64 * kMiB);
  const auto buffer = make();
  const auto data = pattern(5 * kMiB, 1);
  write(*buffer, 0, data);
  auto held = lease(*buffer, false);
  write(*buffer, 5 * kMiB, data);
  for (const std::uint64_t size : {std::uint64_t{0}, 5 * kMiB - 1}) {
    const Status refused = buffer->resize(size);
    EXPECT_EQ(refused.error(), EBUSY);
    EXPECT_NE(refused.message().find("a test"), std::string::npos);
  }
  EXPECT_EQ(buffer->punch(4 * kMiB, kGranule).error(), EBUSY);
  EXPECT_EQ(buffer->punch(5 * kMiB - 1, 1).error(), EBUSY);
  EXPECT_EQ(buffer->size(), 10 * kMiB);
  EXPECT_TRUE(contents(*buffer, 0, 5 * kMiB) == data);
  EXPECT_TRUE(buffer->punch(6 * kMiB, kGranule).ok());
  EXPECT_TRUE(buffer->zero_range(0, kMiB, true).ok());
  EXPECT_TRUE(buffer->resize(5 * kMiB).ok());
  EXPECT_TRUE(buffer->resize(50 * kMiB).ok());
  EXPECT_TRUE(buffer->resize(5 * kMiB).ok());
  const auto second = lease(*buffer, true);
  held.reset();
  EXPECT_EQ(buffer->resize(0).error(), EBUSY);
}

TEST_F(LeaseTest, TheMemoryLivesUntilTheLastLeaseIsClosed) {
  start(64 * kMiB);
  auto buffer = make();
  write(*buffer, 0, pattern(5 * kMiB, 1));
  auto first = lease(*buffer);
  auto second = lease(*buffer);
  buffer.reset();
  first.reset();
  EXPECT_EQ(used(), 6 * kMiB);
  {
    const auto range = import(6 * kMiB, false);
    ASSERT_TRUE(add(*range, *second).ok());
    second.reset();
    EXPECT_EQ(std::memcmp(at(*range, kMiB), pattern(5 * kMiB, 1).data() + kMiB, kMiB), 0);
  }
  expect_nothing_left();
}

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

TEST_F(LeaseTest, HolesGetMemoryForWritersAndRefuseReaders) {
  start(16 * kMiB);
  const auto buffer = make();
  ASSERT_TRUE(buffer->resize(6 * kMiB).ok());
  write(*buffer, 4 * kMiB, pattern(1, 1));
  EXPECT_EQ(buffer->lease(false, true, "").error(), ENODATA);
  EXPECT_EQ(buffer->bytes_held(), kGranule);
  EXPECT_EQ(lease(*buffer)->bytes(), 6 * kMiB);
  EXPECT_EQ(buffer->bytes_held(), 3 * kGranule);
  EXPECT_EQ(lease(*buffer, false)->bytes(), 6 * kMiB);
  ASSERT_TRUE(buffer->resize(17 * kMiB).ok());
  EXPECT_EQ(buffer->lease(true, true, "").error(), ENOSPC);
  EXPECT_EQ(buffer->bytes_held(), 3 * kGranule);
}

TEST_F(LeaseTest, MemoryBeyondTheFileIsNotShared) {
  start(64 * kMiB);
  const auto buffer = make();
  write(*buffer, 0, pattern(kMiB, 1));
  ASSERT_TRUE(buffer->allocate(20 * kMiB, kGranule, true).ok());
  const auto held = lease(*buffer, false);
  const auto range = import(64 * kMiB, false);
  ASSERT_TRUE(add(*range, *held).ok());
  EXPECT_EQ(range->bytes(), kGranule);
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

TEST_F(LeaseTest, AnAddressInThisProcessStaysWhereItIs) {
  start(256 * kMiB);
  const auto buffer = make();
  write(*buffer, 0, pattern(kMiB, 1));
  Result<std::shared_ptr<Buffer::Lease>> local = buffer->lease(true, false, "");
  ASSERT_TRUE(local.ok());
  auto* const address = reinterpret_cast<char*>(local.value()->address());
  write(*buffer, 200 * kMiB, pattern(1, 1));  // moves the range
  address[3] = 'y';
  EXPECT_EQ(contents(*buffer, 3, 1)[0], std::byte{'y'});
  EXPECT_EQ(local.value()->pieces(0, 1).error(), EINVAL);
  ASSERT_TRUE(local.value()->refresh().ok());
  EXPECT_EQ(reinterpret_cast<char*>(local.value()->address())[3], 'y');
}

TEST_F(LeaseTest, MappingsTakeOnlyThePiecesThatFollow) {
  start(64 * kMiB);
  const auto buffer = make();
  write(*buffer, 0, pattern(4 * kMiB, 1));
  const auto held = lease(*buffer);
  std::vector<ExportedMemory> pieces = held->pieces(0, 10).take();
  const auto range = import(8 * kMiB);
  pieces.at(0).offset = kGranule;
  EXPECT_EQ(range->add(pieces[0]).error(), EINVAL);
  pieces.at(0) = {0, 6 * kMiB, std::move(pieces.at(0).descriptor)};
  EXPECT_EQ(range->add(pieces[0]).error(), EINVAL);  // longer than the memory
  EXPECT_EQ(range->add({0, kGranule, UniqueFd()}).error(), EINVAL);
  EXPECT_EQ(range->bytes(), 0U);
}

}  // namespace
}  // namespace gpufs
