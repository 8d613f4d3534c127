// Transfers over a fake device, a fake buffer and a direct path whose failures a test plans; a door at which reads and
// writes wait. Owned by the tests that make them. Doors are for any thread, the rest is for the test's own.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bytes.h"
#include "io/direct_path.h"
#include "io_fakes.h"
#include "transfer_rig.h"

namespace gpufs::testing {

using gpu_test::kMiB;

inline std::vector<std::byte> pattern(std::size_t bytes, unsigned seed = 1) { return pattern_bytes(bytes, seed); }

// It reads and writes the file itself.
class PlannedDirectPath final : public DirectPath {
 public:
  std::atomic<int> fail_at{0};  // the n-th call fails with `error` after half of its bytes
  std::atomic<int> error{ENODEV};
  std::atomic<bool> refuse_file{false};
  std::atomic<int> calls{0};

  [[nodiscard]] const char* name() const override { return "planned"; }
  [[nodiscard]] RefusalMask refusals() const override { return 0; }
  Result<std::unique_ptr<DirectFile>> attach(BackingFile& file) override {
    if (refuse_file) return Status(EIO, "this file is not accepted", 5030);
    return std::unique_ptr<DirectFile>(std::make_unique<File>(*this, file));
  }

 private:
  class File final : public DirectFile {
   public:
    File(PlannedDirectPath& path, BackingFile& file) : path_(path), file_(file) {}
    Moved load(DeviceAddress destination, std::uint64_t bytes, std::uint64_t offset) override {
      return move(bytes, [&](std::uint64_t count) {
        return ::pread(file_.buffered_fd(), reinterpret_cast<void*>(destination), count, static_cast<off_t>(offset));
      });
    }
    Moved store(DeviceAddress source, std::uint64_t bytes, std::uint64_t offset) override {
      return move(bytes, [&](std::uint64_t count) {
        return ::pwrite(file_.buffered_fd(), reinterpret_cast<const void*>(source), count, static_cast<off_t>(offset));
      });
    }

   private:
    template <typename Call>
    Moved move(std::uint64_t bytes, Call call) {
      const bool failing = ++path_.calls == path_.fail_at;
      Moved moved;
      const ssize_t count = call(failing ? bytes / 2 : bytes);
      moved.bytes = count < 0 ? 0 : static_cast<std::uint64_t>(count);
      if (failing) moved.status = Status(path_.error, "planned", 999);
      return moved;
    }
    PlannedDirectPath& path_;
    BackingFile& file_;
  };
};

// What is there before anything else of a rig, and looks back when all of that is gone.
class FakeParts {
 public:
  FakeParts() = default;
  ~FakeParts() {
    EXPECT_EQ(plan->pinned, 0);
    EXPECT_EQ(plan->events, 0);
    EXPECT_EQ(plan->streams, 0);
    EXPECT_EQ(names_in("/proc/self/fd"), before_);
  }
  FakeParts(const FakeParts&) = delete;
  FakeParts& operator=(const FakeParts&) = delete;

  const std::shared_ptr<FakePlan> plan = std::make_shared<FakePlan>();
  const std::shared_ptr<PlannedDirectPath> direct = std::make_shared<PlannedDirectPath>();

 private:
  const std::set<std::string> before_ = names_in("/proc/self/fd");
};

// The memory of the device can be addressed by the CPU, as on the host driver (pieces are moved straight), or not, as
// on a GPU (they go through slots).
class FakeRig : public FakeParts, public TransferRig<FakeBuffer> {
 public:
  explicit FakeRig(bool cpu_addressable, const IoOptions& options = small_options(), const char* directory = "/tmp")
      : TransferRig(driver(cpu_addressable), direct, options, directory) {}
  ~FakeRig() {
    engine->shutdown();
    if (buffer) {
      EXPECT_EQ(buffer->pins, 0);
    }
  }
  FakeRig(const FakeRig&) = delete;
  FakeRig& operator=(const FakeRig&) = delete;

  static IoOptions without_fastpath() {
    IoOptions options = small_options();
    options.fastpath = FastpathMode::kOff;
    return options;
  }

  void make_buffer(std::uint64_t capacity) { buffer = std::make_shared<FakeBuffer>(device, capacity); }
  // The two ends of a transfer in this direction, with the data at the one that is read.
  void make_ends(Direction direction, const std::vector<std::byte>& data, bool may_hang = false) {
    make_buffer(2 * data.size());
    if (direction == Direction::kLoad) {
      make_file(data, may_hang);
    } else {
      buffer->fill(data);
      open_file(may_hang);
    }
  }
  // Whether the buffer begins with these bytes, but for what is before `from`.
  [[nodiscard]] bool buffer_has(const std::vector<std::byte>& data, std::size_t from = 0) const {
    return same_bytes(std::span(buffer->contents() + from, data.size() - from), std::span(data).subspan(from));
  }

 private:
  std::shared_ptr<Driver> driver(bool cpu_addressable) {
    plan->cpu_addressable = cpu_addressable;
    return std::make_shared<FakeDriver>(plan);
  }
};

// Tests that hold whichever way the pieces go.
class EitherWay : public ::testing::TestWithParam<bool> {
 public:
  static std::string name(const ::testing::TestParamInfo<bool>& param) { return param.param ? "Straight" : "Bounced"; }
};

// A door at which reads or writes wait.
class Door {
 public:
  void pass() {
    std::unique_lock lock(mutex_);
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return open_; });
    --waiting_;
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void await(int count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_ >= count; });
  }
  int waiting() {
    const std::lock_guard lock(mutex_);
    return waiting_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
  int waiting_ = 0;
};

}  // namespace gpufs::testing
