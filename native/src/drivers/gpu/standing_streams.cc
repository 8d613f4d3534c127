#include "drivers/gpu/standing_streams.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "drivers/gpu/context.h"

namespace gpufs::gpu {
namespace {

constexpr std::size_t kBlock = std::size_t{1} << 20;
// From here on the driver takes the copy engine of its own accord, whatever else it does with small copies.
constexpr std::size_t kSmall = 32768;

// How much of what is left goes through a block: never so much that one byte would be alone.
std::size_t part_of(std::size_t bytes) { return bytes == kBlock + 1 ? kBlock / 2 : std::min(bytes, kBlock); }

}  // namespace

Status StandingStreams::prepare(std::size_t streams) {
  const std::lock_guard lock(mutex_);
  if (memory_ != nullptr) return {};
  // All at a time: those that are given back would be the next to be borrowed.
  std::vector<StreamHandle> borrowed;
  Status status;
  while (borrowed.size() < streams && status.ok()) {
    Result<StreamHandle> stream = context_.borrow_stream();
    if (stream.ok()) borrowed.push_back(stream.value());
    status = stream.status();
  }
  for (StreamHandle stream : borrowed) context_.return_stream(stream);
  if (!status.ok()) return status;

  void* const memory = ::mmap(nullptr, 2 * kBlock, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return Status::from_errno(errno, "memory for copies beside streams that stand");
  status = context_.pin(memory, 2 * kBlock);
  if (!status.ok()) {
    ::munmap(memory, 2 * kBlock);
    return status.with_context("pinning memory for copies beside streams that stand");
  }
  memory_ = static_cast<std::byte*>(memory);
  prepared_.store(true, std::memory_order_release);
  return {};
}

void StandingStreams::give_up() {
  const std::lock_guard lock(mutex_);
  prepared_ = false;
  // Pages that the driver keeps for itself must stay mapped.
  if (memory_ != nullptr && context_.unpin(memory_).ok()) ::munmap(memory_, 2 * kBlock);
  memory_ = nullptr;
}

Status StandingStreams::copy_in(DeviceAddress destination, const void* source, std::size_t bytes, void* stream) {
  if (bytes > kSmall || bytes < 2) return context_.plain_copy_in(destination, source, bytes, stream);
  const std::size_t width = bytes / 2;
  Status status = context_.copy_rows_in(destination, source, width, 2, stream);
  if (!status.ok() || bytes % 2 == 0) return status;
  // The last byte, with those before it once more.
  return context_.copy_rows_in(destination + 1, static_cast<const std::byte*>(source) + 1, width, 2, stream);
}

Status StandingStreams::fill_zero(DeviceAddress destination, std::size_t bytes, void* stream) {
  if (bytes == 1) return context_.plain_fill_zero(destination, bytes, stream);
  while (bytes > 0) {
    const std::size_t part = part_of(bytes);
    Status status = copy_in(destination, memory_, part, stream);
    if (!status.ok()) return status;
    destination += part;
    bytes -= part;
  }
  return {};
}

Status StandingStreams::copy_within(DeviceAddress destination, DeviceAddress source, std::size_t bytes, void* stream) {
  const std::lock_guard lock(mutex_);
  if (memory_ == nullptr) return context_.plain_copy_within(destination, source, bytes, stream);
  std::byte* const between = memory_ + kBlock;
  while (bytes > 0) {
    const std::size_t part = part_of(bytes);
    Status status = context_.copy_out(between, source, part, stream);
    if (status.ok()) status = copy_in(destination, between, part, stream);
    const DeviceWaits::Wait waiting(&context_.waits());
    const Status done = context_.synchronize_stream(stream);
    if (!status.ok() || !done.ok()) return status.ok() ? done : status;
    destination += part;
    source += part;
    bytes -= part;
  }
  return {};
}

}  // namespace gpufs::gpu
