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
  // Stays as it is where giving it back might wait for ever.
  ~PinnedBlock();
  PinnedBlock(const PinnedBlock&) = delete;
  PinnedBlock& operator=(const PinnedBlock&) = delete;

  // Giving it back now might wait for ever.
  [[nodiscard]] bool held_up() const { return device_->holds_up(); }

  [[nodiscard]] const std::shared_ptr<DeviceContext>& device() const { return device_; }
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

// A block that is waiting to be given back, zeroed, or a new one: who makes and closes many while streams stand all the
// time has no more than are open at a time.
Result<std::shared_ptr<PinnedBlock>> take_block(const std::shared_ptr<DeviceContext>& device, std::size_t bytes);
// Lets go of a block: at once, or, where that would wait for streams that stand, once they have gone on, by a thread
// that is there for nothing else.
void give_back(std::shared_ptr<PinnedBlock> block);

}  // namespace gpufs
