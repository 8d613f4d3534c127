#include "async/pinned_block.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <iterator>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/math.h"
#include "base/thread.h"

namespace gpufs {
namespace {

constexpr std::size_t kPage = 4096;

// Blocks that wait for streams, and the thread that gives them back; never destroyed, as the thread may outlive main().
struct Later {
  std::mutex mutex;  // guards all below; nothing is given back under it
  std::vector<std::shared_ptr<PinnedBlock>> blocks;
  bool running = false;
};

Later& later() {
  static auto* const all = new Later;
  return *all;
}

// Those that can go now; ends the thread when none is left.
bool take_free(std::vector<std::shared_ptr<PinnedBlock>>* free) {
  Later& all = later();
  const std::lock_guard lock(all.mutex);
  const auto stays = [](const std::shared_ptr<PinnedBlock>& block) { return block->held_up(); };
  const auto first = std::stable_partition(all.blocks.begin(), all.blocks.end(), stays);
  std::move(first, all.blocks.end(), std::back_inserter(*free));
  all.blocks.erase(first, all.blocks.end());
  all.running = !free->empty() || !all.blocks.empty();
  return all.running;
}

void give_back_all() {
  constexpr std::chrono::milliseconds kLook{50};
  std::vector<std::shared_ptr<PinnedBlock>> free;
  for (; take_free(&free); std::this_thread::sleep_for(kLook)) free.clear();
}

}  // namespace

Result<std::shared_ptr<PinnedBlock>> take_block(const std::shared_ptr<DeviceContext>& device, std::size_t bytes) {
  {
    Later& all = later();
    const std::lock_guard lock(all.mutex);
    const auto fits = [&](const std::shared_ptr<PinnedBlock>& block) {
      return block->device() == device && block->bytes() == round_up(bytes, kPage);
    };
    const auto found = std::find_if(all.blocks.begin(), all.blocks.end(), fits);
    if (found != all.blocks.end()) {
      std::shared_ptr<PinnedBlock> block = std::move(*found);
      all.blocks.erase(found);
      std::fill_n(block->data(), block->bytes(), std::byte{});
      return block;
    }
  }
  Result<std::unique_ptr<PinnedBlock>> made = PinnedBlock::create(device, bytes);
  if (!made.ok()) return made.status();
  return std::shared_ptr<PinnedBlock>(made.take());
}

void give_back(std::shared_ptr<PinnedBlock> block) {
  if (!block->held_up()) return;
  Later& all = later();
  const std::lock_guard lock(all.mutex);
  all.blocks.push_back(std::move(block));
  if (all.running) return;
  Result<std::thread> started = start_thread("gpufs-unpin", give_back_all);
  if (!started.ok()) {
    log_warning("pinned memory stays pinned until more is given back: ", started.status().message());
    return;
  }
  all.running = true;
  started.value().detach();
}

Result<std::unique_ptr<PinnedBlock>> PinnedBlock::create(std::shared_ptr<DeviceContext> device, std::size_t bytes) {
  if (bytes == 0 || bytes > (std::size_t{1} << 40)) return Status(EINVAL, "pinned memory of this size cannot be had");
  bytes = round_up(bytes, kPage);
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return Status::from_errno(errno, "memory to be pinned");
  std::unique_ptr<PinnedBlock> block(new PinnedBlock(std::move(device), static_cast<std::byte*>(memory), bytes));
  Device& target = block->device_->device();
  const Status pinned = target.pin(memory, bytes);
  if (!pinned.ok()) return pinned.with_context("pinning " + std::to_string(bytes) + " bytes");
  block->pinned_ = true;
  Result<DeviceAddress> address = target.address_of_pinned(memory);
  if (!address.ok()) return address.status();
  block->address_ = address.value();
  return block;
}

PinnedBlock::~PinnedBlock() {
  // What stands may wait for whoever destroys this.
  if (pinned_ && device_->holds_up()) return;
  // Pages that the driver keeps for itself must stay mapped.
  if (pinned_ && !device_->device().unpin(memory_).ok()) return;
  ::munmap(memory_, bytes_);
}

}  // namespace gpufs
