// Registered buffers: memory of another program by the vendors' handles over the fake libraries, and files in memory on
// the host driver.

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <thread>

#include "bytes.h"
#include "fake_vendors.h"
#include "io/fastpath.h"
#include "memory/registered_buffer.h"
#include "transfer_rig.h"

namespace gpufs {
namespace {

using namespace gpu_test;
using std::chrono::milliseconds;

// The calls by which a program passes on its memory.
constexpr std::array<const char*, 2> kLibraries{GPUFS_FAKE_CUDA, GPUFS_FAKE_HIP};
constexpr Names kIpcGetHandle{"cuIpcGetMemHandle", "hipIpcGetMemHandle"};

class RegisteredGpuTest : public ::testing::TestWithParam<std::size_t> {
 protected:
  static constexpr std::uint64_t kBytes = 8 * kMiB;
  static constexpr std::uint64_t kInside = kMiB + 4096 + 512;

  // Two devices without virtual memory, so that the memory of each buffer is one allocation.
  void SetUp() override {
    setup_.devices = 2;
    setup_.virtual_memory = false;
    open();
  }
  void open() {
    ASSERT_EQ(control().reset(&setup_), 0) << "an earlier test left something open";
    driver_ = must(kVendors.at(GetParam()).open({}));
    context_ = must(DeviceContext::create(driver_, 0));
    memory_ = must(driver_->devices().at(0)->create_memory());
    range_ = must(memory_->reserve(kBytes));
    ASSERT_OK(memory_->populate(0, kBytes));
    data_ = pattern(kBytes, 5);
    ASSERT_OK(device().copy_in(range_->base(), data_.data(), kBytes));
  }
  void TearDown() override {
    memory_.reset();
    range_.reset();
    context_.reset();
    driver_.reset();
    EXPECT_EQ(control().reset(&setup_), 0) << "something was left open";
  }

  static const FakeGpuControl& control() { return kVendors.at(GetParam()).fake(); }
  Device& device(std::size_t index = 0) { return *driver_->devices().at(index); }
  // What the program sends for a part of its memory.
  ForeignMemory shared(std::uint64_t offset, std::uint64_t bytes, bool writable = true) {
    ForeignMemory memory;
    memory.kind = ShareKind::kIpc;
    memory.offset = offset;
    memory.bytes = bytes;
    memory.writable = writable;
    EXPECT_OK(device().bind_thread());
    void* const library = ::dlopen(kLibraries.at(GetParam()), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    auto* const get =
        reinterpret_cast<api::Code (*)(void*, DeviceAddress)>(::dlsym(library, kIpcGetHandle.at(GetParam())));
    EXPECT_EQ(get(memory.handle.data(), range_->base() + offset), api::kSuccess);
    return memory;
  }
  std::shared_ptr<RegisteredBuffer> registered(std::uint64_t offset, std::uint64_t bytes, bool writable = true) {
    return std::make_shared<RegisteredBuffer>(context_, must(device().map_foreign(shared(offset, bytes, writable))),
                                              bytes, writable);
  }
  std::vector<std::byte> program_sees(std::uint64_t offset, std::size_t bytes) {
    std::vector<std::byte> seen(bytes);
    EXPECT_OK(device().copy_out(seen.data(), range_->base() + offset, bytes));
    return seen;
  }
  int allocations() {
    FakeGpuState state{};
    control().state(&state);
    return state.allocations;
  }

  FakeGpuSetup setup_;
  std::shared_ptr<Driver> driver_;
  std::shared_ptr<DeviceContext> context_;
  std::unique_ptr<DeviceMemory> memory_;
  std::shared_ptr<AddressRange> range_;
  std::vector<std::byte> data_;
};

INSTANTIATE_TEST_SUITE_P(Vendors, RegisteredGpuTest, kEachVendor, vendor_name);

TEST_P(RegisteredGpuTest, CopiesInBothDirections) {
  const auto buffer = registered(kInside, kMiB);
  const std::shared_ptr<Buffer> ordinary = std::make_shared<ExtentBuffer>(context_);
  const std::shared_ptr<Buffer> elsewhere = std::make_shared<ExtentBuffer>(must(DeviceContext::create(driver_, 1)));
  for (const auto& other : {ordinary, elsewhere}) {
    ASSERT_EQ(must(other->copy_from(*buffer, 10, 0, kMiB, nullptr)), kMiB - 10);
    std::vector<std::byte> copied(kMiB - 10);
    ASSERT_EQ(must(other->read(0, copied)), copied.size());
    EXPECT_TRUE(std::equal(copied.begin(), copied.end(), data_.begin() + kInside + 10));
  }
  const std::vector<std::byte> news = pattern(kMiB, 3);
  ASSERT_EQ(must(ordinary->write(0, news)), news.size());
  ASSERT_OK(ordinary->resize(3 * kMiB));  // a hole follows
  EXPECT_EQ(must(buffer->copy_from(*ordinary, kMiB - 100, kMiB - 200, 10 * kMiB, nullptr)), 200U);
  const std::vector<std::byte> end = program_sees(kInside + kMiB - 200, 200);
  EXPECT_TRUE(std::equal(end.begin(), end.begin() + 100, news.end() - 100));
  EXPECT_TRUE(std::all_of(end.begin() + 100, end.end(), [](std::byte byte) { return byte == std::byte{0}; }));
  EXPECT_EQ(buffer->copy_from(*buffer, 0, 10, 100, nullptr).error(), EINVAL);
}

TEST_P(RegisteredGpuTest, RefusesForgedHandles) {
  const int before = allocations();
  ForeignMemory forged = shared(0, kBytes);
  forged.handle.fill(0);
  EXPECT_EQ(device().map_foreign(forged).error(), EINVAL);
  forged = shared(0, kBytes + 1);
  EXPECT_EQ(device().map_foreign(forged).error(), EINVAL);
  forged = shared(0, 0);
  EXPECT_EQ(device().map_foreign(forged).error(), EINVAL);
  forged = shared(1, kBytes);
  EXPECT_EQ(device().map_foreign(forged).error(), EINVAL);
  forged = shared(1, UINT64_MAX);
  EXPECT_EQ(device().map_foreign(forged).error(), EINVAL);
  forged = shared(0, kBytes);
  EXPECT_EQ(device(1).map_foreign(forged).error(), EXDEV);
  forged.kind = ShareKind::kFile;
  EXPECT_EQ(device().map_foreign(forged).error(), EINVAL);
  EXPECT_EQ(allocations(), before);
}

TEST_P(RegisteredGpuTest, EndsWhenItIsRevoked) {
  const int before = allocations();
  const auto buffer = registered(0, kMiB);
  EXPECT_EQ(allocations(), before + 1);
  auto pin = must(buffer->pin_for_read(0, kMiB, Wait::kAllowed));
  EXPECT_FALSE(buffer->revoke(milliseconds(1)));
  EXPECT_EQ(allocations(), before + 1);  // the pin has it
  std::vector<std::byte> some(100);
  EXPECT_EQ(buffer->read(0, some, Wait::kAllowed).error(), ESTALE);
  EXPECT_EQ(buffer->write(0, some, Wait::kAllowed).error(), ESTALE);
  EXPECT_EQ(buffer->pin_for_read(0, 1, Wait::kAllowed).error(), ESTALE);
  EXPECT_EQ(buffer->pin_for_write(0, 1, Wait::kAllowed).error(), ESTALE);
  EXPECT_EQ(buffer->seek_data(0).error(), ESTALE);
  EXPECT_EQ(buffer->resize(kMiB, Wait::kAllowed).error(), ESTALE);
  EXPECT_OK(device().copy_out(some.data(), pin.pieces.at(0).address, some.size()));
  std::atomic<bool> waited{false};
  std::thread waiter([&] {
    EXPECT_TRUE(buffer->revoke(std::chrono::minutes(5)));
    EXPECT_EQ(allocations(), before);
    waited = true;
  });
  EXPECT_FALSE(waited);
  pin = {};
  waiter.join();
  EXPECT_EQ(buffer->bytes_held(), 0U);
  EXPECT_EQ(buffer->size(), kMiB);
  EXPECT_TRUE(buffer->revoke(milliseconds(0)));
}

// Memory that is exported as descriptors.
class RegisteredDescriptorTest : public RegisteredGpuTest {
 protected:
  void SetUp() override {
    open();
    memory_->fix_in_place();
  }
  ForeignMemory exported(std::uint64_t offset, std::uint64_t bytes) {
    ForeignMemory memory;
    memory.kind = ShareKind::kDescriptor;
    memory.pieces = must(memory_->export_memory(0, 1, 1, true));
    memory.offset = offset;
    memory.bytes = bytes;
    memory.writable = true;
    return memory;
  }
};

INSTANTIATE_TEST_SUITE_P(Vendors, RegisteredDescriptorTest, kEachVendor, vendor_name);

TEST_P(RegisteredDescriptorTest, ShowsAPartOfPhysicalMemory) {
  const auto buffer =
      std::make_shared<RegisteredBuffer>(context_, must(device().map_foreign(exported(kInside, kMiB))), kMiB, true);
  std::vector<std::byte> read(kMiB);
  ASSERT_EQ(must(buffer->read(0, read, Wait::kAllowed)), kMiB);
  EXPECT_TRUE(std::equal(read.begin(), read.end(), data_.begin() + kInside));
  const std::vector<std::byte> news = pattern(1000, 9);
  ASSERT_EQ(must(buffer->write(5000, news, Wait::kAllowed)), news.size());
  EXPECT_EQ(program_sees(kInside + 5000, 1000), news);
  EXPECT_TRUE(buffer->revoke(milliseconds(0)));
}

// As torch's expandable segments are. Here it is the same memory twice.
TEST_P(RegisteredDescriptorTest, ShowsSeveralPiecesAsOne) {
  ForeignMemory memory = exported(kInside, 0);
  const std::uint64_t first = memory.whole_bytes();
  ASSERT_EQ(first, kBytes);
  for (ExportedMemory& piece : exported(0, 0).pieces) {
    piece.offset += first;
    memory.pieces.push_back(std::move(piece));
  }
  memory.bytes = memory.whole_bytes() - kInside;
  const auto mapped =
      std::make_shared<RegisteredBuffer>(context_, must(device().map_foreign(memory)), memory.bytes, true);
  std::vector<std::byte> read(memory.bytes);
  ASSERT_EQ(must(mapped->read(0, read, Wait::kAllowed)), read.size());
  EXPECT_TRUE(std::equal(data_.begin() + kInside, data_.end(), read.begin()));
  EXPECT_TRUE(std::equal(data_.begin(), data_.end(), read.end() - std::ssize(data_)));
  EXPECT_TRUE(mapped->revoke(milliseconds(0)));
}

TEST_P(RegisteredDescriptorTest, RefusesForgedDescriptors) {
  const auto forge = [&](auto change) {
    ForeignMemory forged = exported(0, kMiB);
    change(forged);
    EXPECT_EQ(device().map_foreign(forged).error(), EINVAL);
    EXPECT_OK(device().health());
  };
  forge([](ForeignMemory& forged) { forged.pieces[0].bytes *= 2; });
  forge([](ForeignMemory& forged) { forged.pieces[0].bytes = kMiB; });  // no granule
  forge([](ForeignMemory& forged) { forged.pieces[0].bytes = 0; });
  forge([](ForeignMemory& forged) { forged.pieces[0].offset = kGranule; });
  forge([](ForeignMemory& forged) { forged.pieces.clear(); });
  forge([](ForeignMemory& forged) { forged.offset = forged.whole_bytes(); });
  forge([](ForeignMemory& forged) { forged.offset = UINT64_MAX; });
  forge([](ForeignMemory& forged) { forged.pieces[0].descriptor = UniqueFd(); });
  forge([](ForeignMemory& forged) { forged.pieces.push_back({forged.whole_bytes(), UINT64_MAX - kGranule + 1, {}}); });
  forge([](ForeignMemory& forged) { forged.pieces[0].descriptor = UniqueFd(::open("/dev/null", O_RDWR | O_CLOEXEC)); });
}

class RegisteredHostTest : public ::testing::Test {
 protected:
  static constexpr std::uint64_t kBytes = 4 * kMiB;

  RegisteredHostTest() : fd_(::memfd_create("memory", MFD_CLOEXEC)) {
    EXPECT_EQ(::ftruncate(fd_.get(), kBytes), 0);
    DriverOptions options;
    options.devices = 1;
    options.memory_bytes = 64 * kMiB;
    driver_ = must(open_driver("host", options));
    context_ = must(DeviceContext::create(driver_, 0));
  }
  ForeignMemory shared(std::uint64_t offset, std::uint64_t bytes, bool writable = true) {
    ForeignMemory memory;
    memory.descriptor = UniqueFd(::dup(fd_.get()));
    memory.offset = offset;
    memory.bytes = bytes;
    memory.writable = writable;
    return memory;
  }
  std::shared_ptr<RegisteredBuffer> registered(std::uint64_t offset, std::uint64_t bytes) {
    return std::make_shared<RegisteredBuffer>(context_, must(context_->device().map_foreign(shared(offset, bytes))),
                                              bytes, true);
  }

  UniqueFd fd_;
  std::shared_ptr<Driver> driver_;
  std::shared_ptr<DeviceContext> context_;
};

TEST_F(RegisteredHostTest, HolesAreReadWithoutMemory) {
  constexpr std::uint64_t kPage = 4096;
  constexpr std::uint64_t kData = 2 * kMiB;
  const std::vector<std::byte> data = pattern(kPage, 3);
  ASSERT_EQ(::pwrite(fd_.get(), data.data(), kPage, kData), static_cast<ssize_t>(kPage));
  const auto blocks = [this] {
    struct stat found = {};
    EXPECT_EQ(::fstat(fd_.get(), &found), 0);
    return found.st_blocks;
  };
  const auto before = blocks();
  const auto buffer = registered(kMiB, 3 * kMiB);
  std::vector<std::byte> seen(3 * kMiB, std::byte{1});
  ASSERT_EQ(must(buffer->read(0, seen, Wait::kAllowed)), seen.size());
  std::vector<std::byte> expected(3 * kMiB);
  std::copy(data.begin(), data.end(), expected.begin() + (kData - kMiB));
  EXPECT_TRUE(seen == expected);
  EXPECT_EQ(must(buffer->seek_data(0)), kData - kMiB);
  EXPECT_EQ(must(buffer->seek_hole(kData - kMiB)), kData - kMiB + kPage);
  EXPECT_EQ(buffer->seek_data(kData).error(), ENXIO);
  const auto copy = std::make_shared<ExtentBuffer>(context_);
  EXPECT_EQ(must(copy->copy_from(*buffer, 0, 0, 3 * kMiB, nullptr)), 3 * kMiB);
  ASSERT_EQ(must(copy->read(0, seen)), seen.size());
  EXPECT_TRUE(seen == expected);
  EXPECT_EQ(blocks(), before);
}

TEST_F(RegisteredHostTest, ItCountsAsMemoryOfTheDevice) {
  const std::uint64_t free = must(context_->device().memory()).free_bytes;
  {
    const auto buffer = registered(0, kBytes);
    EXPECT_EQ(must(context_->device().memory()).free_bytes, free - kBytes);
    ASSERT_EQ(::ftruncate(fd_.get(), static_cast<off_t>(free)), 0);
    EXPECT_EQ(context_->device().map_foreign(shared(0, free)).error(), ENOSPC);
  }
  EXPECT_EQ(must(context_->device().memory()).free_bytes, free);
}

TEST_F(RegisteredHostTest, ItsEndWakesThoseThatWaitForMemory) {
  const auto buffer = registered(0, kBytes);
  const std::uint64_t before = context_->releases().count();
  EXPECT_TRUE(buffer->revoke(milliseconds(0)));
  EXPECT_GT(context_->releases().count(), before);
}

TEST_F(RegisteredHostTest, TheProgramsPositionInItsFileStays) {
  const auto buffer = registered(0, kBytes);
  ASSERT_EQ(::lseek(fd_.get(), 1234, SEEK_SET), 1234);
  EXPECT_EQ(buffer->seek_data(0).error(), ENXIO);
  EXPECT_EQ(must(buffer->seek_hole(0)), 0U);
  std::vector<std::byte> seen(kBytes);
  ASSERT_EQ(must(buffer->read(0, seen, Wait::kAllowed)), seen.size());
  EXPECT_EQ(::lseek(fd_.get(), 0, SEEK_CUR), 1234);
}

TEST_F(RegisteredHostTest, APinnedPartMayBeCutOff) {
  const std::vector<std::byte> data = pattern(kBytes, 3);
  ASSERT_EQ(::write(fd_.get(), data.data(), kBytes), static_cast<ssize_t>(kBytes));
  const auto buffer = registered(0, kBytes);
  const auto pin = must(buffer->pin_for_read(0, kBytes, Wait::kAllowed));
  EXPECT_EQ(::ftruncate(fd_.get(), 0), 0);
  std::vector<std::byte> seen(kBytes, std::byte{1});
  EXPECT_OK(context_->device().copy_out(seen.data(), pin.pieces.at(0).address, kBytes));
  EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [](std::byte byte) { return byte == std::byte{0}; }));
  EXPECT_EQ(::ftruncate(fd_.get(), kBytes), 0);  // too late: the range no longer shows the file
  EXPECT_EQ(buffer->read(0, seen, Wait::kAllowed).error(), ESTALE);
}

// What was cut off reads as zeros, which must not pass for the program's data.
TEST_F(RegisteredHostTest, AStoreOfMemoryThatIsCutOffFails) {
  const std::vector<std::byte> data = pattern(kBytes, 3);
  ASSERT_EQ(::write(fd_.get(), data.data(), kBytes), static_cast<ssize_t>(kBytes));
  testing::TransferRig rig(driver_, make_fastpath("none"), testing::TransferRig::small_options(), "/tmp");
  rig.open_file();
  rig.operations.on_write = [&](int, const void* memory, std::size_t, std::uint64_t, ssize_t*) {
    EXPECT_EQ(::ftruncate(fd_.get(), 0), 0);
    EXPECT_EQ(*static_cast<const volatile char*>(memory), 0);
    return false;
  };
  TransferRequest wanted = rig.store();
  wanted.target = std::make_shared<RegisteredBuffer>(
      rig.device, must(rig.device->device().map_foreign(shared(0, kBytes))), kBytes, true);
  const TransferProgress done = rig.finish_in_order(wanted);
  EXPECT_EQ(done.status.error(), ESTALE);
  EXPECT_EQ(done.prefix, 0U);
}

}  // namespace
}  // namespace gpufs
