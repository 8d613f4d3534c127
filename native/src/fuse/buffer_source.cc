#include "fuse/buffer_source.h"

#include <cerrno>
#include <string>

namespace gpufs::fuse {

Status BufferSource::check(std::int32_t device) const {
  return device >= 0 && device < device_count() ? Status() : Status(EINVAL, "no device " + std::to_string(device));
}

Result<std::shared_ptr<Buffer>> BufferSource::create(std::int32_t device) {
  if (Status status = check(device); !status.ok()) return status;
  Result<std::shared_ptr<Buffer>> buffer = Buffer::create(at(device));
  // The inode table trims it when its last writer closes it.
  if (buffer.ok()) buffer.value()->preallocate_on_growth();
  return buffer;
}

Result<std::shared_ptr<RegisteredBuffer>> BufferSource::import(std::int32_t device, const ForeignMemory& memory) {
  if (Status status = check(device); !status.ok()) return status;
  if (memory.bytes > Buffer::kMaximumBytes) return Status(EFBIG, "beyond the largest size of a buffer");
  Result<std::unique_ptr<ForeignMapping>> imported = at(device)->device().map_foreign(memory);
  if (!imported.ok()) return imported.status();
  return std::make_shared<RegisteredBuffer>(at(device), imported.take(), memory.bytes, memory.writable);
}

}  // namespace gpufs::fuse
