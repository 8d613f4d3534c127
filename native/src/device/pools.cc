#include "device/pools.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "base/math.h"
#include "base/pages.h"

namespace gpufs {
namespace {

constexpr std::size_t kChunk = std::size_t{64} << 10;
constexpr std::size_t kCacheLine = 64;
constexpr std::size_t kLargest = std::size_t{1} << 40;

}  // namespace

PinnedPool::~PinnedPool() {
  // A stream that was given up on may never go on, and unpinning would wait for it.
  if (device_.blocked_streams().any()) return;
  for (const PinnedBlock& chunk : chunks_) {
    // Pages that the driver still has pinned must stay mapped.
    if (device_.unpin(chunk.data).ok()) ::munmap(chunk.data, chunk.bytes);
  }
}

Status PinnedPool::pin_chunk(std::size_t bytes) {
  bytes = std::max(kChunk, round_up(bytes, kPageBytes));
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return Status::from_errno(errno, "memory to be pinned");
  const Status pinned = device_.pin(memory, bytes);
  if (!pinned.ok()) {
    ::munmap(memory, bytes);
    return pinned.with_context("pinning " + std::to_string(bytes) + " bytes");
  }
  const Result<DeviceAddress> address = device_.address_of_pinned(memory);
  const PinnedBlock chunk{static_cast<std::byte*>(memory), address.ok() ? address.value() : 0, bytes};
  chunks_.push_back(chunk);
  if (!address.ok()) return address.status();
  rest_ = chunk;
  return {};
}

Result<PinnedBlock> PinnedPool::take(std::size_t bytes) {
  if (bytes == 0 || bytes > kLargest) return Status(EINVAL, "pinned memory of this size cannot be allocated");
  bytes = round_up(bytes, kCacheLine);
  const std::lock_guard lock(mutex_);
  std::vector<PinnedBlock>& free = free_[bytes];
  if (!free.empty()) {
    const PinnedBlock block = free.back();
    free.pop_back();
    std::memset(block.data, 0, block.bytes);
    return block;
  }
  if (rest_.bytes < bytes) {
    TRY(pin_chunk(bytes));
  }
  const PinnedBlock block{rest_.data, rest_.address, bytes};
  rest_ = {rest_.data + bytes, rest_.address + bytes, rest_.bytes - bytes};
  return block;
}

void PinnedPool::release(const PinnedBlock& block) {
  const std::lock_guard lock(mutex_);
  free_[block.bytes].push_back(block);
}

}  // namespace gpufs
