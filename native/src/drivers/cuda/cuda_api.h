// The part of the CUDA driver interface that gpufs uses, beside gpu/api.h: entry points, types and constants, declared
// so that neither the build nor the import needs CUDA's own headers. Owned by nobody (declarations only). Any thread
// may call the driver's functions once Library::load() has succeeded.
#pragma once

#include <cstddef>
#include <cstdint>

#include "drivers/gpu/api.h"

namespace gpufs::cuda {

namespace api = gpu::api;

// Opaque objects and plain numbers, as the driver's binary interface has them on 64-bit Linux.
using CuDevice = int;
using CuAddress = unsigned long long;       // NOLINT(google-runtime-int): the interface says so
using CuMemoryHandle = unsigned long long;  // NOLINT(google-runtime-int)
using CuContext = struct CuContextObject*;

enum : api::Code {
  kCuInvalidContext = 201,
  kCuNvlinkUncorrectable = 220,
  kCuContained = 226,
  kCuHardwareStackError = 714,
  kCuNotPermitted = 800,
};

enum : int {
  kCuAttributeVirtualMemory = 102,
  kCuAttributeExportDescriptor = 103,
  kCuAttributeDirectRdmaWithVirtualMemory = 110,
  kCuAttributeReadOnlyHostRegister = 113,

  kCuPointerMemoryType = 2,
  kCuPointerIsManaged = 8,
  kCuPointerDeviceOrdinal = 9,
};

enum : unsigned {
  kCuHostRegisterReadOnly = 8,
};

// X(member, symbol, parameters...): every entry point returns an api::Code. Symbols with a _v2 ending are those whose
// 64-bit form superseded an older one.
// clang-format off
#define GPUFS_CUDA_REQUIRED(X)                                                                    \
  X(init, "cuInit", unsigned)                                                                     \
  X(driver_version, "cuDriverGetVersion", int*)                                                   \
  X(error_name, "cuGetErrorName", api::Code, const char**)                                         \
  X(error_text, "cuGetErrorString", api::Code, const char**)                                       \
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
  X(copy_to_device, "cuMemcpyHtoDAsync_v2", CuAddress, const void*, std::size_t, api::Stream)        \
  X(copy_to_host, "cuMemcpyDtoHAsync_v2", void*, CuAddress, std::size_t, api::Stream)                \
  X(copy_on_device, "cuMemcpyDtoDAsync_v2", CuAddress, CuAddress, std::size_t, api::Stream)          \
  X(copy_to_peer, "cuMemcpyPeerAsync", CuAddress, CuContext, CuAddress, CuContext, std::size_t, api::Stream) \
  X(fill, "cuMemsetD8Async", CuAddress, unsigned char, std::size_t, api::Stream)                     \
  X(stream_create, "cuStreamCreate", api::Stream*, unsigned)                                         \
  X(stream_destroy, "cuStreamDestroy_v2", api::Stream)                                               \
  X(stream_synchronize, "cuStreamSynchronize", api::Stream)                                          \
  X(stream_wait_event, "cuStreamWaitEvent", api::Stream, api::Event, unsigned)                          \
  X(event_create, "cuEventCreate", api::Event*, unsigned)                                            \
  X(event_destroy, "cuEventDestroy_v2", api::Event)                                                  \
  X(event_record, "cuEventRecord", api::Event, api::Stream)                                             \
  X(event_query, "cuEventQuery", api::Event)                                                         \
  X(event_synchronize, "cuEventSynchronize", api::Event)

// Virtual memory management: all or none of these. A driver without them is used through plain allocations.
#define GPUFS_CUDA_VIRTUAL_MEMORY(X)                                                              \
  X(granularity, "cuMemGetAllocationGranularity", std::size_t*, const api::AllocationProperties*, unsigned) \
  X(address_reserve, "cuMemAddressReserve", CuAddress*, std::size_t, std::size_t, CuAddress, unsigned long long) \
  X(address_free, "cuMemAddressFree", CuAddress, std::size_t)                                     \
  X(memory_create, "cuMemCreate", CuMemoryHandle*, std::size_t, const api::AllocationProperties*, unsigned long long) \
  X(memory_release, "cuMemRelease", CuMemoryHandle)                                               \
  X(memory_map, "cuMemMap", CuAddress, std::size_t, std::size_t, CuMemoryHandle, unsigned long long) \
  X(memory_unmap, "cuMemUnmap", CuAddress, std::size_t)                                           \
  X(memory_set_access, "cuMemSetAccess", CuAddress, std::size_t, const api::Access*, std::size_t)    \
  X(memory_export, "cuMemExportToShareableHandle", void*, CuMemoryHandle, int, unsigned long long)

// Each for itself; null where the driver has none.
#define GPUFS_CUDA_OPTIONAL(X)                                                                    \
  X(launch_host, "cuLaunchHostFunc", api::Stream, void (*)(void*), void*)                            \
  X(stream_wait_value, "cuStreamWaitValue32_v2", api::Stream, CuAddress, std::uint32_t, unsigned)    \
  X(stream_context, "cuStreamGetCtx", api::Stream, CuContext*)                                       \
  X(stream_capturing, "cuStreamIsCapturing", api::Stream, int*)                                      \
  X(host_address, "cuMemHostGetDevicePointer_v2", CuAddress*, void*, unsigned)                    \
  X(pointer_attribute, "cuPointerGetAttribute", void*, int, CuAddress)
// clang-format on

#define GPUFS_CUDA_MEMBER(member, symbol, ...) api::Code (*member)(__VA_ARGS__) = nullptr;
struct Functions {
  GPUFS_CUDA_REQUIRED(GPUFS_CUDA_MEMBER)
  GPUFS_CUDA_VIRTUAL_MEMORY(GPUFS_CUDA_MEMBER)
  GPUFS_CUDA_OPTIONAL(GPUFS_CUDA_MEMBER)
};
#undef GPUFS_CUDA_MEMBER

}  // namespace gpufs::cuda

#define GPUFS_CUDA_SYMBOL(member, symbol, ...) \
  template <>                                  \
  inline constexpr const char* kSymbol<&cuda::Functions::member> = symbol;
namespace gpufs::gpu {
GPUFS_CUDA_REQUIRED(GPUFS_CUDA_SYMBOL)
GPUFS_CUDA_VIRTUAL_MEMORY(GPUFS_CUDA_SYMBOL)
GPUFS_CUDA_OPTIONAL(GPUFS_CUDA_SYMBOL)
}  // namespace gpufs::gpu
#undef GPUFS_CUDA_SYMBOL
