// The sizes of memory pages, and memory of zeros.
// Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace gpufs {

// The unit in which FUSE counts, and the alignment of files and memory where the kernel names none. No processor has
// less.
inline constexpr std::uint32_t kPageBytes = 4096;

// The page size of this machine.
[[nodiscard]] std::uint64_t page_bytes();

// 1 MiB of zeros, which exists from the first call on.
[[nodiscard]] std::span<const std::byte> zeros();

}  // namespace gpufs
