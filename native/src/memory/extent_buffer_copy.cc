// Copies between buffers, on one device or between two, that never wait for memory while they hold a pin: two copies
// in opposite directions would wait for each other.

#include <algorithm>
#include <cerrno>
#include <memory>
#include <new>
#include <utility>

#include "base/math.h"
#include "memory/extent_buffer.h"
#include "observe/trace.h"

namespace gpufs {
namespace {

// Between two looks at a cancellation. A GPU copies in itself so fast that starting and awaiting each chunk shows: with
// chunks of 64 MiB it took 1.7 times as long as in one go.
constexpr std::uint64_t kCopyChunk = std::uint64_t{64} << 20;
constexpr std::uint64_t kOneGpuChunk = std::uint64_t{1} << 30;
constexpr std::uint64_t kStagingBytes = std::uint64_t{4} << 20;  // between devices without a direct way

Status copy_staged(Device& to, DeviceAddress destination, Device& from, DeviceAddress source, std::uint64_t bytes) {
  const std::uint64_t step = std::min(bytes, kStagingBytes);
  const std::unique_ptr<std::byte[]> staging(new (std::nothrow) std::byte[step]);
  if (staging == nullptr) return Status(ENOMEM, "no memory to copy through");
  for (std::uint64_t done = 0; done < bytes;) {
    const std::uint64_t part = std::min(step, bytes - done);
    Status status = from.copy_out(staging.get(), source + done, part);
    if (status.ok()) status = to.copy_in(destination + done, staging.get(), part);
    if (!status.ok()) return status;
    done += part;
  }
  return {};
}

Status copy_between(const DeviceContext& to, DeviceAddress destination, const DeviceContext& from, DeviceAddress source,
                    std::uint64_t bytes) {
  if (&to.device() == &from.device()) return to.device().copy_within(destination, source, bytes);
  if (&to.driver() == &from.driver()) {
    Status status = from.device().copy_to_peer(to.device(), destination, source, bytes);
    if (status.error() != EOPNOTSUPP) return status;
  }
  return copy_staged(to.device(), destination, from.device(), source, bytes);
}

}  // namespace

Result<std::uint64_t> ExtentBuffer::copy_from(Buffer& source, std::uint64_t source_offset, std::uint64_t offset,
                                              std::uint64_t bytes, const std::atomic<bool>* cancelled) {
  const std::uint64_t source_size = source.size();
  if (source_offset >= source_size || bytes == 0) return std::uint64_t{0};
  bytes = std::min(bytes, source_size - source_offset);
  std::uint64_t end = 0;
  Status status = check_end(offset, bytes, &end);
  if (!status.ok()) return status;
  if (&source == this && offset < source_offset + bytes && source_offset < end) {
    return Status(EINVAL, "the ranges to copy overlap");
  }
  const observe::Span span(observe::TraceKind::kBufferCopy, context_->info().index, offset, bytes);
  // Counted at both ends, which are often of one device.
  const std::shared_ptr<DeviceContext> from = source.device();
  observe::Measured taken(from->counters(), observe::Backend::kDeviceCopy, observe::Flow::kOut);
  observe::Measured given(context_->counters(), observe::Backend::kDeviceCopy, observe::Flow::kIn);
  const bool on_one_gpu = &from->device() == &context_->device() && !context_->info().cpu_addressable;
  std::uint64_t chunk = on_one_gpu ? kOneGpuChunk : kCopyChunk;
  std::uint64_t done = 0;
  while (done < bytes) {
    if (cancelled != nullptr && cancelled->load(std::memory_order_relaxed)) {
      status = Status(ECANCELED, "the copy was cancelled");
      break;
    }
    const std::uint64_t part = std::min(chunk, bytes - done);
    const std::uint64_t before = done;
    status = copy_chunk(source, source_offset + done, offset + done, part, &done);
    if (status.error() == ENOSPC && chunk > kCopyChunk) {
      chunk = kCopyChunk;  // as much as there is room for
      status = {};
      continue;
    }
    if (!status.ok() || done - before < part) break;  // the source may have become shorter
  }
  if (done == 0 && !status.ok()) return status;
  taken.done(done);
  given.done(done);
  return done;
}

Status ExtentBuffer::copy_chunk(Buffer& source, std::uint64_t source_offset, std::uint64_t offset, std::uint64_t bytes,
                                std::uint64_t* done) {
  std::vector<Piece> pieces;
  {
    Result<std::unique_ptr<Pinned>> pinned = source.pin_for_read(source_offset, bytes);
    if (!pinned.ok()) return pinned.status();
    pieces = pinned.value()->pieces();
  }
  for (const Piece& piece : pieces) {
    const std::uint64_t target = offset + (piece.offset - source_offset);
    if (piece.address == 0) {
      Status status = copy_hole(target, target + piece.bytes);
      if (!status.ok()) return status;
      *done += piece.bytes;
      continue;
    }
    const std::uint64_t before = *done;
    Status status = copy_data(source, piece.offset, target, piece.bytes, done);
    if (!status.ok() || *done - before < piece.bytes) return status;
  }
  return {};
}

Status ExtentBuffer::copy_data(Buffer& source, std::uint64_t source_offset, std::uint64_t offset, std::uint64_t bytes,
                               std::uint64_t* done) {
  Status status;
  std::uint64_t copied = 0;
  {
    WriteLease target;
    std::unique_ptr<Pinned> pinned;
    for (;;) {
      // The source may have changed since it was looked at: it is cut anew.
      Result<std::unique_ptr<Pinned>> looked_at = source.pin_for_read(source_offset, bytes);
      if (!looked_at.ok()) return looked_at.status();
      pinned = looked_at.take();
      {
        const std::lock_guard lock(state_mutex_);
        if (try_list_locked(offset, offset + bytes, &target)) break;
      }
      // What has to be waited for is waited for without the pin.
      pinned.reset();
      WriteLease made;
      status = acquire_write(offset, offset + bytes, &made);
      if (!status.ok()) return status;
    }
    for (const Piece& piece : pinned->pieces()) {
      const DeviceAddress to = target.address() + (piece.offset - source_offset);
      status = piece.address == 0 ? context_->device().zero(to, piece.bytes)
                                  : copy_between(*context_, to, *source.device(), piece.address, piece.bytes);
      if (!status.ok()) break;
      copied += piece.bytes;
    }
    if (copied > 0) publish(offset + copied);
    *done += copied;
  }
  if (copied == bytes) return status;
  const Status cleared = discard_above_size(offset + copied, bytes - copied);
  return status.ok() ? cleared : status;
}

// A hole of the source: what exists here becomes zeros, what does not stays a hole.
Status ExtentBuffer::copy_hole(std::uint64_t offset, std::uint64_t end) {
  for (const Extent& extent : inside(current()->extents, offset, end)) {
    WriteLease target;
    Status status = acquire_write(extent.offset, extent.offset + extent.bytes, &target);
    if (status.ok()) status = context_->device().zero(target.address(), extent.bytes);
    if (!status.ok()) return status;
  }
  publish(end);
  return {};
}

}  // namespace gpufs
