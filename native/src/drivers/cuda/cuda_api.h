// The part of the CUDA driver interface that gpufs uses: types, constants and entry points, declared here so that
// neither the build nor the import needs CUDA's own headers.
// Owned by nobody (declarations only).
// Any thread may call the driver's functions once Library::load() has succeeded.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gpufs::cuda {

// Opaque objects and plain numbers, as the driver's binary interface has them on 64-bit Linux.
using CuResult = int;
using CuDevice = int;
using CuAddress = unsigned long long;       // NOLINT(google-runtime-int): the interface says so
using CuMemoryHandle = unsigned long long;  // NOLINT(google-runtime-int)
using CuContext = struct CuContextObject*;
using CuStream = struct CuStreamObject*;
using CuEvent = struct CuEventObject*;

enum : CuResult {
  kCuSuccess = 0,
  kCuInvalidValue = 1,
  kCuOutOfMemory = 2,
  kCuNotInitialized = 3,
  kCuDeinitialized = 4,
  kCuNoDevice = 100,
  kCuInvalidDevice = 101,
  kCuInvalidContext = 201,
  kCuEccUncorrectable = 214,
  kCuNvlinkUncorrectable = 220,
  kCuContained = 226,
  kCuInvalidHandle = 400,
  kCuNotReady = 600,
  kCuIllegalAddress = 700,
  kCuLaunchTimeout = 702,
  kCuPeerAccessAlreadyEnabled = 704,
  kCuContextIsDestroyed = 709,
  kCuAssert = 710,
  kCuHostMemoryAlreadyRegistered = 712,
  kCuHostMemoryNotRegistered = 713,
  kCuHardwareStackError = 714,
  kCuLaunchFailed = 719,
  kCuNotPermitted = 800,
  kCuNotSupported = 801,
  kCuCaptureImplicit = 906,
  kCuUnknown = 999,
};

// Streams up to this number are the current context's default streams: none (0), legacy (1), the thread's own (2).
inline constexpr std::uintptr_t kCuLastDefaultStream = 2;

enum : int {
  kCuAttributeVirtualMemory = 102,
  kCuAttributeExportDescriptor = 103,
  kCuAttributeDirectRdmaWithVirtualMemory = 110,
  kCuAttributeReadOnlyHostRegister = 113,

  kCuAllocationPinned = 1,
  kCuLocationDevice = 1,
  kCuHandleDescriptor = 1,
  kCuAccessReadWrite = 3,

  kCuPointerMemoryType = 2,
  kCuPointerIsManaged = 8,
  kCuPointerDeviceOrdinal = 9,
  // Of a pointer, host memory that is pinned included.
  kCuPointerRangeStart = 11,
  kCuPointerRangeBytes = 12,
};

enum : unsigned {
  kCuGranularityMinimum = 0,
  kCuStreamNonBlocking = 1,
  kCuEventDisableTiming = 2,
  kCuHostRegisterPortable = 1,
  kCuHostRegisterReadOnly = 8,

  kCuMemoryTypeDevice = 2,
  kCuWaitValueNotLess = 0,
};

struct CuLocation {
  int type;
  int id;
};

struct CuAllocationProperties {
  int type;
  int handle_types;
  CuLocation location;
  void* windows_attributes;
  struct {
    unsigned char compression;
    unsigned char direct_rdma;
    unsigned short usage;  // NOLINT(google-runtime-int)
    unsigned char reserved[4];
  } flags;
};
static_assert(sizeof(CuAllocationProperties) == 32);

struct CuAccess {
  CuLocation location;
  int flags;
};
static_assert(sizeof(CuAccess) == 12);

// X(member, symbol, parameters...): every entry point returns a CuResult. Symbols with a _v2 ending are those whose
// 64-bit form superseded an older one.
// clang-format off
#define GPUFS_CUDA_REQUIRED(X)                                                                    \
  X(init, "cuInit", unsigned)                                                                     \
  X(driver_version, "cuDriverGetVersion", int*)                                                   \
  X(error_name, "cuGetErrorName", CuResult, const char**)                                         \
  X(error_text, "cuGetErrorString", CuResult, const char**)                                       \
  X(device_count, "cuDeviceGetCount", int*)                                                       \
  X(device_get, "cuDeviceGet", CuDevice*, int)                                                    \
  X(device_name, "cuDeviceGetName", char*, int, CuDevice)                                         \
  X(device_attribute, "cuDeviceGetAttribute", int*, int, CuDevice)                                \
  X(device_pci_address, "cuDeviceGetPCIBusId", char*, int, CuDevice)                              \
  X(device_total_memory, "cuDeviceTotalMem_v2", std::size_t*, CuDevice)                           \
  X(device_can_access_peer, "cuDeviceCanAccessPeer", int*, CuDevice, CuDevice)                    \
  X(primary_context_retain, "cuDevicePrimaryCtxRetain", CuContext*, CuDevice)                     \
  X(primary_context_release, "cuDevicePrimaryCtxRelease_v2", CuDevice)                            \
  X(context_get, "cuCtxGetCurrent", CuContext*)                                                   \
  X(context_set, "cuCtxSetCurrent", CuContext)                                                    \
  X(context_push, "cuCtxPushCurrent_v2", CuContext)                                               \
  X(context_pop, "cuCtxPopCurrent_v2", CuContext*)                                                \
  X(context_enable_peer, "cuCtxEnablePeerAccess", CuContext, unsigned)                            \
  X(memory_info, "cuMemGetInfo_v2", std::size_t*, std::size_t*)                                   \
  X(memory_allocate, "cuMemAlloc_v2", CuAddress*, std::size_t)                                    \
  X(memory_free, "cuMemFree_v2", CuAddress)                                                       \
  X(host_register, "cuMemHostRegister_v2", void*, std::size_t, unsigned)                          \
  X(host_unregister, "cuMemHostUnregister", void*)                                                \
  X(copy_to_device, "cuMemcpyHtoDAsync_v2", CuAddress, const void*, std::size_t, CuStream)        \
  X(copy_to_host, "cuMemcpyDtoHAsync_v2", void*, CuAddress, std::size_t, CuStream)                \
  X(copy_on_device, "cuMemcpyDtoDAsync_v2", CuAddress, CuAddress, std::size_t, CuStream)          \
  X(copy_to_peer, "cuMemcpyPeerAsync", CuAddress, CuContext, CuAddress, CuContext, std::size_t, CuStream) \
  X(fill, "cuMemsetD8Async", CuAddress, unsigned char, std::size_t, CuStream)                     \
  X(stream_create, "cuStreamCreate", CuStream*, unsigned)                                         \
  X(stream_destroy, "cuStreamDestroy_v2", CuStream)                                               \
  X(stream_synchronize, "cuStreamSynchronize", CuStream)                                          \
  X(stream_wait_event, "cuStreamWaitEvent", CuStream, CuEvent, unsigned)                          \
  X(event_create, "cuEventCreate", CuEvent*, unsigned)                                            \
  X(event_destroy, "cuEventDestroy_v2", CuEvent)                                                  \
  X(event_record, "cuEventRecord", CuEvent, CuStream)                                             \
  X(event_query, "cuEventQuery", CuEvent)                                                         \
  X(event_synchronize, "cuEventSynchronize", CuEvent)

// Virtual memory management: all or none of these. A driver without them is used through plain allocations.
#define GPUFS_CUDA_VIRTUAL_MEMORY(X)                                                              \
  X(granularity, "cuMemGetAllocationGranularity", std::size_t*, const CuAllocationProperties*, unsigned) \
  X(address_reserve, "cuMemAddressReserve", CuAddress*, std::size_t, std::size_t, CuAddress, unsigned long long) \
  X(address_free, "cuMemAddressFree", CuAddress, std::size_t)                                     \
  X(memory_create, "cuMemCreate", CuMemoryHandle*, std::size_t, const CuAllocationProperties*, unsigned long long) \
  X(memory_release, "cuMemRelease", CuMemoryHandle)                                               \
  X(memory_map, "cuMemMap", CuAddress, std::size_t, std::size_t, CuMemoryHandle, unsigned long long) \
  X(memory_unmap, "cuMemUnmap", CuAddress, std::size_t)                                           \
  X(memory_set_access, "cuMemSetAccess", CuAddress, std::size_t, const CuAccess*, std::size_t)    \
  X(memory_export, "cuMemExportToShareableHandle", void*, CuMemoryHandle, int, unsigned long long)

// Each for itself; null where the driver has none.
#define GPUFS_CUDA_OPTIONAL(X)                                                                    \
  X(launch_host, "cuLaunchHostFunc", CuStream, void (*)(void*), void*)                            \
  X(stream_wait_value, "cuStreamWaitValue32_v2", CuStream, CuAddress, std::uint32_t, unsigned)    \
  X(stream_context, "cuStreamGetCtx", CuStream, CuContext*)                                       \
  X(stream_capturing, "cuStreamIsCapturing", CuStream, int*)                                      \
  X(host_address, "cuMemHostGetDevicePointer_v2", CuAddress*, void*, unsigned)                    \
  X(pointer_attribute, "cuPointerGetAttribute", void*, int, CuAddress)
// clang-format on

#define GPUFS_CUDA_MEMBER(member, symbol, ...) CuResult (*member)(__VA_ARGS__) = nullptr;
struct Functions {
  GPUFS_CUDA_REQUIRED(GPUFS_CUDA_MEMBER)
  GPUFS_CUDA_VIRTUAL_MEMORY(GPUFS_CUDA_MEMBER)
  GPUFS_CUDA_OPTIONAL(GPUFS_CUDA_MEMBER)
};
#undef GPUFS_CUDA_MEMBER

}  // namespace gpufs::cuda
