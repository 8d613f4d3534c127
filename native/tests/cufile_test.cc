// What only cuFile has: when it is used at all, for which files, and what is made of its answers. What it shares with
// other vendors: fastpath_test.cc.

#include <gtest/gtest.h>
#include <unistd.h>

#include <string>

#include "cufile_fixture.h"

namespace gpufs {
namespace {

using namespace cuda_test;

// ---- whether it is used at all ----

TEST_F(CufileFiles, OnlyWhereGpuDirectIsActive) {
  const FakeCufileSetup working = storage_;
  const auto refusals = [&](const FakeCufileSetup& setup, const char* failing = nullptr, int code = 5007) {
    cufile().reset(&setup);
    if (failing != nullptr) cufile().fail(failing, 1, code);
    return open_path(true)->refusals();
  };
  const RefusalMask none = mask_of(Refusal::kNoGpuDirect);
  EXPECT_EQ(refusals(working), 0U);
  EXPECT_EQ(cufile().calls("cuFileDriverOpen"), 1);
  cufile().reset(&working);
  EXPECT_EQ(open_path(false)->refusals(), none);
  EXPECT_EQ(cufile().calls("cuFileDriverOpen"), 0);  // it would start threads

  FakeCufileSetup setup = working;
  setup.major = 0;  // the library has not found its module
  EXPECT_EQ(refusals(setup), none);
  setup = working;
  setup.supported = 1U << 2 | 1U << 9;  // network file systems alone
  EXPECT_EQ(refusals(setup), none);
  for (const unsigned kind : {kCufileNvme, kCufileNvmeFabrics, kCufileScsi}) {
    setup.supported = kind;
    EXPECT_EQ(refusals(setup), 0U) << kind;
  }
  for (const char* symbol : {"cuFileDriverOpen", "cuFileDriverGetProperties"}) {
    EXPECT_EQ(refusals(working, symbol), none) << symbol;
  }
  // A program that uses it has opened it before us.
  EXPECT_EQ(refusals(working, "cuFileDriverOpen", kCufileAlreadyOpen), 0U);
}

TEST_F(CufileFiles, EveryFunctionIsNeeded) {
  EXPECT_EQ(open_cufile_path({}, true, "libcufile.so.99")->refusals(), mask_of(Refusal::kNoVendorCall));
  EXPECT_EQ(open_cufile_path({}, true, GPUFS_FAKE_CUFILE_OLD)->refusals(), mask_of(Refusal::kNoVendorCall));
  EXPECT_EQ(cufile_of(GPUFS_FAKE_CUFILE_OLD).calls("cuFileDriverOpen"), 0);
  if (::access("/dev/nvidia-fs0", F_OK) != 0) {
    EXPECT_EQ(open_cufile_path({})->refusals(), mask_of(Refusal::kNoGpuDirect));
    EXPECT_EQ(make_fastpath("cuda")->refusals(), mask_of(Refusal::kNoGpuDirect));
  }
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
  const auto data = pattern(kMiB, 1);
  START_OR_SKIP(data);
  EXPECT_EQ(rig_->path->refusals(), 0U);
  const TransferProgress done = rig_->finish(rig_->load());
  EXPECT_TRUE(done.status.ok());
  EXPECT_EQ(done.path_bytes[1], data.size());
  EXPECT_EQ(rig_->refused(Direction::kLoad, Refusal::kNotAccepted), 1U);
  EXPECT_EQ(cufile().calls("cuFileHandleRegister"), 0);
  TransferRequest wanted = rig_->load();
  wanted.fastpath = FastpathMode::kRequire;
  const std::string why = rig_->finish(wanted).status.message();
  EXPECT_NE(why.find(": not_accepted"), std::string::npos) << why;
  EXPECT_NE(why.find("storage"), std::string::npos) << why;  // as cuFile's side of it says
}

TEST_F(CufileFiles, FileSystemsOnTheNetworkAreForThoseWhoAllowThem) {
  EXPECT_EQ(cufile_file_system("nfs4"), cufile_file_system("nfs"));
  EXPECT_NE(cufile_file_system("lustre"), 0U);
  EXPECT_EQ(cufile_file_system("ext4"), 0U);
  storage_.supported = cufile_file_system("nfs4");  // and no local disk
  ASSERT_EQ(cufile().reset(&storage_), 0);
  const auto refusals = [](std::vector<std::string> types) {
    return open_cufile_path(FileSystems(std::move(types)), true, GPUFS_FAKE_CUFILE)->refusals();
  };
  EXPECT_EQ(refusals({}), mask_of(Refusal::kNoGpuDirect));
  EXPECT_EQ(refusals({"lustre"}), mask_of(Refusal::kNoGpuDirect));
  EXPECT_EQ(refusals({"lustre", "nfs4"}), 0U);
  EXPECT_EQ(refusals({"any"}), 0U);
}

TEST_F(CufileFiles, AFileIsRegisteredOnce) {
  START_OR_SKIP(pattern(kMiB, 2));
  for (const Direction direction : {Direction::kLoad, Direction::kStore}) {
    EXPECT_EQ(rig_->finish(rig_->request(direction)).path_bytes[0], kMiB);
  }
  EXPECT_EQ(cufile().calls("cuFileHandleRegister"), 1);
  EXPECT_EQ(cufile().registered(), 1);
  rig_.reset();
  EXPECT_EQ(cufile().registered(), 0);
}

TEST_F(CufileFiles, AFileThatItDoesNotAccept) {
  const auto data = pattern(kMiB, 9);
  START_OR_SKIP(data);
  cufile().fail("cuFileHandleRegister", 1, kCufileInternalError);
  const TransferProgress done = rig_->finish(rig_->load());
  ASSERT_TRUE(done.status.ok());
  EXPECT_EQ(done.path_bytes[1], data.size());
  EXPECT_EQ(rig_->refused(Direction::kLoad, Refusal::kNotAccepted), 1U);
  EXPECT_EQ(rig_->file->fastpath_file(*rig_->path).status().device_code(), kCufileInternalError);
  EXPECT_TRUE(calls().empty());
}

// ---- what it may answer ----

TEST_F(CufileFiles, WhatIsMadeOfEachAnswer) {
  constexpr std::uint64_t kBytes = 4 * 4096;
  START_OR_SKIP(pattern(kBytes, 7));
  expect_answers<FakeCufilePlan>(
      {
          {"success, whatever errno is left", {0, EIO, kBytes, 0}, kBytes, 0, 0},
          {"an errno", {-1, EIO, 0, 0}, 0, EIO, 0},
          {"an errno that lets the fallback try", {-1, ENODEV, 0, 0}, 0, ENODEV, 0},
          {"no word but failure", {-1, 0, 0, 0}, 0, EREMOTEIO, 0},
          {"the library's own failure", {-5011, 0, 0, 0}, 0, EREMOTEIO, 5011},
          {"the library's own failure, whatever errno is left", {-5008, EIO, 0, 0}, 0, EREMOTEIO, 5008},
          {"more bytes than were asked for", {0, 0, kBytes, kBytes + 1}, 0, EREMOTEIO, 0},
      },
      cufile().plan);
}

}  // namespace
}  // namespace gpufs
