// Loads of files with holes: what is left out, what is cleared, and what is counted.
#include "base/pages.h"
#include "io/file_io.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/math.h"
#include "fake_transfer_rig.h"
#include "memory/registered_buffer.h"
#include "results.h"

namespace gpufs {
namespace {

using namespace testing;

constexpr std::uint64_t kSmallGranule = 16 * kPageBytes;

// A file of runs of data; pages are what it has holes in.
class SparseFile {
 public:
  explicit SparseFile(std::uint64_t size) {
    std::string path = "/dev/shm/gpufs-holes-test-XXXXXX";
    fd_ = UniqueFd(::mkostemp(path.data(), O_CLOEXEC));
    EXPECT_TRUE(fd_.valid());
    ::unlink(path.c_str());
    EXPECT_EQ(::ftruncate(fd_.get(), static_cast<off_t>(size)), 0);
    pages_.resize((size + kPageBytes - 1) / kPageBytes);
    size_ = size;
  }
  void write(std::uint64_t page) {
    const char byte = 1;
    ASSERT_EQ(::pwrite(fd_.get(), &byte, 1, static_cast<off_t>(page * kPageBytes)), 1);
    pages_[page] = true;
  }
  // Whether a byte of the file is in a page that was written.
  [[nodiscard]] bool data(std::uint64_t offset) const { return pages_[offset / kPageBytes]; }
  [[nodiscard]] std::uint64_t size() const { return size_; }
  std::shared_ptr<BackingFile> open() { return must(BackingFile::open(fd_.get(), operations)); }
  PlannedFileOps operations;

 private:
  UniqueFd fd_;
  std::vector<bool> pages_;
  std::uint64_t size_ = 0;
};

Extents search(SparseFile& file, HoleSearch wanted) {
  std::atomic<bool> cancelled{false};
  wanted.file_size = file.size();
  return must(holes_of(*file.open(), wanted, cancelled));
}

// Against the plain rule: no byte of data is left out; every granule of the target without data is.
TEST(FileHoles, AsTheRuleHasIt) {
  std::mt19937 random(7);
  for (int round = 0; round < 20; ++round) {
    SparseFile file(random() % (40 * kSmallGranule) + 1);
    const std::uint64_t pages = (file.size() + kPageBytes - 1) / kPageBytes;
    for (auto count = random() % 12; count > 0; --count) file.write(random() % pages);
    HoleSearch wanted;
    wanted.granule = kSmallGranule;
    wanted.file_offset = round % 3 == 0 ? 0 : random() % file.size();
    wanted.target_offset = round % 2 == 0 ? wanted.file_offset : random() % (3 * kSmallGranule);
    wanted.bytes = random() % (file.size() - wanted.file_offset) + 1;
    std::vector<bool> left_out(wanted.bytes);
    std::uint64_t before = 0;
    for (const Extent& hole : search(file, wanted)) {
      ASSERT_GT(hole.bytes, 0U);
      ASSERT_TRUE(hole.offset > before || hole.offset == 0) << "holes meet, or are out of order";
      before = hole.end();
      ASSERT_LE(before, wanted.bytes);
      std::fill_n(left_out.begin() + static_cast<std::ptrdiff_t>(hole.offset), hole.bytes, true);
    }
    // Aligned alike: the granules that hold data are exactly those that are not left out.
    const bool alike = wanted.target_offset % kPageBytes == wanted.file_offset % kPageBytes;
    for (std::uint64_t start = 0; start < wanted.bytes;) {
      const std::uint64_t granule_end = std::min(
          wanted.bytes, round_down(wanted.target_offset + start, kSmallGranule) + kSmallGranule - wanted.target_offset);
      bool data = false;
      bool out = true;
      for (std::uint64_t at = start; at < granule_end; ++at) {
        data = data || file.data(wanted.file_offset + at);
        out = out && left_out[at];
        ASSERT_FALSE(left_out[at] && file.data(wanted.file_offset + at)) << "data at " << at << " is left out";
      }
      if (alike) {
        EXPECT_EQ(out, !data) << start;
      }
      start = granule_end;
    }
  }
}

TEST(FileHoles, ADenseFileIsNotSearched) {
  SparseFile file(8 * kSmallGranule);
  for (std::uint64_t page = 0; page < 8 * kSmallGranule / kPageBytes; ++page) file.write(page);
  EXPECT_TRUE(search(file, {.bytes = 8 * kSmallGranule, .granule = kSmallGranule}).empty());
  EXPECT_EQ(file.operations.seeks, 0);
}

TEST(FileHoles, WithoutAUsefulAnswerAllIsData) {
  SparseFile file(8 * kSmallGranule);
  for (const int error : {EINVAL, 0}) {
    file.operations.on_seek = [&](std::uint64_t offset, int, std::uint64_t* found) {
      *found = offset;  // data and a hole at once, which leads nowhere
      errno = error;
      return error == 0 ? 0 : -1;
    };
    EXPECT_TRUE(search(file, {.bytes = file.size(), .granule = kSmallGranule}).empty());
  }
}

// ---- transfers ----

class HoleTransfers : public EitherWay {};
INSTANTIATE_TEST_SUITE_P(, HoleTransfers, ::testing::Bool(), EitherWay::name);

// Makes the file have data in these granules, and holes elsewhere.
std::vector<std::byte> make_sparse(FakeRig& rig, std::uint64_t bytes, const std::vector<std::uint64_t>& granules) {
  std::vector<std::byte> data(bytes);
  EXPECT_EQ(::ftruncate(rig.fd(), static_cast<off_t>(bytes)), 0);
  for (const std::uint64_t granule : granules) {
    const std::uint64_t start = granule * gpu_test::kGranule;
    const auto part = pattern(std::min(gpu_test::kGranule, bytes - start), static_cast<unsigned>(granule) + 1);
    std::copy(part.begin(), part.end(), data.begin() + static_cast<std::ptrdiff_t>(start));
    EXPECT_EQ(::pwrite(rig.fd(), part.data(), part.size(), static_cast<off_t>(start)),
              static_cast<ssize_t>(part.size()));
  }
  rig.open_file();
  return data;
}

TEST_P(HoleTransfers, HolesOfAFileClearTheBuffer) {
  for (const bool sparse : {true, false}) {
    FakeRig rig(GetParam(), FakeRig::without_fastpath(), "/dev/shm");
    const std::uint64_t size = 10 * gpu_test::kGranule;
    const auto data = make_sparse(rig, size, {3, 7});
    auto expected = pattern(size + 3 * gpu_test::kGranule, 9);
    rig.fill_buffer(expected);
    TransferRequest wanted = rig.load();
    wanted.sparse = sparse;
    wanted.target_offset = 100;  // parts of granules at both ends
    const TransferProgress done = rig.finish(wanted);
    ASSERT_TRUE(done.status.ok()) << done.status.message();
    EXPECT_EQ(done.hole_bytes > 0, sparse);
    std::copy(data.begin(), data.end(), expected.begin() + 100);
    EXPECT_TRUE(rig.buffer_contents() == expected);
    EXPECT_EQ(rig.buffer->bytes_held() < expected.size(), sparse);
  }
}

TEST_P(HoleTransfers, AFileThatIsTruncatedInAHole) {
  FakeRig rig(GetParam(), FakeRig::without_fastpath(), "/dev/shm");
  const std::uint64_t left = 5 * gpu_test::kGranule + 1000;
  (void)make_sparse(rig, 12 * gpu_test::kGranule, {0, 1, 10});
  rig.operations.on_read = [&](int, void*, std::size_t, std::uint64_t, ssize_t*) {
    EXPECT_EQ(::ftruncate(rig.fd(), static_cast<off_t>(left)), 0);
    return false;
  };
  const TransferProgress done = rig.finish_in_order(rig.load());
  EXPECT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_EQ(done.prefix, left);
  EXPECT_EQ(rig.buffer->size(), left);
}

TEST_P(HoleTransfers, MemoryOfAProgramGetsZerosForHoles) {
  for (const bool registered : {false, true}) {
    FakeRig rig(GetParam(), FakeRig::without_fastpath(), "/dev/shm");
    const auto data = make_sparse(rig, 4 * gpu_test::kGranule, {2});
    std::vector<std::byte> memory(data.size(), std::byte{0x5a});
    const auto address = reinterpret_cast<DeviceAddress>(memory.data());
    TransferRequest wanted = rig.load();
    if (registered) {
      wanted.target = std::make_shared<RegisteredBuffer>(rig.device, std::make_unique<ForeignMapping>(address),
                                                         memory.size(), /*writable=*/true);
    } else {
      wanted.target = program_memory(rig.device, address, memory.size());
    }
    const TransferProgress done = rig.finish(wanted);
    ASSERT_TRUE(done.status.ok()) << done.status.message();
    EXPECT_EQ(done.hole_bytes, 0U);
    EXPECT_TRUE(memory == data);
  }
}

}  // namespace
}  // namespace gpufs
