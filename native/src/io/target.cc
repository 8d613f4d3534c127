#include "io/target.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "device/device_context.h"

namespace gpufs {
namespace {

PinnedRange with_pieces(std::unique_ptr<Buffer::Pinned> pinned) {
  PinnedRange range;
  range.pieces = pinned->pieces();
  range.keep = std::move(pinned);
  return range;
}

}  // namespace

std::vector<Buffer::Piece> PinnedRange::part(std::uint64_t offset, std::uint64_t bytes) const {
  const std::uint64_t end = offset + bytes;
  std::vector<Buffer::Piece> found;
  auto piece = std::partition_point(pieces.begin(), pieces.end(), [&](const Buffer::Piece& candidate) {
    return candidate.offset + candidate.bytes <= offset;
  });
  for (; piece != pieces.end() && piece->offset < end; ++piece) {
    const std::uint64_t start = std::max(piece->offset, offset);
    const DeviceAddress address = piece->address == 0 ? 0 : piece->address + (start - piece->offset);
    found.push_back({address, start, std::min(piece->offset + piece->bytes, end) - start});
  }
  return found;
}

Target Target::of_buffer(std::shared_ptr<Buffer> buffer) {
  Target target;
  target.device_ = buffer->device();
  target.buffer_ = std::move(buffer);
  return target;
}

Target Target::of_range(std::shared_ptr<DeviceContext> device, DeviceAddress address, std::uint64_t bytes,
                        std::shared_ptr<const void> keep) {
  Target target;
  target.device_ = std::move(device);
  target.address_ = address;
  target.bytes_ = bytes;
  target.keep_ = std::move(keep);
  return target;
}

bool Target::reached_by_files(std::uint64_t offset) const {
  return buffer_ != nullptr ? device_->info().files_reach_memory : device_->device().holds(address_ + offset);
}

Result<PinnedRange> Target::pin_for_read(std::uint64_t offset, std::uint64_t bytes) const {
  if (buffer_) {
    Result<std::unique_ptr<Buffer::Pinned>> pinned = buffer_->pin_for_read(offset, bytes);
    if (!pinned.ok()) return pinned.status();
    return with_pieces(pinned.take());
  }
  PinnedRange range;
  if (offset < bytes_) range.pieces.push_back({address_ + offset, offset, std::min(bytes, bytes_ - offset)});
  return range;
}

Result<PinnedRange> Target::pin_for_write(std::uint64_t offset, std::uint64_t bytes) const {
  if (buffer_) {
    Result<std::unique_ptr<Buffer::Pinned>> pinned = buffer_->pin_for_write(offset, bytes);
    if (!pinned.ok()) return pinned.status();
    return with_pieces(pinned.take());
  }
  if (offset > bytes_ || bytes > bytes_ - offset) return Status(EINVAL, "beyond the end of the device memory");
  PinnedRange range;
  range.pieces.push_back({address_ + offset, offset, bytes});
  return range;
}

}  // namespace gpufs
