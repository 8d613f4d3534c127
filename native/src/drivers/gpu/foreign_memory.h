// Memory of other programs as a GPU maps it: exported pieces, by descriptors, and allocations, by the vendor's handle.
// Ownership: the caller's. Threads: as ImportedRange and ForeignMapping.
#pragma once

#include <cstdint>
#include <memory>

#include "base/status.h"
#include "drivers/driver.h"
#include "drivers/gpu/gpu_device.h"

namespace gpufs::gpu {

Result<std::unique_ptr<ImportedRange>> import_memory(std::shared_ptr<GpuDevice> device, std::uint64_t capacity,
                                                     bool writable);

// Physical memory, by descriptors that its program has exported. EINVAL: one is not of such memory, or of memory of
// another size.
Result<std::unique_ptr<ForeignMapping>> map_descriptor(const std::shared_ptr<GpuDevice>& device,
                                                       const ForeignMemory& memory);

// An allocation, by the vendor's handle for that (cuIpcOpenMemHandle). The vendor keeps the memory while it is open
// here, also if its program has ended. EINVAL: the handle stands for nothing, or for less than the caller says. EXDEV:
// for memory of another device.
Result<std::unique_ptr<ForeignMapping>> open_ipc_handle(const std::shared_ptr<GpuDevice>& device,
                                                        const ForeignMemory& memory);

}  // namespace gpufs::gpu
