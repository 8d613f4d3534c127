// Memory of other programs as the host driver maps it.
// Ownership: the caller's. Threads: as ImportedRange and ForeignMapping.
#pragma once

#include <cstdint>
#include <memory>

#include "base/status.h"
#include "drivers/driver.h"
#include "drivers/ledger.h"

namespace gpufs {

// Memory that the host driver of another program has exported.
Result<std::unique_ptr<ImportedRange>> import_host_memory(std::uint64_t capacity, ImportAccess access);

// A part of a file in memory (memfd_create(2), shm_open(3)). EINVAL: not such a file, not open as needed, or too small.
Result<std::unique_ptr<ForeignMapping>> map_shared_file(const ForeignMemory& memory, std::shared_ptr<Ledger> limit);

}  // namespace gpufs
