#include "async/pinned_block.h"

#include <sys/mman.h>

#include <cerrno>

#include "base/math.h"

namespace gpufs {
namespace {

constexpr std::size_t kPage = 4096;

}  // namespace

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
  // Pages that the driver keeps for itself must stay mapped.
  if (pinned_ && !device_->device().unpin(memory_).ok()) return;
  ::munmap(memory_, bytes_);
}

}  // namespace gpufs
