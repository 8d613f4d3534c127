// Which pieces of a transfer go by a vendor's direct path, and what happens when it fails.

#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "fake_transfer_rig.h"

namespace gpufs {
namespace {

using namespace testing;

TEST(Fastpath, AlignedRequestsTakeIt) {
  for (const bool host : {true, false}) {
    FakeRig rig(host);
    const auto data = pattern(4 * kMiB);
    rig.make_file(data);
    rig.make_buffer(16 * kMiB);
    TransferProgress done = rig.finish(rig.load());
    ASSERT_TRUE(done.status.ok()) << done.status.message();
    EXPECT_EQ(done.path_bytes[0], data.size());
    EXPECT_EQ(done.path_bytes[1], 0U);
    EXPECT_EQ(done.refusals, 0U);
    EXPECT_TRUE(rig.buffer_has(data));
    done = rig.finish(rig.store());
    EXPECT_EQ(done.path_bytes[0], data.size());
    EXPECT_EQ(rig.file_contents(), data);
  }
}

TEST(Fastpath, UnalignedRequestsAreSplit) {
  for (const bool host : {true, false}) {
    FakeRig rig(host);
    const auto data = pattern(4 * kMiB + 5000);
    rig.make_file(data);
    rig.make_buffer(16 * kMiB);
    TransferRequest wanted = rig.load();
    wanted.file_offset = wanted.target_offset = 100;
    const TransferProgress done = rig.finish(wanted);
    ASSERT_TRUE(done.status.ok()) << done.status.message();
    EXPECT_EQ(done.prefix, data.size() - 100);
    EXPECT_EQ(done.path_bytes[0], 4 * kMiB);
    EXPECT_EQ(done.path_bytes[1], (4096U - 100U) + (5000U - 4096U));
    EXPECT_TRUE(rig.buffer_has(data, 100));
    EXPECT_EQ(rig.refused(Direction::kLoad, Refusal::kOffsetUnaligned), 1U);
  }
}

TEST(Fastpath, WhatIsLeftGoesByFallbackWhenThePathFails) {
  for (const int error : {ENODEV, EREMOTEIO, ENOTTY, EOPNOTSUPP}) {
    for (const bool host : {true, false}) {
      for (const Direction direction : {Direction::kLoad, Direction::kStore}) {
        FakeRig rig(host);
        const auto data = pattern(4 * kMiB);
        rig.make_ends(direction, data);
        rig.direct->fail_at = 5;
        rig.direct->error = error;
        const TransferProgress done = rig.finish_in_order(rig.request(direction));
        ASSERT_TRUE(done.status.ok()) << done.status.message();
        EXPECT_EQ(done.prefix, data.size());
        EXPECT_EQ(done.path_bytes[0], 4 * kChunk + kChunk / 2);
        EXPECT_EQ(done.path_bytes[0] + done.path_bytes[1], data.size());
        EXPECT_EQ(rig.refused(direction, Refusal::kFailedBefore), 1U);
        EXPECT_EQ(rig.direct->calls, 5);
        if (direction == Direction::kLoad) {
          EXPECT_TRUE(rig.buffer_has(data));
        } else {
          EXPECT_EQ(rig.file_contents(), data);
        }
      }
    }
  }
}

TEST(Fastpath, OtherFailuresAreReportedWithTheProgress) {
  FakeRig rig(true);
  rig.make_file(pattern(4 * kMiB));
  rig.make_buffer(16 * kMiB);
  rig.direct->fail_at = 5;
  rig.direct->error = EIO;
  const TransferProgress done = rig.finish_in_order(rig.load());
  EXPECT_EQ(done.status.error(), EIO);
  EXPECT_EQ(done.status.device_code(), 999);
  EXPECT_EQ(done.prefix, 4 * kChunk + kChunk / 2);
  EXPECT_EQ(rig.buffer->size(), done.prefix);
  EXPECT_EQ(rig.counted(Direction::kLoad, Path::kFastpath, &observe::Block::errors), 1U);
  EXPECT_EQ(rig.details(Direction::kLoad).failed, 1U);
}

TEST(Fastpath, FileThatTheVendorRefuses) {
  FakeRig rig(false);
  const auto data = pattern(kMiB);
  rig.make_file(data);
  rig.make_buffer(16 * kMiB);
  rig.direct->refuse_file = true;
  const TransferProgress done = rig.finish(rig.load());
  EXPECT_TRUE(done.status.ok());
  EXPECT_EQ(done.path_bytes[1], data.size());
  EXPECT_NE(done.refusals & mask_of(Refusal::kNotAccepted), 0U);
  TransferRequest required = rig.load();
  required.fastpath = FastpathMode::kRequire;
  const TransferProgress refused = rig.finish(required);
  EXPECT_EQ(refused.status.error(), EOPNOTSUPP);
  EXPECT_NE(refused.status.message().find("not_accepted"), std::string::npos) << refused.status.message();
}

TEST(Fastpath, RequireIsRefusedBeforeAnythingChanges) {
  FakeRig rig(true, FakeRig::small_options(), "/dev/shm");
  rig.make_buffer(4 * kMiB);
  rig.buffer->fill(pattern(kMiB));
  rig.open_file();
  TransferRequest wanted = rig.store();
  wanted.fastpath = FastpathMode::kRequire;
  const TransferProgress done = rig.finish(wanted);
  EXPECT_EQ(done.status.error(), EOPNOTSUPP);
  EXPECT_NE(done.status.message().find("file_system"), std::string::npos);
  EXPECT_EQ(done.prefix, 0U);
  EXPECT_EQ(rig.file_size(), 0U);
}

TEST(Fastpath, FileThatBecomesShorterUnderIt) {
  FakeRig rig(true);
  const auto data = pattern(4 * kMiB);
  rig.make_file(data);
  rig.make_buffer(16 * kMiB);
  rig.operations.on_size = [](std::uint64_t* bytes) {
    *bytes = 8 * kMiB;
    return 0;
  };
  TransferRequest wanted = rig.load();
  wanted.sparse = false;  // what lies beyond the end is no hole that need not be read
  const TransferProgress done = rig.finish(wanted);
  EXPECT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_EQ(done.prefix, data.size());
  EXPECT_EQ(rig.buffer->size(), data.size());
  EXPECT_TRUE(rig.buffer_has(data));
}

TEST(Fastpath, HolesAreNotForTheVendor) {
  FakeRig rig(false);
  auto data = pattern(8 * kChunk);
  rig.make_buffer(16 * kMiB);
  rig.buffer->fill(data);
  rig.buffer->make_hole(kChunk / FakeBuffer::kGranule);
  std::memset(data.data() + kChunk, 0, FakeBuffer::kGranule);
  rig.open_file();
  const TransferProgress done = rig.finish(rig.store());
  EXPECT_TRUE(done.status.ok());
  EXPECT_EQ(done.path_bytes[0], 7 * kChunk);
  EXPECT_EQ(rig.file_contents(), data);
}

}  // namespace
}  // namespace gpufs
