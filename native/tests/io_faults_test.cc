// Whatever goes wrong in a transfer, on every driver and in both directions: the right errno, the right count, memory
// and file as far as the count says and no further, nothing left open, and the next transfer as if nothing had been.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "bytes.h"
#include "cuda_test_support.h"
#include "device/device_context.h"
#include "drivers/cuda/cuda_api.h"
#include "faulty_driver.h"
#include "hip_test_support.h"
#include "io/transfer_engine.h"
#include "io_fakes.h"
#include "temporary_file.h"
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
using testing::PlannedFileOps;

constexpr std::uint64_t kTotal = 5 * kMiB + 4321;
constexpr std::uint64_t kBad = 5 * kChunk + 1000;  // where a file's failure lies
constexpr std::uint64_t kShort = kMiB + 17;        // where a file ends that is cut off
constexpr int kAlways = 1 << 20;

// kHostSlots: memory of the host that passes for a GPU's, through slots and streams.
enum class Library { kHost, kHostSlots, kFakeCuda, kFakeHip };
enum class Fault {
  kShortCounts,
  kFileFails,
  kFileIsGone,
  kFileIsStale,
  kOverQuota,
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
  kContextIsLost,
};
constexpr std::array<const char*, 4> kLibraryNames = {"Host", "HostSlots", "FakeCuda", "FakeHip"};
constexpr std::array<const char*, 19> kFaultNames = {
    "ShortCounts", "FileFails",     "FileIsGone",     "FileIsStale",   "OverQuota",       "FullDisk",    "NoRoomAhead",
    "SyncFails",   "SourceIsCut",   "FastpathIsGone", "FastpathFails", "NothingIsPinned", "OneIsPinned", "NoEvent",
    "NoStream",    "CopyIsRefused", "WaitFails",      "DeviceIsFull",  "ContextIsLost",
};

struct Case {
  Library library;
  Direction direction;
  Fault fault;
};

bool of_gpu(Library library) { return library == Library::kFakeCuda || library == Library::kFakeHip; }

// Which faults there are of a driver and a direction.
bool exists(const Case& tested) {
  const bool load = tested.direction == Direction::kLoad;
  switch (tested.fault) {
    case Fault::kOverQuota:
    case Fault::kFullDisk:
    case Fault::kNoRoomAhead:
    case Fault::kSyncFails:
      return !load;
    case Fault::kDeviceIsFull:
      return load;
    case Fault::kFastpathIsGone:
    case Fault::kFastpathFails:
      return tested.library == Library::kHost;
    case Fault::kNothingIsPinned:
    case Fault::kOneIsPinned:
    case Fault::kNoEvent:
    case Fault::kNoStream:
    case Fault::kCopyIsRefused:
      return tested.library != Library::kHost;
    case Fault::kWaitFails:
    case Fault::kContextIsLost:
      return of_gpu(tested.library);
    default:
      return true;
  }
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const Library library : {Library::kHost, Library::kHostSlots, Library::kFakeCuda, Library::kFakeHip}) {
    for (const Direction direction : {Direction::kLoad, Direction::kStore}) {
      for (std::size_t fault = 0; fault < kFaultNames.size(); ++fault) {
        const Case tested{library, direction, static_cast<Fault>(fault)};
        if (exists(tested)) all.push_back(tested);
      }
    }
  }
  return all;
}

std::string name_of(const ::testing::TestParamInfo<Case>& tested) {
  return std::string(kLibraryNames.at(static_cast<std::size_t>(tested.param.library))) +
         (tested.param.direction == Direction::kLoad ? "Load" : "Store") +
         kFaultNames.at(static_cast<std::size_t>(tested.param.fault));
}

// How it must end: with this errno and device code, after so many bytes.
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
    std::thread([] {}).join();  // with the first thread the thread sanitizer starts one of its own
    threads_ = names_in("/proc/self/task").size();
    pinned_ = pinned();
    fd_ = testing::temporary_file("/var/tmp");
    ASSERT_TRUE(fd_.valid());
  }

  void TearDown() override {
    if (engine_) {
      engine_->shutdown();
      EXPECT_EQ(engine_->active(), 0U);
      EXPECT_EQ(engine_->bounce_pool()->statistics().pinned_bytes, 0U);
    }
    engine_.reset();
    file_.reset();
    buffer_.reset();
    for (const std::shared_ptr<DeviceContext>& device : devices_) {
      EXPECT_EQ(device->events().idle(), device->events().existing());
      EXPECT_EQ(device->streams().idle(), device->streams().existing());
      EXPECT_EQ(device->held_bytes(), 0U);
      if (!lost_device_ || device != devices_[0]) {
        EXPECT_EQ(must(device->device().memory()).free_bytes, must(device->device().memory()).total_bytes);
      }
    }
    devices_.clear();
    driver_.reset();
    // What a lost context had pinned cannot be given back; those pages stay mapped.
    const int kept = lost_device_ ? pinned() - pinned_ : 0;
    if (GetParam().library == Library::kFakeCuda) {
      EXPECT_EQ(cuda_test::fake().reset(&cuda_), kept) << "something was left open";
    } else if (GetParam().library == Library::kFakeHip) {
      EXPECT_EQ(hip_test::fake().reset(&hip_), kept) << "something was left open";
    }
    fd_.reset();
    EXPECT_EQ(names_in("/proc/self/fd"), descriptors_);
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (names_in("/proc/self/task").size() > threads_ && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // joined threads are listed for a moment
    }
    EXPECT_LE(names_in("/proc/self/task").size(), threads_);
  }

  static int pinned() {
    if (GetParam().library == Library::kFakeCuda) return cuda_test::fake_state().pinned;
    return GetParam().library == Library::kFakeHip ? hip_test::fake_state().pinned : 0;
  }
  static bool load() { return GetParam().direction == Direction::kLoad; }

  void open_driver(const DriverOptions& options) {
    switch (GetParam().library) {
      case Library::kFakeCuda:
        cuda_test::fake().reset(&cuda_);
        driver_ = must(open_cuda_driver_from(GPUFS_FAKE_CUDA, options));
        break;
      case Library::kFakeHip:
        hip_test::fake().reset(&hip_);
        driver_ = must(open_hip_driver_from({GPUFS_FAKE_HIP}, options));
        break;
      default:
        plan_->cpu_addressable = GetParam().library == Library::kHost;
        driver_ = testing::make_faulty_driver(plan_, options.memory_bytes, 2);
    }
    for (std::size_t index = 0; index < 2; ++index) devices_.push_back(must(DeviceContext::create(driver_, index)));
  }

  // The n-th call of the driver's from now fails, and all after it (times: so many).
  void fail(const char* cuda, const char* hip, testing::Fault FaultPlan::*host, int n, int code, int times = kAlways) {
    if (GetParam().library == Library::kFakeCuda) {
      cuda_test::fake().fail(cuda, n, code, times);
    } else if (GetParam().library == Library::kFakeHip) {
      hip_test::fake().fail(hip, n, code, times);
    } else {
      (*plan_.*host).at(n, times, code == api::kOutOfMemory ? ENOMEM : EIO);
    }
  }
  void fail_copies(int n, int code, int times) {
    const bool in = load();
    fail(in ? "cuMemcpyHtoDAsync_v2" : "cuMemcpyDtoHAsync_v2", in ? "hipMemcpyHtoDAsync" : "hipMemcpyDtoHAsync",
         &FaultPlan::stream_copy, n, code, times);
  }
  int code_of(int code) const { return of_gpu(GetParam().library) ? code : 700; }  // a FaultPlan's is always this

  // The file answers `error` from `offset` on.
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
    operations_.on_read = [=](int fd, void* memory, std::size_t bytes, std::uint64_t at, ssize_t* result) {
      return ends(fd, bytes, at, result,
                  [&](std::uint64_t count) { return ::pread(fd, memory, count, static_cast<off_t>(at)); });
    };
    operations_.on_write = [=](int fd, const void* memory, std::size_t bytes, std::uint64_t at, ssize_t* result) {
      return ends(fd, bytes, at, result,
                  [&](std::uint64_t count) { return ::pwrite(fd, memory, count, static_cast<off_t>(at)); });
    };
  }

  void give_short_counts() {
    const auto shorten = [this](std::size_t* bytes, ssize_t* result) {
      if (calls_++ % 3 == 0) {
        errno = EINTR;
        *result = -1;
        return true;
      }
      *bytes = std::min<std::size_t>(*bytes, 50000);
      return false;
    };
    operations_.on_read = [=](int fd, void* memory, std::size_t bytes, std::uint64_t at, ssize_t* result) {
      if (!shorten(&bytes, result)) *result = ::pread(fd, memory, bytes, static_cast<off_t>(at));
      return true;
    };
    operations_.on_write = [=](int fd, const void* memory, std::size_t bytes, std::uint64_t at, ssize_t* result) {
      if (!shorten(&bytes, result)) *result = ::pwrite(fd, memory, bytes, static_cast<off_t>(at));
      return true;
    };
  }

  // Before the first byte is moved. A buffer's memory is taken away while others use it: by a thread of its own.
  void cut_source() {
    operations_.on_read = [this](int, void*, std::size_t, std::uint64_t, ssize_t*) {
      std::call_once(once_, [this] { EXPECT_EQ(::ftruncate(fd_.get(), kShort), 0); });
      return false;
    };
    operations_.on_write = [this](int, const void*, std::size_t, std::uint64_t, ssize_t*) {
      std::call_once(once_, [this] { cutter_ = std::thread([this] { EXPECT_OK(buffer_->resize(kShort)); }); });
      return false;
    };
  }

  // What goes wrong, and how that must end.
  Outcome plan() {
    switch (GetParam().fault) {
      case Fault::kShortCounts:
        give_short_counts();
        return {};
      case Fault::kFileFails:
        end_file_at(kBad, EIO);
        return {EIO, kBad, kBad};
      case Fault::kFileIsGone:
        end_file_at(kBad, ENODEV);
        return {ENODEV, kBad, kBad};
      case Fault::kFileIsStale:
        end_file_at(kBad, ESTALE);
        return {ESTALE, kBad, kBad};
      case Fault::kOverQuota:
        end_file_at(kBad, EDQUOT);
        return {EDQUOT, kBad, kBad};
      case Fault::kFullDisk:
        end_file_at(kBad, ENOSPC);
        return {ENOSPC, kBad, kBad};
      case Fault::kNoRoomAhead:
        operations_.on_allocate = [this](int, std::uint64_t, std::uint64_t) {
          EXPECT_EQ(::ftruncate(fd_.get(), kShort), 0);  // as much as there was room for
          errno = ENOSPC;
          return -1;
        };
        return {ENOSPC, 0, 0};
      case Fault::kSyncFails:
        operations_.on_sync = [](bool) {
          errno = EIO;
          return -1;
        };
        return {EIO, kTotal, kTotal};
      case Fault::kSourceIsCut:
        cut_source();
        // What others have pinned is stored as it was.
        return load() ? Outcome{0, kShort, kShort} : Outcome{0, 0, kTotal};
      case Fault::kFastpathIsGone:
        end_file_at(kBad, ENODEV, file_->direct_fd());
        return {};
      case Fault::kFastpathFails:
        end_file_at(kBad, EIO, file_->direct_fd());
        return {EIO, 5 * kChunk, 5 * kChunk};
      case Fault::kNothingIsPinned:
        fail("cuMemHostRegister_v2", "hipHostRegister", &FaultPlan::pin, 1, api::kOutOfMemory);
        return {ENOMEM, 0, 0, code_of(api::kOutOfMemory)};
      case Fault::kOneIsPinned:
        fail("cuMemHostRegister_v2", "hipHostRegister", &FaultPlan::pin, 2, api::kOutOfMemory);
        return {};
      case Fault::kNoEvent:
        fail("cuEventCreate", "hipEventCreateWithFlags", &FaultPlan::create_event, 1, api::kOutOfMemory);
        return {ENOMEM, 0, 0, code_of(api::kOutOfMemory)};
      case Fault::kNoStream:
        fail("cuStreamCreate", "hipStreamCreateWithFlags", &FaultPlan::create_stream, 1, api::kOutOfMemory);
        return {ENOMEM, 0, 0, code_of(api::kOutOfMemory)};
      case Fault::kCopyIsRefused:
        fail_copies(4, api::kInvalidValue, 1);
        return {EIO, 3 * kChunk, 3 * kChunk, code_of(api::kInvalidValue)};
      case Fault::kWaitFails:
        for (const char* symbol : {"cuEventQuery", "cuEventSynchronize"}) {
          if (GetParam().library == Library::kFakeCuda) cuda_test::fake().fail(symbol, 1, api::kInvalidHandle, 1);
        }
        for (const char* symbol : {"hipEventQuery", "hipEventSynchronize"}) {
          if (GetParam().library == Library::kFakeHip) hip_test::fake().fail(symbol, 1, api::kInvalidHandle, 1);
        }
        return {EIO, 0, 0, api::kInvalidHandle};
      case Fault::kDeviceIsFull:
        return {ENOSPC, 0, kTotal - 1, -1};
      case Fault::kContextIsLost:
        lost_ = true;
        fail_copies(4, api::kIllegalAddress, 1);
        return {EIO, 0, 3 * kChunk, api::kIllegalAddress};
    }
    return {};
  }

  void set_up_transfer() {
    IoOptions options;
    options.chunk_bytes = kChunk;
    options.workers = 3;
    options.slots = 2;
    const bool fastpath = GetParam().fault == Fault::kFastpathIsGone || GetParam().fault == Fault::kFastpathFails;
    options.fastpath = fastpath ? FastpathMode::kAuto : FastpathMode::kOff;
    options.direct = GetParam().fault == Fault::kNoRoomAhead ? Switch::kAuto : Switch::kOff;
    DriverOptions device;
    device.devices = 2;
    device.memory_bytes = GetParam().fault == Fault::kDeviceIsFull ? 4 * kMiB : 64 * kMiB;
    open_driver(device);
    engine_ = must(TransferEngine::create(options, devices_, make_direct_path(fastpath ? "host" : "none")));
    buffer_ = must(Buffer::create(devices_[0]));
    data_ = pattern(kTotal, 11);
    if (load()) {
      ASSERT_EQ(::pwrite(fd_.get(), data_.data(), data_.size(), 0), static_cast<ssize_t>(kTotal));
    } else {
      ASSERT_EQ(must(buffer_->write(0, data_)), kTotal);
    }
    file_ = must(BackingFile::open(fd_.get(), operations_));
  }

  TransferProgress move(const std::shared_ptr<Buffer>& buffer) {
    TransferRequest wanted;
    wanted.direction = GetParam().direction;
    wanted.file = file_;
    wanted.target = Target::of_buffer(buffer);
    wanted.share = 1;  // copies are counted
    if (GetParam().fault == Fault::kSyncFails) wanted.sync = SyncMode::kFull;
    const std::shared_ptr<Transfer> transfer = must(engine_->start(wanted));
    transfer->wait();
    return transfer->progress();
  }

  void expect_content(std::uint64_t count) {
    if (load()) {
      EXPECT_EQ(buffer_->size(), count);
      if (lost_) return;
      std::vector<std::byte> found(count);
      EXPECT_EQ(must(buffer_->read(0, found)), count);
      EXPECT_TRUE(testing::same_bytes(found, std::span(data_).first(count)));
      // What was moved beyond a failure does not come back with a larger size.
      EXPECT_OK(buffer_->resize(kTotal));
      found.assign(kTotal, std::byte{0xee});
      EXPECT_EQ(must(buffer_->read(0, found)), kTotal);
      EXPECT_TRUE(testing::all_zero(std::span(found).subspan(count)));
      return;
    }
    struct stat status = {};
    EXPECT_EQ(::fstat(fd_.get(), &status), 0);
    EXPECT_EQ(static_cast<std::uint64_t>(status.st_size), count);
    std::vector<std::byte> found(count);
    EXPECT_EQ(::pread(fd_.get(), found.data(), count, 0), static_cast<ssize_t>(count));
    EXPECT_TRUE(testing::same_bytes(found, std::span(data_).first(count)));
  }

  // All of it, and nothing at the destination.
  void restore_source() {
    if (load()) {
      ASSERT_EQ(::pwrite(fd_.get(), data_.data(), data_.size(), 0), static_cast<ssize_t>(kTotal));
    } else {
      ASSERT_EQ(must(buffer_->write(0, data_)), kTotal);
      ASSERT_EQ(::ftruncate(fd_.get(), 0), 0);
    }
  }

  void forget_faults() {
    operations_.on_read = nullptr;
    operations_.on_write = nullptr;
    operations_.on_allocate = nullptr;
    operations_.on_sync = nullptr;
    for (testing::Fault FaultPlan::*fault :
         {&FaultPlan::pin, &FaultPlan::create_event, &FaultPlan::create_stream, &FaultPlan::stream_copy}) {
      (*plan_.*fault).clear();
    }
    const int none = api::kSuccess;
    for (const char* symbol :
         {"cuMemHostRegister_v2", "cuEventCreate", "cuStreamCreate", "cuEventQuery", "cuEventSynchronize"}) {
      if (GetParam().library == Library::kFakeCuda) cuda_test::fake().fail(symbol, 1, none, 0);
    }
    for (const char* symbol : {"hipHostRegister", "hipEventCreateWithFlags", "hipStreamCreateWithFlags",
                               "hipEventQuery", "hipEventSynchronize"}) {
      if (GetParam().library == Library::kFakeHip) hip_test::fake().fail(symbol, 1, none, 0);
    }
  }

  FakeGpuSetup cuda_{.devices = 2};
  FakeGpuSetup hip_{.devices = 2};
  std::shared_ptr<FaultPlan> plan_ = std::make_shared<FaultPlan>();
  PlannedFileOps operations_;
  std::shared_ptr<Driver> driver_;
  std::vector<std::shared_ptr<DeviceContext>> devices_;
  std::shared_ptr<TransferEngine> engine_;
  std::shared_ptr<Buffer> buffer_;
  std::shared_ptr<BackingFile> file_;
  std::vector<std::byte> data_;
  std::atomic<int> calls_{0};
  std::once_flag once_;
  std::thread cutter_;
  bool lost_ = false;         // the device that is used
  bool lost_device_ = false;  // the first
  UniqueFd fd_;

 private:
  std::set<std::string> descriptors_;
  std::size_t threads_ = 0;
  int pinned_ = 0;
};

INSTANTIATE_TEST_SUITE_P(, IoFaults, ::testing::ValuesIn(cases()), name_of);

TEST_P(IoFaults, EndRightAndLeaveNothing) {
  set_up_transfer();
  if (HasFatalFailure()) return;
  const Outcome outcome = plan();
  const TransferProgress done = move(buffer_);
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
  if (lost_) {
    EXPECT_EQ(move(buffer_).status.error(), EIO);
    buffer_ = must(Buffer::create(devices_[1]));
    lost_ = false;  // of this one all is expected
    lost_device_ = true;
  } else if (load()) {
    buffer_ = must(Buffer::create(devices_[0]));
  }
  restore_source();
  const TransferProgress again = move(buffer_);
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
