// Transfers over a GPU driver and a vendor's way of moving files: a device, a transfer engine, a buffer and a real
// file. Owned by the test that makes it. The test's thread.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device/device_context.h"
#include "device/stream_pool.h"
#include "gpu_test_support.h"
#include "io/transfer.h"
#include "memory/buffer.h"

namespace gpufs::gpu_test {

constexpr std::uint64_t kChunk = std::uint64_t{1} << 18;

class DirectRig {
 public:
  static IoOptions small_options() {
    IoOptions options;
    options.chunk_bytes = kChunk;
    options.workers = 3;
    options.slots = 2;
    return options;
  }

  DirectRig(std::shared_ptr<Driver> driver, std::shared_ptr<DirectPath> direct,
            const IoOptions& options = small_options())
      : path(std::move(direct)), device(must(DeviceContext::create(std::move(driver), 0))) {
    engine = must(TransferEngine::create(options, {device}, path));
    buffer = must(Buffer::create(device));
    name_ = "/var/tmp/gpufs-direct-test-XXXXXX";
    fd_ = UniqueFd(::mkostemp(name_.data(), O_CLOEXEC));
    EXPECT_TRUE(fd_.valid());
  }
  ~DirectRig() {
    engine.reset();
    buffer.reset();
    file.reset();
    EXPECT_EQ(device->streams().idle(), device->streams().existing());
    device.reset();
    fd_.reset();
    ::unlink(name_.c_str());
  }
  DirectRig(const DirectRig&) = delete;
  DirectRig& operator=(const DirectRig&) = delete;

  // False where no file system here has what a direct path needs.
  bool make_file(const std::vector<std::byte>& contents) {
    EXPECT_EQ(::pwrite(fd_.get(), contents.data(), contents.size(), 0), static_cast<ssize_t>(contents.size()));
    file = must(BackingFile::open(fd_.get()));
    return file->facts().fastpath_refusals == 0;
  }
  void fill_buffer(const std::vector<std::byte>& contents) {
    const Result<std::size_t> written = buffer->write(0, contents);
    EXPECT_TRUE(written.ok()) << written.status().message();
  }
  // The vendor's view of the file, for calls without a transfer around them.
  DirectFile& direct_file() { return *must(file->direct_file(*path)); }

  [[nodiscard]] TransferRequest request(Direction direction) const {
    TransferRequest wanted;
    wanted.direction = direction;
    wanted.file = file;
    wanted.target = Target::of_buffer(buffer);
    return wanted;
  }
  TransferProgress finish(const TransferRequest& wanted) {
    const std::shared_ptr<Transfer> transfer = must(engine->start(wanted));
    transfer->wait();
    return transfer->progress();
  }
  // One thread serves it: its pieces come in order.
  TransferProgress finish_in_order(TransferRequest wanted) {
    wanted.share = 1;
    return finish(wanted);
  }

  std::vector<std::byte> buffer_contents() {
    std::vector<std::byte> data(buffer->size());
    EXPECT_EQ(must(buffer->read(0, data)), data.size());
    return data;
  }
  [[nodiscard]] std::vector<std::byte> file_contents() const {
    struct stat status = {};
    EXPECT_EQ(::fstat(fd_.get(), &status), 0);
    std::vector<std::byte> data(static_cast<std::size_t>(status.st_size));
    EXPECT_EQ(::pread(fd_.get(), data.data(), data.size(), 0), static_cast<ssize_t>(data.size()));
    return data;
  }
  [[nodiscard]] std::uint64_t counted(Direction direction, Path way, Counter observe::Block::*member) const {
    return device->counters().region()->sum(0, backend_of(way), flow_of(direction), member);
  }
  [[nodiscard]] std::uint64_t refused(Direction direction, Refusal reason) const {
    std::size_t bit = 0;
    while (mask_of(reason) >> bit != 1U) ++bit;
    return device->counters().region()->refusals(0, observe::Backend::kFastpath, flow_of(direction), bit);
  }
  [[nodiscard]] int fd() const { return fd_.get(); }

 private:
  std::string name_;
  UniqueFd fd_;

 public:
  std::shared_ptr<DirectPath> path;
  std::shared_ptr<DeviceContext> device;
  std::shared_ptr<TransferEngine> engine;
  std::shared_ptr<Buffer> buffer;
  std::shared_ptr<BackingFile> file;
};

}  // namespace gpufs::gpu_test
