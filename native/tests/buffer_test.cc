// Buffer: sizes, holes, growth, limits, addresses, exports, copies, pins.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "buffer_fixture.h"
#include "drivers/driver.h"

namespace gpufs::testing {
namespace {

class BufferTest : public BufferFixture {};

TEST_F(BufferTest, SizesAreBounded) {
  start(8 * kMiB);
  const auto buffer = make();
  const auto byte = pattern(1, 1);
  EXPECT_TRUE(buffer->resize(Buffer::kMaximumBytes).ok());
  EXPECT_EQ(buffer->resize(Buffer::kMaximumBytes + 1).error(), EFBIG);
  EXPECT_EQ(buffer->resize(~std::uint64_t{0}).error(), EFBIG);
  EXPECT_EQ(buffer->write(Buffer::kMaximumBytes, byte).error(), EFBIG);
  EXPECT_EQ(buffer->write(~std::uint64_t{0}, byte).error(), EFBIG);
  EXPECT_EQ(buffer->pin_for_write(~std::uint64_t{0} - 10, 100).error(), EFBIG);
  EXPECT_EQ(buffer->allocate(Buffer::kMaximumBytes - 1, 2, true).error(), EFBIG);
  EXPECT_EQ(buffer->allocate(0, 0, true).error(), EINVAL);
  EXPECT_EQ(buffer->allocate(1, ~std::uint64_t{0}, true).error(), EFBIG);
  EXPECT_EQ(buffer->zero_range(1, ~std::uint64_t{0}, true).error(), EFBIG);
  EXPECT_EQ(buffer->zero_range(1, 0, true).error(), EINVAL);
  EXPECT_EQ(buffer->punch(1, 0).error(), EINVAL);
  EXPECT_TRUE(buffer->punch(~std::uint64_t{0} - 5, 100).ok());
  EXPECT_EQ(buffer->allocate(0, 9 * kMiB, true).error(), ENOSPC);
  EXPECT_EQ(buffer->bytes_held(), 0U);
  EXPECT_TRUE(buffer->pin_for_read(~std::uint64_t{0} - 5, ~std::uint64_t{0}).value().pieces.empty());
  // A huge sparse read is one hole.
  const auto pin = buffer->pin_for_read(5, ~std::uint64_t{0}).take();
  ASSERT_EQ(pin.pieces.size(), 1U);
  EXPECT_EQ(pin.pieces[0].bytes, Buffer::kMaximumBytes - 5);
}

TEST_F(BufferTest, GrowthMovesTheRangeNotTheData) {
  start(512 * kMiB);
  const auto buffer = make();
  const auto data = pattern(kGranule, 9);
  write(*buffer, 0, data);
  const auto pin = buffer->pin_for_read(0, 100).take();
  // Past the first reservation, whatever that is: a new range, the same memory.
  write(*buffer, std::uint64_t{1} << 34, std::span(data).first(10));
  const auto later = buffer->pin_for_read(0, 100).take();
  EXPECT_NE(pin.pieces[0].address, later.pieces[0].address);
  write(*buffer, 0, std::span(data).last(100));
  EXPECT_EQ(std::memcmp(reinterpret_cast<const void*>(pin.pieces[0].address), data.data() + kGranule - 100, 100), 0);
  EXPECT_EQ(plan->copy_within.calls(), 0);
}

TEST_F(BufferTest, APinOutlivesItsBuffer) {
  start(8 * kMiB);
  auto buffer = make();
  write(*buffer, 0, pattern(100, 2));
  auto pin = buffer->pin_for_read(0, 100).take();
  auto writing = buffer->pin_for_write(0, 100).take();
  buffer.reset();
  EXPECT_NE(*reinterpret_cast<const char*>(pin.pieces[0].address), 0);
  pin = {};
  writing = {};
  expect_nothing_left();
}

TEST_F(BufferTest, AWriteUnderWayIsBeforeTheTruncation) {
  start(64 * kMiB);
  const auto buffer = make();
  write(*buffer, 0, pattern(100, 1));
  auto pin = buffer->pin_for_write(50, 3 * kMiB).take();
  const auto junk = pattern(3 * kMiB, 4);
  ASSERT_TRUE(contexts[0]->device().copy_in(pin.pieces[0].address, junk.data(), junk.size()).ok());
  std::thread shrinking([&] { EXPECT_TRUE(buffer->resize(20).ok()); });
  while (buffer->size() != 20) std::this_thread::yield();
  // One that starts now and reaches above the new end comes after it.
  std::thread appending([&] { write(*buffer, 30, pattern(5, 6)); });
  std::this_thread::sleep_for(std::chrono::milliseconds(10));
  buffer->publish(50 + junk.size());
  EXPECT_EQ(buffer->size(), 20U);
  pin = {};
  shrinking.join();
  appending.join();
  EXPECT_EQ(buffer->size(), 35U);
  EXPECT_EQ(contents(*buffer, 30, 100), pattern(5, 6));
  EXPECT_TRUE(all_zero(contents(*buffer, 20, 10)));
  ASSERT_TRUE(buffer->resize(4 * kMiB).ok());
  EXPECT_TRUE(all_zero(contents(*buffer, 35, 4 * kMiB)));
}

TEST_F(BufferTest, DiscardingSparesOtherWriters) {
  start(64 * kMiB);
  const auto buffer = make();
  const auto junk = pattern(kMiB, 4);
  auto failing = buffer->pin_for_write(0, kMiB).take();
  auto other = buffer->pin_for_write(1000, 500).take();
  ASSERT_TRUE(contexts[0]->device().copy_in(failing.pieces[0].address, junk.data(), junk.size()).ok());
  failing = {};
  ASSERT_TRUE(buffer->discard_above_size(0, kMiB).ok());
  buffer->publish(1500);
  other = {};
  EXPECT_TRUE(all_zero(contents(*buffer, 0, 1000)));
  EXPECT_EQ(contents(*buffer, 1000, 500), std::vector<std::byte>(junk.begin() + 1000, junk.begin() + 1500));
  ASSERT_TRUE(buffer->resize(kMiB).ok());
  EXPECT_TRUE(all_zero(contents(*buffer, 1500, kMiB)));
}

TEST_F(BufferTest, CopiesBetweenDevices) {
  start(64 * kMiB, 0, 2);
  const auto from = make(0);
  const auto to = make(1);
  const auto data = pattern(5 * kMiB, 1);
  write(*from, kMiB, data);
  EXPECT_EQ(to->copy_from(*from, 0, 3, ~std::uint64_t{0}, nullptr).value(), 6 * kMiB);
  EXPECT_EQ(to->size(), 6 * kMiB + 3);
  EXPECT_EQ(contents(*to, 3 + kMiB, 5 * kMiB), data);
  EXPECT_GT(plan->peer.calls(), 0);
  EXPECT_EQ(to->copy_from(*from, 6 * kMiB, 0, 10, nullptr).value(), 0U);
  // No direct way: through the host.
  plan->peer.at(1, 1000, EOPNOTSUPP);
  const auto staged = make(1);
  EXPECT_EQ(staged->copy_from(*from, kMiB, 0, 5 * kMiB, nullptr).value(), 5 * kMiB);
  EXPECT_EQ(contents(*staged), data);
  plan->peer.at(1);
  EXPECT_EQ(staged->copy_from(*from, kMiB, 10 * kMiB, 5 * kMiB, nullptr).error(), EIO);
  EXPECT_EQ(staged->size(), 5 * kMiB);
}

TEST_F(BufferTest, SmallFilesMoveOutWhenTheyGrow) {
  start(64 * kMiB, 65536);
  const auto buffer = make();
  const auto data = pattern(200'000, 1);
  std::uint64_t done = 0;
  for (const std::uint64_t step : {100U, 500U, 4000U, 60'936U, 1U, 100'000U}) {
    write(*buffer, done, std::span(data).subspan(done, step));
    done += step;
    ASSERT_EQ(contents(*buffer),
              std::vector<std::byte>(data.begin(), data.begin() + static_cast<std::ptrdiff_t>(done)));
    ASSERT_EQ(buffer->bytes_held(), done <= 65536 ? std::bit_ceil(std::max<std::uint64_t>(done, 512)) : kGranule);
  }
  EXPECT_EQ(used(), kGranule);
  EXPECT_EQ(contexts[0]->held_bytes(), kGranule);
  // Emptied, it may be small again.
  ASSERT_TRUE(buffer->resize(0).ok());
  write(*buffer, 0, std::span(data).first(10));
  EXPECT_EQ(buffer->bytes_held(), 512U);
  // A sparse size does not need memory; a write beyond the largest slot does.
  ASSERT_TRUE(buffer->resize(kMiB * 10).ok());
  EXPECT_EQ(buffer->bytes_held(), 512U);
  EXPECT_EQ(buffer->seek_hole(0).value(), 512U);
  write(*buffer, 9 * kMiB, std::span(data).first(10));
  EXPECT_EQ(buffer->bytes_held(), 2 * kGranule);
  EXPECT_EQ(contents(*buffer, 0, 10), std::vector<std::byte>(data.begin(), data.begin() + 10));
  EXPECT_TRUE(all_zero(contents(*buffer, 10, 9 * kMiB - 10)));
}

TEST_F(BufferTest, OneFileAfterTheOtherTakesTheSameSlabs) {
  start(16 * kMiB, 65536);
  const auto data = pattern(65536, 1);
  const auto grow = [&] {
    const auto buffer = make();
    for (std::size_t bytes = 512; bytes <= data.size(); bytes *= 2) write(*buffer, 0, std::span(data).first(bytes));
    EXPECT_EQ(contents(*buffer), data);
  };
  grow();
  expect_nothing_left();
  const int before = plan->populate.calls();
  for (int files = 0; files < 10; ++files) grow();
  EXPECT_EQ(plan->populate.calls(), before);
  // A full device gets their memory.
  const auto large = make();
  write(*large, 0, pattern(16 * kMiB, 2));
  EXPECT_EQ(contents(*large), pattern(16 * kMiB, 2));
}

TEST_F(BufferTest, MovingOutWaitsForWritersAndLosesNothing) {
  start(64 * kMiB, 65536);
  const auto buffer = make();
  const auto data = pattern(1000, 1);
  write(*buffer, 0, data);
  auto pin = buffer->pin_for_write(0, 100).take();
  std::thread growing([&] { write(*buffer, 70'000, data); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(buffer->size(), 1000U);
  EXPECT_EQ(contents(*buffer), data);  // readers go on
  const auto fresh = pattern(100, 7);
  ASSERT_TRUE(contexts[0]->device().copy_in(pin.pieces[0].address, fresh.data(), 100).ok());
  pin = {};
  growing.join();
  EXPECT_EQ(contents(*buffer, 0, 100), fresh);
  EXPECT_EQ(contents(*buffer, 70'000, 1000), data);
}

TEST_F(BufferTest, ReadersGetDescriptorsThatCannotBeWrittenTo) {
  start(16 * kMiB);
  const auto buffer = make();
  write(*buffer, 0, pattern(10, 1));
  const auto held = buffer->lease(false, true, "").take();
  const std::vector<ExportedMemory> pieces = held->pieces(0, 10).take();
  ASSERT_EQ(pieces.size(), 1U);
  const int fd = pieces[0].descriptor.get();
  EXPECT_EQ(::fcntl(fd, F_GETFD), FD_CLOEXEC);
  EXPECT_EQ(::fcntl(fd, F_GETFL) & O_ACCMODE, O_RDONLY);
  EXPECT_EQ(::mmap(nullptr, kGranule, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
  EXPECT_EQ(::ftruncate(fd, 0), -1);
  const std::shared_ptr<Device> device = open_device("host", "").take();
  const std::unique_ptr<ImportedRange> writable = device->create_import(kGranule, ImportAccess::kWrite).take();
  EXPECT_EQ(writable->add(pieces[0]).error(), EACCES);
  const std::unique_ptr<ImportedRange> read_only = device->create_import(kGranule, ImportAccess::kRead).take();
  EXPECT_TRUE(read_only->add(pieces[0]).ok());
  struct stat file {};
  ASSERT_EQ(::fstat(fd, &file), 0);
  EXPECT_EQ(file.st_mode & 0777, 0400U);  // other users cannot open it for writing
}

TEST_F(BufferTest, WritersCannotShrinkTheMemoryOfOthers) {
  start(16 * kMiB);
  const auto buffer = make();
  write(*buffer, 0, pattern(10, 1));
  const auto held = buffer->lease(true, true, "").take();
  const std::vector<ExportedMemory> pieces = held->pieces(0, 10).take();
  EXPECT_EQ(::ftruncate(pieces.at(0).descriptor.get(), 0), -1);
  EXPECT_EQ(::fcntl(pieces.at(0).descriptor.get(), F_ADD_SEALS, F_SEAL_GROW), -1);
  EXPECT_TRUE(contents(*buffer) == pattern(10, 1));
}

}  // namespace
}  // namespace gpufs::testing
