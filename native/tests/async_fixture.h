// An engine for operations over each kind of driver, a file and streams of the "program's", for the tests of src/async.
// Owned by the tests that include it.
// One thread, except where a test starts more.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <utility>
#include <vector>

#include "async/async_engine.h"
#include "fake_vendors.h"
#include "faulty_driver.h"
#include "io_fakes.h"
#include "memory/extent_buffer.h"
#include "temporary_file.h"
#include "waiting.h"

namespace gpufs::async_test {

using namespace gpufs::gpu_test;
using namespace std::chrono_literals;

using testing::kPatience;
using testing::soon;

// The drivers; where a device's streams are held by calls of the host, the name says so.
enum class Kind { kHost, kHostCalls, kCuda, kCudaCalls, kHip };

inline std::string name_of(const ::testing::TestParamInfo<Kind>& info) {
  static constexpr const char* kNames[] = {"Host", "HostCalls", "Cuda", "CudaCalls", "Hip"};
  return kNames[static_cast<int>(info.param)];
}

// A word that the program's streams wait for.
class Gate {
 public:
  explicit Gate(std::shared_ptr<DeviceContext> device)
      : device_(std::move(device)), block_(must(device_->pinned().take(sizeof(std::uint32_t)))) {}
  ~Gate() { device_->pinned().release(block_); }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  void hold(Stream& stream) { EXPECT_OK(stream.wait_for_value(block_.address, ++value_)); }
  void open() {
    const std::atomic_ref<std::uint32_t> word(*reinterpret_cast<std::uint32_t*>(block_.data));
    word.store(value_);
    word.notify_all();
  }

 private:
  const std::shared_ptr<DeviceContext> device_;
  const PinnedBlock block_;
  std::uint32_t value_ = 0;
};

// A stream that the program made, known to the engine by its native name.
struct ProgramStream {
  std::unique_ptr<Stream> program;
  std::shared_ptr<OperationStream> stream;
};

class Rig {
  // Destroyed last: the fakes count again what is open, without what tests leave behind on purpose.
  struct Recount {
    ~Recount() {
      const FakeGpuSetup cuda;
      cuda_test::fake().reset(&cuda);
      const FakeGpuSetup hip;
      hip_test::fake().reset(&hip);
    }
  };
  const Recount recount_;

 public:
  explicit Rig(Kind kind, AsyncOptions options = {}, int devices = 1, IoOptions io = {}, bool virtual_memory = true)
      : recount_(), plan(std::make_shared<testing::FaultPlan>()) {
    if (kind == Kind::kHostCalls || kind == Kind::kCudaCalls) {
      options.stream_waits = Switch::kOff;
    }
    if (kind == Kind::kHost || kind == Kind::kHostCalls) {
      driver = testing::make_faulty_driver(plan, 512 * kMiB, devices);
    } else if (kind == Kind::kCuda || kind == Kind::kCudaCalls) {
      FakeGpuSetup setup;
      setup.devices = devices;
      setup.virtual_memory = virtual_memory;
      cuda_test::fake().reset(&setup);
      driver = must(open_cuda_driver({}, GPUFS_FAKE_CUDA));
    } else {
      FakeGpuSetup setup;
      setup.devices = devices;
      setup.virtual_memory = virtual_memory;
      hip_test::fake().reset(&setup);
      driver = must(open_hip_driver({}, {GPUFS_FAKE_HIP}));
    }
    for (int index = 0; index < devices; ++index) {
      contexts.push_back(must(DeviceContext::create(driver, static_cast<std::size_t>(index))));
    }
    io.chunk_bytes = std::size_t{256} << 10;
    io.pinned_bytes = 4 * kMiB;
    transfers = must(TransferEngine::create(io, make_fastpath("none")));
    engine = std::make_shared<AsyncEngine>(options, transfers, contexts);
    queue = engine->open_queue(0);
    EXPECT_TRUE(fd_.valid());
    file = must(BackingFile::open(fd_.get(), operations));
  }
  ~Rig() {
    engine->shutdown();
    EXPECT_EQ(engine->outstanding(), 0U);
    transfers->shutdown();
    EXPECT_EQ(cuda_test::fake().calls("in a host function"), 0);
    EXPECT_EQ(hip_test::fake().calls("in a host function"), 0);
  }

  [[nodiscard]] int fd() const { return fd_.get(); }
  const std::shared_ptr<DeviceContext>& device(std::size_t index = 0) { return contexts[index]; }
  void fill_file(const std::vector<std::byte>& bytes) {
    ASSERT_EQ(::pwrite(fd(), bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
  }
  std::shared_ptr<Buffer> buffer(const std::vector<std::byte>& bytes = {}, std::size_t index = 0) {
    std::shared_ptr<Buffer> made = std::make_shared<ExtentBuffer>(contexts[index]);
    if (!bytes.empty()) {
      EXPECT_EQ(must(made->write(0, bytes)), bytes.size());
    }
    return made;
  }
  ProgramStream program_stream(const StreamPromises& promises = {}, std::size_t index = 0) {
    ProgramStream made;
    made.program = must(contexts[index]->device().create_stream());
    made.stream = must(engine->register_stream(made.program->native(), static_cast<int>(index), promises));
    return made;
  }
  struct Numbers {
    std::uint64_t offset = 0;
    std::uint64_t target = 0;
    std::uint64_t cookie = 0;
    std::int64_t* count = nullptr;
    const std::uint64_t* late_bytes = nullptr;
    const std::uint64_t* late_offset = nullptr;
  };
  AsyncEngine::Submission entry(Direction direction, const std::shared_ptr<Buffer>& memory, std::uint64_t bytes,
                                std::shared_ptr<OperationStream> stream, const Numbers& numbers) {
    AsyncEngine::Submission made;
    made.request.transfer.direction = direction;
    made.request.transfer.file = file;
    made.request.transfer.target = memory;
    made.request.transfer.bytes = bytes;
    made.request.transfer.file_offset = numbers.offset;
    made.request.transfer.target_offset = numbers.target;
    made.request.bytes_cell = numbers.late_bytes;
    made.request.file_offset_cell = numbers.late_offset;
    made.request.cookie = numbers.cookie;
    made.request.count = numbers.count;
    made.stream = std::move(stream);
    return made;
  }
  AsyncEngine::Submission entry(Direction direction, const std::shared_ptr<Buffer>& memory, std::uint64_t bytes,
                                std::shared_ptr<OperationStream> stream = nullptr) {
    return entry(direction, memory, bytes, std::move(stream), Numbers());
  }
  Status load(const std::shared_ptr<Buffer>& memory, std::uint64_t bytes,
              std::shared_ptr<OperationStream> stream = nullptr) {
    return load(memory, bytes, std::move(stream), Numbers());
  }
  Status load(const std::shared_ptr<Buffer>& memory, std::uint64_t bytes, std::shared_ptr<OperationStream> stream,
              const Numbers& numbers, std::uint64_t* id = nullptr) {
    return submit(entry(Direction::kLoad, memory, bytes, std::move(stream), numbers), id);
  }
  Status submit(AsyncEngine::Submission given, std::uint64_t* id = nullptr) {
    std::vector<AsyncEngine::Submission> entries;
    entries.push_back(std::move(given));
    std::vector<std::uint64_t> ids;
    std::size_t bad = 0;
    Status status = engine->submit(queue, std::move(entries), &ids, &bad);
    if (status.ok() && id != nullptr) *id = ids.at(0);
    return status;
  }
  // The next that is over.
  Completion next() {
    std::vector<Completion> over = queue->collect(1, 1, kPatience);
    EXPECT_EQ(over.size(), 1U) << "nothing ended";
    return over.empty() ? Completion{} : over[0];
  }

  std::shared_ptr<testing::FaultPlan> plan;
  std::shared_ptr<Driver> driver;
  std::vector<std::shared_ptr<DeviceContext>> contexts;
  std::shared_ptr<TransferEngine> transfers;
  std::shared_ptr<AsyncEngine> engine;
  std::shared_ptr<CompletionQueue> queue;
  testing::PlannedFileOps operations;
  std::shared_ptr<BackingFile> file;

 private:
  const UniqueFd fd_ = testing::temporary_file();
};

inline std::vector<std::byte> contents(Buffer& buffer) {
  std::vector<std::byte> bytes(buffer.size());
  EXPECT_EQ(must(buffer.read(0, bytes)), bytes.size());
  return bytes;
}

}  // namespace gpufs::async_test
