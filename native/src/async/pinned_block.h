// Host memory of its own pages that is pinned, so that the CPU and the device's kernels and streams both reach it.
// Owned by whoever made it, for as long as a device may still look at it.
// Any thread may call any function, but none that a driver calls back: making and destroying are calls of the driver.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/status.h"
#include "device/device_context.h"

namespace gpufs {

class PinnedBlock {
 public:
  // At least one byte; zeroed. ENOMEM (or what pinning gave) when no more can be pinned.
  static Result<std::unique_ptr<PinnedBlock>> create(std::shared_ptr<DeviceContext> device, std::size_t bytes);
  ~PinnedBlock();
  PinnedBlock(const PinnedBlock&) = delete;
  PinnedBlock& operator=(const PinnedBlock&) = delete;

  [[nodiscard]] std::byte* data() const { return memory_; }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  [[nodiscard]] DeviceAddress device_address() const { return address_; }  // of data(), as the device sees it

 private:
  PinnedBlock(std::shared_ptr<DeviceContext> device, std::byte* memory, std::size_t bytes)
      : device_(std::move(device)), memory_(memory), bytes_(bytes) {}

  const std::shared_ptr<DeviceContext> device_;
  std::byte* const memory_;
  const std::size_t bytes_;
  bool pinned_ = false;
  DeviceAddress address_ = 0;
};

}  // namespace gpufs
