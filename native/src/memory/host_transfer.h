// Copies between a program's own memory and a buffer: straight where that memory is locked, by the driver's own detour
// where it is not; each part is counted as what it is.
// Owned by nobody (functions).
// Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "memory/buffer.h"

namespace gpufs {

// As Buffer::read() and Buffer::write(). With LockPolicy::kMandatory memory that is not locked is locked for as long as
// the copy takes: what that fails with, HostLocks::lock() says. EACCES: devices may only read that memory.
Result<std::size_t> read_to_host(Buffer& buffer, std::uint64_t offset, std::span<std::byte> destination);
Result<std::size_t> write_from_host(Buffer& buffer, std::uint64_t offset, std::span<const std::byte> source);

}  // namespace gpufs
