// Result codes, flags and structures that CUDA's driver interface and HIP's runtime share: HIP has taken them over from
// CUDA with the same numbers and layout. Declared here so that neither the build nor the import needs the vendors'
// headers. What only one vendor has is in cuda/cuda_api.h and hip/hip_api.h.
#pragma once

#include <cstdint>

namespace gpufs::gpu::api {

// The result codes of the functions.
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

// Streams up to this number are default streams of the current device: null (0), legacy (1), per thread (2).
inline constexpr std::uintptr_t kLastDefaultStream = 2;

// What a thread's calls do to the graphs that other threads capture: see Current.
enum CaptureMode : int { kCaptureGlobal = 0, kCaptureThreadLocal = 1, kCaptureRelaxed = 2 };

enum : int {
  kAllocationPinned = 1,
  kLocationDevice = 1,
  kLocationHostNode = 3,  // memory of the host, at a NUMA node; CUDA only
  kHandleDescriptor = 1,
  kAccessRead = 1,
  kAccessReadWrite = 3,
  kMemoryTypeDevice = 2,  // HIP: since ROCm 6; earlier versions have other numbers
  // Attributes of a pointer, also of one to pinned host memory.
  kPointerRangeStart = 11,
  kPointerRangeBytes = 12,
};

enum : unsigned {
  kGranularityMinimum = 0,
  kIpcLazyPeerAccess = 1,
  kStreamNonBlocking = 1,
  kEventDisableTiming = 2,
  kHostRegisterPortable = 1,
  kWaitValueNotLess = 0,
};

struct Location {
  int type;
  int id;
};

// HIP: since ROCm 6; the members had another order before.
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

struct IpcHandle {
  unsigned char bytes[64];
};

struct Access {
  Location location;
  int flags;
};
static_assert(sizeof(Access) == 12);

}  // namespace gpufs::gpu::api
