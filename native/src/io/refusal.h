// Why a backend does not take a request: each reason is a bit with a name, counted in the statistics.
// Pure values.
// Any thread may use them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace gpufs {

enum class Refusal : std::uint32_t {
  kDisabled = 1U << 0,            // a knob or the request's own option switched the backend off
  kNothingToMove = 1U << 1,       // size 0
  kTooSmall = 1U << 2,            // no whole alignment unit inside the request
  kOffsetUnaligned = 1U << 3,     // file offset is no multiple of the alignment unit
  kSizeUnaligned = 1U << 4,       // size is no multiple of the alignment unit
  kMemoryUnaligned = 1U << 5,     // the device address does not fit the file offset
  kOffsetRange = 1U << 6,         // the end lies beyond what a signed 64-bit offset can name
  kNoDirectDescriptor = 1U << 7,  // the file cannot be opened with O_DIRECT here
  kFileSystem = 1U << 8,          // not a file system that the path supports
  kMountOptions = 1U << 9,        // the right file system, mounted in a way that the path does not support
  kNoVendorCall = 1U << 10,       // the driver has no such call, or its library is not there
  kNoGpuDirect = 1U << 11,        // the library is there, its kernel module is not (it would copy through the host)
  kNotAccepted = 1U << 12,        // the vendor's library refused this very file
  kFailedBefore = 1U << 13,       // started and gave up: the rest went the other way
  kMemoryKind = 1U << 14,         // memory of a kind that the path does not reach: not the device's own, or virtual
  kNoKernelSupport = 1U << 15,    // the kernel's GPU driver cannot be reached, or has no such interface
};
inline constexpr std::size_t kRefusalCount = 16;

using RefusalMask = std::uint32_t;
constexpr RefusalMask mask_of(Refusal reason) { return static_cast<RefusalMask>(reason); }

// In the order of the bits; what statistics and messages show.
inline constexpr std::array<std::string_view, kRefusalCount> kRefusalNames = {
    "disabled",     "nothing_to_move",      "too_small",   "offset_unaligned", "size_unaligned", "memory_unaligned",
    "offset_range", "no_direct_descriptor", "file_system", "mount_options",    "no_vendor_call", "no_gpudirect",
    "not_accepted", "failed_before",        "memory_kind", "no_kernel_support"};

// "file_system, no_vendor_call"; "none" for 0.
std::string describe_refusals(RefusalMask mask);

}  // namespace gpufs
