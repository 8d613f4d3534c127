#include "async/stream_counters.h"

#include <utility>

namespace gpufs {
namespace {

constexpr std::size_t kBlockBytes = std::size_t{64} << 10;
constexpr std::size_t kSpacing = 64;  // a cache line each

}  // namespace

Result<StreamCounter> StreamCounters::take() {
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      if (!idle_.empty()) {
        const StreamCounter counter = idle_.back();
        idle_.pop_back();
        return counter;
      }
    }
    Result<std::unique_ptr<PinnedBlock>> made = PinnedBlock::create(device_, kBlockBytes);
    if (!made.ok()) return made.status();
    const std::lock_guard lock(mutex_);
    const PinnedBlock& block = *made.value();
    for (std::size_t at = 0; at < block.bytes(); at += kSpacing) {
      idle_.push_back({reinterpret_cast<std::uint32_t*>(block.data() + at), block.device_address() + at});
    }
    blocks_.push_back(made.take());
  }
}

void StreamCounters::give_back(const StreamCounter& counter) {
  const std::lock_guard lock(mutex_);
  idle_.push_back(counter);
}

}  // namespace gpufs
