// Transfers from end to end over fake devices and real files: every path, every planned fault, and nothing left over.

#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <random>
#include <set>
#include <string>
#include <thread>

#include "device/event_pool.h"
#include "device/stream_pool.h"
#include "io/cancel_token.h"
#include "io/transfer.h"
#include "io_fakes.h"

namespace gpufs {
namespace {

using testing::FakeBuffer;
using testing::FakeDriver;
using testing::FakePlan;
using testing::PlannedFileOps;
using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr std::uint64_t kMiB = 1 << 20;
constexpr std::uint64_t kChunk = 1 << 18;

int open_descriptors() {
  DIR* const directory = ::opendir("/proc/self/fd");
  int count = 0;
  while (::readdir(directory) != nullptr) ++count;
  ::closedir(directory);
  return count;
}

std::vector<std::byte> pattern(std::size_t bytes, unsigned seed = 1) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> data(bytes);
  for (std::size_t at = 0; at + 8 <= bytes; at += 8) {
    const std::uint64_t number = random();
    std::memcpy(data.data() + at, &number, 8);
  }
  for (std::size_t at = bytes / 8 * 8; at < bytes; ++at) data[at] = std::byte{0xee};
  return data;
}

// A direct path whose calls a test plans; it reads and writes the file itself.
class PlannedDirectPath final : public DirectPath {
 public:
  std::atomic<int> fail_at{0};  // the n-th call fails with `error` after half of its bytes
  std::atomic<int> error{ENODEV};
  std::atomic<int> refuse_file{0};
  std::atomic<int> calls{0};
  RefusalMask refused = 0;

  [[nodiscard]] const char* name() const override { return "planned"; }
  [[nodiscard]] RefusalMask refusals() const override { return refused; }
  Result<std::unique_ptr<DirectFile>> attach(BackingFile& file) override {
    if (refuse_file != 0) return Status(EIO, "this file is not accepted", 5030);
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

// A device, a transfer engine over it, and a file; checks at its end that nothing is left over.
class Rig {
 public:
  explicit Rig(bool cpu_addressable, const IoOptions& options = small_options(), const char* directory = "/tmp")
      : descriptors_(open_descriptors()), plan(std::make_shared<FakePlan>()) {
    plan->cpu_addressable = cpu_addressable;
    Result<std::shared_ptr<DeviceContext>> made = DeviceContext::create(std::make_shared<FakeDriver>(plan), 0);
    EXPECT_TRUE(made.ok()) << made.status().message();
    device = made.take();
    direct = std::make_shared<PlannedDirectPath>();
    Result<std::shared_ptr<TransferEngine>> created = TransferEngine::create(options, {device}, direct);
    EXPECT_TRUE(created.ok()) << created.status().message();
    engine = created.take();
    path_ = std::string(directory) + "/gpufs-io-test-XXXXXX";
    fd_ = UniqueFd(::mkostemp(path_.data(), O_CLOEXEC));
    EXPECT_TRUE(fd_.valid());
  }
  ~Rig() {
    engine->shutdown();
    EXPECT_EQ(engine->active(), 0U);
    EXPECT_EQ(engine->bounce_pool()->statistics().pinned_bytes, 0U);
    engine.reset();
    EXPECT_EQ(plan->pinned, 0);
    EXPECT_EQ(device->events().idle(), device->events().existing());
    EXPECT_EQ(device->streams().idle(), device->streams().existing());
    if (buffer) {
      EXPECT_EQ(buffer->pins, 0);
    }
    buffer.reset();
    file.reset();
    device.reset();
    EXPECT_EQ(plan->events, 0);
    EXPECT_EQ(plan->streams, 0);
    fd_.reset();
    ::unlink(path_.c_str());
    EXPECT_EQ(open_descriptors(), descriptors_);
  }
  Rig(const Rig&) = delete;
  Rig& operator=(const Rig&) = delete;

  static IoOptions small_options() {
    IoOptions options;
    options.chunk_bytes = kChunk;
    options.workers = 3;
    options.slots = 2;
    return options;
  }

  // The file with these contents, opened for transfers; may_hang and always_hot as a network or tmpfs file would be.
  void make_file(const std::vector<std::byte>& contents, bool may_hang = false) {
    EXPECT_EQ(::pwrite(fd_.get(), contents.data(), contents.size(), 0), static_cast<ssize_t>(contents.size()));
    open_file(may_hang);
  }
  void open_file(bool may_hang = false) {
    Result<std::shared_ptr<BackingFile>> opened = BackingFile::open(fd_.get(), operations);
    ASSERT_TRUE(opened.ok()) << opened.status().message();
    file = opened.take();
    if (!may_hang) return;
    BackingFacts facts = file->facts();
    facts.may_hang = true;
    facts.fastpath_refusals |= mask_of(Refusal::kFileSystem);
    UniqueFd again(::fcntl(file->buffered_fd(), F_DUPFD_CLOEXEC, 3));
    file = BackingFile::adopt(std::move(again), UniqueFd(), facts, operations);
  }
  void make_buffer(std::uint64_t capacity) { buffer = std::make_shared<FakeBuffer>(device, capacity); }

  [[nodiscard]] TransferRequest load() const { return request(Direction::kLoad); }
  [[nodiscard]] TransferRequest store() const { return request(Direction::kStore); }
  [[nodiscard]] TransferRequest request(Direction direction) const {
    TransferRequest wanted;
    wanted.direction = direction;
    wanted.file = file;
    wanted.target = Target::of_buffer(buffer);
    return wanted;
  }
  TransferProgress finish(const TransferRequest& wanted) {
    Result<std::shared_ptr<Transfer>> started = engine->start(wanted);
    EXPECT_TRUE(started.ok()) << started.status().message();
    if (!started.ok()) return {};
    started.value()->wait();
    return started.value()->progress();
  }
  std::vector<std::byte> file_contents() const {
    struct stat status = {};
    EXPECT_EQ(::fstat(fd_.get(), &status), 0);
    std::vector<std::byte> data(static_cast<std::size_t>(status.st_size));
    EXPECT_EQ(::pread(fd_.get(), data.data(), data.size(), 0), static_cast<ssize_t>(data.size()));
    return data;
  }
  std::uint64_t file_size() const {
    struct stat status = {};
    EXPECT_EQ(::fstat(fd_.get(), &status), 0);
    return static_cast<std::uint64_t>(status.st_size);
  }
  std::uint64_t counted(Direction direction, Path path, Counter observe::Block::*member) const {
    return device->counters().region()->sum(0, backend_of(path), flow_of(direction), member);
  }
  [[nodiscard]] observe::TransferDetails& details(Direction direction) const {
    return device->counters().region()->details(0, flow_of(direction));
  }
  std::uint64_t refused(Direction direction, Refusal reason) const {
    std::size_t bit = 0;
    while (mask_of(reason) >> bit != 1U) ++bit;
    return device->counters().region()->refusals(0, observe::Backend::kFastpath, flow_of(direction), bit);
  }
  [[nodiscard]] int fd() const { return fd_.get(); }

 private:
  int descriptors_;
  std::string path_;
  UniqueFd fd_;

 public:
  PlannedFileOps operations;
  std::shared_ptr<FakePlan> plan;
  std::shared_ptr<DeviceContext> device;
  std::shared_ptr<PlannedDirectPath> direct;
  std::shared_ptr<TransferEngine> engine;
  std::shared_ptr<BackingFile> file;
  std::shared_ptr<FakeBuffer> buffer;
};

bool same(const FakeBuffer&, const std::byte* memory, const std::vector<std::byte>& data, std::size_t from = 0) {
  return std::memcmp(memory, data.data() + from, data.size() - from) == 0;
}

IoOptions without_fastpath() {
  IoOptions options = Rig::small_options();
  options.fastpath = FastpathMode::kOff;
  return options;
}

// ---- both directions, by slots and straight ----

class Paths : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(, Paths, ::testing::Bool(),
                         [](const auto& param) { return param.param ? "Straight" : "Bounced"; });

TEST_P(Paths, LoadMovesTheWholeFile) {
  Rig rig(GetParam(), without_fastpath());
  const auto data = pattern(5 * kMiB + 123);
  rig.make_file(data);
  rig.make_buffer(16 * kMiB);
  const TransferProgress done = rig.finish(rig.load());
  EXPECT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_EQ(done.prefix, data.size());
  EXPECT_EQ(done.moved, data.size());
  EXPECT_EQ(done.total, data.size());
  EXPECT_EQ(rig.buffer->size(), data.size());
  EXPECT_TRUE(same(*rig.buffer, rig.buffer->contents(), data));
  EXPECT_EQ(done.path_bytes[1], data.size());
  EXPECT_EQ(rig.counted(Direction::kLoad, Path::kFallback, &observe::Block::bytes), data.size());
  EXPECT_EQ(rig.counted(Direction::kLoad, Path::kFastpath, &observe::Block::bytes), 0U);
  EXPECT_EQ(rig.refused(Direction::kLoad, Refusal::kDisabled), 1U);
}

TEST_P(Paths, StoreMovesTheWholeBuffer) {
  Rig rig(GetParam(), without_fastpath());
  const auto data = pattern(5 * kMiB + 123);
  rig.make_buffer(16 * kMiB);
  rig.buffer->fill(data);
  rig.open_file();
  TransferRequest wanted = rig.store();
  wanted.sync = SyncMode::kFull;
  const TransferProgress done = rig.finish(wanted);
  EXPECT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_EQ(done.prefix, data.size());
  EXPECT_EQ(rig.file_contents(), data);
}

TEST_P(Paths, UnalignedRangesEitherWay) {
  Rig rig(GetParam(), without_fastpath());
  const auto data = pattern(3 * kMiB);
  rig.make_file(data);
  rig.make_buffer(16 * kMiB);
  for (const std::uint64_t file_offset : {0ULL, 1ULL, 511ULL, 4096ULL, 262143ULL, 262145ULL}) {
    for (const std::uint64_t buffer_offset : {0ULL, 3ULL, 65536ULL}) {
      for (const std::uint64_t bytes : {1ULL, 4095ULL, 4097ULL, 600000ULL}) {
        rig.make_buffer(16 * kMiB);
        TransferRequest wanted = rig.load();
        wanted.file_offset = file_offset;
        wanted.target_offset = buffer_offset;
        wanted.bytes = bytes;
        const TransferProgress done = rig.finish(wanted);
        ASSERT_TRUE(done.status.ok()) << done.status.message();
        ASSERT_EQ(done.prefix, bytes);
        ASSERT_EQ(rig.buffer->size(), buffer_offset + bytes);
        ASSERT_EQ(std::memcmp(rig.buffer->contents() + buffer_offset, data.data() + file_offset, bytes), 0);

        TransferRequest back = wanted;
        back.direction = Direction::kStore;
        back.file_offset = file_offset + 7;
        ASSERT_EQ(rig.finish(back).prefix, bytes);
        std::vector<std::byte> found(bytes);
        ASSERT_EQ(::pread(rig.fd(), found.data(), bytes, static_cast<off_t>(file_offset + 7)),
                  static_cast<ssize_t>(bytes));
        ASSERT_EQ(std::memcmp(found.data(), data.data() + file_offset, bytes), 0);
        ASSERT_EQ(::pwrite(rig.fd(), data.data(), data.size(), 0), static_cast<ssize_t>(data.size()));
      }
    }
  }
}

TEST_P(Paths, DirectAndBufferedAgree) {
  for (const Switch direct : {Switch::kOn, Switch::kOff}) {
    IoOptions options = without_fastpath();
    options.direct = direct;
    Rig rig(GetParam(), options);
    const auto data = pattern(4 * kMiB + 77);
    rig.make_buffer(16 * kMiB);
    rig.buffer->fill(data);
    rig.open_file();
    TransferRequest out = rig.store();
    out.file_offset = 4096 + 100;
    out.target_offset = 100;
    const TransferProgress stored = rig.finish(out);
    ASSERT_TRUE(stored.status.ok()) << stored.status.message();
    ASSERT_EQ(stored.prefix, data.size() - 100);
    rig.buffer = std::make_shared<FakeBuffer>(rig.device, 16 * kMiB);
    TransferRequest in = rig.load();
    in.file_offset = 4096 + 100;
    in.target_offset = 100;
    ASSERT_TRUE(rig.finish(in).status.ok());
    EXPECT_EQ(std::memcmp(rig.buffer->contents() + 100, data.data() + 100, data.size() - 100), 0);
    const bool used = rig.details(Direction::kLoad).direct_bytes > 0;
    EXPECT_EQ(used, direct == Switch::kOn);
    EXPECT_EQ(rig.details(Direction::kStore).direct_bytes > 0, direct == Switch::kOn);
  }
}

TEST_P(Paths, ColdPiecesGoDirectAndHotOnesBuffered) {
  Rig rig(GetParam(), without_fastpath());
  const auto data = pattern(8 * kChunk);
  rig.make_file(data);
  rig.make_buffer(16 * kMiB);
  std::atomic<int> asked{0};
  rig.operations.on_cached = [&](std::uint64_t bytes, std::uint64_t* cached) {
    *cached = asked++ % 2 == 0 ? bytes : bytes / 2;
    return 0;
  };
  ASSERT_TRUE(rig.finish(rig.load()).status.ok());
  EXPECT_EQ(asked, 8);
  EXPECT_EQ(rig.details(Direction::kLoad).buffered_bytes, data.size() / 2);
  EXPECT_EQ(rig.details(Direction::kLoad).direct_bytes, data.size() / 2);
  EXPECT_TRUE(same(*rig.buffer, rig.buffer->contents(), data));

  rig.operations.on_cached = [](std::uint64_t, std::uint64_t*) {
    errno = EPERM;
    return -1;
  };
  ASSERT_TRUE(rig.finish(rig.load()).status.ok());
  EXPECT_EQ(rig.details(Direction::kLoad).direct_bytes, data.size() / 2);
}

TEST_P(Paths, TmpfsIsNeverReadDirect) {
  Rig rig(GetParam(), Rig::small_options(), "/dev/shm");
  const auto data = pattern(kMiB + 1);
  rig.make_file(data);
  rig.make_buffer(4 * kMiB);
  const TransferProgress done = rig.finish(rig.load());
  EXPECT_TRUE(done.status.ok());
  EXPECT_EQ(done.path_bytes[0], 0U);
  EXPECT_EQ(rig.details(Direction::kLoad).direct_bytes, 0U);
  EXPECT_NE(done.refusals & mask_of(Refusal::kFileSystem), 0U);
  EXPECT_EQ(rig.refused(Direction::kLoad, Refusal::kFileSystem), 1U);
}

IoOptions with_pages() {
  IoOptions options = Rig::small_options();
  options.write_pages = Switch::kOn;
  return options;
}

TEST_P(Paths, StoreToTmpfsWritesPagesSideBySide) {
  Rig rig(GetParam(), with_pages(), "/dev/shm");
  auto data = pattern(4 * kMiB + 1234);
  rig.make_buffer(16 * kMiB);
  rig.buffer->fill(data);
  const auto old = pattern(kMiB, 8);
  rig.make_file(old);
  timespec long_ago[2] = {{1000, 0}, {1000, 0}};
  ASSERT_EQ(::futimens(rig.fd(), long_ago), 0);
  TransferRequest wanted = rig.store();
  wanted.file_offset = 777;
  ASSERT_TRUE(rig.finish(wanted).status.ok());
  EXPECT_GE(rig.operations.page_writes, 16);
  data.insert(data.begin(), old.begin(), old.begin() + 777);
  EXPECT_EQ(rig.file_contents(), data);
  struct stat status = {};
  ASSERT_EQ(::fstat(rig.fd(), &status), 0);
  EXPECT_GT(status.st_mtime, 1000);

  // A file that is cut off meanwhile is extended again, as by any other write.
  rig.operations.on_write = [&](int, const void*, std::size_t, std::uint64_t offset, ssize_t*) {
    if (offset > 2 * kMiB) {
      EXPECT_EQ(::ftruncate(rig.fd(), static_cast<off_t>(kMiB)), 0);
    }
    return false;
  };
  wanted.file_offset = 4096 + 777;
  const TransferProgress cut = rig.finish(wanted);
  EXPECT_TRUE(cut.status.ok()) << cut.status.message();
  EXPECT_EQ(rig.file_size(), 4096 + 777 + 4 * kMiB + 1234);
}

TEST_P(Paths, FullTmpfsOnStore) {
  Rig rig(GetParam(), with_pages(), "/dev/shm");
  rig.make_buffer(16 * kMiB);
  rig.buffer->fill(pattern(4 * kMiB));
  rig.open_file();
  rig.operations.on_write = [&](int fd, const void* memory, std::size_t bytes, std::uint64_t offset, ssize_t* result) {
    if (offset + bytes <= 2 * kMiB) return false;
    errno = ENOSPC;
    *result = offset >= 2 * kMiB ? -1 : ::pwrite(fd, memory, 2 * kMiB - offset, static_cast<off_t>(offset));
    return true;
  };
  const TransferProgress done = rig.finish(rig.store());
  EXPECT_EQ(done.status.error(), ENOSPC);
  EXPECT_EQ(done.prefix, 2 * kMiB);
  EXPECT_EQ(rig.file_size(), 2 * kMiB);
}

TEST_P(Paths, HolesAreNotReadFromTheDevice) {
  for (const bool sparse : {true, false}) {
    Rig rig(GetParam(), without_fastpath());
    auto data = pattern(24 * FakeBuffer::kGranule);
    rig.make_buffer(16 * kMiB);
    rig.buffer->fill(data);
    for (const std::uint64_t granule : {0U, 5U, 6U, 7U, 8U, 9U, 10U, 11U, 23U}) {
      rig.buffer->make_hole(granule);
      std::memset(data.data() + granule * FakeBuffer::kGranule, 0, FakeBuffer::kGranule);
    }
    const auto old = pattern(data.size() - 1000, 2);
    rig.make_file(old);
    TransferRequest wanted = rig.store();
    wanted.sparse = sparse;
    const TransferProgress done = rig.finish(wanted);
    ASSERT_TRUE(done.status.ok()) << done.status.message();
    ASSERT_EQ(done.prefix, data.size());
    EXPECT_EQ(rig.file_contents(), data) << sparse;
    EXPECT_EQ(rig.details(Direction::kStore).hole_bytes, 9 * FakeBuffer::kGranule);
    struct stat status = {};
    ASSERT_EQ(::fstat(rig.fd(), &status), 0);
    const bool holes = static_cast<std::uint64_t>(status.st_blocks) * 512 < data.size();
    EXPECT_EQ(holes, sparse);
  }
}

TEST_P(Paths, HolesWhereTheFileSystemHasNone) {
  Rig rig(GetParam(), without_fastpath());
  auto data = pattern(8 * FakeBuffer::kGranule);
  rig.make_buffer(4 * kMiB);
  rig.buffer->fill(data);
  rig.buffer->make_hole(3);
  std::memset(data.data() + 3 * FakeBuffer::kGranule, 0, FakeBuffer::kGranule);
  rig.make_file(pattern(data.size(), 3));
  rig.operations.on_allocate = [](int, std::uint64_t, std::uint64_t) {
    errno = EOPNOTSUPP;
    return -1;
  };
  ASSERT_TRUE(rig.finish(rig.store()).status.ok());
  EXPECT_EQ(rig.file_contents(), data);
}

TEST_P(Paths, StoreOfAHoleAtTheEndSetsTheSize) {
  Rig rig(GetParam(), without_fastpath());
  rig.make_buffer(4 * kMiB);
  ASSERT_TRUE(rig.buffer->resize(kMiB + 5).ok());
  rig.open_file();
  const TransferProgress done = rig.finish(rig.store());
  ASSERT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_EQ(rig.file_size(), kMiB + 5);
}

TEST_P(Paths, NothingToMove) {
  Rig rig(GetParam());
  rig.make_file(pattern(100));
  rig.make_buffer(kMiB);
  TransferRequest none = rig.load();
  none.bytes = 0;
  TransferProgress done = rig.finish(none);
  EXPECT_EQ(done.state, TransferState::kDone);
  EXPECT_TRUE(done.status.ok());
  TransferRequest beyond = rig.load();
  beyond.file_offset = 100;
  done = rig.finish(beyond);
  EXPECT_TRUE(done.status.ok());
  EXPECT_EQ(done.prefix, 0U);
  EXPECT_EQ(rig.buffer->size(), 0U);
  TransferRequest empty = rig.store();
  done = rig.finish(empty);
  EXPECT_TRUE(done.status.ok());
  EXPECT_EQ(rig.file_size(), 100U);
  EXPECT_EQ(rig.direct->calls, 0);
  EXPECT_EQ(rig.counted(Direction::kLoad, Path::kFallback, &observe::Block::started), 0U);
}

TEST_P(Paths, FileThatStatesNoSize) {
  Rig rig(GetParam());
  const UniqueFd status(::open("/proc/self/status", O_RDONLY | O_CLOEXEC));
  Result<std::shared_ptr<BackingFile>> opened = BackingFile::open(status.get());
  ASSERT_TRUE(opened.ok());
  rig.file = opened.take();
  rig.make_buffer(kMiB);
  const TransferProgress done = rig.finish(rig.load());
  EXPECT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_GT(done.prefix, 100U);
  EXPECT_EQ(std::memcmp(rig.buffer->contents(), "Name:", 5), 0);
  EXPECT_EQ(rig.buffer->size(), done.prefix);
}

TEST_P(Paths, ForeignMemory) {
  Rig rig(GetParam(), without_fastpath());
  const auto data = pattern(2 * kMiB);
  rig.make_file(data);
  std::vector<std::byte> memory(kMiB + 10, std::byte{9});
  TransferRequest wanted;
  wanted.file = rig.file;
  wanted.target = Target::of_range(rig.device, reinterpret_cast<DeviceAddress>(memory.data()), memory.size() - 10, {});
  TransferProgress done = rig.finish(wanted);
  ASSERT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_EQ(done.prefix, kMiB);
  EXPECT_EQ(std::memcmp(memory.data(), data.data(), kMiB), 0);
  EXPECT_EQ(memory[kMiB], std::byte{9});

  wanted.direction = Direction::kStore;
  wanted.file_offset = kMiB + 3;
  wanted.target_offset = 1;
  wanted.bytes = 1000;
  EXPECT_EQ(rig.finish(wanted).prefix, 1000U);
  EXPECT_EQ(std::memcmp(rig.file_contents().data() + kMiB + 3, data.data() + 1, 1000), 0);

  wanted.bytes = kMiB;
  EXPECT_EQ(rig.engine->start(wanted).error(), EINVAL);
  wanted.target_offset = kMiB + 1;
  wanted.bytes = kToTheEnd;
  EXPECT_EQ(rig.engine->start(wanted).error(), EINVAL);
}

// ---- requests that are refused ----

TEST(Requests, OverflowsAndWrongModes) {
  Rig rig(true);
  rig.make_file(pattern(100));
  rig.make_buffer(kMiB);
  TransferRequest wanted = rig.load();
  wanted.file_offset = std::uint64_t{1} << 63;
  EXPECT_EQ(rig.engine->start(wanted).error(), EINVAL);
  wanted.file_offset = (std::uint64_t{1} << 63) - 10;
  wanted.bytes = 100;
  EXPECT_EQ(rig.engine->start(wanted).error(), EINVAL);
  wanted.file_offset = 0;
  wanted.target_offset = ~std::uint64_t{0} - 5;
  EXPECT_EQ(rig.engine->start(wanted).error(), EINVAL);
  wanted = rig.load();
  wanted.target_offset = Buffer::kMaximumBytes + 1;
  EXPECT_EQ(rig.engine->start(wanted).error(), EFBIG);

  BackingFacts facts = rig.file->facts();
  facts.readable = false;
  facts.append = true;
  const auto appending =
      BackingFile::adopt(UniqueFd(::fcntl(rig.fd(), F_DUPFD_CLOEXEC, 3)), UniqueFd(), facts, rig.operations);
  wanted = rig.load();
  wanted.file = appending;
  EXPECT_EQ(rig.engine->start(wanted).error(), EBADF);
  wanted.direction = Direction::kStore;
  EXPECT_EQ(rig.engine->start(wanted).error(), EBADF);

  EXPECT_EQ(rig.engine->start(TransferRequest{}).error(), EINVAL);
}

TEST(Requests, BadOptionsAreNamed) {
  IoOptions options;
  options.chunk_bytes = 3 * kMiB;
  EXPECT_NE(TransferEngine::create(options, {}, nullptr).status().message().find("chunk_bytes"), std::string::npos);
  options = {};
  options.pinned_bytes = 1;
  EXPECT_EQ(TransferEngine::create(options, {}, nullptr).error(), EINVAL);
  options = {};
  options.fastpath = FastpathMode::kOff;
  options.fallback = false;
  EXPECT_EQ(TransferEngine::create(options, {}, nullptr).error(), EINVAL);
}

TEST(Requests, NothingStartsAfterShutdown) {
  Rig rig(true);
  rig.make_file(pattern(100));
  rig.make_buffer(kMiB);
  rig.engine->shutdown();
  EXPECT_EQ(rig.engine->start(rig.load()).error(), ESHUTDOWN);
}

// ---- fastpath ----

TEST(Fastpath, AlignedRequestsTakeIt) {
  for (const bool host : {true, false}) {
    Rig rig(host);
    const auto data = pattern(4 * kMiB);
    rig.make_file(data);
    rig.make_buffer(16 * kMiB);
    TransferProgress done = rig.finish(rig.load());
    ASSERT_TRUE(done.status.ok()) << done.status.message();
    EXPECT_EQ(done.path_bytes[0], data.size());
    EXPECT_EQ(done.path_bytes[1], 0U);
    EXPECT_EQ(done.refusals, 0U);
    EXPECT_TRUE(same(*rig.buffer, rig.buffer->contents(), data));
    done = rig.finish(rig.store());
    EXPECT_EQ(done.path_bytes[0], data.size());
    EXPECT_EQ(rig.file_contents(), data);
  }
}

TEST(Fastpath, UnalignedRequestsAreSplit) {
  for (const bool host : {true, false}) {
    Rig rig(host);
    const auto data = pattern(4 * kMiB + 5000);
    rig.make_file(data);
    rig.make_buffer(16 * kMiB);
    TransferRequest wanted = rig.load();
    wanted.file_offset = wanted.target_offset = 100;
    const TransferProgress done = rig.finish(wanted);
    ASSERT_TRUE(done.status.ok()) << done.status.message();
    EXPECT_EQ(done.prefix, data.size() - 100);
    EXPECT_EQ(done.path_bytes[0], 4 * kMiB);
    EXPECT_EQ(done.path_bytes[1], (4096U - 100U) + (5000U - 4096U));
    EXPECT_EQ(std::memcmp(rig.buffer->contents() + 100, data.data() + 100, data.size() - 100), 0);
    EXPECT_EQ(rig.refused(Direction::kLoad, Refusal::kOffsetUnaligned), 1U);
  }
}

TEST(Fastpath, WhatIsLeftGoesByFallbackWhenThePathFails) {
  for (const int error : {ENODEV, EREMOTEIO, ENOTTY, EOPNOTSUPP}) {
    for (const bool host : {true, false}) {
      for (const Direction direction : {Direction::kLoad, Direction::kStore}) {
        Rig rig(host);
        const auto data = pattern(4 * kMiB);
        rig.make_buffer(16 * kMiB);
        if (direction == Direction::kLoad) {
          rig.make_file(data);
        } else {
          rig.buffer->fill(data);
          rig.open_file();
        }
        rig.direct->fail_at = 5;
        rig.direct->error = error;
        TransferRequest wanted = rig.request(direction);
        wanted.share = 1;  // so that the fifth call is the fifth piece
        const TransferProgress done = rig.finish(wanted);
        ASSERT_TRUE(done.status.ok()) << done.status.message();
        EXPECT_EQ(done.prefix, data.size());
        EXPECT_EQ(done.path_bytes[0], 4 * kChunk + kChunk / 2);
        EXPECT_EQ(done.path_bytes[0] + done.path_bytes[1], data.size());
        EXPECT_EQ(rig.refused(direction, Refusal::kFailedBefore), 1U);
        EXPECT_EQ(rig.direct->calls, 5);
        if (direction == Direction::kLoad) {
          EXPECT_TRUE(same(*rig.buffer, rig.buffer->contents(), data));
        } else {
          EXPECT_EQ(rig.file_contents(), data);
        }
      }
    }
  }
}

TEST(Fastpath, OtherFailuresAreReportedWithTheProgress) {
  Rig rig(true);
  rig.make_file(pattern(4 * kMiB));
  rig.make_buffer(16 * kMiB);
  rig.direct->fail_at = 5;
  rig.direct->error = EIO;
  TransferRequest wanted = rig.load();
  wanted.share = 1;  // so that the fifth call is the fifth piece
  const TransferProgress done = rig.finish(wanted);
  EXPECT_EQ(done.status.error(), EIO);
  EXPECT_EQ(done.status.device_code(), 999);
  EXPECT_EQ(done.prefix, 4 * kChunk + kChunk / 2);
  EXPECT_EQ(rig.buffer->size(), done.prefix);
  EXPECT_EQ(rig.counted(Direction::kLoad, Path::kFastpath, &observe::Block::errors), 1U);
  EXPECT_EQ(rig.details(Direction::kLoad).failed, 1U);
}

TEST(Fastpath, FileThatTheVendorRefuses) {
  Rig rig(false);
  const auto data = pattern(kMiB);
  rig.make_file(data);
  rig.make_buffer(16 * kMiB);
  rig.direct->refuse_file = 1;
  const TransferProgress done = rig.finish(rig.load());
  EXPECT_TRUE(done.status.ok());
  EXPECT_EQ(done.path_bytes[1], data.size());
  EXPECT_NE(done.refusals & mask_of(Refusal::kNotAccepted), 0U);
  TransferRequest required = rig.load();
  required.fastpath = FastpathMode::kRequire;
  const TransferProgress refused = rig.finish(required);
  EXPECT_EQ(refused.status.error(), EOPNOTSUPP);
  EXPECT_NE(refused.status.message().find("not_accepted"), std::string::npos) << refused.status.message();
}

TEST(Fastpath, RequireIsRefusedBeforeAnythingChanges) {
  Rig rig(true, Rig::small_options(), "/dev/shm");
  rig.make_buffer(4 * kMiB);
  rig.buffer->fill(pattern(kMiB));
  rig.open_file();
  TransferRequest wanted = rig.store();
  wanted.fastpath = FastpathMode::kRequire;
  const TransferProgress done = rig.finish(wanted);
  EXPECT_EQ(done.status.error(), EOPNOTSUPP);
  EXPECT_NE(done.status.message().find("file_system"), std::string::npos);
  EXPECT_EQ(done.prefix, 0U);
  EXPECT_EQ(rig.file_size(), 0U);
}

TEST(Fastpath, FileThatBecomesShorterUnderIt) {
  Rig rig(true);
  const auto data = pattern(4 * kMiB);
  rig.make_file(data);
  rig.make_buffer(16 * kMiB);
  rig.operations.on_size = [](std::uint64_t* bytes) {
    *bytes = 8 * kMiB;
    return 0;
  };
  const TransferProgress done = rig.finish(rig.load());
  EXPECT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_EQ(done.prefix, data.size());
  EXPECT_EQ(rig.buffer->size(), data.size());
  EXPECT_TRUE(same(*rig.buffer, rig.buffer->contents(), data));
}

TEST(Fastpath, HolesAreNotForTheVendor) {
  Rig rig(false);
  auto data = pattern(8 * kChunk);
  rig.make_buffer(16 * kMiB);
  rig.buffer->fill(data);
  rig.buffer->make_hole(kChunk / FakeBuffer::kGranule);
  std::memset(data.data() + kChunk, 0, FakeBuffer::kGranule);
  rig.open_file();
  const TransferProgress done = rig.finish(rig.store());
  EXPECT_TRUE(done.status.ok());
  EXPECT_EQ(done.path_bytes[0], 7 * kChunk);
  EXPECT_EQ(rig.file_contents(), data);
}

// ---- planned faults ----

TEST_P(Paths, ShortReadsAndInterruptionsAreContinued) {
  Rig rig(GetParam(), without_fastpath());
  const auto data = pattern(2 * kMiB + 11);
  rig.make_file(data);
  rig.make_buffer(4 * kMiB);
  std::atomic<int> calls{0};
  rig.operations.on_read = [&](int fd, void* memory, std::size_t bytes, std::uint64_t offset, ssize_t* result) {
    if (calls++ % 3 == 0) {
      errno = EINTR;
      *result = -1;
      return true;
    }
    if (fd != rig.file->buffered_fd()) return false;
    *result = ::pread(fd, memory, std::min<std::size_t>(bytes, 50000), static_cast<off_t>(offset));
    return true;
  };
  const TransferProgress done = rig.finish(rig.load());
  EXPECT_TRUE(done.status.ok());
  EXPECT_EQ(done.prefix, data.size());
  EXPECT_TRUE(same(*rig.buffer, rig.buffer->contents(), data));
}

TEST_P(Paths, ReadErrorInTheMiddleReportsThePrefix) {
  Rig rig(GetParam(), without_fastpath());
  const auto data = pattern(4 * kMiB);
  rig.make_file(data);
  rig.make_buffer(16 * kMiB);
  constexpr std::uint64_t kBad = 5 * kChunk + 1000;
  rig.operations.on_read = [&](int fd, void* memory, std::size_t bytes, std::uint64_t offset, ssize_t* result) {
    if (offset + bytes <= kBad) return false;
    if (offset >= kBad) {
      errno = EIO;
      *result = -1;
    } else {
      *result = ::pread(fd, memory, kBad - offset, static_cast<off_t>(offset));
    }
    return true;
  };
  TransferRequest wanted = rig.load();
  const TransferProgress done = rig.finish(wanted);
  EXPECT_EQ(done.status.error(), EIO);
  EXPECT_EQ(done.status.device_code(), 0);
  EXPECT_EQ(done.prefix, kBad);
  EXPECT_EQ(rig.buffer->size(), kBad);
  EXPECT_EQ(std::memcmp(rig.buffer->contents(), data.data(), kBad), 0);
  // What was moved beyond the failure is gone again.
  for (std::uint64_t at = kBad; at < data.size(); ++at) ASSERT_EQ(rig.buffer->contents()[at], std::byte{0}) << at;
  EXPECT_GE(rig.counted(Direction::kLoad, Path::kFallback, &observe::Block::errors), 1U);
  const Result<std::uint64_t> again = run_transfer(*rig.engine, wanted, nullptr);
  EXPECT_TRUE(again.ok());
  EXPECT_EQ(again.value(), kBad);
  wanted.file_offset = kBad;
  EXPECT_EQ(run_transfer(*rig.engine, wanted, nullptr).error(), EIO);
}

TEST_P(Paths, FileTruncatedUnderTheCopyIsAShortCount) {
  Rig rig(GetParam(), without_fastpath());
  const auto data = pattern(4 * kMiB);
  rig.make_file(data);
  rig.make_buffer(16 * kMiB);
  std::atomic<bool> cut{false};
  rig.operations.on_read = [&](int, void*, std::size_t, std::uint64_t, ssize_t*) {
    if (!cut.exchange(true)) {
      EXPECT_EQ(::ftruncate(rig.fd(), static_cast<off_t>(kMiB + 17)), 0);
    }
    return false;
  };
  const TransferProgress done = rig.finish(rig.load());
  EXPECT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_EQ(done.prefix, kMiB + 17);
  EXPECT_EQ(rig.buffer->size(), kMiB + 17);
}

TEST_P(Paths, BufferTruncatedUnderTheCopyIsAShortCount) {
  Rig rig(GetParam(), without_fastpath());
  rig.make_buffer(16 * kMiB);
  rig.buffer->fill(pattern(4 * kMiB));
  rig.open_file();
  std::atomic<bool> cut{false};
  rig.operations.on_write = [&](int, const void*, std::size_t, std::uint64_t, ssize_t*) {
    if (!cut.exchange(true)) (void)rig.buffer->resize(kChunk / 2);
    return false;
  };
  TransferRequest wanted = rig.store();
  wanted.share = 1;
  const TransferProgress done = rig.finish(wanted);
  EXPECT_TRUE(done.status.ok()) << done.status.message();
  // Through slots the memory is pinned in large windows, in which this buffer shows what it held when it was pinned.
  if (GetParam()) {
    EXPECT_LT(done.prefix, 4 * kMiB);
  }
  EXPECT_EQ(rig.file_size(), done.prefix);
}

TEST_P(Paths, BufferThatIsTruncatedDuringALoadStaysSo) {
  Rig rig(GetParam(), without_fastpath());
  rig.make_buffer(16 * kMiB);
  rig.make_file(pattern(4 * kMiB));
  std::atomic<int> reads{0};
  rig.operations.on_read = [&](int, void*, std::size_t, std::uint64_t, ssize_t*) {
    // The pieces before are in place, and what they were pinned by may be gone.
    if (++reads == 8) (void)rig.buffer->resize(0);
    return false;
  };
  TransferRequest wanted = rig.load();
  wanted.share = 1;
  const TransferProgress done = rig.finish(wanted);
  EXPECT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_EQ(done.prefix, 4 * kMiB);
  EXPECT_EQ(rig.buffer->size(), 0U);
  // Nothing is left above the size that a later growth would show.
  EXPECT_EQ(std::count(rig.buffer->contents(), rig.buffer->contents() + 4 * kMiB, std::byte{0}), 4 * kMiB);
  rig.operations.on_read = nullptr;
  EXPECT_EQ(rig.finish(rig.load()).prefix, 4 * kMiB);
  EXPECT_EQ(rig.buffer->size(), 4 * kMiB);
}

TEST_P(Paths, FullDiskOnStore) {
  for (const bool fresh : {true, false}) {
    Rig rig(GetParam(), without_fastpath());
    const auto data = pattern(4 * kMiB);
    rig.make_buffer(16 * kMiB);
    rig.buffer->fill(data);
    const std::uint64_t before = fresh ? 0 : 6 * kMiB;
    rig.make_file(pattern(before, 5));
    constexpr std::uint64_t kRoom = 6 * kChunk + 8192;
    rig.operations.on_write = [&](int fd, const void* memory, std::size_t bytes, std::uint64_t offset,
                                  ssize_t* result) {
      if (offset + bytes <= kRoom) return false;
      if (offset >= kRoom) {
        errno = ENOSPC;
        *result = -1;
      } else {
        *result = ::pwrite(fd, memory, kRoom - offset, static_cast<off_t>(offset));
      }
      return true;
    };
    rig.operations.on_allocate = [](int, std::uint64_t, std::uint64_t) {
      errno = EOPNOTSUPP;
      return -1;
    };
    const TransferProgress done = rig.finish(rig.store());
    EXPECT_EQ(done.status.error(), ENOSPC);
    EXPECT_EQ(done.prefix, kRoom);
    EXPECT_EQ(rig.file_size(), fresh ? kRoom : before);
    EXPECT_EQ(std::memcmp(rig.file_contents().data(), data.data(), kRoom), 0);
  }
}

TEST_P(Paths, FullDiskFoundBeforeTheWorkLeavesTheFileAsItWas) {
  Rig rig(GetParam(), without_fastpath());
  rig.make_buffer(16 * kMiB);
  rig.buffer->fill(pattern(4 * kMiB));
  const auto old = pattern(10000, 4);
  rig.make_file(old);
  rig.operations.on_allocate = [&](int, std::uint64_t, std::uint64_t) {
    EXPECT_EQ(::ftruncate(rig.fd(), 3 * kMiB), 0);  // as much as there was room for
    errno = ENOSPC;
    return -1;
  };
  const TransferProgress done = rig.finish(rig.store());
  EXPECT_EQ(done.status.error(), ENOSPC);
  EXPECT_EQ(done.prefix, 0U);
  EXPECT_EQ(rig.file_contents(), old);
}

TEST_P(Paths, FullDeviceOnLoad) {
  Rig rig(GetParam(), without_fastpath());
  const auto data = pattern(4 * kMiB);
  rig.make_file(data);
  rig.make_buffer(16 * kMiB);
  rig.buffer->set_room(2 * kMiB);
  const TransferProgress done = rig.finish(rig.load());
  EXPECT_EQ(done.status.error(), ENOSPC);
  EXPECT_LE(done.prefix, 2 * kMiB);
  EXPECT_EQ(rig.buffer->size(), done.prefix);
}

TEST_P(Paths, FailedSyncIsAnErrorAlthoughBytesMoved) {
  Rig rig(GetParam(), without_fastpath());
  rig.make_buffer(4 * kMiB);
  rig.buffer->fill(pattern(kMiB));
  rig.open_file();
  bool data_only = false;
  rig.operations.on_sync = [&](bool data) {
    data_only = data;
    errno = EIO;
    return -1;
  };
  TransferRequest wanted = rig.store();
  wanted.sync = SyncMode::kData;
  EXPECT_EQ(run_transfer(*rig.engine, wanted, nullptr).error(), EIO);
  EXPECT_TRUE(data_only);
  const TransferProgress done = rig.finish(wanted);
  EXPECT_TRUE(done.sync_failed);
  EXPECT_EQ(done.prefix, kMiB);
}

TEST(Faults, CopyThatTheDriverRefuses) {
  Rig rig(false, without_fastpath());
  rig.make_file(pattern(4 * kMiB));
  rig.make_buffer(16 * kMiB);
  rig.plan->fail_copy_in = 4;
  TransferRequest wanted = rig.load();
  wanted.share = 1;
  const TransferProgress done = rig.finish(wanted);
  EXPECT_EQ(done.status.error(), EIO);
  EXPECT_EQ(done.status.device_code(), 700);
  EXPECT_EQ(done.prefix, 3 * kChunk);
  EXPECT_EQ(rig.buffer->size(), 3 * kChunk);
}

TEST(Faults, EventsCannotBeCreated) {
  Rig rig(false, without_fastpath());
  rig.make_file(pattern(kMiB));
  rig.make_buffer(4 * kMiB);
  rig.plan->fail_event = 1;
  const TransferProgress done = rig.finish(rig.load());
  EXPECT_EQ(done.status.error(), ENOMEM);
  EXPECT_EQ(done.prefix, 0U);
  EXPECT_EQ(rig.buffer->size(), 0U);
}

TEST(Faults, StreamsCannotBeCreated) {
  Rig rig(false, without_fastpath());
  rig.make_file(pattern(kMiB));
  rig.make_buffer(4 * kMiB);
  rig.plan->fail_stream = 1;
  EXPECT_EQ(rig.finish(rig.load()).status.error(), ENOMEM);
}

TEST(Faults, NothingCanBePinned) {
  Rig rig(false, without_fastpath());
  rig.make_file(pattern(kMiB));
  rig.make_buffer(4 * kMiB);
  rig.plan->pins_possible = 0;
  const TransferProgress done = rig.finish(rig.load());
  EXPECT_EQ(done.status.error(), ENOMEM);
  EXPECT_EQ(done.prefix, 0U);
  // Not for ever.
  rig.plan->pins_possible = 100;
  EXPECT_TRUE(rig.finish(rig.load()).status.ok());
}

TEST(Faults, OneSlotIsEnough) {
  Rig rig(false, without_fastpath());
  const auto data = pattern(4 * kMiB);
  rig.make_file(data);
  rig.make_buffer(16 * kMiB);
  rig.plan->pins_possible = 1;
  const TransferProgress done = rig.finish(rig.load());
  EXPECT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_TRUE(same(*rig.buffer, rig.buffer->contents(), data));
  EXPECT_EQ(rig.plan->pins, 1);
}

TEST(Faults, PinnedMemoryStaysWithinItsCap) {
  IoOptions options = without_fastpath();
  options.workers = 8;
  options.slots = 8;
  options.pinned_bytes = 5 * kChunk + 17;
  Rig rig(false, options);
  const auto data = pattern(16 * kMiB);
  rig.make_file(data);
  rig.make_buffer(32 * kMiB);
  EXPECT_TRUE(rig.finish(rig.load()).status.ok());
  EXPECT_LE(rig.plan->pins, 5);
  EXPECT_TRUE(same(*rig.buffer, rig.buffer->contents(), data));
}

// ---- the page cache's own pages ----

TEST(PageCache, HotPiecesAreCopiedStraightFromIt) {
  IoOptions options = without_fastpath();
  options.chunk_bytes = 1 << 20;
  options.pagecache = Switch::kOn;
  Rig rig(false, options);
  rig.plan->read_only_pins_possible = 1000;
  const auto data = pattern(6 * kMiB + 4321);
  rig.make_file(data);
  rig.make_buffer(16 * kMiB);
  TransferRequest wanted = rig.load();
  wanted.file_offset = wanted.target_offset = 100;
  const TransferProgress done = rig.finish(wanted);
  ASSERT_TRUE(done.status.ok()) << done.status.message();
  EXPECT_EQ(done.prefix, data.size() - 100);
  EXPECT_EQ(std::memcmp(rig.buffer->contents() + 100, data.data() + 100, data.size() - 100), 0);
  EXPECT_GE(done.pagecache_bytes, 5 * kMiB);
  EXPECT_EQ(rig.plan->read_only_pins, 5);
}

TEST(PageCache, DriverThatCannotFallsBackToSlots) {
  IoOptions options = without_fastpath();
  options.chunk_bytes = 1 << 20;
  options.pagecache = Switch::kOn;
  Rig rig(false, options);
  const auto data = pattern(6 * kMiB);
  rig.make_file(data);
  rig.make_buffer(16 * kMiB);
  const TransferProgress done = rig.finish(rig.load());
  EXPECT_TRUE(done.status.ok());
  EXPECT_EQ(done.pagecache_bytes, 0U);
  EXPECT_TRUE(same(*rig.buffer, rig.buffer->contents(), data));
}

// ---- cancelling and hanging ----

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

TEST_P(Paths, CancelEndsAtTheNextPiece) {
  for (const Direction direction : {Direction::kLoad, Direction::kStore}) {
    Rig rig(GetParam(), without_fastpath());
    const auto data = pattern(16 * kMiB);
    rig.make_buffer(32 * kMiB);
    if (direction == Direction::kLoad) {
      rig.make_file(data);
    } else {
      rig.buffer->fill(data);
      rig.open_file();
    }
    std::atomic<bool> cancelled{false};
    const auto slow = [&](int, auto, std::size_t, std::uint64_t offset, ssize_t*) {
      do {
        std::this_thread::sleep_for(milliseconds(5));
      } while (offset >= 12 * kChunk && !cancelled);
      return false;
    };
    rig.operations.on_read = slow;
    rig.operations.on_write = slow;
    Result<std::shared_ptr<Transfer>> started = rig.engine->start(rig.request(direction));
    ASSERT_TRUE(started.ok());
    while (started.value()->progress().prefix < kChunk) std::this_thread::sleep_for(milliseconds(1));
    started.value()->cancel();
    started.value()->cancel();
    cancelled = true;
    started.value()->wait();
    const TransferProgress done = started.value()->progress();
    EXPECT_EQ(done.status.error(), ECANCELED);
    EXPECT_GE(done.prefix, kChunk);
    EXPECT_LT(done.prefix, data.size());
    if (direction == Direction::kLoad) {
      EXPECT_EQ(rig.buffer->size(), done.prefix);
      EXPECT_EQ(std::memcmp(rig.buffer->contents(), data.data(), done.prefix), 0);
    } else {
      EXPECT_EQ(rig.file_size(), done.prefix);
      EXPECT_EQ(std::memcmp(rig.file_contents().data(), data.data(), done.prefix), 0);
    }
    EXPECT_EQ(rig.details(direction).cancelled, 1U);
  }
}

TEST(Cancel, TokenStopsARunningTransfer) {
  Rig rig(true, without_fastpath());
  rig.make_file(pattern(4 * kMiB));
  rig.make_buffer(16 * kMiB);
  CancelToken before;
  before.cancel();
  EXPECT_EQ(run_transfer(*rig.engine, rig.load(), &before).error(), ECANCELED);

  Door door;
  rig.operations.on_read = [&](int, void*, std::size_t, std::uint64_t offset, ssize_t*) {
    if (offset >= 2 * kChunk) door.pass();
    return false;
  };
  CancelToken token;
  std::thread canceller([&] {
    door.await(3);  // all threads: what is before is moved
    token.cancel();
    door.open();
  });
  const Result<std::uint64_t> count = run_transfer(*rig.engine, rig.load(), &token);
  canceller.join();
  ASSERT_TRUE(count.ok()) << count.status().message();
  EXPECT_GE(count.value(), 2 * kChunk);
  EXPECT_LT(count.value(), 4 * kMiB);
}

TEST_P(Paths, HungFileIsLeftBehind) {
  for (const Direction direction : {Direction::kLoad, Direction::kStore}) {
    Rig rig(GetParam(), without_fastpath());
    const auto data = pattern(4 * kMiB);
    rig.make_buffer(16 * kMiB);
    if (direction == Direction::kLoad) {
      rig.make_file(data, /*may_hang=*/true);
    } else {
      rig.buffer->fill(data);
      rig.open_file(/*may_hang=*/true);
    }
    Door door;
    const auto hang = [&](int, auto, std::size_t, std::uint64_t offset, ssize_t*) {
      if (offset >= 2 * kChunk) door.pass();
      return false;
    };
    rig.operations.on_read = hang;
    rig.operations.on_write = hang;
    Result<std::shared_ptr<Transfer>> started = rig.engine->start(rig.request(direction));
    ASSERT_TRUE(started.ok());
    door.await(3);
    started.value()->cancel();
    ASSERT_TRUE(started.value()->wait(milliseconds(60000)));
    const TransferProgress done = started.value()->progress();
    EXPECT_EQ(done.status.error(), ECANCELED);
    EXPECT_EQ(done.prefix, 2 * kChunk);
    EXPECT_EQ(rig.details(direction).abandoned, 1U);
    // The memory is free although the threads still hang.
    EXPECT_EQ(rig.buffer->pins, 0);
    if (direction == Direction::kLoad) {
      EXPECT_EQ(rig.buffer->size(), 2 * kChunk);
      EXPECT_EQ(rig.buffer.use_count(), 1);
      std::memset(rig.buffer->contents(), 0x11, data.size());
      door.open();
      while (door.waiting() > 0) std::this_thread::sleep_for(milliseconds(1));
      rig.engine->shutdown();
      for (std::uint64_t at = 0; at < data.size(); ++at) ASSERT_EQ(rig.buffer->contents()[at], std::byte{0x11});
    } else {
      door.open();
    }
  }
}

// The process's threads, by their numbers.
std::set<std::string> threads_now() {
  std::set<std::string> threads;
  DIR* const directory = ::opendir("/proc/self/task");
  while (const dirent* const entry = ::readdir(directory)) threads.insert(entry->d_name);
  ::closedir(directory);
  return threads;
}

TEST(Hanging, ShutdownLeavesThreadsBehind) {
  std::thread([] {}).join();  // with the first thread the thread sanitizer starts one of its own
  const std::set<std::string> before = threads_now();
  IoOptions options = without_fastpath();
  options.shutdown_grace = milliseconds(200);
  Door door;
  std::shared_ptr<Transfer> transfer;
  auto operations = std::make_shared<PlannedFileOps>();
  {
    auto plan = std::make_shared<FakePlan>();
    Result<std::shared_ptr<DeviceContext>> device = DeviceContext::create(std::make_shared<FakeDriver>(plan), 0);
    ASSERT_TRUE(device.ok());
    Result<std::shared_ptr<TransferEngine>> engine =
        TransferEngine::create(options, {device.value()}, std::make_shared<PlannedDirectPath>());
    ASSERT_TRUE(engine.ok());
    char path[] = "/tmp/gpufs-io-test-XXXXXX";
    const UniqueFd fd(::mkostemp(path, O_CLOEXEC));
    ::unlink(path);
    ASSERT_EQ(::ftruncate(fd.get(), kMiB), 0);
    operations->on_read = [&](int, void*, std::size_t, std::uint64_t, ssize_t*) {
      door.pass();
      return false;
    };
    Result<std::shared_ptr<BackingFile>> opened = BackingFile::open(fd.get(), *operations);
    ASSERT_TRUE(opened.ok());
    BackingFacts facts = opened.value()->facts();
    facts.may_hang = true;
    TransferRequest wanted;
    wanted.file = BackingFile::adopt(UniqueFd(::fcntl(fd.get(), F_DUPFD_CLOEXEC, 3)), UniqueFd(), facts, *operations);
    wanted.target = Target::of_buffer(std::make_shared<FakeBuffer>(device.value(), 4 * kMiB));
    Result<std::shared_ptr<Transfer>> started = engine.value()->start(wanted);
    ASSERT_TRUE(started.ok());
    transfer = started.take();
    door.await(1);
    engine.value()->shutdown();
    EXPECT_TRUE(transfer->wait(milliseconds(0)));
    EXPECT_EQ(transfer->progress().status.error(), ECANCELED);
  }
  door.open();
  // The threads end by themselves; the last things they hold go with them.
  const std::weak_ptr<Transfer> watch = transfer;
  transfer.reset();
  const auto all_ended = [&] {
    const std::set<std::string> now = threads_now();
    return std::includes(before.begin(), before.end(), now.begin(), now.end());
  };
  for (int tries = 0; tries < 60000 && !all_ended(); ++tries) std::this_thread::sleep_for(milliseconds(1));
  EXPECT_TRUE(all_ended());
  EXPECT_TRUE(watch.expired());
}

TEST(Hanging, OneClientDoesNotStopTheOthers) {
  IoOptions options = without_fastpath();
  options.workers = 2;
  Rig rig(false, options);
  const auto data = pattern(2 * kMiB);
  rig.make_file(data, /*may_hang=*/true);
  rig.make_buffer(4 * kMiB);
  Door door;
  const int hanging = rig.file->buffered_fd();
  rig.operations.on_read = [&](int fd, void*, std::size_t, std::uint64_t, ssize_t*) {
    if (fd == hanging) door.pass();
    return false;
  };
  const std::shared_ptr<BackingFile> hung_file = rig.file;
  std::vector<std::shared_ptr<Transfer>> hung;
  for (int number = 0; number < 5; ++number) {
    TransferRequest wanted = rig.load();
    wanted.client = 1000;
    hung.push_back(rig.engine->start(wanted).take());
  }
  door.await(2);
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_EQ(door.waiting(), 2);  // the client's share

  rig.open_file();
  rig.make_buffer(4 * kMiB);
  for (std::uint64_t client = 0; client < 3; ++client) {
    TransferRequest wanted = rig.load();
    wanted.client = client;
    Result<std::shared_ptr<Transfer>> started = rig.engine->start(wanted);
    ASSERT_TRUE(started.ok());
    ASSERT_TRUE(started.value()->wait(milliseconds(60000)));
    EXPECT_EQ(started.value()->progress().prefix, data.size());
  }
  EXPECT_TRUE(same(*rig.buffer, rig.buffer->contents(), data));
  for (const auto& transfer : hung) transfer->cancel();
  for (const auto& transfer : hung) EXPECT_TRUE(transfer->wait(milliseconds(60000)));
  door.open();
}

TEST(Hanging, ManyServersDoNotStopFilesOnDisks) {
  IoOptions options = without_fastpath();
  options.workers = 2;
  Rig rig(false, options);
  const auto data = pattern(2 * kMiB);
  rig.make_file(data, /*may_hang=*/true);
  rig.make_buffer(4 * kMiB);
  Door door;
  const int hanging = rig.file->buffered_fd();
  rig.operations.on_read = [&](int fd, void*, std::size_t, std::uint64_t, ssize_t*) {
    if (fd == hanging) door.pass();
    return false;
  };
  const std::shared_ptr<BackingFile> hung_file = rig.file;
  std::vector<std::shared_ptr<Transfer>> hung;
  for (std::uint64_t server = 0; server < 6; ++server) {
    TransferRequest wanted = rig.load();
    wanted.client = 1000 + server;
    hung.push_back(rig.engine->start(wanted).take());
  }
  door.await(2);
  std::this_thread::sleep_for(milliseconds(20));
  EXPECT_EQ(door.waiting(), 2);  // as many as one client may have

  rig.open_file();
  rig.make_buffer(4 * kMiB);
  Result<std::shared_ptr<Transfer>> started = rig.engine->start(rig.load());
  ASSERT_TRUE(started.ok());
  ASSERT_TRUE(started.value()->wait(milliseconds(60000)));
  EXPECT_EQ(started.value()->progress().prefix, data.size());
  for (const auto& transfer : hung) transfer->cancel();
  for (const auto& transfer : hung) EXPECT_TRUE(transfer->wait(milliseconds(60000)));
  door.open();
}

TEST(Sharing, ManyTransfersTakeTurns) {
  IoOptions options = without_fastpath();
  options.workers = 2;
  Rig rig(true, options);
  rig.make_file(pattern(64 * kChunk));
  rig.make_buffer(128 * kMiB);
  std::atomic<bool> looked{false};
  rig.operations.on_read = [&](int, void*, std::size_t, std::uint64_t offset, ssize_t*) {
    do {
      std::this_thread::sleep_for(milliseconds(5));
    } while (offset >= 63 * kChunk && !looked);
    return false;
  };
  std::vector<std::shared_ptr<Transfer>> transfers;
  for (std::uint64_t client = 0; client < 6; ++client) {
    TransferRequest wanted = rig.load();
    wanted.client = client;
    wanted.target_offset = client * 16 * kMiB;
    transfers.push_back(rig.engine->start(wanted).take());
  }
  // Three threads and six clients: all have moved something long before the first comes to its last piece.
  const auto end = Clock::now() + std::chrono::seconds(60);
  const auto moved = [](const std::shared_ptr<Transfer>& transfer) { return transfer->progress().moved > 0; };
  while (!std::all_of(transfers.begin(), transfers.end(), moved) && Clock::now() < end) {
    std::this_thread::sleep_for(milliseconds(5));
  }
  EXPECT_TRUE(std::all_of(transfers.begin(), transfers.end(), moved));
  const auto done = [](const std::shared_ptr<Transfer>& transfer) {
    return transfer->progress().state == TransferState::kDone;
  };
  EXPECT_TRUE(std::none_of(transfers.begin(), transfers.end(), done));
  for (const auto& transfer : transfers) transfer->cancel();
  looked = true;
  for (const auto& transfer : transfers) transfer->wait();
}

TEST(Completion, EventBecomesReadable) {
  Rig rig(true);
  rig.make_file(pattern(kMiB));
  rig.make_buffer(4 * kMiB);
  for (const bool early : {true, false}) {
    Result<std::shared_ptr<Transfer>> started = rig.engine->start(rig.load());
    ASSERT_TRUE(started.ok());
    if (!early) started.value()->wait();
    Result<int> event = started.value()->event_fd();
    ASSERT_TRUE(event.ok());
    pollfd watched = {event.value(), POLLIN, 0};
    EXPECT_EQ(::poll(&watched, 1, 60000), 1);
    EXPECT_EQ(started.value()->progress().state, TransferState::kDone);
  }
}

TEST(Statistics, AreJson) {
  Rig rig(false);
  rig.make_file(pattern(kMiB + 1));
  rig.make_buffer(4 * kMiB);
  (void)rig.finish(rig.load());
  const std::string text = rig.engine->statistics_json();
  EXPECT_NE(text.find("\"fastpath\": {\"bytes\": 1048576"), std::string::npos) << text;
  EXPECT_NE(text.find("\"size_unaligned\": 1"), std::string::npos) << text;
  EXPECT_NE(text.find("\"bounce_pool\": {\"slot_bytes\": 262144"), std::string::npos) << text;
  EXPECT_EQ(std::count(text.begin(), text.end(), '{'), std::count(text.begin(), text.end(), '}'));
}

TEST(Parallel, ManyTransfersAtOnce) {
  for (const bool host : {true, false}) {
    Rig rig(host);
    const auto data = pattern(8 * kMiB + 5);
    rig.make_file(data);
    rig.make_buffer(32 * kMiB);
    std::vector<std::thread> threads;
    std::atomic<int> good{0};
    for (std::uint64_t part = 0; part < 8; ++part) {
      threads.emplace_back([&, part] {
        TransferRequest wanted = rig.load();
        wanted.file_offset = wanted.target_offset = part * kMiB;
        wanted.bytes = part == 7 ? kToTheEnd : kMiB;
        wanted.client = part % 3;
        const Result<std::uint64_t> count = run_transfer(*rig.engine, wanted, nullptr);
        if (count.ok() && count.value() == (part == 7 ? kMiB + 5 : kMiB)) ++good;
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(good, 8);
    EXPECT_TRUE(same(*rig.buffer, rig.buffer->contents(), data));
    EXPECT_EQ(rig.buffer->size(), data.size());
  }
}

}  // namespace
}  // namespace gpufs
