// A vendor's way of moving files, over the fake of its library: what the tests of all vendors start from.
// Owned by the tests that include it.
// The test's thread, except where a test starts more.
#pragma once

#include <gtest/gtest.h>

#include "fake_gpu_fixture.h"
#include "io/fastpath.h"
#include "transfer_rig.h"

namespace gpufs::gpu_test {

using testing::kChunk;

class FastpathRig : public testing::TransferRig {
 public:
  FastpathRig(std::shared_ptr<Driver> driver, const std::shared_ptr<Fastpath>& direct, IoOptions options,
              std::size_t index)
      : TransferRig(std::move(driver), direct, std::move(options), "/var/tmp", index), path(direct) {
    make_buffer();
  }
  // The vendor's view of the file, for calls without a transfer around them.
  FastpathFile& fastpath_file() { return *must(file->fastpath_file(*path)); }

  const std::shared_ptr<Fastpath> path;
};

// What a fake has recorded of a call for a file.
struct FileCall {
  bool write;
  int fd;
  std::int64_t offset;
  std::uint64_t bytes;
  DeviceAddress address;
  bool prepared;  // whatever else the vendor asks of the caller was done before it
};

// What a vendor's call answers, and what must be made of it, after how many bytes.
template <typename Plan>
struct Answer {
  const char* what;
  Plan plan;
  std::uint64_t bytes;
  int error;
  int code;
};

class FastpathFixture : public FakeGpu {
 protected:
  using FakeGpu::FakeGpu;

  // Over the vendor's fake; `kernel_ready` as if its part of the kernel were there.
  virtual std::shared_ptr<Fastpath> open_path(bool kernel_ready) = 0;
  // The next call that has no plan yet ends so, after moving at most so many bytes: well, or with this errno.
  virtual void plan(int error, std::uint64_t bytes) = 0;
  [[nodiscard]] virtual std::vector<FileCall> recorded() const = 0;

  // A transfer's two ends; false where the file system here has no O_DIRECT.
  bool start(const std::vector<std::byte>& contents, bool kernel_ready = true) {
    rig_.reset();
    open(setup_, options_);
    rig_ = std::make_unique<FastpathRig>(std::shared_ptr<Driver>(std::move(driver_)), open_path(kernel_ready),
                                         io_options_, device_);
    rig_->make_file(contents);
    return rig_->file->facts().fastpath_refusals == 0;
  }
  void TearDown() override {
    pinned_ = {};
    rig_.reset();
    FakeGpu::TearDown();
  }
  void plan_good(int calls) {
    for (int call = 0; call < calls; ++call) plan(0, UINT64_MAX);
  }
  // In the order of their offsets.
  [[nodiscard]] std::vector<FileCall> calls() const {
    std::vector<FileCall> found = recorded();
    std::sort(found.begin(), found.end(), [](const auto& one, const auto& other) { return one.offset < other.offset; });
    return found;
  }
  // The first bytes of the buffer's memory, which is there and large enough.
  DeviceAddress memory(std::uint64_t bytes) {
    pinned_ = must(rig_->buffer->pin_for_write(0, bytes));
    return pinned_.pieces.at(0).address;
  }
  // A file of four blocks, which is loaded and stored as a whole: with each of the answers in turn.
  template <typename Plan>
  void expect_answers(const std::vector<Answer<Plan>>& answers, void (*plan_call)(const Plan*)) {
    const std::vector<std::byte> data = rig_->file_contents();
    const DeviceAddress address = memory(data.size());
    FastpathFile& file = rig_->fastpath_file();
    for (const Direction direction : {Direction::kLoad, Direction::kStore}) {
      for (const Answer<Plan>& one : answers) {
        plan_call(&one.plan);
        const Moved moved = file.move(direction, address, data.size(), 0);
        EXPECT_EQ(moved.bytes, one.bytes) << one.what;
        EXPECT_EQ(moved.status.error(), one.error) << one.what << ": " << moved.status.message();
        EXPECT_EQ(moved.status.device_code(), one.code) << one.what;
      }
    }
    EXPECT_EQ(rig_->path->refusals(), 0U);  // none of these says that the kernel has no such interface
    EXPECT_EQ(rig_->file_contents(), data);
  }

  DriverOptions options_;
  IoOptions io_options_ = testing::TransferRig::small_options();
  std::size_t device_ = 0;  // the one that a rig is for
  Buffer::Pin pinned_;
  std::unique_ptr<FastpathRig> rig_;
};

#define START_OR_SKIP(...) \
  if (!this->start(__VA_ARGS__)) GTEST_SKIP() << "no file system for a fastpath at /var/tmp"

}  // namespace gpufs::gpu_test
