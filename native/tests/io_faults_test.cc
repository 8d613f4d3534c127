// Every fault of a transfer, in both directions, on the host's memory and on a GPU's: the right errno and count, memory
// and file changed exactly as far as the count says, nothing left open, and the next transfer works.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <mutex>
#include <span>
#include <thread>

#include "bytes.h"
#include "drivers/cuda/cuda_api.h"
#include "fake_vendors.h"
#include "faulty_driver.h"
#include "io/fastpath.h"
#include "transfer_rig.h"

namespace gpufs {
namespace {

namespace api = gpu::api;
using gpu_test::kMiB;
using gpu_test::must;
using gpu_test::pattern;
using testing::FaultPlan;
using testing::kChunk;
using testing::names_in;
using testing::TransferRig;

constexpr std::uint64_t kTotal = 5 * kMiB + 4321;
constexpr std::uint64_t kBad = 5 * kChunk + 1000;  // the file fails from here on
constexpr std::uint64_t kShort = kMiB + 17;        // the size of a source that is truncated
constexpr int kAlways = 1 << 20;

// kHostSlots: memory of the host that is treated like a GPU's, with bounce buffers and streams.
enum class DriverKind { kHost, kHostSlots, kFakeCuda };
enum class Fault {
  kShortCounts,
  kFileFails,
  kFullDisk,
  kNoRoomAhead,
  kSyncFails,
  kSourceIsCut,
  kFastpathIsGone,
  kFastpathFails,
  kNothingIsPinned,
  kOneIsPinned,
  kNoEvent,
  kNoStream,
  kCopyIsRefused,
  kWaitFails,
  kDeviceIsFull,
};
constexpr std::array<const char*, 3> kDriverNames = {"Host", "HostSlots", "FakeCuda"};
constexpr std::array<const char*, 15> kFaultNames = {
    "ShortCounts", "FileFails",      "FullDisk",      "NoRoomAhead",     "SyncFails",
    "SourceIsCut", "FastpathIsGone", "FastpathFails", "NothingIsPinned", "OneIsPinned",
    "NoEvent",     "NoStream",       "CopyIsRefused", "WaitFails",       "DeviceIsFull",
};

struct Case {
  DriverKind driver;
  Direction direction;
  Fault fault;
};

// Whether a driver and a direction can have the fault.
bool exists(const Case& tested) {
  const bool load = tested.direction == Direction::kLoad;
  switch (tested.fault) {
    case Fault::kFullDisk:
    case Fault::kNoRoomAhead:
    case Fault::kSyncFails:
      return !load;
    case Fault::kDeviceIsFull:
      return load;
    case Fault::kFastpathIsGone:
    case Fault::kFastpathFails:
      return tested.driver == DriverKind::kHost;
    case Fault::kNothingIsPinned:
    case Fault::kOneIsPinned:
    case Fault::kNoEvent:
    case Fault::kNoStream:
    case Fault::kCopyIsRefused:
      return tested.driver != DriverKind::kHost;
    case Fault::kWaitFails:
      return tested.driver == DriverKind::kFakeCuda;
    default:
      return true;
  }
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const DriverKind driver : {DriverKind::kHost, DriverKind::kHostSlots, DriverKind::kFakeCuda}) {
    for (const Direction direction : {Direction::kLoad, Direction::kStore}) {
      for (std::size_t fault = 0; fault < kFaultNames.size(); ++fault) {
        const Case tested{driver, direction, static_cast<Fault>(fault)};
        if (exists(tested)) all.push_back(tested);
      }
    }
  }
  return all;
}

std::string name_of(const ::testing::TestParamInfo<Case>& tested) {
  return std::string(kDriverNames.at(static_cast<std::size_t>(tested.param.driver))) +
         (tested.param.direction == Direction::kLoad ? "Load" : "Store") +
         kFaultNames.at(static_cast<std::size_t>(tested.param.fault));
}

// How the transfer must end: with this errno and device code, after so many bytes.
struct Outcome {
  int error = 0;
  std::uint64_t least = kTotal;
  std::uint64_t most = kTotal;
  int device_code = 0;
};

class IoFaults : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    descriptors_ = names_in("/proc/self/fd");
    const Fault fault = GetParam().fault;
    const bool fastpath = fault == Fault::kFastpathIsGone || fault == Fault::kFastpathFails;
    IoOptions options = TransferRig::small_options();
    options.fastpath = fastpath ? FastpathMode::kAuto : FastpathMode::kOff;
    options.direct = fault == Fault::kNoRoomAhead ? Switch::kAuto : Switch::kOff;
    rig_ = std::make_unique<TransferRig>(open_driver(fault == Fault::kDeviceIsFull ? 4 * kMiB : 64 * kMiB),
                                         make_fastpath(fastpath ? "host" : "none"), options, "/var/tmp");
    rig_->make_buffer();
    restore_source();
    rig_->open_file();
  }
  void TearDown() override {
    rig_.reset();
    if (of_cuda()) {
      EXPECT_EQ(cuda_test::fake().reset(&cuda_), 0) << "something was left open";
    }
    EXPECT_EQ(names_in("/proc/self/fd"), descriptors_);
  }

  static bool load() { return GetParam().direction == Direction::kLoad; }
  static bool of_cuda() { return GetParam().driver == DriverKind::kFakeCuda; }

  std::shared_ptr<Driver> open_driver(std::uint64_t memory_bytes) {
    if (of_cuda()) {
      cuda_test::fake().reset(&cuda_);
      DriverOptions options;
      options.memory_bytes = memory_bytes;
      return must(open_cuda_driver(options, GPUFS_FAKE_CUDA));
    }
    plan_->cpu_addressable = GetParam().driver == DriverKind::kHost;
    return testing::make_faulty_driver(plan_, memory_bytes);
  }

  // All of the source, and nothing at the destination.
  void restore_source() {
    if (load()) {
      ASSERT_EQ(::pwrite(rig_->fd(), data_.data(), data_.size(), 0), static_cast<ssize_t>(kTotal));
      rig_->make_buffer();
    } else {
      rig_->fill_buffer(data_);
      ASSERT_EQ(::ftruncate(rig_->fd(), 0), 0);
    }
  }

  // The n-th call from now fails, and so do the next ones (times: so many).
  void fail(const char* cuda, testing::Fault FaultPlan::*host, int n, int code, int times = kAlways) {
    if (of_cuda()) {
      cuda_test::fake().fail(cuda, n, code, times);
    } else {
      (*plan_.*host).at(n, times, code == api::kOutOfMemory ? ENOMEM : EIO);
    }
  }
  static int code_of(int code) { return of_cuda() ? code : 700; }  // that of a FaultPlan

  // The file fails with `error` from `offset` on; only_fd: through that descriptor alone.
  void end_file_at(std::uint64_t offset, int error, int only_fd = -1) {
    const auto ends = [=](int fd, std::size_t bytes, std::uint64_t at, ssize_t* result, const auto& move) {
      if ((only_fd >= 0 && fd != only_fd) || at + bytes <= offset) return false;
      if (at >= offset || only_fd >= 0) {
        errno = error;
        *result = -1;
      } else {
        *result = move(offset - at);
      }
      return true;
    };
    rig_->operations.on_read = [=](int fd, void* memory, std::size_t bytes, std::uint64_t at, ssize_t* result) {
      return ends(fd, bytes, at, result,
                  [&](std::uint64_t count) { return ::pread(fd, memory, count, static_cast<off_t>(at)); });
    };
    rig_->operations.on_write = [=](int fd, const void* memory, std::size_t bytes, std::uint64_t at, ssize_t* result) {
      return ends(fd, bytes, at, result,
                  [&](std::uint64_t count) { return ::pwrite(fd, memory, count, static_cast<off_t>(at)); });
    };
  }

  void return_short_counts() {
    const auto shorten = [this](std::size_t* bytes, ssize_t* result) {
      if (calls_++ % 3 == 0) {
        errno = EINTR;
        *result = -1;
        return true;
      }
      *bytes = std::min<std::size_t>(*bytes, 50000);
      return false;
    };
    rig_->operations.on_read = [=](int fd, void* memory, std::size_t bytes, std::uint64_t at, ssize_t* result) {
      if (!shorten(&bytes, result)) *result = ::pread(fd, memory, bytes, static_cast<off_t>(at));
      return true;
    };
    rig_->operations.on_write = [=](int fd, const void* memory, std::size_t bytes, std::uint64_t at, ssize_t* result) {
      if (!shorten(&bytes, result)) *result = ::pwrite(fd, memory, bytes, static_cast<off_t>(at));
      return true;
    };
  }

  // Before the first byte is moved. A thread of its own truncates a buffer, since that waits for the buffer's users.
  void cut_source() {
    rig_->operations.on_read = [this](int, void*, std::size_t, std::uint64_t, ssize_t*) {
      std::call_once(once_, [this] { EXPECT_EQ(::ftruncate(rig_->fd(), kShort), 0); });
      return false;
    };
    rig_->operations.on_write = [this](int, const void*, std::size_t, std::uint64_t, ssize_t*) {
      std::call_once(once_, [this] { cutter_ = std::thread([this] { EXPECT_OK(rig_->buffer->resize(kShort)); }); });
      return false;
    };
  }

  // Plans the fault. Returns how the transfer must end.
  Outcome plan() {
    switch (GetParam().fault) {
      case Fault::kShortCounts:
        return_short_counts();
        return {};
      case Fault::kFileFails:
        end_file_at(kBad, EIO);
        return {EIO, kBad, kBad};
      case Fault::kFullDisk:
        end_file_at(kBad, ENOSPC);
        return {ENOSPC, kBad, kBad};
      case Fault::kNoRoomAhead:
        rig_->operations.on_allocate = [this](int, std::uint64_t, std::uint64_t) {
          EXPECT_EQ(::ftruncate(rig_->fd(), kShort), 0);  // as much as there was space for
          errno = ENOSPC;
          return -1;
        };
        return {ENOSPC, 0, 0};
      case Fault::kSyncFails:
        rig_->operations.on_sync = [](bool) {
          errno = EIO;
          return -1;
        };
        return {EIO, kTotal, kTotal};
      case Fault::kSourceIsCut:
        cut_source();
        // What is pinned is stored as it was.
        return load() ? Outcome{0, kShort, kShort} : Outcome{0, 0, kTotal};
      case Fault::kFastpathIsGone:
        end_file_at(kBad, ENODEV, rig_->file->direct_fd());
        return {};
      case Fault::kFastpathFails:
        end_file_at(kBad, EIO, rig_->file->direct_fd());
        return {EIO, 5 * kChunk, 5 * kChunk};
      case Fault::kNothingIsPinned:
        fail("cuMemHostRegister_v2", &FaultPlan::pin, 1, api::kOutOfMemory);
        return {ENOMEM, 0, 0, code_of(api::kOutOfMemory)};
      case Fault::kOneIsPinned:
        fail("cuMemHostRegister_v2", &FaultPlan::pin, 2, api::kOutOfMemory);
        return {};
      case Fault::kNoEvent:
        fail("cuEventCreate", &FaultPlan::create_event, 1, api::kOutOfMemory);
        return {ENOMEM, 0, 0, code_of(api::kOutOfMemory)};
      case Fault::kNoStream:
        fail("cuStreamCreate", &FaultPlan::create_stream, 1, api::kOutOfMemory);
        return {ENOMEM, 0, 0, code_of(api::kOutOfMemory)};
      case Fault::kCopyIsRefused:
        fail(load() ? "cuMemcpyHtoDAsync_v2" : "cuMemcpyDtoHAsync_v2", &FaultPlan::stream_copy, 4, api::kInvalidValue,
             1);
        return {EIO, 3 * kChunk, 3 * kChunk, code_of(api::kInvalidValue)};
      case Fault::kWaitFails:
        cuda_test::fake().fail("cuEventQuery", 1, api::kInvalidHandle, 1);
        return {EIO, 0, 0, api::kInvalidHandle};
      case Fault::kDeviceIsFull:
        return {ENOSPC, 0, kTotal - 1, -1};
    }
    return {};
  }

  void forget_faults() {
    rig_->operations.on_read = nullptr;
    rig_->operations.on_write = nullptr;
    rig_->operations.on_allocate = nullptr;
    rig_->operations.on_sync = nullptr;
    for (testing::Fault FaultPlan::*fault :
         {&FaultPlan::pin, &FaultPlan::create_event, &FaultPlan::create_stream, &FaultPlan::stream_copy}) {
      (*plan_.*fault).clear();
    }
    if (!of_cuda()) return;
    for (const char* symbol : {"cuMemHostRegister_v2", "cuEventCreate", "cuStreamCreate", "cuEventQuery"}) {
      cuda_test::fake().fail(symbol, 1, api::kSuccess, 0);
    }
  }

  TransferProgress move() {
    TransferRequest wanted = rig_->request(GetParam().direction);
    if (GetParam().fault == Fault::kSyncFails) wanted.sync = SyncMode::kFull;
    return rig_->finish_in_order(wanted);  // copies are counted
  }

  void expect_content(std::uint64_t count) {
    const std::span<const std::byte> expected = std::span(data_).first(count);
    EXPECT_TRUE(testing::same_bytes(load() ? rig_->buffer_contents() : rig_->file_contents(), expected));
    if (!load()) return;
    // What was moved beyond a failure does not come back with a larger size.
    EXPECT_OK(rig_->buffer->resize(kTotal));
    EXPECT_TRUE(testing::all_zero(std::span<const std::byte>(rig_->buffer_contents()).subspan(count)));
  }

  FakeGpuSetup cuda_{};
  const std::shared_ptr<FaultPlan> plan_ = std::make_shared<FaultPlan>();
  const std::vector<std::byte> data_ = pattern(kTotal, 11);
  std::unique_ptr<TransferRig> rig_;
  std::atomic<int> calls_{0};
  std::once_flag once_;
  std::thread cutter_;

 private:
  std::set<std::string> descriptors_;
};

INSTANTIATE_TEST_SUITE_P(, IoFaults, ::testing::ValuesIn(cases()), name_of);

TEST_P(IoFaults, EndRightAndLeaveNothing) {
  const Outcome outcome = plan();
  const TransferProgress done = move();
  if (cutter_.joinable()) cutter_.join();
  EXPECT_EQ(done.state, TransferState::kDone);
  EXPECT_EQ(done.status.error(), outcome.error) << done.status.message();
  if (outcome.device_code >= 0) {
    EXPECT_EQ(done.status.device_code(), outcome.device_code);
  }
  EXPECT_GE(done.prefix, outcome.least);
  EXPECT_LE(done.prefix, outcome.most);
  EXPECT_EQ(done.sync_failed, GetParam().fault == Fault::kSyncFails);
  if (GetParam().fault == Fault::kFastpathIsGone) {
    EXPECT_EQ(done.path_bytes[static_cast<std::size_t>(Path::kFastpath)], 5 * kChunk);
  }
  expect_content(done.prefix);

  forget_faults();
  restore_source();
  const TransferProgress again = move();
  if (GetParam().fault == Fault::kDeviceIsFull) {
    EXPECT_EQ(again.status.error(), ENOSPC);
    return;
  }
  EXPECT_TRUE(again.status.ok()) << again.status.message();
  EXPECT_EQ(again.prefix, kTotal);
  expect_content(kTotal);
}

}  // namespace
}  // namespace gpufs
