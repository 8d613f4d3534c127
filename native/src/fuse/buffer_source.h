// The engine's devices as a mount uses them: where the inode table gets buffers from.
// Ownership: shared with the inode table. Keeps the devices' contexts, not the engine.
// Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/status.h"
#include "device/device_context.h"
#include "drivers/driver.h"
#include "memory/buffer.h"
#include "memory/registered_buffer.h"

namespace gpufs::fuse {

class BufferSource {
 public:
  explicit BufferSource(std::vector<std::shared_ptr<DeviceContext>> devices) : devices_(std::move(devices)) {}

  [[nodiscard]] std::int32_t device_count() const { return static_cast<std::int32_t>(devices_.size()); }
  // EINVAL outside 0..device_count()-1, as for import().
  Result<std::shared_ptr<Buffer>> create(std::int32_t device);
  // A buffer over memory of another program.
  Result<std::shared_ptr<RegisteredBuffer>> import(std::int32_t device, const ForeignMemory& memory);
  // The next three: of a device that exists.
  Result<MemoryInfo> memory(std::int32_t device) { return at(device)->device().memory(); }
  [[nodiscard]] std::uint64_t granule(std::int32_t device) const { return at(device)->info().granule; }
  // Whether the CPU can read a buffer's memory in place.
  [[nodiscard]] bool in_host_memory(std::int32_t device) const { return at(device)->info().cpu_addressable; }

 private:
  [[nodiscard]] const std::shared_ptr<DeviceContext>& at(std::int32_t device) const {
    return devices_[static_cast<std::size_t>(device)];
  }
  [[nodiscard]] Status check(std::int32_t device) const;

  const std::vector<std::shared_ptr<DeviceContext>> devices_;
};

}  // namespace gpufs::fuse
