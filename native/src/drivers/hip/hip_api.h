// The part of AMD's HIP runtime that gpufs uses: types, constants and entry points, declared here so that neither the
// build nor the import needs ROCm's own headers.
// Owned by nobody (declarations only).
// Any thread may call the runtime's functions once Library::load() has succeeded.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gpufs::hip {

// Opaque objects and plain numbers, as the runtime's binary interface has them on 64-bit Linux. A device is its
// ordinal.
using HipResult = int;
using HipMemoryHandle = struct HipMemoryHandleObject*;
using HipStream = struct HipStreamObject*;
using HipEvent = struct HipEventObject*;

enum : HipResult {
  kHipSuccess = 0,
  kHipInvalidValue = 1,
  kHipOutOfMemory = 2,
  kHipNotInitialized = 3,
  kHipDeinitialized = 4,
  kHipPriorLaunchFailure = 53,
  kHipNoDevice = 100,
  kHipInvalidDevice = 101,
  kHipEccUncorrectable = 214,
  kHipInvalidHandle = 400,
  kHipNotFound = 500,
  kHipNotReady = 600,
  kHipIllegalAddress = 700,
  kHipLaunchTimeout = 702,
  kHipPeerAccessAlreadyEnabled = 704,
  kHipContextIsDestroyed = 709,
  kHipAssert = 710,
  kHipHostMemoryAlreadyRegistered = 712,
  kHipHostMemoryNotRegistered = 713,
  kHipLaunchFailure = 719,
  kHipNotSupported = 801,
  kHipCaptureImplicit = 906,
  kHipUnknown = 999,
};

// hipRuntimeGetVersion() answers major * 10,000,000 + minor * 100,000 + patch.
inline constexpr int kHipVersion6 = 60'000'000;

// Streams up to this number are the current device's default streams: none (0), legacy (1), the thread's own (2).
inline constexpr std::uintptr_t kHipLastDefaultStream = 2;
inline constexpr std::uint32_t kHipWholeValue = 0xffffffff;

enum : int {
  kHipAttributeVirtualMemory = 89,

  kHipAllocationPinned = 1,
  kHipLocationDevice = 1,
  kHipHandleDescriptor = 1,
  kHipAccessReadWrite = 3,

  kHipMemoryTypeDevice = 2,  // as of ROCm 6; earlier ones number otherwise

  kHipSymbolFound = 0,  // what hipGetProcAddress says of a symbol

  // Of a pointer, host memory that is pinned included.
  kHipPointerRangeStart = 11,
  kHipPointerRangeBytes = 12,
};

enum : unsigned {
  kHipGranularityMinimum = 0,
  kHipStreamNonBlocking = 1,
  kHipEventDisableTiming = 2,
  // There is no flag for memory that may only be read: what is that in CUDA asks for coarse-grained memory here.
  kHipHostRegisterPortable = 1,
  kHipWaitValueNotLess = 0,
};

struct HipLocation {
  int type;
  int id;
};

// As of ROCm 6: before that the members had another order.
struct HipAllocationProperties {
  int type;
  int handle_type;
  HipLocation location;
  void* windows_metadata;
  struct {
    unsigned char compression;
    unsigned char direct_rdma;
    unsigned short usage;  // NOLINT(google-runtime-int): the interface says so
  } flags;
};
static_assert(sizeof(HipAllocationProperties) == 32);

struct HipAccess {
  HipLocation location;
  int flags;
};
static_assert(sizeof(HipAccess) == 12);

struct HipPointerAttributes {
  int type;
  int device;
  void* device_pointer;
  void* host_pointer;
  int managed;
  unsigned flags;
};
static_assert(sizeof(HipPointerAttributes) == 32);

// What hipAmdFileRead and hipAmdFileWrite take by value: zeroed, then the descriptor set.
union HipFileHandle {
  void* handle;
  int fd;
};
static_assert(sizeof(HipFileHandle) == 8);

// status: a negative errno. Size 0 and early failures leave size_copied and status as they were.
using HipFileCall = HipResult (*)(HipFileHandle handle, void* device, std::uint64_t size, std::int64_t file_offset,
                                  std::uint64_t* size_copied, std::int32_t* status);

// X(member, symbol, parameters...): every entry point returns a HipResult.
// clang-format off
#define GPUFS_HIP_REQUIRED(X)                                                                     \
  X(init, "hipInit", unsigned)                                                                    \
  X(device_count, "hipGetDeviceCount", int*)                                                      \
  X(device_name, "hipDeviceGetName", char*, int, int)                                             \
  X(device_attribute, "hipDeviceGetAttribute", int*, int, int)                                    \
  X(device_pci_address, "hipDeviceGetPCIBusId", char*, int, int)                                  \
  X(device_total_memory, "hipDeviceTotalMem", std::size_t*, int)                                  \
  X(device_current, "hipGetDevice", int*)                                                         \
  X(device_set, "hipSetDevice", int)                                                              \
  X(memory_info, "hipMemGetInfo", std::size_t*, std::size_t*)                                     \
  X(memory_allocate, "hipMalloc", void**, std::size_t)                                            \
  X(memory_free, "hipFree", void*)                                                                \
  X(host_register, "hipHostRegister", void*, std::size_t, unsigned)                               \
  X(host_unregister, "hipHostUnregister", void*)                                                  \
  X(copy_to_device, "hipMemcpyHtoDAsync", void*, const void*, std::size_t, HipStream)             \
  X(copy_to_host, "hipMemcpyDtoHAsync", void*, void*, std::size_t, HipStream)                     \
  X(copy_on_device, "hipMemcpyDtoDAsync", void*, void*, std::size_t, HipStream)                   \
  X(fill, "hipMemsetD8Async", void*, unsigned char, std::size_t, HipStream)                       \
  X(stream_create, "hipStreamCreateWithFlags", HipStream*, unsigned)                              \
  X(stream_destroy, "hipStreamDestroy", HipStream)                                                \
  X(stream_synchronize, "hipStreamSynchronize", HipStream)                                        \
  X(stream_wait_event, "hipStreamWaitEvent", HipStream, HipEvent, unsigned)                       \
  X(event_create, "hipEventCreateWithFlags", HipEvent*, unsigned)                                 \
  X(event_destroy, "hipEventDestroy", HipEvent)                                                   \
  X(event_record, "hipEventRecord", HipEvent, HipStream)                                          \
  X(event_query, "hipEventQuery", HipEvent)                                                       \
  X(event_synchronize, "hipEventSynchronize", HipEvent)

// Virtual memory management: all or none of these. A runtime without them is used through plain allocations.
#define GPUFS_HIP_VIRTUAL_MEMORY(X)                                                               \
  X(granularity, "hipMemGetAllocationGranularity", std::size_t*, const HipAllocationProperties*, int) \
  X(address_reserve, "hipMemAddressReserve", void**, std::size_t, std::size_t, void*, unsigned long long) \
  X(address_free, "hipMemAddressFree", void*, std::size_t)                                        \
  X(memory_create, "hipMemCreate", HipMemoryHandle*, std::size_t, const HipAllocationProperties*, unsigned long long) \
  X(memory_release, "hipMemRelease", HipMemoryHandle)                                             \
  X(memory_map, "hipMemMap", void*, std::size_t, std::size_t, HipMemoryHandle, unsigned long long) \
  X(memory_unmap, "hipMemUnmap", void*, std::size_t)                                              \
  X(memory_set_access, "hipMemSetAccess", void*, std::size_t, const HipAccess*, std::size_t)

// Copies between devices: all or none. Without them such copies go through the host.
#define GPUFS_HIP_PEERS(X)                                                                        \
  X(device_can_access_peer, "hipDeviceCanAccessPeer", int*, int, int)                             \
  X(device_enable_peer, "hipDeviceEnablePeerAccess", int, unsigned)                               \
  X(copy_to_peer, "hipMemcpyPeerAsync", void*, int, const void*, int, std::size_t, HipStream)

// Each for itself; null where the runtime has none.
#define GPUFS_HIP_OPTIONAL(X)                                                                     \
  X(runtime_version, "hipRuntimeGetVersion", int*)                                                \
  X(memory_export, "hipMemExportToShareableHandle", void*, HipMemoryHandle, int, unsigned long long) \
  X(pointer_attributes, "hipPointerGetAttributes", HipPointerAttributes*, const void*)            \
  X(launch_host, "hipLaunchHostFunc", HipStream, void (*)(void*), void*)                          \
  X(stream_wait_value, "hipStreamWaitValue32", HipStream, void*, std::uint32_t, unsigned, std::uint32_t) \
  X(stream_device, "hipStreamGetDevice", HipStream, int*)                                         \
  X(stream_capturing, "hipStreamIsCapturing", HipStream, int*)                                    \
  X(host_address, "hipHostGetDevicePointer", void**, void*, unsigned)                             \
  X(pointer_attribute, "hipPointerGetAttribute", void*, int, void*)                               \
  X(symbol_address, "hipGetProcAddress", const char*, void**, int, std::uint64_t, int*)
// clang-format on

#define GPUFS_HIP_MEMBER(member, symbol, ...) HipResult (*member)(__VA_ARGS__) = nullptr;
struct Functions {
  GPUFS_HIP_REQUIRED(GPUFS_HIP_MEMBER)
  GPUFS_HIP_VIRTUAL_MEMORY(GPUFS_HIP_MEMBER)
  GPUFS_HIP_PEERS(GPUFS_HIP_MEMBER)
  GPUFS_HIP_OPTIONAL(GPUFS_HIP_MEMBER)
  const char* (*error_name)(HipResult) = nullptr;  // these two are required, too
  const char* (*error_text)(HipResult) = nullptr;
};
#undef GPUFS_HIP_MEMBER

}  // namespace gpufs::hip
