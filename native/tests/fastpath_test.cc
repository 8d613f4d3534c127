// Transfers by the vendors' fastpaths, over the fakes of their libraries: which calls are made, with what, and what
// becomes of a transfer when they fail. What only one vendor has: cufile_test.cc, hip_file_test.cc.

#include <fcntl.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <string>

#include "cufile_fixture.h"
#include "hip_file_fixture.h"

namespace gpufs {
namespace {

using namespace gpu_test;

template <typename Files>
class VendorFiles : public Files {};

struct VendorNames {
  template <typename Files>
  static std::string GetName(int) {
    return std::is_same_v<Files, hip_test::HipFiles> ? "HipAmdFile" : "Cufile";
  }
};
using Vendors = ::testing::Types<cuda_test::CufileFiles, hip_test::HipFiles>;
TYPED_TEST_SUITE(VendorFiles, Vendors, VendorNames);

// ---- what is called ----

TYPED_TEST(VendorFiles, TransfersDoNotEndTheProgramsCaptures) {
  const auto data = pattern(4 * kMiB, 1);
  this->setup_.program_captures = true;
  START_OR_SKIP(data);
  FastpathRig& rig = *this->rig_;
  for (const FastpathMode mode : {FastpathMode::kAuto, FastpathMode::kOff}) {
    TransferRequest request = rig.load();
    request.fastpath = mode;
    const TransferProgress done = rig.finish(request);
    EXPECT_TRUE(done.status.ok()) << done.status.message();
  }
  EXPECT_EQ(this->control_.calls("captures ended"), 0);
}

TYPED_TEST(VendorFiles, AlignedRequestsTakeIt) {
  const auto data = pattern(4 * kMiB, 1);
  START_OR_SKIP(data);
  FastpathRig& rig = *this->rig_;
  TransferProgress done = rig.finish(rig.load());
  ASSERT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_EQ(done.path_bytes[0], data.size());
  EXPECT_EQ(done.path_bytes[1], 0U);
  EXPECT_EQ(done.refusals, 0U);
  EXPECT_EQ(rig.buffer_contents(), data);
  EXPECT_EQ(this->control_.calls(this->kHostCopy), 0);  // no byte by way of the host
  std::vector<FileCall> calls = this->calls();
  ASSERT_EQ(calls.size(), data.size() / kChunk);
  for (std::size_t index = 0; index < calls.size(); ++index) {
    EXPECT_FALSE(calls[index].write);
    EXPECT_EQ(calls[index].fd, rig.file->direct_fd());
    EXPECT_NE(::fcntl(calls[index].fd, F_GETFL) & O_DIRECT, 0);
    EXPECT_EQ(calls[index].offset, static_cast<std::int64_t>(index * kChunk));
    EXPECT_EQ(calls[index].bytes, kChunk);
    EXPECT_EQ(calls[index].address, calls[0].address + index * kChunk);
    EXPECT_TRUE(calls[index].prepared);
  }
  EXPECT_EQ(rig.counted(Direction::kLoad, Path::kFastpath, &observe::Block::bytes), data.size());
  EXPECT_EQ(rig.counted(Direction::kLoad, Path::kFallback, &observe::Block::ended), 0U);

  const auto other = pattern(4 * kMiB, 2);
  rig.fill_buffer(other);
  done = rig.finish(rig.store());
  ASSERT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_EQ(done.path_bytes[0], data.size());
  EXPECT_EQ(rig.file_contents(), other);
  calls = this->calls();
  EXPECT_EQ(std::count_if(calls.begin(), calls.end(), [](const auto& call) { return call.write; }), 16);
}

TYPED_TEST(VendorFiles, NoCallIsLargerThanTheKernelsLimit) {
  START_OR_SKIP(pattern(4096, 4));
  this->plan(EIO, 0);
  // Not memory of the device: what counts is what is asked for.
  (void)this->rig_->fastpath_file().move(Direction::kLoad, 4096, std::uint64_t{5} << 30, 0);
  ASSERT_EQ(this->calls().size(), 1U);
  EXPECT_EQ(this->calls()[0].bytes, 0x7ffff000U);
}

TYPED_TEST(VendorFiles, InterruptionsAreResumedAndShortCopiesContinued) {
  constexpr std::uint64_t kBytes = 8 * 4096;
  START_OR_SKIP(pattern(kBytes, 6));
  const DeviceAddress address = this->memory(kBytes);
  FastpathFile& file = this->rig_->fastpath_file();
  this->plan(EINTR, 0);
  this->plan(this->kFailuresMove ? EINTR : 0, 4096);
  this->plan(0, 8192);
  Moved moved = file.move(Direction::kLoad, address, kBytes, 0);
  EXPECT_TRUE(moved.status.ok()) << moved.status.message();
  EXPECT_EQ(moved.bytes, kBytes);
  const std::vector<FileCall> calls = this->calls();
  ASSERT_EQ(calls.size(), 4U);
  const std::vector<std::int64_t> offsets = {0, 0, 4096, 3 * 4096};
  for (std::size_t index = 0; index < calls.size(); ++index) {
    EXPECT_EQ(calls[index].offset, offsets[index]);
    EXPECT_EQ(calls[index].address, address + static_cast<std::uint64_t>(offsets[index]));
    EXPECT_EQ(calls[index].bytes, kBytes - static_cast<std::uint64_t>(offsets[index]));
  }
  // What cannot be continued at an aligned offset ends it; and nothing moved is the end.
  for (const int error : {0, this->kFailuresMove ? EINTR : 0}) {
    this->plan(error, 4096 + 512);
    moved = file.move(Direction::kLoad, address, kBytes, 0);
    EXPECT_TRUE(moved.status.ok());
    EXPECT_EQ(moved.bytes, 4096U + 512U);
  }
  this->plan(0, 0);
  EXPECT_EQ(file.move(Direction::kLoad, address, kBytes, 0).bytes, 0U);
  EXPECT_EQ(this->calls().size(), 7U);
}

TYPED_TEST(VendorFiles, AFileThatBecomesShorterEndsThere) {
  const auto data = pattern(2 * kMiB, 8);
  START_OR_SKIP(data);
  FastpathRig& rig = *this->rig_;
  std::atomic<int> asked{0};
  rig.operations.on_size = [&](std::uint64_t* bytes) {  // at first as large as it once was
    *bytes = asked++ == 0 ? 4 * kMiB : data.size();
    return 0;
  };
  rig.open_file();
  TransferRequest wanted = rig.load();
  wanted.fastpath = FastpathMode::kRequire;
  const TransferProgress done = rig.finish_in_order(wanted);
  EXPECT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_EQ(done.prefix, data.size());
  EXPECT_EQ(rig.buffer_contents(), data);
}

TYPED_TEST(VendorFiles, HolesOfTheBufferNeedNoFallback) {
  START_OR_SKIP(std::vector<std::byte>(1));
  FastpathRig& rig = *this->rig_;
  auto data = pattern(3 * kGranule, 14);
  rig.fill_buffer(data);
  ASSERT_OK(rig.buffer->punch(kGranule, kGranule));
  std::fill_n(data.begin() + kGranule, kGranule, std::byte{0});
  for (const FastpathMode mode : {FastpathMode::kAuto, FastpathMode::kRequire}) {
    TransferRequest wanted = rig.store();
    wanted.fastpath = mode;
    const TransferProgress done = rig.finish(wanted);
    ASSERT_TRUE(done.status.ok()) << done.status.message();
    EXPECT_GT(done.path_bytes[0], 0U);
    EXPECT_EQ(done.path_bytes[1], 0U);
    EXPECT_TRUE(rig.file_contents() == data);
  }
}

// ---- when it fails in the middle ----

TYPED_TEST(VendorFiles, WhereItAloneIsAllowedTheRestStaysUnmoved) {
  START_OR_SKIP(pattern(4 * kMiB, 10));
  FastpathRig& rig = *this->rig_;
  TransferRequest wanted = rig.load();
  wanted.fastpath = FastpathMode::kRequire;
  this->plan_good(1);
  this->plan(ENODEV, kChunk / 2);
  const TransferProgress done = rig.finish_in_order(wanted);
  EXPECT_EQ(done.status.error(), EOPNOTSUPP);
  EXPECT_NE(done.status.message().find("No such device"), std::string::npos) << done.status.message();
  EXPECT_EQ(done.prefix, kChunk + (this->kFailuresMove ? kChunk / 2 : 0));
  EXPECT_EQ(done.path_bytes[1], 0U);
  EXPECT_EQ(rig.refused(Direction::kLoad, Refusal::kFailedBefore), 1U);
  // A call that stops without a word is a failure, too, unless the file ends there.
  this->plan(0, 0);
  EXPECT_EQ(rig.finish_in_order(wanted).status.error(), EIO);
}

TYPED_TEST(VendorFiles, HolesBeforeAFailureAreNoneOfTheBytesOfTheRest) {
  this->io_options_.chunk_bytes = 4 * kGranule;
  START_OR_SKIP(std::vector<std::byte>(1));
  FastpathRig& rig = *this->rig_;
  auto data = pattern(3 * kGranule, 15);
  rig.fill_buffer(data);
  ASSERT_OK(rig.buffer->punch(0, 2 * kGranule));
  std::fill_n(data.begin(), 2 * kGranule, std::byte{0});
  this->plan(ENODEV, 0);
  const TransferProgress done = rig.finish(rig.store());
  ASSERT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_EQ(done.hole_bytes, 2 * kGranule);
  EXPECT_EQ(done.path_bytes[1], kGranule);
  EXPECT_EQ(rig.counted(Direction::kStore, Path::kFastpath, &observe::Block::bytes), 0U);
  EXPECT_EQ(rig.counted(Direction::kStore, Path::kFallback, &observe::Block::bytes), kGranule);
  EXPECT_TRUE(rig.file_contents() == data);
}

// ---- what it is not for ----

TYPED_TEST(VendorFiles, WithoutTheVendorsPartOfTheKernelItIsRefused) {
  START_OR_SKIP(pattern(kMiB, 12), false);
  FastpathRig& rig = *this->rig_;
  const Result<FastpathFile*> attached = rig.file->fastpath_file(*rig.path);
  ASSERT_FALSE(attached.ok());
  EXPECT_EQ(attached.error(), EOPNOTSUPP);

  TransferRequest wanted = rig.load();
  wanted.fastpath = FastpathMode::kRequire;
  const TransferProgress done = rig.finish(wanted);
  EXPECT_EQ(done.status.error(), EOPNOTSUPP);
  EXPECT_EQ(done.status.message(), std::string("fastpath is required but refused: ") + this->kNotReadyName);
  EXPECT_EQ(rig.buffer->size(), 0U);
  EXPECT_EQ(rig.refused(Direction::kLoad, this->kNotReady), 1U);
  EXPECT_TRUE(this->calls().empty());
}

TYPED_TEST(VendorFiles, MemoryOfAProgramMustBeTheDevices) {
  const auto data = pattern(kMiB, 13);
  START_OR_SKIP(data);
  FastpathRig& rig = *this->rig_;
  TransferRequest wanted = rig.load();
  wanted.fastpath = FastpathMode::kRequire;
  const DeviceAddress address = this->memory(2 * kMiB);
  wanted.target = program_memory(rig.device, address + 4096, kMiB);
  TransferProgress done = rig.finish(wanted);
  EXPECT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_EQ(done.path_bytes[0], kMiB);
  const std::size_t before = this->calls().size();
  ASSERT_GT(before, 0U);
  EXPECT_EQ(this->calls()[0].address, address + 4096);

  std::vector<std::byte> host(kMiB + 4096);
  const auto aligned = (reinterpret_cast<DeviceAddress>(host.data()) + 4095) / 4096 * 4096;
  wanted.target = program_memory(rig.device, aligned, kMiB);
  done = rig.finish(wanted);
  EXPECT_EQ(done.status.error(), EOPNOTSUPP);
  EXPECT_EQ(done.status.message(), "fastpath is required but refused: memory_kind");
  EXPECT_EQ(rig.refused(Direction::kLoad, Refusal::kMemoryKind), 1U);
  // Nor is its alignment anybody's but its own.
  wanted.target = program_memory(rig.device, address + 1, kMiB);
  done = rig.finish(wanted);
  EXPECT_EQ(done.status.message(), "fastpath is required but refused: memory_unaligned");
  EXPECT_EQ(this->calls().size(), before);
}

TEST(Fastpaths, OtherDriversHaveNone) {
  EXPECT_EQ(make_fastpath("none of these")->refusals(), mask_of(Refusal::kNoVendorCall));
}

}  // namespace
}  // namespace gpufs
