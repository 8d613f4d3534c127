// Copies between a program's own memory and a buffer. Locked memory is copied directly, other memory through the
// driver's own staging area; each part is counted as what it is.
// Any thread may call any function.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "memory/buffer.h"

namespace gpufs {

// As Buffer::read() and Buffer::write(). With LockPolicy::kMandatory memory that is not locked is locked while the copy
// lasts, and fails as HostLocks::lock() does. EACCES: devices may only read that memory.
Result<std::size_t> read_to_host(Buffer& buffer, std::uint64_t offset, std::span<std::byte> destination);
Result<std::size_t> write_from_host(Buffer& buffer, std::uint64_t offset, std::span<const std::byte> source);

}  // namespace gpufs
