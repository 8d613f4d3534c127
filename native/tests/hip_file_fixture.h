// hipAmdFileRead and hipAmdFileWrite as a fastpath, over the fake runtime.
// Owned by the tests that include it.
// The test's thread, except where a test starts more.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "fake_vendors.h"
#include "fastpath_fixture.h"

namespace gpufs::hip_test {

class HipFiles : public FastpathFixture {
 protected:
  static constexpr const char* kHostCopy = "hipMemcpyHtoDAsync";
  static constexpr Refusal kNotReady = Refusal::kNoKernelSupport;
  static constexpr const char* kNotReadyName = "no_kernel_support";
  static constexpr bool kFailuresMove = true;

  HipFiles() : FastpathFixture(fake(), open_fake) {
    setup_.devices = 2;
    options_.hip_memory = HipMemory::kPlain;  // the calls reach no other
  }
  std::shared_ptr<Fastpath> open_path(bool kernel_ready) override {
    return open_hip_file_path({GPUFS_FAKE_HIP}, kernel_ready);
  }
  void plan(int error, std::uint64_t bytes) override {
    FakeHipFilePlan plan;
    plan.bytes = bytes;
    if (error != 0) plan.result = api::kUnknown;
    plan.status = -error;
    if (error == ENOTTY) {  // a kernel without the interface, which leaves garbage elsewhere
      plan.status = 99;
      plan.error_number = ENOTTY;
    }
    fake().plan_file_call(&plan);
  }
  [[nodiscard]] std::vector<FileCall> recorded() const override {
    std::vector<FakeHipFileCall> found(static_cast<std::size_t>(fake().file_calls(nullptr, 0)));
    fake().file_calls(found.data(), static_cast<int>(found.size()));
    std::vector<FileCall> calls;
    for (const FakeHipFileCall& call : found) {
      calls.push_back({call.write, call.fd, call.file_offset, call.bytes, call.device_address,
                       call.outputs_zeroed && call.errno_zeroed && call.device == static_cast<int>(device_)});
    }
    return calls;
  }
};

}  // namespace gpufs::hip_test
