// Transfers over the host's memory, which the CPU addresses or not.
#pragma once

#include "bytes.h"
#include "faulty_driver.h"
#include "io/fastpath.h"
#include "transfer_rig.h"

namespace gpufs::testing {

// What exists before a rig, and is checked after it.
class RigPlan {
 public:
  ~RigPlan() { EXPECT_EQ(names_in("/proc/self/fd"), before_); }
  const std::shared_ptr<FaultPlan> plan = std::make_shared<FaultPlan>();

 private:
  const std::set<std::string> before_ = names_in("/proc/self/fd");
};

// cpu_addressable: as on the host driver, where chunks are moved without a bounce buffer. Otherwise as on a GPU.
class FakeRig : public RigPlan, public TransferRig {
 public:
  explicit FakeRig(bool cpu_addressable, const IoOptions& options = small_options(), const char* directory = "/tmp")
      : TransferRig(make_driver(cpu_addressable), make_fastpath("host"), options, directory) {
    make_buffer();
  }

  static IoOptions without_fastpath() {
    IoOptions options = small_options();
    options.fastpath = FastpathMode::kOff;
    return options;
  }

  // The two ends of a transfer in this direction, with the data at the one that is read.
  void make_ends(Direction direction, const std::vector<std::byte>& data, bool may_hang = false) {
    if (direction == Direction::kLoad) {
      make_file(data, may_hang);
    } else {
      fill_buffer(data);
      open_file(may_hang);
    }
  }
  [[nodiscard]] std::vector<std::byte> destination(Direction direction) const {
    return direction == Direction::kLoad ? buffer_contents() : file_contents();
  }

 private:
  std::shared_ptr<Driver> make_driver(bool cpu_addressable) {
    plan->cpu_addressable = cpu_addressable;
    return make_faulty_driver(plan, 256 * kMiB);
  }
};

// Tests of both ways of fallback: straight between file and memory, or through bounce buffers.
class EitherWay : public ::testing::TestWithParam<bool> {
 public:
  static std::string name(const ::testing::TestParamInfo<bool>& param) { return param.param ? "Straight" : "Bounced"; }
};

}  // namespace gpufs::testing
