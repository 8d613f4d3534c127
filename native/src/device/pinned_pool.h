// Pinned host memory in small blocks, for the words that a program, its kernels and its streams share.
// Unpinning waits for all streams of the device, so a released block is kept for the next one of its size, and all is
// unpinned with the pool.
// Thread-safe. Owned by the DeviceContext.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <vector>

#include "base/status.h"
#include "drivers/driver.h"

namespace gpufs {

struct PinnedBlock {
  std::byte* data = nullptr;
  DeviceAddress address = 0;  // of data, as the device sees it
  std::size_t bytes = 0;
};

class PinnedPool {
 public:
  explicit PinnedPool(Device& device) : device_(device) {}
  ~PinnedPool();
  PinnedPool(const PinnedPool&) = delete;
  PinnedPool& operator=(const PinnedPool&) = delete;

  // Zeroed, and a cache line of its own at least. ENOMEM, or what the driver returned, if no more can be pinned.
  Result<PinnedBlock> take(std::size_t bytes);
  // Neither a device nor a kernel may use it any more.
  void release(const PinnedBlock& block);

 private:
  // Pins at least so many bytes as the new chunk to cut blocks from. mutex_ is held.
  Status pin_chunk(std::size_t bytes);

  Device& device_;
  std::mutex mutex_;  // guards all below
  std::vector<PinnedBlock> chunks_;
  PinnedBlock rest_;                                      // of the last chunk
  std::map<std::size_t, std::vector<PinnedBlock>> free_;  // by size
};

}  // namespace gpufs
