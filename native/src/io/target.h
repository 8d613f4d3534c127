// The device memory that a transfer reads or writes: a buffer, or a range that the program allocated itself.
// A value that keeps a buffer alive; a range is the program's to keep. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>

#include "base/status.h"
#include "memory/buffer.h"

namespace gpufs {

class Target {
 public:
  Target() = default;
  static Target of_buffer(std::shared_ptr<Buffer> buffer);
  static Target of_range(std::shared_ptr<DeviceContext> device, DeviceAddress address, std::uint64_t bytes);

  [[nodiscard]] bool valid() const { return device_ != nullptr; }
  [[nodiscard]] const std::shared_ptr<DeviceContext>& device() const { return device_; }
  [[nodiscard]] const std::shared_ptr<Buffer>& buffer() const { return buffer_; }  // null for a range

  // Where a store ends: the current size of the buffer, or that of the range.
  [[nodiscard]] std::uint64_t size() const { return buffer_ ? buffer_->size() : bytes_; }
  // How far a load may write.
  [[nodiscard]] std::uint64_t limit() const { return buffer_ ? Buffer::kMaximumBytes : bytes_; }
  // The address of `offset` modulo `align`, as far as is known before the memory is pinned.
  [[nodiscard]] std::uint64_t phase(std::uint64_t offset, std::uint64_t align) const {
    return (buffer_ ? offset : address_ + offset) % align;
  }

  // Whether the vendor's calls for files can reach the memory at `offset`: it must be the device's own and of a kind
  // that they support.
  [[nodiscard]] bool reached_by_files(std::uint64_t offset) const;

  // Clipped to size().
  [[nodiscard]] Result<Buffer::Pin> pin_for_read(std::uint64_t offset, std::uint64_t bytes) const;
  // Allocates memory where a buffer has none.
  [[nodiscard]] Result<Buffer::Pin> pin_for_write(std::uint64_t offset, std::uint64_t bytes) const;

 private:
  std::shared_ptr<DeviceContext> device_;
  std::shared_ptr<Buffer> buffer_;
  DeviceAddress address_ = 0;
  std::uint64_t bytes_ = 0;
};

}  // namespace gpufs
