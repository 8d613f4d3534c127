// hipAmdFileRead and hipAmdFileWrite as a direct path, over the fake runtime: which calls are made, with what, and what
// is made of all that the runtime may answer.

#include "io/hip_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "direct_path_support.h"
#include "drivers/hip/hip_api.h"
#include "hip_test_support.h"
#include "io_fakes.h"

namespace gpufs {
namespace {

using namespace hip_test;
using namespace hip;

class HipFiles : public FakeHip {
 protected:
  static std::shared_ptr<DirectPath> open_path(bool kernel_driver = true) {
    return open_hip_file_path_from({GPUFS_FAKE_HIP}, kernel_driver);
  }
  // False where the file system here has no O_DIRECT.
  bool start(const std::vector<std::byte>& contents, const IoOptions& options = DirectRig::small_options(),
             bool kernel_driver = true) {
    FakeGpuSetup setup;
    setup.devices = 2;
    open(setup);
    rig_ = std::make_unique<DirectRig>(std::shared_ptr<Driver>(std::move(driver_)), open_path(kernel_driver), options);
    return rig_->make_file(contents);
  }
  void TearDown() override {
    pinned_.reset();
    rig_.reset();
    FakeHip::TearDown();
  }
  static void plan(int result, int status, int error_number = 0, std::uint64_t bytes = UINT64_MAX) {
    FakeHipFilePlan plan;
    plan.result = result;
    plan.status = status;
    plan.error_number = error_number;
    plan.bytes = bytes;
    fake().plan_file_call(&plan);
  }
  static void plan_early_failure(int result, int error_number = 0) {
    FakeHipFilePlan plan;
    plan.result = result;
    plan.error_number = error_number;
    plan.outputs_untouched = true;
    fake().plan_file_call(&plan);
  }
  // In the order of their offsets.
  static std::vector<FakeHipFileCall> records() {
    std::vector<FakeHipFileCall> found(static_cast<std::size_t>(fake().file_calls(nullptr, 0)));
    fake().file_calls(found.data(), static_cast<int>(found.size()));
    std::sort(found.begin(), found.end(),
              [](const auto& one, const auto& other) { return one.file_offset < other.file_offset; });
    return found;
  }
  // The first bytes of the buffer's memory, which is there and large enough.
  DeviceAddress memory(std::uint64_t bytes) {
    pinned_ = must(rig_->buffer->pin_for_write(0, bytes));
    return pinned_->pieces().at(0).address;
  }

  std::unique_ptr<Buffer::Pinned> pinned_;
  std::unique_ptr<DirectRig> rig_;
};

// The system's calls, about a file that is said to be larger than it is until it has been asked once.
class PlannedSize final : public testing::PlannedFileOps {
 public:
  explicit PlannedSize(std::uint64_t bytes) {
    on_size = [this, bytes](std::uint64_t* answer) {
      *answer = asked_++ == 0 ? bytes : bytes / 2;
      return 0;
    };
  }

 private:
  std::atomic<int> asked_{0};
};

#define START_OR_SKIP(...) \
  if (!start(__VA_ARGS__)) GTEST_SKIP() << "no file system for a direct path at /var/tmp"

// ---- whether there is a path at all ----

TEST_F(HipFiles, BothCallsAndTheKernelsDriverAreNeeded) {
  const RefusalMask no_call = mask_of(Refusal::kNoVendorCall);
  const RefusalMask no_kernel = mask_of(Refusal::kNoKernelSupport);
  EXPECT_EQ(open_path()->refusals(), 0U);
  EXPECT_EQ(open_path(false)->refusals(), no_kernel);
  EXPECT_EQ(open_hip_file_path_from({"libamdhip64.so.99"}, true)->refusals(), no_call);
  EXPECT_EQ(open_hip_file_path_from({"libamdhip64.so.99"}, false)->refusals(), no_call | no_kernel);
  FakeGpuSetup bare_setup;
  control_of(GPUFS_FAKE_HIP_BARE).reset(&bare_setup);
  EXPECT_EQ(open_hip_file_path_from({GPUFS_FAKE_HIP_BARE}, true)->refusals(), no_call);

  for (const char* symbol : {"hipRuntimeGetVersion", "hipGetProcAddress"}) {
    fake().fail(symbol, 1, api::kInvalidValue, 2);
    EXPECT_EQ(open_path()->refusals(), no_call) << symbol;
    fake().reset(&setup_);
  }
  fake().fail("hipGetProcAddress", 2, api::kInvalidValue, 1);  // the second call only: for writing
  EXPECT_EQ(open_path()->refusals(), no_call);
  setup_.file_write = false;
  fake().reset(&setup_);
  EXPECT_EQ(open_path()->refusals(), no_call);
  setup_.file_calls = false;
  fake().reset(&setup_);
  EXPECT_EQ(open_path()->refusals(), no_call);
  EXPECT_EQ(fake().file_calls(nullptr, 0), 0);
}

TEST_F(HipFiles, APathThatRefusesTakesNoFile) {
  START_OR_SKIP(pattern(4096, 1), DirectRig::small_options(), false);
  Result<DirectFile*> attached = rig_->file->direct_file(*rig_->path);
  ASSERT_FALSE(attached.ok());
  EXPECT_EQ(attached.error(), EOPNOTSUPP);
  EXPECT_EQ(attached.status().message(), "hipAmdFile: no_kernel_support");
}

TEST_F(HipFiles, TheDriversNameLeadsToIt) {
  // Whichever runtime is installed here, or none: there is no GPU of AMD's where the unit tests run.
  if (::access("/dev/kfd", F_OK) == 0) GTEST_SKIP() << "there may be one";
  EXPECT_NE(make_direct_path("hip")->refusals() & mask_of(Refusal::kNoKernelSupport), 0U);
  EXPECT_STREQ(make_direct_path("hip")->name(), "hipAmdFile");
}

// ---- what is called ----

TEST_F(HipFiles, AlignedRequestsTakeIt) {
  const auto data = pattern(4 * kMiB, 1);
  START_OR_SKIP(data);
  TransferProgress done = rig_->finish(rig_->request(Direction::kLoad));
  ASSERT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_EQ(done.path_bytes[0], data.size());
  EXPECT_EQ(done.path_bytes[1], 0U);
  EXPECT_EQ(done.refusals, 0U);
  EXPECT_EQ(rig_->buffer_contents(), data);
  EXPECT_EQ(fake().calls("hipMemcpyHtoDAsync"), 0);  // no byte by way of the host

  std::vector<FakeHipFileCall> calls = records();
  ASSERT_EQ(calls.size(), data.size() / kChunk);
  for (std::size_t index = 0; index < calls.size(); ++index) {
    const FakeHipFileCall& call = calls[index];
    EXPECT_FALSE(call.write);
    EXPECT_EQ(call.fd, rig_->file->direct_fd());
    EXPECT_NE(::fcntl(call.fd, F_GETFL) & O_DIRECT, 0);
    EXPECT_EQ(call.file_offset, static_cast<std::int64_t>(index * kChunk));
    EXPECT_EQ(call.bytes, kChunk);
    EXPECT_EQ(call.copied, kChunk);
    EXPECT_EQ(call.device_address, calls[0].device_address + index * kChunk);
    EXPECT_EQ(call.device, 0);
    EXPECT_TRUE(call.outputs_zeroed);
    EXPECT_TRUE(call.errno_zeroed);
  }
  EXPECT_EQ(rig_->counted(Direction::kLoad, Path::kFastpath, &observe::Block::bytes), data.size());
  EXPECT_EQ(rig_->counted(Direction::kLoad, Path::kFallback, &observe::Block::ended), 0U);

  const auto other = pattern(4 * kMiB, 2);
  rig_->fill_buffer(other);
  done = rig_->finish(rig_->request(Direction::kStore));
  ASSERT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_EQ(done.path_bytes[0], data.size());
  EXPECT_EQ(rig_->file_contents(), other);
  calls = records();
  EXPECT_EQ(std::count_if(calls.begin(), calls.end(), [](const auto& call) { return call.write; }), 16);
}

TEST_F(HipFiles, UnalignedRequestsAreSplit) {
  const auto data = pattern(4 * kMiB + 5000, 3);
  START_OR_SKIP(data);
  TransferRequest wanted = rig_->request(Direction::kLoad);
  wanted.file_offset = wanted.target_offset = 100;
  const TransferProgress done = rig_->finish(wanted);
  ASSERT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_EQ(done.prefix, data.size() - 100);
  EXPECT_EQ(done.path_bytes[0], 4 * kMiB);
  EXPECT_EQ(done.path_bytes[1], (4096U - 100U) + (5000U - 4096U));
  std::uint64_t expected = 4096;
  for (const FakeHipFileCall& call : records()) {
    EXPECT_EQ(call.file_offset, static_cast<std::int64_t>(expected));
    EXPECT_EQ(call.bytes % 4096, 0U);
    expected += call.bytes;
  }
  EXPECT_EQ(expected, 4096 + 4 * kMiB);
  EXPECT_EQ(rig_->refused(Direction::kLoad, Refusal::kOffsetUnaligned), 1U);
  EXPECT_EQ(rig_->refused(Direction::kLoad, Refusal::kSizeUnaligned), 1U);
  const auto there = rig_->buffer_contents();
  EXPECT_TRUE(std::equal(there.begin() + 100, there.end(), data.begin() + 100, data.end()));

  // Where offsets in file and memory do not agree no cut helps.
  wanted.target_offset = 101;
  EXPECT_EQ(rig_->finish(wanted).path_bytes[0], 0U);
  EXPECT_EQ(rig_->refused(Direction::kLoad, Refusal::kMemoryUnaligned), 1U);
  // Nor is there anything to call for where no whole unit lies within, or nothing at all.
  const int calls = fake().file_calls(nullptr, 0);
  wanted.file_offset = wanted.target_offset = 4095;
  wanted.bytes = 4096;
  EXPECT_EQ(rig_->finish(wanted).prefix, 4096U);
  EXPECT_EQ(rig_->refused(Direction::kLoad, Refusal::kTooSmall), 1U);
  wanted.bytes = 0;
  EXPECT_TRUE(rig_->finish(wanted).status.ok());
  EXPECT_EQ(fake().file_calls(nullptr, 0), calls);
}

TEST_F(HipFiles, EachThreadMakesInitOnce) {
  START_OR_SKIP(pattern(4096, 1));
  const DeviceAddress address = memory(4096);
  DirectFile& file = rig_->direct_file();
  std::thread([&] {
    const int before = fake().calls("hipInit");
    EXPECT_EQ(file.load(address, 4096, 0).bytes, 4096U);
    EXPECT_EQ(fake().calls("hipInit"), before + 1);
    EXPECT_EQ(file.load(address, 4096, 0).bytes, 4096U);
    EXPECT_EQ(fake().calls("hipInit"), before + 1);
  }).join();
  std::thread([&] {
    const std::size_t before = records().size();
    fake().fail("hipInit", 1, api::kNotInitialized, 1);
    const Moved moved = file.load(address, 4096, 0);
    EXPECT_EQ(moved.status.error(), EREMOTEIO);
    EXPECT_EQ(moved.status.device_code(), api::kNotInitialized);
    EXPECT_EQ(records().size(), before);
  }).join();
}

TEST_F(HipFiles, NoCallIsLargerThanTheKernelsLimit) {
  START_OR_SKIP(pattern(4096, 1));
  // Not memory of the device: what counts is what is asked for.
  (void)rig_->direct_file().load(4096, std::uint64_t{5} << 30, 0);
  ASSERT_EQ(records().size(), 1U);
  EXPECT_EQ(records()[0].bytes, 0x7ffff000U);
}

TEST_F(HipFiles, AFileLivesLongerThanItsPath) {
  START_OR_SKIP(pattern(4096, 1));
  const DeviceAddress address = memory(4096);
  std::shared_ptr<DirectPath> path = open_path();
  const std::unique_ptr<DirectFile> file = must(path->attach(*rig_->file));
  path.reset();
  EXPECT_EQ(file->load(address, 4096, 0).bytes, 4096U);
}

// ---- what the runtime may answer ----

TEST_F(HipFiles, WhatIsMadeOfEachAnswer) {
  constexpr std::uint64_t kBytes = 4 * 4096;
  const auto data = pattern(kBytes, 5);
  START_OR_SKIP(data);
  const DeviceAddress address = memory(kBytes);
  DirectFile& file = rig_->direct_file();
  struct Case {
    const char* what;
    FakeHipFilePlan plan;
    std::uint64_t bytes;
    int error;
    int code;
  };
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
  const Case cases[] = {
      {"success, whatever errno is left", answer(0, 0, ENOTTY, kBytes), kBytes, 0, 0},
      {"an errno in the status", answer(api::kUnknown, -EIO, 0, 0), 0, EIO, api::kUnknown},
      {"the status goes before the result", answer(api::kSuccess, -EIO, 0, 0), 0, EIO, 0},
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
      {"a status that is no errno", answer(api::kUnknown, -4000, 0, 4096), 0, EREMOTEIO, api::kUnknown},
      {"a positive status", answer(api::kSuccess, 5, 0, 4096), 0, EREMOTEIO, 0},
      {"more bytes than were asked for", answer(api::kSuccess, 0, 0, kBytes, kBytes + 1), 0, EREMOTEIO, 0},
      {"garbage everywhere", answer(api::kUnknown, 0x7f3c, 0, 0, 0xdeadbeefdeadbeef), 0, EREMOTEIO, api::kUnknown},
  };
  for (const Direction direction : {Direction::kLoad, Direction::kStore}) {
    for (const Case& one : cases) {
      fake().plan_file_call(&one.plan);
      const Moved moved =
          direction == Direction::kLoad ? file.load(address, kBytes, 0) : file.store(address, kBytes, 0);
      EXPECT_EQ(moved.bytes, one.bytes) << one.what;
      EXPECT_EQ(moved.status.error(), one.error) << one.what << ": " << moved.status.message();
      EXPECT_EQ(moved.status.device_code(), one.code) << one.what;
      EXPECT_EQ(rerun_on_fallback(moved.status.error()),
                one.error == ENODEV || one.error == EREMOTEIO || one.error == EOPNOTSUPP);
    }
  }
  EXPECT_EQ(rig_->path->refusals(), 0U);  // none of these says that the kernel has no such interface
  EXPECT_EQ(rig_->file_contents(), data);
}

TEST_F(HipFiles, InterruptionsAreResumedAndShortCopiesContinued) {
  constexpr std::uint64_t kBytes = 8 * 4096;
  const auto data = pattern(kBytes, 6);
  START_OR_SKIP(data);
  const DeviceAddress address = memory(kBytes);
  plan(api::kUnknown, -EINTR, 0, 0);
  plan(api::kUnknown, -EINTR, 0, 4096);
  plan(api::kSuccess, 0, 0, 8192);
  Moved moved = rig_->direct_file().load(address, kBytes, 0);
  EXPECT_TRUE(moved.status.ok()) << moved.status.message();
  EXPECT_EQ(moved.bytes, kBytes);
  const std::vector<FakeHipFileCall> calls = records();
  ASSERT_EQ(calls.size(), 4U);
  const std::vector<std::int64_t> offsets = {0, 0, 4096, 3 * 4096};
  for (std::size_t index = 0; index < calls.size(); ++index) {
    EXPECT_EQ(calls[index].file_offset, offsets[index]);
    EXPECT_EQ(calls[index].device_address, address + static_cast<std::uint64_t>(offsets[index]));
    EXPECT_EQ(calls[index].bytes, kBytes - static_cast<std::uint64_t>(offsets[index]));
  }
  // What cannot be continued at an aligned offset ends it; and nothing moved is the end.
  plan(api::kSuccess, 0, 0, 4096 + 512);
  moved = rig_->direct_file().load(address, kBytes, 0);
  EXPECT_TRUE(moved.status.ok());
  EXPECT_EQ(moved.bytes, 4096U + 512U);
  plan(api::kUnknown, -EINTR, 0, 4096 + 512);
  moved = rig_->direct_file().load(address, kBytes, 0);
  EXPECT_TRUE(moved.status.ok());
  EXPECT_EQ(moved.bytes, 4096U + 512U);
  plan(api::kSuccess, 0, 0, 0);
  EXPECT_EQ(rig_->direct_file().load(address, kBytes, 0).bytes, 0U);
  EXPECT_EQ(records().size(), 7U);
}

TEST_F(HipFiles, TheEndOfTheFileIsAShortCount) {
  const auto data = pattern(5 * 4096 + 512, 7);
  START_OR_SKIP(data);
  const Moved moved = rig_->direct_file().load(memory(8 * 4096), 8 * 4096, 0);
  EXPECT_TRUE(moved.status.ok()) << moved.status.message();
  EXPECT_EQ(moved.bytes, data.size());
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
  TransferProgress done = rig_->finish_in_order(rig_->request(Direction::kLoad));
  ASSERT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_EQ(done.path_bytes[0], 0U);
  EXPECT_EQ(done.path_bytes[1], data.size());
  EXPECT_EQ(rig_->buffer_contents(), data);
  EXPECT_EQ(rig_->refused(Direction::kLoad, Refusal::kFailedBefore), 1U);
  EXPECT_EQ(records().size(), 1U);
  EXPECT_EQ(rig_->path->refusals(), mask_of(Refusal::kNoKernelSupport));

  done = rig_->finish(rig_->request(Direction::kStore));
  EXPECT_TRUE(done.status.ok());
  EXPECT_EQ(done.refusals, mask_of(Refusal::kNoKernelSupport));
  EXPECT_EQ(rig_->refused(Direction::kStore, Refusal::kNoKernelSupport), 1U);
  EXPECT_EQ(records().size(), 1U);
}

// ---- when it fails in the middle ----

TEST_F(HipFiles, TheRestGoesByFallback) {
  for (const int error : {ENODEV, EREMOTEIO, ENOTTY, EOPNOTSUPP}) {
    for (const Direction direction : {Direction::kLoad, Direction::kStore}) {
      const auto data = pattern(4 * kMiB, static_cast<unsigned>(error));
      START_OR_SKIP(direction == Direction::kLoad ? data : std::vector<std::byte>(1));
      if (direction == Direction::kStore) rig_->fill_buffer(data);
      for (int good = 0; good < 4; ++good) plan(api::kSuccess, 0);
      if (error == ENOTTY) {
        plan(api::kUnknown, 99, ENOTTY, kChunk / 2);
      } else {
        plan(api::kUnknown, -error, 0, kChunk / 2);
      }
      const TransferProgress done = rig_->finish_in_order(rig_->request(direction));
      ASSERT_TRUE(done.status.ok()) << done.status.message();
      EXPECT_EQ(done.prefix, data.size());
      // After ENOTTY nothing of what the call says can be believed.
      EXPECT_EQ(done.path_bytes[0], 4 * kChunk + (error == ENOTTY ? 0 : kChunk / 2));
      EXPECT_EQ(done.path_bytes[0] + done.path_bytes[1], data.size());
      EXPECT_EQ(records().size(), 5U);
      EXPECT_EQ(rig_->refused(direction, Refusal::kFailedBefore), 1U);
      EXPECT_EQ(rig_->counted(direction, Path::kFastpath, &observe::Block::errors), 1U);
      EXPECT_EQ(rig_->counted(direction, Path::kFastpath, &observe::Block::bytes), done.path_bytes[0]);
      EXPECT_EQ(rig_->counted(direction, Path::kFallback, &observe::Block::bytes), done.path_bytes[1]);
      if (direction == Direction::kLoad) {
        EXPECT_EQ(rig_->buffer_contents(), data);
      } else {
        EXPECT_EQ(rig_->file_contents(), data);
      }
      rig_.reset();
    }
  }
}

TEST_F(HipFiles, OtherFailuresAreReportedWithTheProgress) {
  START_OR_SKIP(pattern(4 * kMiB, 9));
  for (int good = 0; good < 4; ++good) plan(api::kSuccess, 0);
  plan(api::kUnknown, -EIO, 0, kChunk / 2);
  const TransferProgress done = rig_->finish_in_order(rig_->request(Direction::kLoad));
  EXPECT_EQ(done.status.error(), EIO);
  EXPECT_EQ(done.status.device_code(), api::kUnknown);
  EXPECT_EQ(done.prefix, 4 * kChunk + kChunk / 2);
  EXPECT_EQ(rig_->buffer->size(), done.prefix);
  EXPECT_EQ(done.path_bytes[1], 0U);
  EXPECT_EQ(rig_->counted(Direction::kLoad, Path::kFastpath, &observe::Block::errors), 1U);
}

TEST_F(HipFiles, WhereItAloneIsAllowedTheRestStaysUnmoved) {
  for (const bool required : {true, false}) {
    START_OR_SKIP(pattern(4 * kMiB, 10));
    TransferRequest wanted = rig_->request(Direction::kLoad);
    if (required) {
      wanted.fastpath = FastpathMode::kRequire;
    } else {
      wanted.fallback = false;
    }
    plan(api::kSuccess, 0);
    plan(api::kUnknown, -ENODEV, 0, kChunk / 2);
    const TransferProgress done = rig_->finish_in_order(wanted);
    EXPECT_EQ(done.status.error(), EOPNOTSUPP);
    EXPECT_EQ(done.status.device_code(), api::kUnknown);
    EXPECT_NE(done.status.message().find("No such device"), std::string::npos) << done.status.message();
    EXPECT_EQ(done.prefix, kChunk + kChunk / 2);
    EXPECT_EQ(done.path_bytes[1], 0U);
    EXPECT_EQ(rig_->refused(Direction::kLoad, Refusal::kFailedBefore), 1U);
    // A call that stops without a word is a failure, too, unless the file ends there.
    plan(api::kSuccess, 0, 0, 0);
    EXPECT_EQ(rig_->finish_in_order(wanted).status.error(), EIO);
    rig_.reset();
  }
}

TEST_F(HipFiles, WhereItAloneIsAllowedNoThreadGoesAnotherWay) {
  START_OR_SKIP(pattern(4 * kMiB, 14));
  TransferRequest wanted = rig_->request(Direction::kLoad);
  wanted.fastpath = FastpathMode::kRequire;
  for (int round = 0; round < 20; ++round) {
    plan(api::kSuccess, 0);
    plan(api::kUnknown, -ENODEV, 0, 0);
    const TransferProgress done = rig_->finish(wanted);
    EXPECT_EQ(done.status.error(), EOPNOTSUPP);
    EXPECT_EQ(done.path_bytes[1], 0U);
  }
  EXPECT_EQ(rig_->counted(Direction::kLoad, Path::kFallback, &observe::Block::started), 0U);
}

TEST_F(HipFiles, AFileThatBecomesShorterEndsThere) {
  const auto data = pattern(2 * kMiB, 11);
  START_OR_SKIP(data);
  TransferRequest wanted = rig_->request(Direction::kLoad);
  wanted.fastpath = FastpathMode::kRequire;
  PlannedSize operations(4 * kMiB);
  rig_->file = must(BackingFile::open(rig_->fd(), operations));
  wanted.file = rig_->file;
  const TransferProgress done = rig_->finish_in_order(wanted);
  EXPECT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_EQ(done.prefix, data.size());
  EXPECT_EQ(rig_->buffer_contents(), data);
}

TEST_F(HipFiles, RequireIsRefusedWithTheReasons) {
  START_OR_SKIP(pattern(kMiB, 12), DirectRig::small_options(), false);
  TransferRequest wanted = rig_->request(Direction::kLoad);
  wanted.fastpath = FastpathMode::kRequire;
  const TransferProgress done = rig_->finish(wanted);
  EXPECT_EQ(done.status.error(), EOPNOTSUPP);
  EXPECT_EQ(done.status.message(), "fastpath is required but refused: no_kernel_support");
  EXPECT_EQ(rig_->buffer->size(), 0U);
  EXPECT_EQ(rig_->refused(Direction::kLoad, Refusal::kNoKernelSupport), 1U);
  EXPECT_TRUE(records().empty());
}

// ---- memory that a program brings along ----

TEST_F(HipFiles, ForeignMemoryMustBeTheDevices) {
  const auto data = pattern(kMiB, 13);
  START_OR_SKIP(data);
  TransferRequest wanted = rig_->request(Direction::kLoad);
  wanted.fastpath = FastpathMode::kRequire;
  const DeviceAddress address = memory(2 * kMiB);
  wanted.target = Target::of_range(rig_->device, address + 4096, kMiB, {});
  TransferProgress done = rig_->finish(wanted);
  EXPECT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_EQ(done.path_bytes[0], kMiB);
  EXPECT_EQ(records()[0].device_address, address + 4096);

  const std::size_t before = records().size();
  std::vector<std::byte> host(kMiB + 4096);
  const auto aligned = (reinterpret_cast<DeviceAddress>(host.data()) + 4095) / 4096 * 4096;
  wanted.target = Target::of_range(rig_->device, aligned, kMiB, {});
  done = rig_->finish(wanted);
  EXPECT_EQ(done.status.error(), EOPNOTSUPP);
  EXPECT_EQ(done.status.message(), "fastpath is required but refused: memory_kind");
  EXPECT_EQ(rig_->refused(Direction::kLoad, Refusal::kMemoryKind), 1U);
  // Nor is its alignment anybody's but its own.
  wanted.target = Target::of_range(rig_->device, address + 1, kMiB, {});
  done = rig_->finish(wanted);
  EXPECT_EQ(done.status.message(), "fastpath is required but refused: memory_unaligned");
  EXPECT_EQ(records().size(), before);
}

}  // namespace
}  // namespace gpufs
