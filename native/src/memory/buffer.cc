// What all kinds of buffers share: what a copy between buffers checks and counts, and what a buffer of fixed size
// refuses.

#include "memory/buffer.h"

#include <linux/falloc.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "device/device_context.h"
#include "observe/counters.h"
#include "observe/trace.h"

namespace gpufs {
namespace {

constexpr std::uint64_t kStagingBytes = std::uint64_t{4} << 20;  // between devices without peer access

Status copy_staged(Device& to, DeviceAddress destination, Device& from, DeviceAddress source, std::uint64_t bytes) {
  const std::uint64_t step = std::min(bytes, kStagingBytes);
  const auto staging = std::make_unique_for_overwrite<std::byte[]>(step);
  for (std::uint64_t done = 0; done < bytes;) {
    const std::uint64_t part = std::min(step, bytes - done);
    TRY(from.copy_out(staging.get(), source + done, part));
    TRY(to.copy_in(destination + done, staging.get(), part));
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

Result<std::uint64_t> Buffer::copy_from(Buffer& source, std::uint64_t source_offset, std::uint64_t offset,
                                        std::uint64_t bytes, const std::atomic<bool>* cancelled, Wait wait) {
  const std::uint64_t source_size = source.size();
  if (source_offset >= source_size || bytes == 0) return std::uint64_t{0};
  bytes = std::min(bytes, source_size - source_offset);
  TRY(clip_copy(offset, &bytes));
  if (&source == this && offset < source_offset + bytes && source_offset < offset + bytes) {
    return Status(EINVAL, "the ranges to copy overlap");
  }
  const observe::Span span(observe::TraceKind::kBufferCopy, device()->info().index, offset, bytes);
  // Counted at both ends, which are often of one device.
  const std::shared_ptr<DeviceContext> from = source.residence();
  observe::ScopedOperationCount taken(from->counters(), observe::Backend::kDeviceCopy, observe::Flow::kFromDevice);
  observe::ScopedOperationCount given(device()->counters(), observe::Backend::kDeviceCopy, observe::Flow::kToDevice);
  std::uint64_t done = 0;
  Status status = copy_chunks(source, source_offset, offset, bytes, cancelled, wait, &done, [&] {
    taken.advance(done);
    given.advance(done);
  });
  if (done == 0 && !status.ok()) return status;
  taken.done(done);
  given.done(done);
  source.activity().note(observe::Backend::kDeviceCopy, observe::Flow::kFromDevice, done);
  activity().note(observe::Backend::kDeviceCopy, observe::Flow::kToDevice, done);
  return done;
}

Status Buffer::copy_pinned(DeviceAddress destination, const Pin& source, std::uint64_t* copied) const {
  const DeviceContext& to = *device();
  for (const Piece& piece : source.pieces) {
    TRY(piece.address == 0 ? to.device().zero(destination + *copied, piece.bytes)
                           : copy_between(to, destination + *copied, *source.device, piece.address, piece.bytes));
    *copied += piece.bytes;
  }
  return {};
}

Status Buffer::fixed_size() { return {EPERM, "a registered file has a fixed size and the memory of its program"}; }

Status Buffer::refuse_change() {
  Status usable = pin_for_read(0, 0).status();
  return usable.ok() ? fixed_size() : usable;
}

Result<Buffer::Gathered> Buffer::gather(std::uint64_t /*offset*/, std::uint64_t /*bytes*/, Wait /*wait*/) {
  return Status(EOPNOTSUPP, "the memory of another program is copied");
}

Status Buffer::allocate(std::uint64_t /*offset*/, std::uint64_t /*bytes*/, bool /*keep_size*/) {
  return refuse_change();
}

Status Buffer::punch(std::uint64_t /*offset*/, std::uint64_t /*bytes*/) { return refuse_change(); }

Status Buffer::zero_range(std::uint64_t /*offset*/, std::uint64_t /*bytes*/, bool /*keep_size*/) {
  return refuse_change();
}

Status Buffer::fallocate(std::uint32_t mode, std::uint64_t offset, std::uint64_t bytes) {
  const bool keep_size = (mode & FALLOC_FL_KEEP_SIZE) != 0;
  switch (mode & ~static_cast<std::uint32_t>(FALLOC_FL_KEEP_SIZE)) {
    case 0:
      return allocate(offset, bytes, keep_size);
    case FALLOC_FL_PUNCH_HOLE:
      return keep_size ? punch(offset, bytes) : Status(EOPNOTSUPP, "punching a hole keeps the size");
    case FALLOC_FL_ZERO_RANGE:
      return zero_range(offset, bytes, keep_size);
    default:
      return Status(EOPNOTSUPP, "unsupported mode of fallocate");
  }
}

// NOLINTNEXTLINE(performance-unnecessary-value-param): the implementations keep it
Result<std::shared_ptr<Buffer::Lease>> Buffer::lease(bool /*writable*/, bool /*exports*/, std::string /*label*/,
                                                     std::optional<std::uint64_t> /*placement*/,
                                                     std::uint64_t /*most*/) {
  return Status(EPERM, "the memory of a registered file belongs to another program, which alone can pass it on");
}

}  // namespace gpufs
