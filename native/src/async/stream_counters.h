// Where a device's streams wait for operations: each stream has a word of pinned memory that counts those which are
// over. One pool a device, shared by its streams. Words never go back: the next stream counts on from where the last
// one stopped, so that a device which still looks at a word finds what it waits for. Any thread may call any function,
// but none that a driver calls back.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "async/pinned_block.h"

namespace gpufs {

struct StreamCounter {
  std::uint32_t* word = nullptr;  // null: there is none
  DeviceAddress address = 0;
};

class StreamCounters {
 public:
  explicit StreamCounters(std::shared_ptr<DeviceContext> device) : device_(std::move(device)) {}
  // What making a block gave when there is no word left.
  Result<StreamCounter> take();
  void give_back(const StreamCounter& counter);

 private:
  const std::shared_ptr<DeviceContext> device_;
  std::mutex mutex_;  // guards all below; nothing is pinned under it
  std::vector<std::unique_ptr<PinnedBlock>> blocks_;
  std::vector<StreamCounter> idle_;
};

}  // namespace gpufs
