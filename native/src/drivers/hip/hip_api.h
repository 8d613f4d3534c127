// The part of AMD's HIP runtime that gpufs uses, beside gpu/api.h: entry points, types and constants, declared so that
// neither the build nor the import needs ROCm's own headers. Owned by nobody (declarations only). Any thread may call
// the runtime's functions once Library::load() has succeeded.
#pragma once

#include <cstddef>
#include <cstdint>

#include "drivers/gpu/api.h"

namespace gpufs::hip {

namespace api = gpu::api;

// As the runtime's binary interface has them on 64-bit Linux. A device is its ordinal.
using HipMemoryHandle = struct HipMemoryHandleObject*;

enum : api::Code {
  kHipPriorLaunchFailure = 53,
};

// hipRuntimeGetVersion() answers major * 10,000,000 + minor * 100,000 + patch.
inline constexpr int kHipVersion6 = 60'000'000;

inline constexpr std::uint32_t kHipWholeValue = 0xffffffff;

enum : int {
  kHipAttributeVirtualMemory = 89,
  kHipSymbolFound = 0,  // what hipGetProcAddress says of a symbol
};

struct HipPointerAttributes {
  int type;
  int device;
  void* device_pointer;
  void* host_pointer;
  int managed;
  unsigned flags;
};
static_assert(sizeof(HipPointerAttributes) == 32);

inline constexpr const char* kKernelDriver = "/dev/kfd";

inline constexpr const char* kFileRead = "hipAmdFileRead";
inline constexpr const char* kFileWrite = "hipAmdFileWrite";

// What hipAmdFileRead and hipAmdFileWrite take by value: zeroed, then the descriptor set.
union HipFileHandle {
  void* handle;
  int fd;
};
static_assert(sizeof(HipFileHandle) == 8);

// status: a negative errno. Size 0 and early failures leave size_copied and status as they were.
using HipFileCall = api::Code (*)(HipFileHandle handle, void* device, std::uint64_t size, std::int64_t file_offset,
                                  std::uint64_t* size_copied, std::int32_t* status);

// X(member, symbol, parameters...): every entry point returns an api::Code.
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
  X(copy_to_device, "hipMemcpyHtoDAsync", void*, const void*, std::size_t, api::Stream)             \
  X(copy_to_host, "hipMemcpyDtoHAsync", void*, void*, std::size_t, api::Stream)                     \
  X(copy_on_device, "hipMemcpyDtoDAsync", void*, void*, std::size_t, api::Stream)                   \
  X(fill, "hipMemsetD8Async", void*, unsigned char, std::size_t, api::Stream)                       \
  X(stream_create, "hipStreamCreateWithFlags", api::Stream*, unsigned)                              \
  X(stream_destroy, "hipStreamDestroy", api::Stream)                                                \
  X(stream_synchronize, "hipStreamSynchronize", api::Stream)                                        \
  X(stream_wait_event, "hipStreamWaitEvent", api::Stream, api::Event, unsigned)                       \
  X(event_create, "hipEventCreateWithFlags", api::Event*, unsigned)                                 \
  X(event_destroy, "hipEventDestroy", api::Event)                                                   \
  X(event_record, "hipEventRecord", api::Event, api::Stream)                                          \
  X(event_query, "hipEventQuery", api::Event)                                                       \
  X(event_synchronize, "hipEventSynchronize", api::Event)

// Virtual memory management: all or none of these. A runtime without them is used through plain allocations.
#define GPUFS_HIP_VIRTUAL_MEMORY(X)                                                               \
  X(granularity, "hipMemGetAllocationGranularity", std::size_t*, const api::AllocationProperties*, int) \
  X(address_reserve, "hipMemAddressReserve", void**, std::size_t, std::size_t, void*, unsigned long long) \
  X(address_free, "hipMemAddressFree", void*, std::size_t)                                        \
  X(memory_create, "hipMemCreate", HipMemoryHandle*, std::size_t, const api::AllocationProperties*, unsigned long long) \
  X(memory_release, "hipMemRelease", HipMemoryHandle)                                             \
  X(memory_map, "hipMemMap", void*, std::size_t, std::size_t, HipMemoryHandle, unsigned long long) \
  X(memory_unmap, "hipMemUnmap", void*, std::size_t)                                              \
  X(memory_set_access, "hipMemSetAccess", void*, std::size_t, const api::Access*, std::size_t)

// Copies between devices: all or none. Without them such copies go through the host.
#define GPUFS_HIP_PEERS(X)                                                                        \
  X(device_can_access_peer, "hipDeviceCanAccessPeer", int*, int, int)                             \
  X(device_enable_peer, "hipDeviceEnablePeerAccess", int, unsigned)                               \
  X(copy_to_peer, "hipMemcpyPeerAsync", void*, int, const void*, int, std::size_t, api::Stream)

// Each for itself; null where the runtime has none.
#define GPUFS_HIP_OPTIONAL(X)                                                                     \
  X(runtime_version, "hipRuntimeGetVersion", int*)                                                \
  X(memory_export, "hipMemExportToShareableHandle", void*, HipMemoryHandle, int, unsigned long long) \
  X(pointer_attributes, "hipPointerGetAttributes", HipPointerAttributes*, const void*)            \
  X(launch_host, "hipLaunchHostFunc", api::Stream, void (*)(void*), void*)                          \
  X(stream_wait_value, "hipStreamWaitValue32", api::Stream, void*, std::uint32_t, unsigned, std::uint32_t) \
  X(stream_device, "hipStreamGetDevice", api::Stream, int*)                                         \
  X(stream_capturing, "hipStreamIsCapturing", api::Stream, int*)                                    \
  X(host_address, "hipHostGetDevicePointer", void**, void*, unsigned)                             \
  X(pointer_attribute, "hipPointerGetAttribute", void*, int, void*)                               \
  X(symbol_address, "hipGetProcAddress", const char*, void**, int, std::uint64_t, int*)
// clang-format on

#define GPUFS_HIP_MEMBER(member, symbol, ...) api::Code (*member)(__VA_ARGS__) = nullptr;
struct Functions {
  GPUFS_HIP_REQUIRED(GPUFS_HIP_MEMBER)
  GPUFS_HIP_VIRTUAL_MEMORY(GPUFS_HIP_MEMBER)
  GPUFS_HIP_PEERS(GPUFS_HIP_MEMBER)
  GPUFS_HIP_OPTIONAL(GPUFS_HIP_MEMBER)
  const char* (*error_name)(api::Code) = nullptr;  // these two are required, too
  const char* (*error_text)(api::Code) = nullptr;
};
#undef GPUFS_HIP_MEMBER

}  // namespace gpufs::hip

#define GPUFS_HIP_SYMBOL(member, symbol, ...) \
  template <>                                 \
  inline constexpr const char* kSymbol<&hip::Functions::member> = symbol;
namespace gpufs::gpu {
GPUFS_HIP_REQUIRED(GPUFS_HIP_SYMBOL)
GPUFS_HIP_VIRTUAL_MEMORY(GPUFS_HIP_SYMBOL)
GPUFS_HIP_PEERS(GPUFS_HIP_SYMBOL)
GPUFS_HIP_OPTIONAL(GPUFS_HIP_SYMBOL)
}  // namespace gpufs::gpu
#undef GPUFS_HIP_SYMBOL
