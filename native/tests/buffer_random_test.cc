// Random operations on buffers beside a plain model of the files, on devices that are short of memory and whose driver
// fails at random, with accounts that have limits: bytes are always right, a failed call changes nothing, calls that
// release memory never fail, accounts show what their buffers hold, and the device stays in service. Files also go to
// the host's memory and come back.
// GPUFS_TEST_SEEDS in the environment sets how many seeds to run (scripts/check: 300), GPUFS_TEST_SEED the first one,
// as a failure names it.

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <random>
#include <vector>

#include "bytes.h"
#include "device/device_context.h"
#include "fake_vendors.h"
#include "faulty_driver.h"
#include "memory/account.h"
#include "memory/extent_buffer.h"
#include "memory/slab_pool.h"

namespace gpufs::gpu_test {
namespace {

constexpr int kSteps = 150;
constexpr std::uint64_t kLargest = 12 * kMiB;  // of a file whose bytes are compared
constexpr std::uint64_t kMemory = 20 * kMiB;
constexpr std::uint64_t kAddresses = 1024 * kMiB;
constexpr std::chrono::milliseconds kAtOnce{0};

int number_in_environment(const char* name, int otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}

struct RandomSetting {
  const char* name;
  int vendor = -1;              // index in kVendors; -1: the host driver, with the two below
  bool reserve_copies = false;  // as a device without virtual memory
  std::uint64_t span = 0;       // releasing memory moves pieces of this size
};

class BufferRandomTest : public ::testing::TestWithParam<RandomSetting> {
 protected:
  struct File {
    std::shared_ptr<ExtentBuffer> buffer;
    std::vector<std::byte> bytes;          // what it must hold
    std::shared_ptr<Buffer::Lease> lease;  // the memory is fixed in place
    std::array<std::shared_ptr<Account>, 2> accounts;

    void write(std::uint64_t offset, std::span<const std::byte> data) {
      grow(offset + data.size());
      std::copy(data.begin(), data.end(), bytes.begin() + static_cast<std::ptrdiff_t>(offset));
    }
    void zero(std::uint64_t offset, std::uint64_t end) {
      end = std::min<std::uint64_t>(end, bytes.size());
      if (offset < end) std::memset(bytes.data() + offset, 0, end - offset);
    }
    void grow(std::uint64_t size) { bytes.resize(std::max<std::size_t>(bytes.size(), size)); }
  };

  static bool on_host() { return GetParam().vendor < 0; }
  static bool has_host_tier() { return GetParam().vendor == 0; }
  static const FakeVendor& vendor() { return kVendors.at(static_cast<std::size_t>(GetParam().vendor)); }

  std::uint64_t below(std::uint64_t limit) { return random_() % limit; }

  // Offsets where mistakes are likely: around slots, pages and granules.
  std::uint64_t place() {
    const std::uint64_t granule = below(kLargest / kGranule) * kGranule;
    const std::uint64_t power = std::uint64_t{512} << below(13);
    switch (below(4)) {
      case 0:
        return granule;
      case 1:
        return granule + below(5000);
      case 2:
        return power - below(512) + below(700);
      default:
        return below(kLargest / 2);
    }
  }
  std::uint64_t length(std::uint64_t offset) {
    const std::uint64_t bytes = below(3) == 0 ? (1 + below(6)) * kGranule : 1 + below(below(2) == 0 ? 5000 : 3 * kMiB);
    return std::min(bytes, kLargest - offset);
  }

  // A few calls of the driver may fail from now on. At most one unmapping fails at a time: memory that cannot be
  // unmapped twice in a row is lost.
  void plan_faults() {
    faults_ = below(2) == 0;
    const int call = faults_ ? 1 + static_cast<int>(below(5)) : 0;
    const int times = 1 + static_cast<int>(below(3));
    if (on_host()) {
      const std::array<Fault*, 3> faults{&plan_->create_memory, &plan_->reserve, &plan_->populate};
      for (Fault* fault : faults) fault->clear();
      faults.at(below(3))->at(call, times, below(2) == 0 ? ENOMEM : EIO);
      return;
    }
    constexpr std::array<Names, 5> kFunctions{kAddressReserve, kMemoryCreate, kMemoryMap, kMemorySetAccess,
                                              kMemoryUnmap};
    const auto fail = [&](std::size_t function, int n, int count) {
      const char* const symbol = kFunctions.at(function).at(static_cast<std::size_t>(GetParam().vendor));
      vendor().fake().fail(symbol, n, below(2) == 0 ? api::kOutOfMemory : api::kInvalidValue, count);
    };
    constexpr int kNever = 1 << 30;
    for (std::size_t function = 0; function < kFunctions.size(); ++function) fail(function, kNever, 1);
    if (faults_ && below(3) != 0) fail(below(4), call, times);
    if (faults_ && below(3) == 0) fail(4, 1 + static_cast<int>(below(4)), 1);
  }

  // Whether the call succeeded; a failure must have a reason.
  bool allowed(const Status& status, const File& file) {
    if (status.ok() || status.error() == ENOSPC) return status.ok();
    if (status.error() == EDQUOT && (file.accounts[0] != nullptr || file.accounts[1] != nullptr)) return false;
    EXPECT_TRUE(faults_ || (file.lease && status.error() == EFBIG)) << status.message();
    EXPECT_TRUE(on_host() || status.device_code() != api::kIllegalAddress) << status.message();
    return false;
  }

  // Likewise of a call that releases memory, which fails only where the contents have to come back first.
  bool released(const Status& status, bool parked, const File& file) {
    if (!parked) EXPECT_OK(status);
    return allowed(status, file);
  }

  void check(File& file, std::uint64_t offset, std::uint64_t bytes) {
    ASSERT_EQ(file.buffer->size(), file.bytes.size());
    offset = std::min<std::uint64_t>(offset, file.bytes.size());
    bytes = std::min<std::uint64_t>(bytes, file.bytes.size() - offset);
    std::vector<std::byte> found(bytes, std::byte{0xee});
    ASSERT_EQ(must(file.buffer->read(offset, found)), bytes);
    ASSERT_TRUE(testing::same_bytes(found, std::span(file.bytes).subspan(offset, bytes)));
  }

  // Bytes outside what SEEK_DATA and SEEK_HOLE call data are zero.
  static void check_holes(File& file) {
    for (std::uint64_t at = 0; at < file.bytes.size();) {
      const Result<std::uint64_t> data = file.buffer->seek_data(at);
      ASSERT_TRUE(data.ok() || data.error() == ENXIO);
      const std::uint64_t hole_end = data.ok() ? data.value() : file.bytes.size();
      ASSERT_TRUE(testing::all_zero(std::span(file.bytes).subspan(at, hole_end - at)));
      if (!data.ok()) return;
      at = must(file.buffer->seek_hole(data.value()));
      ASSERT_GT(at, data.value());
    }
  }

  static void check_gathered(File& file, std::uint64_t offset, std::uint64_t bytes) {
    const Result<Buffer::Gathered> gathered = file.buffer->gather(offset, bytes);
    if (!on_host()) return;
    ASSERT_OK(gathered.status());
    std::uint64_t at = offset;
    for (const iovec& piece : gathered.value().pieces) {
      ASSERT_EQ(std::memcmp(piece.iov_base, file.bytes.data() + at, piece.iov_len), 0);
      at += piece.iov_len;
    }
    ASSERT_EQ(at - offset, gathered.value().bytes);
  }

  // The buffers hold what their devices' accounts show.
  void check_accounts() {
    std::uint64_t parked = 0;
    for (const File& file : files_) parked += file.buffer->bytes_parked();
    ASSERT_EQ(contexts_.back()->held_bytes(), parked);
    for (std::size_t index = 0; index < 2; ++index) {
      const DeviceContext& context = *contexts_[index];
      ASSERT_OK(context.device().health());
      if (context.slabs() != nullptr) continue;
      std::uint64_t held = 0;
      for (std::size_t file = index; file < files_.size(); file += 2) held += files_[file].buffer->bytes_held();
      for (const auto& far : sparse_) held += index == 0 ? far->bytes_held() : 0;
      ASSERT_EQ(held, context.held_bytes());
    }
    for (const std::shared_ptr<Account>& account : accounts_) {
      std::uint64_t held = 0;
      for (const File& file : files_) {
        held += std::ranges::count(file.accounts, account) == 1 ? file.buffer->bytes_held() : 0;
      }
      ASSERT_EQ(held, account->used());
    }
  }

  // Another owner, or another directory.
  void move(File& file) {
    const std::size_t payer = below(2);
    const std::shared_ptr<Account> account = accounts_.at(2 * payer + below(2));
    file.buffer->charge().move(static_cast<Charge::Payer>(payer), account);
    file.accounts.at(payer) = account;
  }

  // A write of which only a part arrives.
  void write_a_part(File& file, std::uint64_t offset, std::uint64_t bytes) {
    Result<Buffer::Pin> pin = file.buffer->pin_for_write(offset, bytes);
    if (!allowed(pin.status(), file)) return;
    const std::uint64_t size = file.bytes.size();
    ASSERT_EQ(file.buffer->size(), size);
    for (const Buffer::Piece& piece : pin.value().pieces) {
      const std::byte* const source = data_.data() + (piece.offset - offset);
      ASSERT_OK(file.buffer->device()->device().copy_in(piece.address, source, piece.bytes));
    }
    const std::uint64_t arrived = below(bytes);
    if (arrived > 0) file.buffer->publish(offset + arrived);
    pin.value() = {};
    ASSERT_OK(file.buffer->discard_above_size(offset + arrived, bytes - arrived));
    // Below the old end all of it was overwritten.
    const std::uint64_t there = std::max(arrived, std::min(bytes, size - std::min(offset, size)));
    if (there > 0) file.write(offset, std::span(data_).first(there));
  }

  void copy(File& file, std::uint64_t offset, std::uint64_t bytes) {
    const File& source = files_[below(files_.size())];
    const std::uint64_t from = place();
    const std::uint64_t size = source.bytes.size();
    const std::uint64_t there = from >= size ? 0 : std::min(bytes, size - from);
    const bool overlap = &source == &file && there > 0 && from < offset + there && offset < from + there;
    const Result<std::uint64_t> copied = file.buffer->copy_from(*source.buffer, from, offset, bytes, nullptr);
    if (overlap) {
      ASSERT_EQ(copied.error(), EINVAL);
      return;
    }
    if (!allowed(copied.status(), file)) return;
    ASSERT_LE(copied.value(), there);
    if (copied.value() == 0) return;
    const auto start = source.bytes.begin() + static_cast<std::ptrdiff_t>(from);
    file.write(offset, std::vector(start, start + static_cast<std::ptrdiff_t>(copied.value())));
  }

  void lease(File& file) {
    std::optional<std::uint64_t> placement;
    if (below(4) != 0) placement = below(kPlacementEnd);
    if (below(4) != 0) file.lease.reset();
    const std::shared_ptr<Buffer::Lease> earlier = file.lease;
    Result<std::shared_ptr<Buffer::Lease>> lease = file.buffer->lease(true, false, "", placement);
    if (!allowed(lease.status(), file)) return;
    const std::uint64_t size = file.bytes.size();
    // Nobody else uses the file, and a device with as much free memory as the file has has enough for a scratch.
    const bool moves = !file.lease && size > 0 && !file.buffer->device()->info().reserve_copies && !file.accounts[0] &&
                       !file.accounts[1] && !faults_;
    file.lease = lease.take();
    if (size == 0) return;
    ASSERT_EQ(file.lease->address() % kPlacementEnd, file.lease->placement());
    if (placement && moves && free_bytes(file) >= 4 * kMiB) {
      ASSERT_EQ(file.lease->placement(), *placement);
    }
    std::vector<std::byte> found(size);
    ASSERT_OK(file.buffer->device()->device().copy_out(found.data(), file.lease->address(), size));
    ASSERT_TRUE(testing::same_bytes(found, file.bytes));
    const std::uint64_t before = file.lease->placement();
    std::vector<std::byte> beside(before);
    ASSERT_OK(file.buffer->device()->device().copy_out(beside.data(), file.lease->address() - before, before));
    ASSERT_TRUE(testing::all_zero(beside));
    if (!earlier || earlier->bytes() == 0) return;
    found.resize(earlier->bytes());
    ASSERT_OK(file.buffer->device()->device().copy_out(found.data(), earlier->address(), found.size()));
    ASSERT_TRUE(testing::same_bytes(found, std::span(file.bytes).first(found.size())));
  }

  // To the host's memory and back, or one of the two.
  void park(File& file) {
    if (below(4) != 0) {
      const Result<bool> parked = file.buffer->park(contexts_.back(), nullptr);
      if (parked.error() != EBUSY && parked.error() != EFBIG) (void)allowed(parked.status(), file);
      if (parked.ok() && parked.value()) {
        ASSERT_EQ(file.buffer->bytes_held(), 0U);
      }
    }
    if (below(2) == 0) (void)allowed(file.buffer->bring_back(Wait::kAllowed), file);
    check(file, 0, kLargest);
  }

  // Without the parts of pieces that a full device could not split.
  static std::uint64_t free_bytes(const File& file) { return must(file.buffer->device()->memory()).free_bytes; }

  File make(std::size_t on) {
    File file;
    file.buffer = std::make_shared<ExtentBuffer>(contexts_.at(on), below(2) == 0);
    return file;
  }

  void step() {
    const std::size_t which = below(files_.size());
    File& file = files_[which];
    ExtentBuffer& buffer = *file.buffer;
    const std::uint64_t offset = place();
    const std::uint64_t bytes = length(offset);
    const bool keep = below(2) == 0;
    const bool parked = buffer.bytes_parked() > 0;
    plan_faults();
    switch (below(20)) {
      case 0:
      case 1:
      case 2: {
        const auto data = std::span(data_).subspan(below(4096), bytes);
        if (allowed(buffer.write(offset, data).status(), file)) file.write(offset, data);
        break;
      }
      case 3:
        write_a_part(file, offset, bytes);
        break;
      case 4:
        check(file, offset, bytes);
        break;
      case 5:
        file.lease.reset();
        if (released(buffer.resize(offset), parked, file)) file.bytes.resize(offset);
        break;
      case 6:
      case 7:
      case 8:
        file.lease.reset();
        if (released(buffer.punch(offset, bytes), parked, file)) file.zero(offset, offset + bytes);
        break;
      case 9:
        if (allowed(buffer.allocate(offset, bytes, keep), file) && !keep) file.grow(offset + bytes);
        break;
      case 10:
        if (!allowed(buffer.zero_range(offset, bytes, keep), file)) break;
        file.zero(offset, offset + bytes);
        if (!keep) file.grow(offset + bytes);
        break;
      case 11:
      case 12:
        copy(file, offset, bytes);
        break;
      case 13: {  // as a load that ends early
        std::shared_ptr<const ExtentBuffer::Claim> loading = keep ? buffer.claim({offset, bytes}) : nullptr;
        (void)allowed(buffer.pin_for_write(offset, bytes).status(), file);
        loading.reset();
        ASSERT_TRUE(buffer.trim(kAtOnce));
        break;
      }
      case 14:
        if (below(4) != 0) {
          ASSERT_TRUE(buffer.trim(kAtOnce));
        } else {
          lease(file);
        }
        break;
      case 15:
        file = make(which % 2);
        move(file);
        break;
      case 16:
      case 17:
        park(file);
        break;
      case 18:
        move(file);
        check_holes(file);
        check_gathered(file, offset, bytes);
        break;
      default: {  // addresses, with hardly any memory
        if (below(3) == 0) sparse_.clear();
        File far = make(0);
        const std::uint64_t end = (std::uint64_t{1} + below(200)) * kMiB;
        if (allowed(far.buffer->write(end, std::span(data_).first(1)).status(), far)) sparse_.push_back(far.buffer);
      }
    }
  }

  std::shared_ptr<Driver> open() {
    if (on_host()) {
      plan_ = std::make_shared<testing::FaultPlan>();
      plan_->reserve_copies = GetParam().reserve_copies;
      plan_->span = GetParam().span;
      return testing::make_faulty_driver(plan_, kMemory, 3);
    }
    FakeGpuSetup setup;
    setup.devices = has_host_tier() ? 2 : 3;
    setup.memory_bytes = kMemory;
    setup.address_space_bytes = kAddresses;
    setup.peers = below(2) == 0;
    EXPECT_EQ(vendor().fake().reset(&setup), 0) << "something was left open";
    DriverOptions options;
    options.keep_freed = std::chrono::milliseconds(below(2) * 20);
    if (has_host_tier()) options.host_memory_bytes = 64 * kMiB;
    return must(vendor().open(options));
  }

  void compact() {
    for (const auto& context : contexts_) {
      if (context->slabs() != nullptr) {
        context->slabs()->compact(std::chrono::steady_clock::now() + std::chrono::seconds(1));
      }
    }
  }

  void run(unsigned seed) {
    random_.seed(seed);
    const std::shared_ptr<Driver> driver = open();
    for (std::size_t index = 0; index < 3; ++index) {
      contexts_.push_back(must(DeviceContext::create(driver, index)));
      if (index == 2 || below(2) == 0) continue;
      Result<std::shared_ptr<SlabPool>> slabs = SlabPool::create(*contexts_[index], 65536);
      if (slabs.ok()) contexts_[index]->set_slabs(slabs.take());
    }
    for (std::size_t index = 0; index < 5; ++index) files_.push_back(make(index % 2));
    for (int number = 0; number < kSteps && !HasFailure(); ++number) {
      SCOPED_TRACE("step " + std::to_string(number));
      step();
      if (number % 4 == 0) compact();
      check_accounts();
      if (number % 16 != 0) continue;
      check(files_[static_cast<std::size_t>(number) / 16 % files_.size()], 0, kLargest);
    }
    for (File& file : files_) check(file, 0, kLargest);
    files_.clear();
    sparse_.clear();
    for (const auto& account : accounts_) EXPECT_EQ(account->used(), 0U);
    for (const auto& context : contexts_) EXPECT_EQ(context->held_bytes(), 0U);
    contexts_.clear();
    for (const auto& device : driver->devices()) {
      const MemoryInfo memory = must(device->memory());
      EXPECT_EQ(memory.free_bytes, memory.total_bytes);
    }
  }

  using Fault = testing::Fault;
  std::mt19937_64 random_;
  const std::vector<std::byte> data_ = pattern(kLargest + 4096, 7);
  std::shared_ptr<testing::FaultPlan> plan_;              // of the host driver
  std::vector<std::shared_ptr<DeviceContext>> contexts_;  // the last: of the host's memory, or of what stands for it
  std::vector<File> files_;                               // file N is on device N % 2
  std::vector<std::shared_ptr<ExtentBuffer>> sparse_;
  // Two of owners, two of directories.
  const std::array<std::shared_ptr<Account>, 4> accounts_{
      std::make_shared<Account>("an owner", 8 * kMiB), std::make_shared<Account>("another owner"),
      std::make_shared<Account>("a directory", 12 * kMiB), std::make_shared<Account>("another directory", 2 * kMiB)};
  bool faults_ = false;  // calls may fail in this step
};

TEST_P(BufferRandomTest, MatchesAPlainModel) {
  const int first = number_in_environment("GPUFS_TEST_SEED", 1);
  const int seeds = number_in_environment("GPUFS_TEST_SEEDS", 3);
  for (int seed = first; seed < first + seeds && !HasFailure(); ++seed) {
    SCOPED_TRACE("GPUFS_TEST_SEED=" + std::to_string(seed));
    run(static_cast<unsigned>(seed));
    if (on_host()) continue;
    const FakeGpuSetup setup;
    EXPECT_EQ(vendor().fake().reset(&setup), 0) << "something was left open";
  }
}

INSTANTIATE_TEST_SUITE_P(Settings, BufferRandomTest,
                         ::testing::Values(RandomSetting{"Host"}, RandomSetting{"HostCopying", -1, true},
                                           RandomSetting{"HostPieces", -1, false, 2 * kGranule},
                                           RandomSetting{"Cuda", 0}, RandomSetting{"Hip", 1}),
                         [](const auto& setting) { return std::string(setting.param.name); });

}  // namespace
}  // namespace gpufs::gpu_test
