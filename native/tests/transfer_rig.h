// What a test of transfers needs: a device, a transfer engine, a buffer, and a real file whose system calls a test can
// plan. Its destructor checks that nothing is left over.
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstddef>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "device/device_context.h"
#include "gpu_test_support.h"
#include "io/transfer_engine.h"
#include "io_fakes.h"
#include "memory/extent_buffer.h"
#include "temporary_file.h"

namespace gpufs::testing {

constexpr std::uint64_t kChunk = std::uint64_t{1} << 18;

// The names in a directory: of /proc/self/fd the open descriptors, of /proc/self/task the threads.
inline std::set<std::string> names_in(const char* path) {
  std::set<std::string> names;
  DIR* const directory = ::opendir(path);
  while (const dirent* const entry = ::readdir(directory)) names.insert(entry->d_name);
  ::closedir(directory);
  return names;
}

class TransferRig {
 public:
  static IoOptions small_options() {
    IoOptions options;
    options.chunk_bytes = kChunk;
    options.workers = 3;
    options.slots = 2;
    return options;
  }

  TransferRig(std::shared_ptr<Driver> driver, std::shared_ptr<Fastpath> direct, const IoOptions& options,
              const std::string& directory, std::size_t index = 0)
      : device(gpu_test::must(DeviceContext::create(std::move(driver), index))),
        engine(gpu_test::must(TransferEngine::create(options, std::move(direct)))),
        fd_(temporary_file(directory)) {
    EXPECT_TRUE(fd_.valid());
  }
  ~TransferRig() {
    engine->shutdown();
    EXPECT_EQ(engine->active(), 0U);
    EXPECT_EQ(engine->bounce_pool()->statistics().pinned_bytes, 0U);
    engine.reset();
    EXPECT_EQ(device->events().idle(), device->events().existing());
    EXPECT_EQ(device->streams().idle(), device->streams().existing());
    buffer.reset();
    file.reset();
    device.reset();
    fd_.reset();
  }

  // Opens the file for transfers; may_hang: as if it were on a network.
  void open_file(bool may_hang = false) {
    file = gpu_test::must(BackingFile::open(fd_.get(), operations));
    if (!may_hang) return;
    BackingFacts facts = file->facts();
    facts.may_hang = true;
    facts.fastpath_refusals |= mask_of(Refusal::kFileSystem);
    file =
        BackingFile::adopt(UniqueFd(::fcntl(file->buffered_fd(), F_DUPFD_CLOEXEC, 3)), UniqueFd(), facts, operations);
  }
  void make_file(const std::vector<std::byte>& contents, bool may_hang = false) {
    EXPECT_EQ(::pwrite(fd_.get(), contents.data(), contents.size(), 0), static_cast<ssize_t>(contents.size()));
    open_file(may_hang);
  }

  [[nodiscard]] TransferRequest load() const { return request(Direction::kLoad); }
  [[nodiscard]] TransferRequest store() const { return request(Direction::kStore); }
  [[nodiscard]] TransferRequest request(Direction direction) const {
    TransferRequest wanted;
    wanted.direction = direction;
    wanted.file = file;
    wanted.target = buffer;
    return wanted;
  }
  void make_buffer() { buffer = std::make_shared<ExtentBuffer>(device); }
  void fill_buffer(const std::vector<std::byte>& contents) {
    EXPECT_EQ(gpu_test::must(buffer->write(0, contents)), contents.size());
  }
  [[nodiscard]] std::vector<std::byte> buffer_contents() const {
    std::vector<std::byte> data(buffer->size());
    EXPECT_EQ(gpu_test::must(buffer->read(0, data)), data.size());
    return data;
  }

  TransferProgress finish(const TransferRequest& wanted) {
    const auto started = must(engine->start(wanted));
    started->wait();
    return started->progress();
  }
  // One thread serves it, so its chunks come in order.
  TransferProgress finish_in_order(TransferRequest wanted) {
    wanted.share = 1;
    return finish(wanted);
  }

  [[nodiscard]] std::uint64_t file_size() const {
    struct stat status = {};
    EXPECT_EQ(::fstat(fd_.get(), &status), 0);
    return static_cast<std::uint64_t>(status.st_size);
  }
  [[nodiscard]] std::vector<std::byte> file_contents() const {
    std::vector<std::byte> data(file_size());
    EXPECT_EQ(::pread(fd_.get(), data.data(), data.size(), 0), static_cast<ssize_t>(data.size()));
    return data;
  }
  [[nodiscard]] std::uint64_t counted(Direction direction, Path way, Counter observe::Block::*member) const {
    return device->counters().region().sum(0, backend_of(way), flow_of(direction), member);
  }
  [[nodiscard]] observe::TransferDetails& details(Direction direction) const {
    return device->counters().region().details(0, flow_of(direction));
  }
  [[nodiscard]] std::uint64_t refused(Direction direction, Refusal reason) const {
    std::size_t bit = 0;
    while (mask_of(reason) >> bit != 1U) ++bit;
    return device->counters().region().sum(0, observe::Backend::kFastpath, flow_of(direction),
                                           [bit](const observe::Block& block) { return block.refusals[bit].load(); });
  }
  [[nodiscard]] int fd() const { return fd_.get(); }

  PlannedFileOps operations;
  std::shared_ptr<DeviceContext> device;
  std::shared_ptr<TransferEngine> engine;
  std::shared_ptr<BackingFile> file;
  std::shared_ptr<ExtentBuffer> buffer;

 private:
  UniqueFd fd_;
};

}  // namespace gpufs::testing
