// Random operations on buffers of a GPU that is short of memory and addresses and whose driver fails at random, beside
// a plain model of the files: bytes are always right, what fails changes nothing, what takes memory away never fails,
// and the device is never lost.
// GPUFS_TEST_SEEDS in the environment says how many seeds to run (scripts/check: 300), GPUFS_TEST_SEED which one is the
// first, as a failure names it.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "bytes.h"
#include "cuda_test_support.h"
#include "device/device_context.h"
#include "hip_test_support.h"
#include "memory/buffer.h"
#include "memory/slab_pool.h"

namespace gpufs::gpu_test {
namespace {

constexpr int kSteps = 120;
constexpr std::uint64_t kLargest = 24 * kMiB;  // of a file whose bytes are compared
constexpr std::uint64_t kMemory = 40 * kMiB;
constexpr std::uint64_t kAddresses = 1024 * kMiB;

int number_in_environment(const char* name, int otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}

struct Vendor {
  const char* name;
  const FakeGpuControl& (*fake)();
  Result<std::unique_ptr<Driver>> (*open)(const DriverOptions& options);
  std::array<const char*, 4> symbols;  // that may fail several times in a row
  const char* unmap;
};

const FakeGpuControl& fake_cuda() { return cuda_test::fake(); }
const FakeGpuControl& fake_hip() { return hip_test::fake(); }

constexpr std::array<Vendor, 2> kVendors{{{"Cuda",
                                           fake_cuda,
                                           cuda_test::open_fake,
                                           {"cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess"},
                                           "cuMemUnmap"},
                                          {"Hip",
                                           fake_hip,
                                           hip_test::open_fake,
                                           {"hipMemAddressReserve", "hipMemCreate", "hipMemMap", "hipMemSetAccess"},
                                           "hipMemUnmap"}}};

class BufferRandomFaults : public FakeGpu, public ::testing::WithParamInterface<std::size_t> {
 protected:
  BufferRandomFaults() : FakeGpu(vendor().fake(), vendor().open) {}
  static const Vendor& vendor() { return kVendors.at(GetParam()); }

  struct File {
    std::shared_ptr<Buffer> buffer;
    std::vector<std::byte> bytes;  // what it must hold
    bool promised = false;         // an address, for kLargest bytes

    void write(std::uint64_t offset, std::span<const std::byte> data) {
      if (offset + data.size() > bytes.size()) bytes.resize(offset + data.size());
      std::copy(data.begin(), data.end(), bytes.begin() + static_cast<std::ptrdiff_t>(offset));
    }
    void zero(std::uint64_t offset, std::uint64_t end) {
      end = std::min<std::uint64_t>(end, bytes.size());
      if (offset >= end) return;
      std::fill(bytes.begin() + static_cast<std::ptrdiff_t>(offset), bytes.begin() + static_cast<std::ptrdiff_t>(end),
                std::byte{0});
    }
    void grow(std::uint64_t size) { bytes.resize(std::max<std::size_t>(bytes.size(), size)); }
  };

  std::uint64_t below(std::uint64_t limit) { return random_() % limit; }
  std::uint64_t place() {
    const std::uint64_t edge = below(kLargest / kGranule) * kGranule;
    return below(2) == 0 ? edge : below(2) == 0 ? edge + below(5000) : below(kLargest / 2);
  }
  std::uint64_t length(std::uint64_t offset) {
    const std::uint64_t bytes = below(3) == 0 ? (1 + below(6)) * kGranule : 1 + below(below(2) == 0 ? 5000 : 3 * kMiB);
    return std::min(bytes, kLargest - offset);
  }

  // From now on a few calls of the driver fail, which need not come. What cannot be unmapped twice in a row is lost to
  // the driver, and to the account of memory with it: that does not happen.
  void plan_faults() {
    faults_ = false;
    for (const char* symbol : vendor().symbols) control_.fail(symbol, kNever, 0, 1);
    control_.fail(vendor().unmap, kNever, 0, 1);
    if (below(2) == 0) return;
    faults_ = true;
    const auto code = [&] { return below(2) == 0 ? api::kOutOfMemory : api::kInvalidValue; };
    const int call = 1 + static_cast<int>(below(5));
    if (below(3) != 0) control_.fail(vendor().symbols.at(below(4)), call, code(), 1 + static_cast<int>(below(3)));
    if (below(3) == 0) control_.fail(vendor().unmap, 1 + static_cast<int>(below(4)), code(), 1);
  }

  // Whether it succeeded; a failure must have a reason.
  bool allowed(const Status& status, const File& file) {
    if (status.ok() || status.error() == ENOSPC) return status.ok();
    EXPECT_TRUE(faults_ || (file.promised && status.error() == EFBIG)) << status.message();
    EXPECT_NE(status.device_code(), api::kIllegalAddress) << status.message();
    return false;
  }

  void check(File& file, std::uint64_t offset, std::uint64_t bytes) {
    ASSERT_EQ(file.buffer->size(), file.bytes.size());
    offset = std::min<std::uint64_t>(offset, file.bytes.size());
    bytes = std::min<std::uint64_t>(bytes, file.bytes.size() - offset);
    std::vector<std::byte> found(bytes, std::byte{0xee});
    ASSERT_EQ(must(file.buffer->read(offset, found)), bytes);
    ASSERT_TRUE(testing::same_bytes(found, std::span(file.bytes).subspan(offset, bytes)));
  }

  File make(std::size_t on) {
    File file;
    file.buffer = must(Buffer::create(contexts_.at(on)));
    if (below(2) == 0) file.buffer->preallocate_on_growth();
    return file;
  }

  void step() {
    const std::size_t which = below(files_.size());
    File& file = files_[which];
    Buffer& buffer = *file.buffer;
    const std::uint64_t offset = place();
    const std::uint64_t bytes = length(offset);
    plan_faults();
    switch (below(16)) {
      case 0:
      case 1:
      case 2: {
        const auto data = std::span(data_).subspan(below(4096), bytes);
        if (allowed(buffer.write(offset, data).status(), file)) file.write(offset, data);
        break;
      }
      case 3:
        ASSERT_NO_FATAL_FAILURE(check(file, offset, bytes));
        break;
      case 4:
        ASSERT_OK(buffer.resize(offset));
        file.bytes.resize(offset);
        break;
      case 5:
      case 6:
      case 7:
        ASSERT_OK(buffer.punch(offset, bytes));
        file.zero(offset, offset + bytes);
        break;
      case 8: {
        const bool keep = below(2) == 0;
        if (allowed(buffer.allocate(offset, bytes, keep), file) && !keep) file.grow(offset + bytes);
        break;
      }
      case 9: {
        const bool keep = below(2) == 0;
        if (!allowed(buffer.zero_range(offset, bytes, keep), file)) break;
        file.zero(offset, offset + bytes);
        if (!keep) file.grow(offset + bytes);
        break;
      }
      case 10:
      case 11: {
        const File& source = files_[below(files_.size())];
        const std::uint64_t from = place();
        const std::uint64_t size = source.bytes.size();
        const std::uint64_t there = from >= size ? 0 : std::min(bytes, size - from);
        if (&source == &file && from < offset + there && offset < from + there) break;
        const Result<std::uint64_t> copied = buffer.copy_from(*source.buffer, from, offset, bytes, nullptr);
        if (!allowed(copied.status(), file)) break;
        ASSERT_LE(copied.value(), there);
        if (copied.value() == 0) break;
        const std::vector<std::byte> moved(source.bytes.begin() + static_cast<std::ptrdiff_t>(from),
                                           source.bytes.begin() + static_cast<std::ptrdiff_t>(from + copied.value()));
        file.write(offset, moved);
        break;
      }
      case 12: {  // as a load that ends early
        std::shared_ptr<void> loading = below(2) == 0 ? buffer.keep_unpublished() : nullptr;
        (void)allowed(buffer.populate(offset, bytes), file);
        loading.reset();
        ASSERT_TRUE(buffer.trim(std::chrono::milliseconds(0)));
        break;
      }
      case 13:
        if (below(4) != 0) {
          ASSERT_TRUE(buffer.trim(std::chrono::milliseconds(0)));
        } else if (allowed(buffer.pin_address(kLargest).status(), file)) {
          file.promised = true;
        }
        break;
      case 14:
        file = make(which % contexts_.size());
        break;
      default: {  // addresses, for hardly any memory
        if (below(3) == 0) sparse_.clear();
        File far = make(0);
        if (allowed(far.buffer->write((std::uint64_t{1} + below(200)) * kMiB, std::span(data_).first(1)).status(),
                    far)) {
          sparse_.push_back(far.buffer);
        }
      }
    }
  }

  void run(unsigned seed) {
    random_.seed(seed);
    FakeGpuSetup setup;
    setup.devices = 2;
    setup.memory_bytes = kMemory;
    setup.address_space_bytes = kAddresses;
    setup.peers = below(2) == 0;
    DriverOptions options;
    options.keep_freed = std::chrono::milliseconds(below(2) * 20);
    open(setup, options);
    const std::shared_ptr<Driver> driver(std::move(driver_));
    for (std::size_t index = 0; index < 2; ++index) {
      contexts_.push_back(must(DeviceContext::create(driver, index)));
      if (below(2) == 0) contexts_[index]->set_slabs(must(SlabPool::create(*contexts_[index], 65536)));
    }
    for (std::size_t index = 0; index < 5; ++index) files_.push_back(make(index % 2));
    for (int number = 0; number < kSteps && !HasFailure(); ++number) {
      SCOPED_TRACE("step " + std::to_string(number));
      step();
      for (const auto& context : contexts_) ASSERT_OK(context->device().health());
      if (number % 16 != 0) continue;
      for (File& file : files_) ASSERT_NO_FATAL_FAILURE(check(file, 0, kLargest));
    }
    for (File& file : files_) check(file, 0, kLargest);
    files_.clear();
    sparse_.clear();
    for (const auto& context : contexts_) EXPECT_EQ(context->held_bytes(), 0U);
    contexts_.clear();
    for (const auto& device : driver->devices()) EXPECT_EQ(must(device->memory()).free_bytes, kMemory);
  }

  static constexpr int kNever = 1 << 30;
  std::mt19937_64 random_;
  const std::vector<std::byte> data_ = pattern(kLargest + 4096, 7);
  std::vector<std::shared_ptr<DeviceContext>> contexts_;
  std::vector<File> files_;
  std::vector<std::shared_ptr<Buffer>> sparse_;
  bool faults_ = false;  // some may come in this step
};

TEST_P(BufferRandomFaults, NothingIsLost) {
  const int first = number_in_environment("GPUFS_TEST_SEED", 1);
  const int seeds = number_in_environment("GPUFS_TEST_SEEDS", 6);
  for (int seed = first; seed < first + seeds && !HasFailure(); ++seed) {
    SCOPED_TRACE("GPUFS_TEST_SEED=" + std::to_string(seed));
    run(static_cast<unsigned>(seed));
    const FakeGpuState left = state_of(control_);
    EXPECT_EQ(left.bytes_used, 0U);
    EXPECT_EQ(left.mappings, 0);
    EXPECT_EQ(left.reservations, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(All, BufferRandomFaults, ::testing::Range(std::size_t{0}, kVendors.size()),
                         [](const auto& chosen) { return std::string(kVendors.at(chosen.param).name); });

}  // namespace
}  // namespace gpufs::gpu_test
