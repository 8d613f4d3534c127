// cuFile as a fastpath, over fakes of libcufile and libcuda.
// Owned by the tests that include it.
// The test's thread, except where a test starts more.
#pragma once

#include <gtest/gtest.h>

#include <cerrno>

#include "fake_cufile/fake_cufile.h"
#include "fake_vendors.h"
#include "fastpath_fixture.h"
#include "io/cufile.h"

namespace gpufs::cuda_test {

constexpr int kCufileInternalError = 5030;

inline const FakeCufileControl& cufile_of(const char* library) {
  return control_of<FakeCufileControl>(library, "fake_cufile_control");
}
inline const FakeCufileControl& cufile() {
  static const FakeCufileControl& control = cufile_of(GPUFS_FAKE_CUFILE);
  return control;
}

class CufileFiles : public FastpathFixture {
 protected:
  static constexpr const char* kHostCopy = "cuMemcpyHtoDAsync_v2";
  static constexpr Refusal kNotReady = Refusal::kNoGpuDirect;
  static constexpr const char* kNotReadyName = "no_gpudirect";
  static constexpr bool kFailuresMove = false;  // a call that fails has moved nothing

  CufileFiles() : FastpathFixture(fake(), open_fake) {}
  void SetUp() override {
    FastpathFixture::SetUp();
    storage_.has_context = [] { return fake().current() == 0; };
    ASSERT_EQ(cufile().reset(&storage_), 0);
  }
  void TearDown() override {
    FastpathFixture::TearDown();
    EXPECT_EQ(cufile().reset(&storage_), 0) << "a file is still registered";
  }
  // A transfer's two ends, and nothing of earlier ones.
  bool start(const std::vector<std::byte>& contents, bool kernel_ready = true) {
    rig_.reset();
    EXPECT_EQ(cufile().reset(&storage_), 0);
    return FastpathFixture::start(contents, kernel_ready);
  }
  std::shared_ptr<Fastpath> open_path(bool kernel_ready) override {
    return open_cufile_path({}, kernel_ready, GPUFS_FAKE_CUFILE);
  }
  void plan(int error, std::uint64_t bytes) override {
    FakeCufilePlan plan{0, error, bytes, 0};
    if (error != 0) plan.result = error == EREMOTEIO ? -kCufileInternalError : -1;
    cufile().plan(&plan);
  }
  [[nodiscard]] std::vector<FileCall> recorded() const override {
    std::vector<FakeCufileCall> found(static_cast<std::size_t>(cufile().records(nullptr, 0)));
    cufile().records(found.data(), static_cast<int>(found.size()));
    std::vector<FileCall> calls;
    for (const FakeCufileCall& call : found) {
      calls.push_back({call.write, call.fd, call.file_offset, call.bytes, call.device_base,
                       call.context && call.device_offset == 0});
    }
    return calls;
  }

  FakeCufileSetup storage_;
};

}  // namespace gpufs::cuda_test
