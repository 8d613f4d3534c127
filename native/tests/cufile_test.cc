// cuFile as a direct path, over fakes of libcufile and libcuda: when it is used at all, which calls are made, and what
// is made of all that they may answer.

#include "io/cufile.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <string>
#include <vector>

#include "cuda_test_support.h"
#include "direct_path_support.h"
#include "fake_cufile/fake_cufile.h"

namespace gpufs {
namespace {

using namespace cuda_test;

constexpr int kInternalError = 5030;

const FakeCufileControl& control_of(const char* library) {
  void* const handle = ::dlopen(library, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) ADD_FAILURE() << ::dlerror();
  return *reinterpret_cast<const FakeCufileControl* (*)()>(::dlsym(handle, "fake_cufile_control"))();
}

const FakeCufileControl& cufile() {
  static const FakeCufileControl& control = control_of(GPUFS_FAKE_CUFILE);
  return control;
}

bool has_context() { return fake().current() == 0; }

class CufileFiles : public FakeCuda {
 protected:
  void SetUp() override {
    FakeCuda::SetUp();
    storage_.has_context = has_context;
    ASSERT_EQ(cufile().reset(&storage_), 0);
  }
  void TearDown() override {
    pinned_.reset();
    rig_.reset();
    EXPECT_EQ(cufile().reset(&storage_), 0) << "a file is still registered";
    FakeCuda::TearDown();
  }
  static std::shared_ptr<DirectPath> open_path(bool module_present = true) {
    return open_cufile_path_from(GPUFS_FAKE_CUFILE, module_present);
  }
  RefusalMask refusals() {
    const RefusalMask refused = open_path()->refusals();
    storage_ = FakeCufileSetup{};
    storage_.has_context = has_context;
    cufile().reset(&storage_);
    return refused;
  }
  // False where the file system here has no O_DIRECT.
  bool start(const std::vector<std::byte>& contents, bool module_present = true) {
    open();
    rig_ = std::make_unique<DirectRig>(std::shared_ptr<Driver>(std::move(driver_)), open_path(module_present));
    return rig_->make_file(contents);
  }
  static void plan(ssize_t result, int error_number = 0, std::uint64_t bytes = UINT64_MAX) {
    const FakeCufilePlan plan{result, error_number, bytes, 0};
    cufile().plan(&plan);
  }
  // In the order of their offsets.
  static std::vector<FakeCufileCall> records() {
    std::vector<FakeCufileCall> found(static_cast<std::size_t>(cufile().records(nullptr, 0)));
    cufile().records(found.data(), static_cast<int>(found.size()));
    std::sort(found.begin(), found.end(),
              [](const auto& one, const auto& other) { return one.file_offset < other.file_offset; });
    return found;
  }
  DeviceAddress memory(std::uint64_t bytes) {
    pinned_ = must(rig_->buffer->pin_for_write(0, bytes));
    return pinned_->pieces().at(0).address;
  }

  FakeCufileSetup storage_;
  std::unique_ptr<Buffer::Pinned> pinned_;
  std::unique_ptr<DirectRig> rig_;
};

#define START_OR_SKIP(...) \
  if (!start(__VA_ARGS__)) GTEST_SKIP() << "no file system for a direct path at /var/tmp"

// ---- whether it is used at all ----

TEST_F(CufileFiles, OnlyWhereGpuDirectIsActive) {
  const RefusalMask none = mask_of(Refusal::kNoGpuDirect);
  EXPECT_EQ(open_path()->refusals(), 0U);
  EXPECT_EQ(cufile().calls("cuFileDriverOpen"), 1);
  cufile().reset(&storage_);
  EXPECT_EQ(open_path(false)->refusals(), none);
  EXPECT_EQ(cufile().calls("cuFileDriverOpen"), 0);  // it would start threads

  storage_.major = 0;  // the library has not found its module
  cufile().reset(&storage_);
  EXPECT_EQ(refusals(), none);
  storage_.supported = 1U << 2 | 1U << 9;  // network file systems alone
  cufile().reset(&storage_);
  EXPECT_EQ(refusals(), none);
  for (const unsigned kind : {kCufileNvme, kCufileNvmeFabrics, kCufileScsi}) {
    storage_.supported = kind;
    cufile().reset(&storage_);
    EXPECT_EQ(refusals(), 0U) << kind;
  }
  for (const char* symbol : {"cuFileDriverOpen", "cuFileDriverGetProperties"}) {
    cufile().fail(symbol, 1, 5007);
    EXPECT_EQ(refusals(), none) << symbol;
  }
  // A program that uses it has opened it before us.
  cufile().fail("cuFileDriverOpen", 1, kCufileAlreadyOpen);
  EXPECT_EQ(refusals(), 0U);
}

TEST_F(CufileFiles, EveryFunctionIsNeeded) {
  EXPECT_EQ(open_cufile_path_from("libcufile.so.99", true)->refusals(), mask_of(Refusal::kNoVendorCall));
  EXPECT_EQ(open_cufile_path_from(GPUFS_FAKE_CUFILE_OLD, true)->refusals(), mask_of(Refusal::kNoVendorCall));
  EXPECT_EQ(control_of(GPUFS_FAKE_CUFILE_OLD).calls("cuFileDriverOpen"), 0);
  if (::access("/dev/nvidia-fs0", F_OK) != 0) {
    EXPECT_EQ(open_cufile_path()->refusals(), mask_of(Refusal::kNoGpuDirect));
    EXPECT_EQ(make_direct_path("cuda")->refusals(), mask_of(Refusal::kNoGpuDirect));
  }
}

TEST(DirectPaths, OtherDriversHaveNone) {
  EXPECT_EQ(make_direct_path("none of these")->refusals(), mask_of(Refusal::kNoVendorCall));
}

TEST(CufileStorage, IsKnownByItsPlace) {
  const std::string pci = "../../devices/pci0000:00/0000:00:1f.0/";
  EXPECT_EQ(cufile_storage(pci + "nvme/nvme0/nvme0n1/nvme0n1p1"), kCufileNvme);
  EXPECT_EQ(cufile_storage("../../devices/virtual/nvme-fabrics/ctl/nvme1/nvme1n1"), kCufileNvmeFabrics);
  EXPECT_EQ(cufile_storage("../../devices/virtual/nvme-subsystem/nvme-subsys0/nvme0n1"),
            kCufileNvme | kCufileNvmeFabrics);
  EXPECT_EQ(cufile_storage(pci + "ata1/host0/target0:0:0/0:0:0:0/block/sda/sda1"), kCufileScsi);
  EXPECT_EQ(cufile_storage(pci + "virtio2/block/vda/vda1"), 0U);
  EXPECT_EQ(cufile_storage("../../devices/virtual/block/dm-0"), 0U);
  EXPECT_EQ(cufile_storage(""), 0U);
}

TEST_F(CufileFiles, WhereItMayCopyThroughTheHostTheStorageIsLookedAt) {
  storage_.supported = kCufileNvmeFabrics;  // where no file of the tests lies
  storage_.control = kCufileMayCopyThroughHost;
  cufile().reset(&storage_);
  const auto data = pattern(kMiB, 1);
  START_OR_SKIP(data);
  EXPECT_EQ(rig_->path->refusals(), 0U);
  const TransferProgress done = rig_->finish(rig_->request(Direction::kLoad));
  EXPECT_TRUE(done.status.ok());
  EXPECT_EQ(done.path_bytes[1], data.size());
  EXPECT_EQ(rig_->refused(Direction::kLoad, Refusal::kNotAccepted), 1U);
  EXPECT_EQ(cufile().calls("cuFileHandleRegister"), 0);
  TransferRequest wanted = rig_->request(Direction::kLoad);
  wanted.fastpath = FastpathMode::kRequire;
  EXPECT_EQ(rig_->finish(wanted).status.message(), "fastpath is required but refused: not_accepted");
}

// ---- what is called ----

TEST_F(CufileFiles, AlignedRequestsTakeIt) {
  const auto data = pattern(4 * kMiB, 2);
  START_OR_SKIP(data);
  TransferProgress done = rig_->finish(rig_->request(Direction::kLoad));
  ASSERT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_EQ(done.path_bytes[0], data.size());
  EXPECT_EQ(done.path_bytes[1], 0U);
  EXPECT_EQ(done.refusals, 0U);
  EXPECT_EQ(rig_->buffer_contents(), data);
  EXPECT_EQ(fake().calls("cuMemcpyHtoDAsync_v2"), 0);  // no byte by way of the host
  EXPECT_EQ(cufile().registered(), 1);

  std::vector<FakeCufileCall> calls = records();
  ASSERT_EQ(calls.size(), data.size() / kChunk);
  for (std::size_t index = 0; index < calls.size(); ++index) {
    EXPECT_FALSE(calls[index].write);
    EXPECT_EQ(calls[index].fd, rig_->file->direct_fd());
    EXPECT_EQ(calls[index].file_offset, static_cast<std::int64_t>(index * kChunk));
    EXPECT_EQ(calls[index].bytes, kChunk);
    EXPECT_EQ(calls[index].device_base, calls[0].device_base + index * kChunk);
    EXPECT_EQ(calls[index].device_offset, 0);
    EXPECT_TRUE(calls[index].context);
  }
  const auto other = pattern(4 * kMiB, 3);
  rig_->fill_buffer(other);
  done = rig_->finish(rig_->request(Direction::kStore));
  ASSERT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_EQ(done.path_bytes[0], data.size());
  EXPECT_EQ(rig_->file_contents(), other);
  EXPECT_EQ(cufile().calls("cuFileHandleRegister"), 1);  // once for each file
}

TEST_F(CufileFiles, UnalignedRequestsAreSplit) {
  const auto data = pattern(4 * kMiB + 5000, 4);
  START_OR_SKIP(data);
  TransferRequest wanted = rig_->request(Direction::kLoad);
  wanted.file_offset = wanted.target_offset = 100;
  const TransferProgress done = rig_->finish(wanted);
  ASSERT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_EQ(done.prefix, data.size() - 100);
  EXPECT_EQ(done.path_bytes[0], 4 * kMiB);
  std::uint64_t expected = 4096;
  for (const FakeCufileCall& call : records()) {
    EXPECT_EQ(call.file_offset, static_cast<std::int64_t>(expected));
    EXPECT_EQ(call.bytes % 4096, 0U);
    expected += call.bytes;
  }
  EXPECT_EQ(expected, 4096 + 4 * kMiB);
  const auto there = rig_->buffer_contents();
  EXPECT_TRUE(std::equal(there.begin() + 100, there.end(), data.begin() + 100, data.end()));
}

TEST_F(CufileFiles, NoCallIsLargerThanTheKernelsLimit) {
  START_OR_SKIP(pattern(4096, 5));
  plan(-1, EIO);
  (void)rig_->direct_file().load(4096, std::uint64_t{5} << 30, 0);
  ASSERT_EQ(records().size(), 1U);
  EXPECT_EQ(records()[0].bytes, 0x7ffff000U);
}

TEST_F(CufileFiles, AFileLivesLongerThanItsPath) {
  START_OR_SKIP(pattern(4096, 6));
  const DeviceAddress address = memory(4096);
  std::shared_ptr<DirectPath> path = open_path();
  std::unique_ptr<DirectFile> file = must(path->attach(*rig_->file));
  path.reset();
  EXPECT_EQ(file->load(address, 4096, 0).bytes, 4096U);
  file.reset();
  EXPECT_EQ(cufile().registered(), 0);
}

// ---- what it may answer ----

TEST_F(CufileFiles, WhatIsMadeOfEachAnswer) {
  constexpr std::uint64_t kBytes = 4 * 4096;
  const auto data = pattern(kBytes, 7);
  START_OR_SKIP(data);
  const DeviceAddress address = memory(kBytes);
  struct Case {
    const char* what;
    FakeCufilePlan plan;
    std::uint64_t bytes;
    int error;
    int code;
  };
  const Case cases[] = {
      {"success, whatever errno is left", {0, EIO, kBytes, 0}, kBytes, 0, 0},
      {"an errno", {-1, EIO, 0, 0}, 0, EIO, 0},
      {"an errno that lets the fallback try", {-1, ENODEV, 0, 0}, 0, ENODEV, 0},
      {"no word but failure", {-1, 0, 0, 0}, 0, EREMOTEIO, 0},
      {"the library's own failure", {-5011, 0, 0, 0}, 0, EREMOTEIO, 5011},
      {"the library's own failure, whatever errno is left", {-5008, EIO, 0, 0}, 0, EREMOTEIO, 5008},
      {"more bytes than were asked for", {0, 0, kBytes, kBytes + 1}, 0, EREMOTEIO, 0},
  };
  for (const Direction direction : {Direction::kLoad, Direction::kStore}) {
    for (const Case& one : cases) {
      cufile().plan(&one.plan);
      DirectFile& file = rig_->direct_file();
      const Moved moved =
          direction == Direction::kLoad ? file.load(address, kBytes, 0) : file.store(address, kBytes, 0);
      EXPECT_EQ(moved.bytes, one.bytes) << one.what;
      EXPECT_EQ(moved.status.error(), one.error) << one.what << ": " << moved.status.message();
      EXPECT_EQ(moved.status.device_code(), one.code) << one.what;
    }
  }
  EXPECT_EQ(rig_->file_contents(), data);
}

TEST_F(CufileFiles, InterruptionsAreResumedAndShortCopiesContinued) {
  constexpr std::uint64_t kBytes = 8 * 4096;
  START_OR_SKIP(pattern(kBytes, 8));
  const DeviceAddress address = memory(kBytes);
  plan(-1, EINTR);
  plan(0, 0, 4096);
  plan(0, 0, 8192);
  Moved moved = rig_->direct_file().load(address, kBytes, 0);
  EXPECT_TRUE(moved.status.ok()) << moved.status.message();
  EXPECT_EQ(moved.bytes, kBytes);
  const std::vector<FakeCufileCall> calls = records();
  ASSERT_EQ(calls.size(), 4U);
  const std::vector<std::int64_t> offsets = {0, 0, 4096, 3 * 4096};
  for (std::size_t index = 0; index < calls.size(); ++index) {
    EXPECT_EQ(calls[index].file_offset, offsets[index]);
    EXPECT_EQ(calls[index].device_base, address + static_cast<std::uint64_t>(offsets[index]));
    EXPECT_EQ(calls[index].device_offset, 0);
  }
  plan(0, 0, 4096 + 512);  // cannot be continued at an aligned offset
  moved = rig_->direct_file().load(address, kBytes, 0);
  EXPECT_TRUE(moved.status.ok());
  EXPECT_EQ(moved.bytes, 4096U + 512U);
  plan(0, 0, 0);
  EXPECT_EQ(rig_->direct_file().load(address, kBytes, 0).bytes, 0U);
  EXPECT_EQ(records().size(), 6U);
}

TEST_F(CufileFiles, AFileThatItDoesNotAccept) {
  const auto data = pattern(kMiB, 9);
  START_OR_SKIP(data);
  cufile().fail("cuFileHandleRegister", 1, kInternalError);
  const TransferProgress done = rig_->finish(rig_->request(Direction::kLoad));
  ASSERT_TRUE(done.status.ok());
  EXPECT_EQ(done.path_bytes[1], data.size());
  EXPECT_EQ(rig_->refused(Direction::kLoad, Refusal::kNotAccepted), 1U);
  EXPECT_EQ(rig_->file->direct_file(*rig_->path).status().device_code(), kInternalError);
  EXPECT_TRUE(records().empty());
}

// ---- when it fails in the middle ----

TEST_F(CufileFiles, TheRestGoesByFallback) {
  for (const ssize_t result : {ssize_t{-1}, ssize_t{-5030}}) {
    for (const Direction direction : {Direction::kLoad, Direction::kStore}) {
      const auto data = pattern(4 * kMiB, static_cast<unsigned>(-result));
      START_OR_SKIP(direction == Direction::kLoad ? data : std::vector<std::byte>(1));
      if (direction == Direction::kStore) rig_->fill_buffer(data);
      for (int good = 0; good < 4; ++good) plan(0);
      plan(result, ENODEV);
      const TransferProgress done = rig_->finish_in_order(rig_->request(direction));
      ASSERT_TRUE(done.status.ok()) << done.status.message();
      EXPECT_EQ(done.prefix, data.size());
      EXPECT_EQ(done.path_bytes[0], 4 * kChunk);
      EXPECT_EQ(done.path_bytes[1], data.size() - 4 * kChunk);
      EXPECT_EQ(records().size(), 5U);
      EXPECT_EQ(rig_->refused(direction, Refusal::kFailedBefore), 1U);
      EXPECT_EQ(rig_->counted(direction, Path::kFastpath, &observe::Block::errors), 1U);
      EXPECT_EQ(rig_->counted(direction, Path::kFastpath, &observe::Block::bytes), done.path_bytes[0]);
      if (direction == Direction::kLoad) {
        EXPECT_EQ(rig_->buffer_contents(), data);
      } else {
        EXPECT_EQ(rig_->file_contents(), data);
      }
      rig_.reset();
      cufile().reset(&storage_);
    }
  }
}

TEST_F(CufileFiles, OtherFailuresAreReportedWithTheProgress) {
  START_OR_SKIP(pattern(4 * kMiB, 10));
  plan(0);
  plan(-1, EIO);
  const TransferProgress done = rig_->finish_in_order(rig_->request(Direction::kLoad));
  EXPECT_EQ(done.status.error(), EIO);
  EXPECT_EQ(done.prefix, kChunk);
  EXPECT_EQ(done.path_bytes[1], 0U);
}

TEST_F(CufileFiles, RequireIsRefusedWithTheReasons) {
  START_OR_SKIP(pattern(kMiB, 11), false);
  TransferRequest wanted = rig_->request(Direction::kLoad);
  wanted.fastpath = FastpathMode::kRequire;
  const TransferProgress done = rig_->finish(wanted);
  EXPECT_EQ(done.status.error(), EOPNOTSUPP);
  EXPECT_EQ(done.status.message(), "fastpath is required but refused: no_gpudirect");
  EXPECT_EQ(rig_->buffer->size(), 0U);
  EXPECT_TRUE(records().empty());
}

}  // namespace
}  // namespace gpufs
