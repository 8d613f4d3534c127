#include "io/target.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "device/device_context.h"

namespace gpufs {
Target Target::of_buffer(std::shared_ptr<Buffer> buffer) {
  Target target;
  target.device_ = buffer->device();
  target.buffer_ = std::move(buffer);
  return target;
}

Target Target::of_range(std::shared_ptr<DeviceContext> device, DeviceAddress address, std::uint64_t bytes) {
  Target target;
  target.device_ = std::move(device);
  target.address_ = address;
  target.bytes_ = bytes;
  return target;
}

bool Target::reached_by_files(std::uint64_t offset) const {
  return buffer_ != nullptr ? device_->info().files_reach_memory : device_->device().holds(address_ + offset);
}

Result<Buffer::Pin> Target::pin_for_read(std::uint64_t offset, std::uint64_t bytes) const {
  if (buffer_) return buffer_->pin_for_read(offset, bytes);
  Buffer::Pin pin;
  if (offset < bytes_) pin.pieces.push_back({address_ + offset, offset, std::min(bytes, bytes_ - offset)});
  return pin;
}

Result<Buffer::Pin> Target::pin_for_write(std::uint64_t offset, std::uint64_t bytes) const {
  if (buffer_) return buffer_->pin_for_write(offset, bytes);
  if (offset > bytes_ || bytes > bytes_ - offset) return Status(EINVAL, "beyond the end of the device memory");
  return Buffer::Pin{{{address_ + offset, offset, bytes}}, nullptr};
}

}  // namespace gpufs
