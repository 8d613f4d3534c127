// What only hipAmdFileRead and hipAmdFileWrite have: what of the runtime and the kernel they need, and what is made of
// their answers. What they share with other vendors' calls: fastpath_test.cc.

#include "io/fastpath.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>

#include "drivers/hip/hip_api.h"
#include "hip_file_fixture.h"

namespace gpufs {
namespace {

using namespace hip_test;
using namespace hip;

// ---- whether there is a path at all ----

TEST_F(HipFiles, BothCallsAndTheKernelsDriverAreNeeded) {
  const RefusalMask no_call = mask_of(Refusal::kNoVendorCall);
  const RefusalMask no_kernel = mask_of(Refusal::kNoKernelSupport);
  EXPECT_EQ(open_path(true)->refusals(), 0U);
  EXPECT_EQ(open_path(false)->refusals(), no_kernel);
  EXPECT_EQ(open_hip_file_path({"libamdhip64.so.99"}, true)->refusals(), no_call);
  EXPECT_EQ(open_hip_file_path({"libamdhip64.so.99"}, false)->refusals(), no_call | no_kernel);
  FakeGpuSetup bare_setup;
  control_of(GPUFS_FAKE_HIP_BARE).reset(&bare_setup);
  EXPECT_EQ(open_hip_file_path({GPUFS_FAKE_HIP_BARE}, true)->refusals(), no_call);

  for (const char* symbol : {"hipRuntimeGetVersion", "hipGetProcAddress"}) {
    fake().fail(symbol, 1, api::kInvalidValue, 2);
    EXPECT_EQ(open_path(true)->refusals(), no_call) << symbol;
    fake().reset(&setup_);
  }
  fake().fail("hipGetProcAddress", 2, api::kInvalidValue, 1);  // the second call only: for writing
  EXPECT_EQ(open_path(true)->refusals(), no_call);
  setup_.file_write = false;
  fake().reset(&setup_);
  EXPECT_EQ(open_path(true)->refusals(), no_call);
  setup_.file_calls = false;
  fake().reset(&setup_);
  EXPECT_EQ(open_path(true)->refusals(), no_call);
  EXPECT_EQ(fake().file_calls(nullptr, 0), 0);
}

TEST_F(HipFiles, TheDriversNameLeadsToIt) {
  // Holds with any runtime and without one: the unit tests run where there is no AMD GPU.
  if (::access("/dev/kfd", F_OK) == 0) GTEST_SKIP() << "there may be one";
  EXPECT_NE(make_fastpath("hip")->refusals() & mask_of(Refusal::kNoKernelSupport), 0U);
}

// ---- what is called ----

// ---- what the runtime may answer ----

TEST_F(HipFiles, WhatIsMadeOfEachAnswer) {
  constexpr std::uint64_t kBytes = 4 * 4096;
  START_OR_SKIP(pattern(kBytes, 5));
  const auto answer = [](int result, int status, int error_number, std::uint64_t bytes,
                         std::uint64_t claimed = UINT64_MAX) {
    FakeHipFilePlan plan;
    plan.result = result;
    plan.status = status;
    plan.error_number = error_number;
    plan.bytes = bytes;
    plan.claimed = claimed;
    return plan;
  };
  const auto early = [](int result) {
    FakeHipFilePlan plan;
    plan.result = result;
    plan.outputs_untouched = true;
    return plan;
  };
  expect_answers<FakeHipFilePlan>(
      {
          {"success, whatever errno is left", answer(0, 0, ENOTTY, kBytes), kBytes, 0, 0},
          {"an errno in the status", answer(api::kUnknown, -EIO, 0, 0), 0, EIO, api::kUnknown},
          {"the status goes before the result", answer(api::kSuccess, -EIO, 0, 0), 0, EIO, 0},
          {"memory that the kernel refuses", answer(api::kUnknown, -EINVAL, 0, 0), 0, EOPNOTSUPP, api::kUnknown},
          {"the same errno after progress", answer(api::kUnknown, -EINVAL, 0, 4096), 4096, EINVAL, api::kUnknown},
          {"an error after progress", answer(api::kUnknown, -ENOSPC, 0, 8192), 8192, ENOSPC, api::kUnknown},
          {"the storage device is not known", answer(api::kUnknown, -ENODEV, 0, 0), 0, ENODEV, api::kUnknown},
          {"the devices do not reach each other", answer(api::kUnknown, -EREMOTEIO, 0, 4096), 4096, EREMOTEIO,
           api::kUnknown},
          {"not for this file", answer(api::kUnknown, -EOPNOTSUPP, 0, 0), 0, EOPNOTSUPP, api::kUnknown},
          {"an early failure", early(api::kUnknown), 0, EREMOTEIO, api::kUnknown},
          {"memory that the runtime does not know", early(api::kInvalidValue), 0, EREMOTEIO, api::kInvalidValue},
          {"a call that it does not support", early(api::kNotSupported), 0, EOPNOTSUPP, api::kNotSupported},
          {"a device that has failed", early(api::kIllegalAddress), 0, EIO, api::kIllegalAddress},
          {"a result alone, after progress", answer(api::kUnknown, 0, 0, 8192), 8192, EIO, api::kUnknown},
          {"a status that is not an errno", answer(api::kUnknown, -4000, 0, 4096), 0, EREMOTEIO, api::kUnknown},
          {"a positive status", answer(api::kSuccess, 5, 0, 4096), 0, EREMOTEIO, 0},
          {"more bytes than were asked for", answer(api::kSuccess, 0, 0, kBytes, kBytes + 1), 0, EREMOTEIO, 0},
          {"garbage everywhere", answer(api::kUnknown, 0x7f3c, 0, 0, 0xdeadbeefdeadbeef), 0, EREMOTEIO, api::kUnknown},
      },
      fake().plan_file_call);
}

TEST_F(HipFiles, AnErrnoFromBeforeTheCallMeansNothing) {
  START_OR_SKIP(pattern(4096, 6));
  const DeviceAddress address = memory(4096);
  FakeHipFilePlan failure;
  failure.result = api::kUnknown;
  failure.status = -EIO;
  failure.bytes = 0;
  failure.error_number = -1;
  fake().plan_file_call(&failure);
  errno = ENOTTY;
  EXPECT_EQ(rig_->fastpath_file().move(Direction::kLoad, address, 4096, 0).status.error(), EIO);
  EXPECT_EQ(rig_->path->refusals(), 0U);
}

// ---- kinds of memory ----

TEST_F(HipFiles, VirtualMemoryIsRefusedBeforeItIsTried) {
  options_.hip_memory = HipMemory::kVirtual;
  const auto data = pattern(4 * kMiB, 7);
  START_OR_SKIP(data);
  TransferRequest wanted = rig_->load();
  TransferProgress done = rig_->finish(wanted);
  ASSERT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_EQ(done.refusals, mask_of(Refusal::kMemoryKind));
  EXPECT_EQ(done.path_bytes[1], data.size());
  EXPECT_EQ(rig_->buffer_contents(), data);
  EXPECT_EQ(rig_->refused(Direction::kLoad, Refusal::kMemoryKind), 1U);
  wanted.fastpath = FastpathMode::kRequire;
  EXPECT_EQ(rig_->finish(wanted).status.message(), "fastpath is required but refused: memory_kind");
  EXPECT_TRUE(calls().empty());
}

TEST_F(HipFiles, MemoryThatTheKernelRefusesGoesByFallback) {
  options_.hip_memory = HipMemory::kVirtual;
  const auto data = pattern(4 * kMiB, 8);
  START_OR_SKIP(data);
  // A program's own range: the runtime only says that it is the device's.
  TransferRequest wanted = rig_->load();
  wanted.target = program_memory(rig_->device, memory(data.size()), data.size());
  const TransferProgress done = rig_->finish_in_order(wanted);
  ASSERT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_EQ(done.path_bytes[0], 0U);
  EXPECT_EQ(done.path_bytes[1], data.size());
  EXPECT_EQ(calls().size(), 1U);
  EXPECT_EQ(rig_->refused(Direction::kLoad, Refusal::kMemoryKind), 1U);
  EXPECT_EQ(rig_->refused(Direction::kLoad, Refusal::kFailedBefore), 1U);
  wanted.fastpath = FastpathMode::kRequire;
  EXPECT_EQ(rig_->finish_in_order(wanted).status.error(), EOPNOTSUPP);
}

TEST_F(HipFiles, TheSecondDeviceHasItToo) {
  device_ = 1;
  const auto data = pattern(4 * kMiB, 9);
  START_OR_SKIP(data);
  for (const Direction direction : {Direction::kLoad, Direction::kStore}) {
    TransferRequest wanted = rig_->request(direction);
    wanted.fastpath = FastpathMode::kRequire;
    const TransferProgress done = rig_->finish(wanted);
    ASSERT_TRUE(done.status.ok()) << done.status.message();
    EXPECT_EQ(done.path_bytes[0], data.size());
  }
  EXPECT_EQ(rig_->buffer_contents(), data);
  const std::vector<FileCall> made = calls();
  EXPECT_EQ(made.size(), 2 * data.size() / kChunk);
  EXPECT_TRUE(std::all_of(made.begin(), made.end(), [](const FileCall& call) { return call.prepared; }));
}

TEST_F(HipFiles, AnInterfaceThatHasWorkedIsAskedAgain) {
  const auto data = pattern(4 * kMiB, 8);
  START_OR_SKIP(data);
  ASSERT_EQ(rig_->finish(rig_->load()).path_bytes[0], data.size());
  FakeHipFilePlan failure;
  failure.result = api::kUnknown;
  failure.error_number = ENOTTY;
  fake().plan_file_call(&failure);
  TransferProgress done = rig_->finish_in_order(rig_->load());
  ASSERT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_EQ(done.path_bytes[1], data.size());
  EXPECT_EQ(rig_->path->refusals(), 0U);
  EXPECT_EQ(rig_->finish(rig_->load()).path_bytes[0], data.size());
  EXPECT_EQ(rig_->buffer_contents(), data);
}

TEST_F(HipFiles, AKernelWithoutTheInterfaceIsAskedOnce) {
  const auto data = pattern(4 * kMiB, 8);
  START_OR_SKIP(data);
  FakeHipFilePlan garbage;
  garbage.result = api::kUnknown;
  garbage.status = -12345678;
  garbage.error_number = ENOTTY;
  garbage.bytes = 0;
  garbage.claimed = 0xdeadbeef;
  fake().plan_file_call(&garbage);
  TransferProgress done = rig_->finish_in_order(rig_->load());
  ASSERT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_EQ(done.path_bytes[0], 0U);
  EXPECT_EQ(done.path_bytes[1], data.size());
  EXPECT_EQ(rig_->buffer_contents(), data);
  EXPECT_EQ(rig_->refused(Direction::kLoad, Refusal::kFailedBefore), 1U);
  EXPECT_EQ(calls().size(), 1U);
  EXPECT_EQ(rig_->path->refusals(), mask_of(Refusal::kNoKernelSupport));

  done = rig_->finish(rig_->store());
  EXPECT_TRUE(done.status.ok());
  EXPECT_EQ(done.refusals, mask_of(Refusal::kNoKernelSupport));
  EXPECT_EQ(rig_->refused(Direction::kStore, Refusal::kNoKernelSupport), 1U);
  EXPECT_EQ(calls().size(), 1U);
}

}  // namespace
}  // namespace gpufs
