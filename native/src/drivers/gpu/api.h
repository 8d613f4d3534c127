// What HIP's runtime has taken over from CUDA's driver interface: result codes, flags and structures, with the same
// numbers and layout in both. What only one of them has stands in cuda/cuda_api.h and hip/hip_api.h.
// Owned by nobody (declarations only).
// Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace gpufs::gpu::api {

// What every entry point returns.
using Code = int;
using Stream = struct StreamObject*;
using Event = struct EventObject*;

enum : Code {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kDeinitialized = 4,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kEccUncorrectable = 214,
  kInvalidHandle = 400,
  kNotReady = 600,
  kIllegalAddress = 700,
  kLaunchTimeout = 702,
  kPeerAccessAlreadyEnabled = 704,
  kContextIsDestroyed = 709,
  kAssert = 710,
  kHostMemoryAlreadyRegistered = 712,
  kHostMemoryNotRegistered = 713,
  kLaunchFailed = 719,
  kNotPermitted = 800,
  kNotSupported = 801,
  kCaptureImplicit = 906,
  kUnknown = 999,
};

// Streams up to this number are default streams of what is current: none (0), legacy (1), the thread's own (2).
inline constexpr std::uintptr_t kLastDefaultStream = 2;

enum : int {
  kAllocationPinned = 1,
  kLocationDevice = 1,
  kHandleDescriptor = 1,
  kAccessReadWrite = 3,
  kMemoryTypeDevice = 2,  // HIP: as of ROCm 6; earlier ones number otherwise
  // Of a pointer, host memory that is pinned included.
  kPointerRangeStart = 11,
  kPointerRangeBytes = 12,
};

enum : unsigned {
  kGranularityMinimum = 0,
  kStreamNonBlocking = 1,
  kEventDisableTiming = 2,
  kHostRegisterPortable = 1,
  kWaitValueNotLess = 0,
};

struct Location {
  int type;
  int id;
};

// HIP: as of ROCm 6; before that the members had another order.
struct AllocationProperties {
  int type;
  int handle_types;
  Location location;
  void* windows_attributes;
  struct {
    unsigned char compression;
    unsigned char direct_rdma;
    unsigned short usage;  // NOLINT(google-runtime-int): the interface says so
    unsigned char reserved[4];
  } flags;
};
static_assert(sizeof(AllocationProperties) == 32);

struct Access {
  Location location;
  int flags;
};
static_assert(sizeof(Access) == 12);

}  // namespace gpufs::gpu::api

namespace gpufs::gpu {

// The symbol of each member of a vendor's table of functions; the vendor's header gives them.
template <auto Function>
inline constexpr const char* kSymbol = nullptr;

// One of the vendor's objects or addresses as another type for the same bits: a number, or a pointer.
template <typename To, typename From>
To as(From from) {
  if constexpr (std::is_pointer_v<To> == std::is_pointer_v<From>) {
    return static_cast<To>(from);
  } else {
    return reinterpret_cast<To>(from);
  }
}

}  // namespace gpufs::gpu
