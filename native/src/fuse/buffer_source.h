// Where the inode table gets buffers from: the engine's devices, or a test's.
// Ownership: shared with the inode table.
// Thread-safe.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/status.h"
#include "drivers/driver.h"
#include "memory/buffer.h"
#include "memory/registered_buffer.h"

namespace gpufs::fuse {

class BufferSource {
 public:
  virtual ~BufferSource() = default;
  [[nodiscard]] virtual std::int32_t device_count() const = 0;
  // EINVAL outside 0..device_count()-1, as for all below.
  virtual Result<std::shared_ptr<Buffer>> create(std::int32_t device) = 0;
  // A buffer over memory of another program.
  virtual Result<std::shared_ptr<RegisteredBuffer>> import(std::int32_t /*device*/, const ForeignMemory& /*memory*/) {
    return Status(EOPNOTSUPP, "memory of other programs cannot be used here");
  }
  virtual Result<MemoryInfo> memory(std::int32_t device) = 0;
  virtual std::uint64_t granule(std::int32_t device) = 0;  // 0 for an unknown device
  // Whether the CPU can read a buffer's memory in place; not for unknown devices.
  [[nodiscard]] virtual bool in_host_memory(std::int32_t device) const = 0;
};

}  // namespace gpufs::fuse
