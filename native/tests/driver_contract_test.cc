// The promises of the driver interface, tested with the host driver and the GPUs' drivers: over the fake libraries with
// and without virtual memory, and over the real ones if there is a GPU.
#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <future>
#include <optional>
#include <thread>

#include "bytes.h"
#include "device/pools.h"
#include "fake_vendors.h"
#include "streams.h"

namespace gpufs::gpu_test {
namespace {

enum class Library { kHost, kFakeCuda, kFakeCudaPlain, kCuda, kFakeHip, kBareHip, kHip };

class DriverContract : public ::testing::TestWithParam<Library> {
 protected:
  void SetUp() override {
    Result<std::unique_ptr<Driver>> driver = open();
    if (!driver.ok() && real()) GTEST_SKIP() << driver.status().message();
    ASSERT_TRUE(driver.ok()) << driver.status().message();
    driver_ = driver.take();
    device_ = driver_->devices().at(0).get();
    ASSERT_OK(device_->bind_thread());
    granule_ = device_->info().granule;
  }

  void TearDown() override {
    driver_.reset();
    if (real() || on_host()) return;
    const FakeGpuSetup setup;
    EXPECT_EQ(fake().reset(&setup), 0) << "something was left open";
  }

  Result<std::unique_ptr<Driver>> open(DriverOptions options = {}) {
    if (on_host()) {
      options.devices = 2;
      if (options.memory_bytes == 0) options.memory_bytes = std::uint64_t{4} << 30;
      return open_driver("host", options);
    }
    if (GetParam() == Library::kCuda) return open_driver("cuda", options);
    if (GetParam() == Library::kHip) return open_driver("hip", options);
    FakeGpuSetup setup;
    setup.devices = 2;
    setup.virtual_memory = GetParam() != Library::kFakeCudaPlain;
    fake().reset(&setup);
    if (of_cuda()) return open_cuda_driver(options, GPUFS_FAKE_CUDA);
    return open_hip_driver(options, {hip_library()});
  }

  static bool on_host() { return GetParam() == Library::kHost; }
  static bool real() { return GetParam() == Library::kCuda || GetParam() == Library::kHip; }
  static bool of_cuda() {
    return GetParam() == Library::kFakeCuda || GetParam() == Library::kFakeCudaPlain || GetParam() == Library::kCuda;
  }
  static const char* hip_library() { return GetParam() == Library::kBareHip ? GPUFS_FAKE_HIP_BARE : GPUFS_FAKE_HIP; }
  static const FakeGpuControl& fake() {
    if (of_cuda()) return cuda_test::fake();
    return hip_test::control_of(hip_library());
  }
  // Physical memory in use on a fake device.
  static std::optional<std::uint64_t> bytes_used() {
    if (GetParam() == Library::kFakeCuda) return cuda_test::fake_state().bytes_used;
    if (GetParam() == Library::kFakeHip) return hip_test::fake_state().bytes_used;
    return std::nullopt;
  }

  bool plain() const { return device_->info().reserve_copies; }

  std::vector<std::byte> read(DeviceAddress address, std::size_t bytes) {
    std::vector<std::byte> data(bytes, std::byte{0xEE});
    EXPECT_OK(device_->copy_out(data.data(), address, bytes));
    return data;
  }
  void write(DeviceAddress address, const std::vector<std::byte>& data) {
    EXPECT_OK(device_->copy_in(address, data.data(), data.size()));
  }
  bool all_zero(DeviceAddress address, std::size_t bytes) { return testing::all_zero(read(address, bytes)); }

  std::unique_ptr<Driver> driver_;
  Device* device_ = nullptr;
  std::uint64_t granule_ = 0;
};

std::string name_of(const ::testing::TestParamInfo<Library>& tested) {
  constexpr std::array<const char*, 7> kNames = {"Host",    "FakeCuda", "FakeCudaPlain", "Cuda", "FakeHip",
                                                 "BareHip", "Hip"};
  return kNames.at(static_cast<std::size_t>(tested.param));
}

INSTANTIATE_TEST_SUITE_P(Libraries, DriverContract,
                         ::testing::Values(Library::kHost, Library::kFakeCuda, Library::kFakeCudaPlain, Library::kCuda,
                                           Library::kFakeHip, Library::kBareHip, Library::kHip),
                         name_of);

TEST_P(DriverContract, DescribesItsDevices) {
  EXPECT_STREQ(driver_->name(), on_host() ? "host" : of_cuda() ? "cuda" : "hip");
  const DeviceInfo& info = device_->info();
  EXPECT_EQ(info.index, 0);
  EXPECT_FALSE(info.name.empty());
  EXPECT_EQ(info.pci_address.empty(), on_host());
  EXPECT_TRUE(
      std::none_of(info.pci_address.begin(), info.pci_address.end(), [](char c) { return 'A' <= c && c <= 'Z'; }));
  EXPECT_GT(info.total_bytes, granule_);
  EXPECT_EQ(granule_ & (granule_ - 1), 0U);
  EXPECT_EQ(info.cpu_addressable, on_host());
  const MemoryInfo memory = must(device_->memory());
  EXPECT_LE(memory.free_bytes, memory.total_bytes);
  EXPECT_OK(device_->health());
  RecordProperty("device", info.name + " at " + info.pci_address);
}

TEST_P(DriverContract, CopiesEverySizeInAndOut) {
  auto [memory, range] = take(*device_, 4 * granule_, 8 * granule_);
  EXPECT_TRUE(all_zero(range->base(), 4 * granule_));
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{4095}, std::size_t{65537}, 3 * granule_ + 17}) {
    const std::vector<std::byte> data = pattern(bytes, static_cast<unsigned>(bytes));
    write(range->base() + 5, data);
    EXPECT_EQ(read(range->base() + 5, bytes), data) << bytes;
  }
  EXPECT_OK(device_->copy_in(range->base(), nullptr, 0));
  EXPECT_OK(device_->copy_out(nullptr, range->base(), 0));
}

TEST_P(DriverContract, CopiesAndZeroesWithin) {
  auto [memory, range] = take(*device_, 4 * granule_);
  const std::vector<std::byte> data = pattern(granule_, 7);
  write(range->base(), data);
  ASSERT_OK(device_->copy_within(range->base() + 2 * granule_ + 3, range->base(), granule_));
  EXPECT_TRUE(testing::same_bytes(read(range->base() + 2 * granule_ + 3, granule_), data));
  ASSERT_OK(device_->zero(range->base() + 100, granule_ - 200));
  EXPECT_TRUE(all_zero(range->base() + 100, granule_ - 200));
  EXPECT_EQ(read(range->base() + 99, 1)[0], data[99]);
  EXPECT_EQ(read(range->base() + granule_ - 100, 1)[0], data[granule_ - 100]);
}

TEST_P(DriverContract, MemoryIsZeroWheneverItIsPopulated) {
  auto [memory, range] = take(*device_, 0, 8 * granule_);
  for (int round = 0; round < 2; ++round) {
    ASSERT_OK(memory->populate(granule_, 6 * granule_));
    EXPECT_TRUE(all_zero(range->base() + granule_, 6 * granule_));
    write(range->base() + granule_, pattern(6 * granule_, 1));
    memory->release(2 * granule_, granule_);
    ASSERT_OK(memory->populate(2 * granule_, granule_));
    EXPECT_TRUE(all_zero(range->base() + 2 * granule_, granule_));
    memory->release(granule_, 6 * granule_);
  }
}

TEST_P(DriverContract, ALargerRangeShowsTheSameMemory) {
  auto [memory, first] = take(*device_, 0, 2 * granule_);
  ASSERT_OK(memory->populate(granule_, granule_));
  const std::vector<std::byte> data = pattern(granule_, 3);
  write(first->base() + granule_, data);
  const Extent populated{granule_, granule_};
  auto second = must(memory->reserve(16 * granule_, {&populated, 1}));
  EXPECT_GE(second->bytes(), 16 * granule_);
  EXPECT_TRUE(testing::same_bytes(read(second->base() + granule_, granule_), data));
  EXPECT_TRUE(testing::same_bytes(read(first->base() + granule_, granule_), data));  // the earlier one keeps showing it
  ASSERT_OK(memory->populate(8 * granule_, granule_));
  EXPECT_TRUE(all_zero(second->base() + 8 * granule_, granule_));
  if (!plain()) {
    write(second->base() + granule_, pattern(64, 9));  // both show the same memory
    EXPECT_EQ(read(first->base() + granule_, 64), pattern(64, 9));
  }
  memory.reset();
  EXPECT_EQ(read(second->base() + granule_ + 64, granule_ - 64),
            std::vector<std::byte>(data.begin() + 64, data.end()));  // ranges outlive the memory they show
}

TEST_P(DriverContract, ReleasingAPartKeepsTheRest) {
  auto [memory, range] = take(*device_, 0, 32 * granule_);
  auto later = must(memory->reserve(64 * granule_));
  const std::uint64_t before = must(device_->memory()).free_bytes;
  ASSERT_OK(memory->populate(0, 16 * granule_));
  const std::vector<std::byte> data = pattern(16 * granule_, 5);
  write(later->base(), data);
  const Extent span = memory->release_span(4 * granule_, 3 * granule_);
  EXPECT_LE(span.offset, 4 * granule_);
  EXPECT_GE(span.end(), 7 * granule_);
  memory->release(4 * granule_, 3 * granule_);
  EXPECT_TRUE(testing::same_bytes(read(later->base(), 4 * granule_), std::span(data).first(4 * granule_)));
  EXPECT_TRUE(
      testing::same_bytes(read(later->base() + 7 * granule_, 9 * granule_), std::span(data).subspan(7 * granule_)));
  if (!plain()) {
    EXPECT_LE(must(device_->memory()).free_bytes, before - 13 * granule_);
  }
  if (bytes_used()) {
    EXPECT_EQ(bytes_used(), 13 * granule_);
  }
  memory->release(0, 4 * granule_);
  memory->release(7 * granule_, 9 * granule_);
  if (bytes_used()) {
    EXPECT_EQ(bytes_used(), 0U);
  }
}

TEST_P(DriverContract, FixedMemoryIsNotMoved) {
  auto [memory, range] = take(*device_, 8 * granule_, 16 * granule_);
  memory->fix_in_place();
  const std::vector<std::byte> data = pattern(8 * granule_, 11);
  write(range->base(), data);
  const Extent span = memory->release_span(granule_, granule_);
  EXPECT_EQ(span.offset, granule_);
  EXPECT_EQ(span.bytes, granule_);
  memory->release(granule_, granule_);
  EXPECT_TRUE(testing::same_bytes(read(range->base() + 2 * granule_, granule_),
                                  std::span(data).subspan(2 * granule_, granule_)));
  ASSERT_OK(memory->populate(granule_, granule_));
  EXPECT_TRUE(all_zero(range->base() + granule_, granule_));
  memory->release(0, 8 * granule_);
  if (bytes_used()) {
    EXPECT_EQ(bytes_used(), 0U);
  }
}

TEST_P(DriverContract, ExportsEveryPiece) {
  if (on_host()) GTEST_SKIP() << "its memory is one piece";
  auto [memory, range] = take(*device_, 2 * granule_, 2048 * kMiB);
  ASSERT_OK(memory->populate(4 * granule_, 1100 * kMiB));
  Result<std::vector<ExportedMemory>> exported = memory->export_memory(0, UINT64_MAX, SIZE_MAX, true);
  if (plain()) {
    EXPECT_EQ(exported.error(), EOPNOTSUPP);
    return;
  }
  if (real() && exported.error() == EOPNOTSUPP) GTEST_SKIP() << exported.status().message();
  ASSERT_OK(exported.status());
  ASSERT_EQ(exported.value().size(), 3U);
  EXPECT_EQ(exported.value()[0].bytes, 2 * granule_);
  EXPECT_EQ(exported.value()[1].offset, 4 * granule_);
  EXPECT_EQ(exported.value()[1].bytes, 1024 * kMiB);
  EXPECT_EQ(exported.value()[2].offset, 4 * granule_ + 1024 * kMiB);
  EXPECT_EQ(exported.value()[2].bytes, 76 * kMiB);
  for (const ExportedMemory& part : exported.value()) {
    EXPECT_EQ(::fcntl(part.descriptor.get(), F_GETFD), FD_CLOEXEC);
  }
}

TEST_P(DriverContract, ImportedMemoryIsTheExporters) {
  if (on_host()) GTEST_SKIP() << "it has tests of its own";
  auto [memory, range] = take(*device_, granule_, 512 * kMiB);
  ASSERT_OK(memory->populate(granule_, 3 * granule_));
  const Status shares = device_->check_sharing();
  if (plain() || shares.error() == EOPNOTSUPP) {
    EXPECT_EQ(shares.error(), EOPNOTSUPP);
    EXPECT_NE(shares.message().find("shared"), std::string::npos);
    EXPECT_EQ(device_->create_import(granule_, ImportAccess::kWrite).error(), plain() ? EOPNOTSUPP : 0);
    return;
  }
  const auto pieces = must(memory->export_memory(0, UINT64_MAX, SIZE_MAX, true));
  const auto writable = must(device_->create_import(4 * granule_, ImportAccess::kWrite));
  const auto read_only = must(device_->create_import(8 * granule_, ImportAccess::kRead));
  for (const auto& piece : pieces) {
    ASSERT_OK(writable->add(piece));
    ASSERT_OK(read_only->add(piece));
  }
  EXPECT_EQ(writable->bytes(), 4 * granule_);
  const auto data = pattern(2 * granule_, 1);
  write(range->base() + granule_ / 2, data);  // across two pieces
  EXPECT_TRUE(testing::same_bytes(read(writable->base() + granule_ / 2, data.size()), data));
  const auto changed = pattern(granule_, 2);
  write(writable->base(), changed);
  EXPECT_TRUE(testing::same_bytes(read(range->base(), changed.size()), changed));
  EXPECT_TRUE(testing::same_bytes(read(read_only->base(), changed.size()), changed));
  EXPECT_FALSE(device_->copy_in(read_only->base(), data.data(), 16).ok());
  EXPECT_OK(device_->health());
  EXPECT_TRUE(testing::same_bytes(read(range->base(), changed.size()), changed));

  ASSERT_OK(memory->populate(4 * granule_, granule_));
  const auto more = must(memory->export_memory(4 * granule_, UINT64_MAX, SIZE_MAX, true));
  ASSERT_EQ(more.size(), 1U);
  EXPECT_EQ(writable->add(more[0]).error(), EFBIG);
  EXPECT_OK(read_only->add(more[0]));
  // The addresses show other memory, and again what they have shown.
  ASSERT_OK(writable->clear());
  EXPECT_EQ(writable->bytes(), 0U);
  {
    auto [other, place] = take(*device_, 2 * granule_);
    write(place->base(), data);
    const DeviceAddress base = writable->base();
    for (const auto& piece : must(other->export_memory(0, UINT64_MAX, SIZE_MAX, true))) ASSERT_OK(writable->add(piece));
    EXPECT_TRUE(testing::same_bytes(read(base, data.size()), data));
    ASSERT_OK(writable->clear());
    EXPECT_EQ(writable->base(), base);
  }
  for (const auto& piece : pieces) ASSERT_OK(writable->add(piece));
  // The importer keeps what the exporter has released.
  memory.reset();
  range.reset();
  EXPECT_TRUE(testing::same_bytes(read(writable->base(), changed.size()), changed));
}

TEST_P(DriverContract, SynchronizingWaitsForTheWorkOfAllStreams) {
  if (on_host()) GTEST_SKIP() << "it has nothing to wait for";
  auto [memory, range] = take(*device_, 64 * kMiB);
  const auto data = pattern(64 * kMiB, 4);
  auto stream = must(device_->create_stream());
  auto event = must(device_->create_event());
  for (int round = 0; round < 20; ++round) {
    ASSERT_OK(testing::copy_in(*stream, range->base(), data.data(), data.size()));
  }
  ASSERT_OK(stream->record(*event));
  device_->synchronize();
  EXPECT_TRUE(GetParam() == Library::kBareHip || must(event->query()));
  ASSERT_OK(stream->synchronize());
}

TEST_P(DriverContract, ImportedMemoryStaysMappedForQueuedWork) {
  if (on_host() || plain() || GetParam() == Library::kBareHip) {
    GTEST_SKIP() << "cannot import memory of a GPU, or call a function in a stream";
  }
  auto [memory, range] = take(*device_, granule_, 64 * kMiB);
  if (device_->check_sharing().error() == EOPNOTSUPP) GTEST_SKIP() << device_->check_sharing().message();
  write(range->base(), pattern(granule_, 1));
  auto imported = must(device_->create_import(granule_, ImportAccess::kWrite));
  for (const auto& piece : must(memory->export_memory(0, UINT64_MAX, SIZE_MAX, true))) ASSERT_OK(imported->add(piece));
  auto stream = must(device_->create_stream());
  std::promise<void> gate;
  std::shared_future<void> opened = gate.get_future().share();
  ASSERT_OK(stream->call([](void* argument) { static_cast<std::shared_future<void>*>(argument)->wait(); }, &opened));
  ASSERT_OK(stream->fill_zero(imported->base(), granule_));
  std::future<void> unmapped = std::async(std::launch::async, [&] { imported.reset(); });
  EXPECT_EQ(unmapped.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout);
  gate.set_value();
  unmapped.get();
  EXPECT_OK(stream->synchronize());
  EXPECT_OK(device_->health());
  EXPECT_TRUE(all_zero(range->base(), granule_));
}

TEST_P(DriverContract, OneDeviceOpensByItsPciAddress) {
  if (on_host()) GTEST_SKIP() << "it has no PCI address";
  const std::string address = device_->info().pci_address;
  const auto open_one = [&](const std::string& at) -> Result<std::shared_ptr<Device>> {
    if (real()) return open_device(of_cuda() ? "cuda" : "hip", at);
    return of_cuda() ? open_cuda_device(at, GPUFS_FAKE_CUDA) : open_hip_device(at, {hip_library()});
  };
  EXPECT_EQ(must(open_one(address))->info().pci_address, address);
  const Status missing = open_one("0000:ee:1f.0").status();
  EXPECT_EQ(missing.error(), ENODEV);
  EXPECT_NE(missing.message().find("VISIBLE_DEVICES"), std::string::npos);
}

TEST_P(DriverContract, StreamsAndEventsKeepOrder) {
  auto [memory, range] = take(*device_, 64 * kMiB);
  auto stream = must(device_->create_stream());
  auto stored = must(device_->create_event());
  EXPECT_TRUE(must(stored->query()));  // never recorded: nothing to wait for

  const std::size_t bytes = 16 * kMiB;
  void* pinned = ::mmap(nullptr, 2 * bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(pinned, MAP_FAILED);
  ASSERT_OK(device_->pin(pinned, 2 * bytes));
  EXPECT_EQ(device_->pin(pinned, 2 * bytes).error(), EEXIST);
  auto* host = static_cast<std::byte*>(pinned);
  for (unsigned round = 0; round < 4; ++round) {
    const std::vector<std::byte> data = pattern(bytes, round);
    std::memcpy(host, data.data(), bytes);
    std::memset(host + bytes, 0xEE, bytes);
    ASSERT_OK(stream->fill_zero(range->base(), bytes));
    ASSERT_OK(testing::copy_in(*stream, range->base(), host, bytes));
    ASSERT_OK(testing::copy_out(*stream, host + bytes, range->base(), bytes));
    ASSERT_OK(stream->record(*stored));
    // Any thread may query and wait, also one that was never bound.
    std::thread waiter([&] { EXPECT_OK(testing::finished(*stored)); });
    waiter.join();
    EXPECT_TRUE(must(stored->query()));
    EXPECT_EQ(std::memcmp(host + bytes, data.data(), bytes), 0);
  }
  ASSERT_OK(stream->synchronize());
  EXPECT_OK(device_->unpin(pinned));
  EXPECT_EQ(device_->unpin(pinned).error(), ENOENT);
  ::munmap(pinned, 2 * bytes);
}

// As many streams are blocked as may wait for operations, each as by OperationStream and after a copy of the program.
// They continue after 20 s at the latest, which only a hang exceeds.
TEST_P(DriverContract, WorkGoesOnBesideBlockedStreams) {
  if (GetParam() == Library::kBareHip) GTEST_SKIP() << "its streams cannot wait for a value";
  constexpr std::size_t kBytes = 4 * kMiB;
  auto [memory, range] = take(*device_, 32 * kMiB, 64 * kMiB);
  PinnedPool pool(*device_);
  const PinnedBlock host = must(pool.take(2 * kBytes));
  const PinnedBlock gate = must(pool.take(4 + 4 * BlockedStreams::kMost));
  if (!real() && !on_host()) fake().share_queues();
  const DeviceAddress base = range->base();
  std::vector<std::unique_ptr<Stream>> blocked;
  for (int number = 0; number < BlockedStreams::kMost; ++number) {
    blocked.push_back(must(device_->create_stream()));
    Stream& stream = *blocked.back();
    const DeviceAddress own = base + (24 + number) * kMiB;
    ASSERT_OK(number % 2 == 0 ? testing::copy_in(stream, own, host.data + 2 * kMiB, kMiB)
                              : testing::copy_out(stream, host.data + kBytes + number * kMiB, own, kMiB));
    ASSERT_OK(stream.fill_zero(gate.address + 4 + 4 * number, 4));
    ASSERT_OK(stream.wait_for_value(gate.address, 1));
  }
  std::promise<void> over;
  std::atomic<bool> late{false};
  std::thread watch([&, ended = over.get_future()] {
    late = ended.wait_for(std::chrono::seconds(20)) == std::future_status::timeout;
    const std::atomic_ref<std::uint32_t> word(*reinterpret_cast<std::uint32_t*>(gate.data));
    word.store(1);
    word.notify_all();
  });
  for (int round = 0; round < 32; ++round) {
    const std::size_t size = round % 2 == 0 ? 4096 : kMiB;
    const std::vector<std::byte> data = pattern(size, static_cast<unsigned>(round));
    std::memcpy(host.data, data.data(), size);
    EXPECT_OK(device_->copy_in(base, host.data, size));
    EXPECT_OK(device_->copy_within(base + 8 * kMiB, base, size));
    EXPECT_OK(device_->zero(base + 8 * kMiB, 100));
    EXPECT_OK(device_->copy_out(host.data + kBytes, base + 8 * kMiB, size));
    EXPECT_TRUE(testing::all_zero({host.data + kBytes, host.data + kBytes + 100}));
    EXPECT_EQ(std::memcmp(host.data + kBytes + 100, data.data() + 100, size - 100), 0);
    const std::unique_ptr<Stream> stream = must(device_->create_stream());
    EXPECT_OK(testing::copy_in(*stream, base, host.data, size));
    EXPECT_OK(stream->synchronize());
  }
  EXPECT_OK(memory->populate(32 * kMiB, 4 * kMiB));
  over.set_value();
  watch.join();
  EXPECT_FALSE(late) << "some of it came behind the blocked streams";
  for (const auto& stream : blocked) EXPECT_OK(stream->synchronize());
}

TEST_P(DriverContract, PinsReadOnlyFileMappings) {
  std::vector<std::byte> data = pattern(8 * kMiB, 2);
  UniqueFd file(::memfd_create("contents", MFD_CLOEXEC));
  ASSERT_EQ(::write(file.get(), data.data(), data.size()), static_cast<ssize_t>(data.size()));
  void* mapping = ::mmap(nullptr, data.size(), PROT_READ, MAP_SHARED, file.get(), 0);
  ASSERT_NE(mapping, MAP_FAILED);
  const Status pinned = device_->pin_read_only(mapping, data.size());
  if (pinned.ok()) {
    auto [memory, range] = take(*device_, data.size());
    ASSERT_OK(device_->copy_in(range->base(), mapping, data.size()));
    EXPECT_TRUE(testing::same_bytes(read(range->base(), data.size()), data));
    EXPECT_OK(device_->unpin(mapping));
  } else {
    EXPECT_TRUE(real() || !of_cuda()) << pinned.message();
    EXPECT_EQ(pinned.error(), EOPNOTSUPP);
    RecordProperty("pin_read_only", pinned.message());
  }
  ::munmap(mapping, data.size());
}

TEST_P(DriverContract, ManyThreadsCopyWithoutBinding) {
  constexpr int kThreads = 6;
  auto [memory, range] = take(*device_, kThreads * granule_);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      const DeviceAddress address = range->base() + static_cast<std::uint64_t>(i) * granule_;
      for (unsigned round = 0; round < 20; ++round) {
        const std::vector<std::byte> data = pattern(100000, static_cast<unsigned>(i) * 100 + round);
        std::vector<std::byte> back(data.size());
        EXPECT_OK(device_->copy_in(address + round, data.data(), data.size()));
        EXPECT_OK(device_->copy_out(back.data(), address + round, back.size()));
        EXPECT_TRUE(testing::same_bytes(data, back));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_P(DriverContract, ReachingTheCapIsNotSticky) {
  driver_.reset();
  DriverOptions options;
  options.memory_bytes = 64 * kMiB;
  driver_ = must(open(options));
  Device& device = *driver_->devices().at(0);
  EXPECT_EQ(device.info().total_bytes, 64 * kMiB);
  EXPECT_EQ(must(device.memory()).free_bytes, 64 * kMiB);
  auto memory = must(device.create_memory());
  auto other = must(device.create_memory());
  auto range = must(memory->reserve(48 * kMiB));
  ASSERT_OK(memory->populate(0, 48 * kMiB));
  EXPECT_EQ(must(device.memory()).free_bytes, 16 * kMiB);
  Result<std::shared_ptr<AddressRange>> second = other->reserve(32 * kMiB);
  if (device.info().reserve_copies) {
    EXPECT_EQ(second.error(), ENOSPC);
  } else {
    ASSERT_OK(second.status());
    EXPECT_EQ(other->populate(0, 32 * kMiB).error(), ENOSPC);
  }
  EXPECT_EQ(must(device.memory()).free_bytes, 16 * kMiB);
  EXPECT_OK(device.health());
  memory.reset();
  range.reset();
  EXPECT_EQ(must(device.memory()).free_bytes, 64 * kMiB);
  if (device.info().reserve_copies) second = other->reserve(32 * kMiB);
  EXPECT_OK(other->populate(0, 32 * kMiB));
}

TEST_P(DriverContract, CopiesToPeers) {
  if (driver_->devices().size() < 2) GTEST_SKIP() << "one device only";
  Device& peer = *driver_->devices().at(1);
  auto [here, here_range] = take(*device_, 32 * kMiB);
  auto [there, there_range] = take(peer, 32 * kMiB);
  const std::vector<std::byte> data = pattern(32 * kMiB, 21);
  write(here_range->base(), data);
  const Status copied = device_->copy_to_peer(peer, there_range->base(), here_range->base(), data.size());
  if (copied.error() == EOPNOTSUPP) GTEST_SKIP() << copied.message();
  ASSERT_OK(copied);
  std::vector<std::byte> back(data.size());
  ASSERT_OK(peer.copy_out(back.data(), there_range->base(), back.size()));
  EXPECT_TRUE(testing::same_bytes(back, data));
  EXPECT_OK(device_->copy_to_peer(*device_, here_range->base() + 16 * kMiB, here_range->base(), 4096));
}

TEST_P(DriverContract, RecognisesItsOwnMemory) {
  auto [memory, range] = take(*device_, 2 * granule_);
  if (on_host()) GTEST_SKIP() << "all of its memory is host memory";
  // A runtime that cannot describe memory recognises none.
  const bool says = GetParam() != Library::kBareHip;
  EXPECT_EQ(device_->holds(range->base()), says);
  EXPECT_EQ(device_->holds(range->base() + 2 * granule_ - 1), says);
  const std::vector<std::byte> host(64);
  EXPECT_FALSE(device_->holds(reinterpret_cast<DeviceAddress>(host.data())));
  if (driver_->devices().size() < 2) return;
  EXPECT_FALSE(driver_->devices().at(1)->holds(range->base()));
}

TEST_P(DriverContract, AnyThreadMayReleaseARange) {
  for (int round = 0; round < 5; ++round) {
    auto [memory, first] = take(*device_, 4 * granule_);
    const Extent populated{0, 4 * granule_};
    auto second = must(memory->reserve(8 * granule_, {&populated, 1}));
    std::thread other([range = std::move(first)]() mutable { range.reset(); });
    memory->release(2 * granule_, granule_);
    memory->release(0, granule_);
    other.join();
    EXPECT_TRUE(all_zero(second->base() + granule_, granule_));
    std::thread last([memory = std::move(memory), range = std::move(second)]() mutable {
      memory.reset();
      range.reset();
    });
    last.join();
  }
}

}  // namespace
}  // namespace gpufs::gpu_test
