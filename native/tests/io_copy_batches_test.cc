// Copies that wait while the device has enough go to it together, over the fake CUDA library.

#include <gtest/gtest.h>

#include <cstddef>
#include <vector>

#include "bytes.h"
#include "device/device_context.h"
#include "fake_vendors.h"
#include "io/copy_batches.h"

namespace gpufs {
namespace {

using namespace testing;
using gpu_test::must;

constexpr const char* kBatchCall = "cuMemcpyBatchAsync";
constexpr std::size_t kCopyBytes = 2 << 20;
constexpr std::size_t kCopyCount = 12;

class CopyBatchesTest : public cuda_test::FakeCuda {
 protected:
  void SetUp() override {
    FakeCuda::SetUp();
    std::shared_ptr<Driver> driver = must(cuda_test::open_fake());
    device_ = must(DeviceContext::create(driver, 0));
    memory_ = must(device_->device().create_memory());
    range_ = must(memory_->reserve(32 * kMiB));
    ASSERT_OK(memory_->populate(0, 32 * kMiB));
    ASSERT_OK(device_->device().pin(host_.data(), host_.size()));
  }
  void TearDown() override {
    EXPECT_OK(device_->device().unpin(host_.data()));
    range_.reset();
    memory_.reset();
    device_.reset();
    FakeCuda::TearDown();
  }

  HostCopy copy(std::size_t number) {
    return {range_->base() + number * kCopyBytes, host_.data() + number * kCopyBytes, kCopyBytes};
  }
  // Each copy as a chunk of its own, while the device does nothing yet.
  std::vector<std::shared_ptr<const CopyBatches::Batch>> add_all(CopyBatches& batches, bool known = true) {
    cuda_test::fake().hold(true);
    std::vector<std::shared_ptr<const CopyBatches::Batch>> added;
    for (std::size_t number = 0; number < kCopyCount; ++number) {
      const HostCopy one = copy(number);
      added.push_back(batches.add({&one, 1}, known));
    }
    batches.advance();
    cuda_test::fake().hold(false);
    return added;
  }
  static void finish(CopyBatches& batches, const CopyBatches::Batch& batch) {
    while (!batch.done()) batches.advance();
  }

  std::vector<std::byte> host_ = pattern(kCopyCount * kCopyBytes, 5);
  std::shared_ptr<DeviceContext> device_;
  std::unique_ptr<DeviceMemory> memory_;
  std::shared_ptr<AddressRange> range_;
};

TEST_F(CopyBatchesTest, CopiesThatWaitBecomeOneCall) {
  for (const CopyDirection direction : {CopyDirection::kToDevice, CopyDirection::kToHost}) {
    const std::vector<std::byte> wanted = host_;
    if (direction == CopyDirection::kToHost) std::fill(host_.begin(), host_.end(), std::byte{0});
    const int calls = cuda_test::fake().calls(kBatchCall);
    const auto batches = must(CopyBatches::create(*device_, direction));
    for (const auto& batch : add_all(*batches)) {
      finish(*batches, *batch);
      EXPECT_OK(batch->status());
    }
    // The first two go alone, at once; the other ten in two batches.
    EXPECT_EQ(cuda_test::fake().calls(kBatchCall) - calls, 2);
    EXPECT_TRUE(same_bytes(host_, wanted));
    std::vector<std::byte> there(host_.size());
    ASSERT_OK(device_->device().copy_out(there.data(), range_->base(), there.size()));
    EXPECT_TRUE(same_bytes(there, wanted));
  }
}

TEST_F(CopyBatchesTest, AChunkOfUnknownAddressesIsOnItsOwn) {
  cuda_test::fake().fail("cuMemcpyHtoDAsync_v2", 5, gpu::api::kInvalidValue, 1);
  const auto batches = must(CopyBatches::create(*device_, CopyDirection::kToDevice));
  const auto added = add_all(*batches, /*known=*/false);
  for (std::size_t number = 0; number < kCopyCount; ++number) {
    finish(*batches, *added[number]);
    EXPECT_EQ(added[number]->status().ok(), number != 4) << number;
  }
  EXPECT_EQ(cuda_test::fake().calls(kBatchCall), 0);
}

TEST_F(CopyBatchesTest, CopiesOfARefusedBatchGoOneByOne) {
  for (const auto code : {gpu::api::kNotSupported, gpu::api::kInvalidValue}) {
    cuda_test::fake().fail(kBatchCall, 1, code, 100);
    const auto batches = must(CopyBatches::create(*device_, CopyDirection::kToDevice));
    for (const auto& batch : add_all(*batches)) {
      finish(*batches, *batch);
      EXPECT_OK(batch->status());
    }
    std::vector<std::byte> there(host_.size());
    ASSERT_OK(device_->device().copy_out(there.data(), range_->base(), there.size()));
    EXPECT_TRUE(same_bytes(there, host_));
    ASSERT_OK(device_->device().zero(range_->base(), host_.size()));
  }
}

TEST_F(CopyBatchesTest, AFailureIsThatOfItsBatch) {
  cuda_test::fake().fail(kBatchCall, 1, gpu::api::kInvalidValue, 1);
  cuda_test::fake().fail("cuMemcpyHtoDAsync_v2", 3, gpu::api::kInvalidValue, 1);
  const auto batches = must(CopyBatches::create(*device_, CopyDirection::kToDevice));
  const auto added = add_all(*batches);
  std::size_t failed = 0;
  for (std::size_t number = 0; number < kCopyCount; ++number) {
    finish(*batches, *added[number]);
    if (added[number]->status().ok()) continue;
    ++failed;
    EXPECT_EQ(added[number]->status().device_code(), gpu::api::kInvalidValue);
    EXPECT_EQ(added[number], added[2]) << "the first batch of several copies";
  }
  EXPECT_EQ(failed, 8U);
}

}  // namespace
}  // namespace gpufs
