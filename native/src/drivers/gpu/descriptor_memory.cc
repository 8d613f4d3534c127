#include "drivers/gpu/descriptor_memory.h"

#include <fcntl.h>

#include <cerrno>
#include <string>

#include "base/math.h"
#include "base/unique_fd.h"

namespace gpufs::gpu {

Result<std::unique_ptr<ForeignMapping>> DescriptorMemory::open(GpuDevice& device, const ForeignMemory& memory) {
  std::uint64_t end = 0;
  if (memory.bytes == 0 || memory.whole_bytes % device.info().granule != 0 ||
      add_overflows(memory.offset, memory.bytes, &end) || end > memory.whole_bytes) {
    return Status{EINVAL, "the memory is " + std::to_string(memory.bytes) + " bytes at offset " +
                              std::to_string(memory.offset) + " of " + std::to_string(memory.whole_bytes) + " bytes"};
  }
  UniqueFd descriptor(::fcntl(memory.descriptor.get(), F_DUPFD_CLOEXEC, 3));
  if (!descriptor.valid()) return Status::from_errno(errno, "duplicating the descriptor of the memory");
  Result<std::unique_ptr<ImportedRange>> range = device.create_import(memory.whole_bytes, memory.writable);
  if (!range.ok()) return range.status();
  Status status = range.value()->add({0, memory.whole_bytes, std::move(descriptor)});
  if (!status.ok()) {
    return Status{EINVAL, "the descriptor cannot be mapped: " + status.message(), status.device_code()};
  }
  return std::unique_ptr<ForeignMapping>(new DescriptorMemory(range.take(), memory.offset));
}

}  // namespace gpufs::gpu
