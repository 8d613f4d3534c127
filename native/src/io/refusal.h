// Why the fastpath does not take a request. Each reason is a bit with a name, counted in the statistics.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace gpufs {

enum class Refusal : std::uint32_t {
  kDisabled = 1U << 0,            // a knob or the request's own option switched it off
  kNothingToMove = 1U << 1,       // size 0
  kTooSmall = 1U << 2,            // below the bound in the options, or no whole alignment unit inside it
  kOffsetUnaligned = 1U << 3,     // the file offset is not a multiple of the alignment unit
  kSizeUnaligned = 1U << 4,       // the size is not a multiple of the alignment unit
  kMemoryUnaligned = 1U << 5,     // device address and file offset are not aligned alike
  kOffsetRange = 1U << 6,         // the end exceeds a signed 64-bit offset
  kNoDirectDescriptor = 1U << 7,  // the file cannot be opened with O_DIRECT here
  kFileSystem = 1U << 8,          // the path does not support the file system
  kMountOptions = 1U << 9,        // the right file system, mounted in a way that the path does not support
  kNoVendorCall = 1U << 10,       // the driver has no such call, or its library is missing
  kNoGpuDirect = 1U << 11,        // the library's kernel module is not active, so it would copy through the host
  kNotAccepted = 1U << 12,        // the vendor's library refused this file
  kFailedBefore = 1U << 13,       // it failed on a chunk, and the rest went by fallback
  kMemoryKind = 1U << 14,         // the memory is not the device's own, or virtual
  kNoKernelSupport = 1U << 15,    // the kernel's GPU driver cannot be reached, or has no such interface
};
inline constexpr std::size_t kRefusalCount = 16;

using RefusalMask = std::uint32_t;
constexpr RefusalMask mask_of(Refusal reason) { return static_cast<RefusalMask>(reason); }

// In the order of the bits, for statistics and messages.
inline constexpr std::array<std::string_view, kRefusalCount> kRefusalNames = {
    "disabled",     "nothing_to_move",      "too_small",   "offset_unaligned", "size_unaligned", "memory_unaligned",
    "offset_range", "no_direct_descriptor", "file_system", "mount_options",    "no_vendor_call", "no_gpudirect",
    "not_accepted", "failed_before",        "memory_kind", "no_kernel_support"};

// "file_system, no_vendor_call"; "none" for 0.
std::string describe_refusals(RefusalMask mask);

}  // namespace gpufs
