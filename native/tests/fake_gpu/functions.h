// The functions that both vendors' libraries have in the same form, by CUDA's or HIP's names. HIP declares addresses
// and handles of memory as pointers, CUDA as numbers of 64 bits; on 64-bit Linux both are passed alike. Included once
// by each fake, within extern "C" and after machine.h. FAKE_CUDA: by CUDA's names. FAKE_GPU_BARE: without all that a
// library may lack. FAKE_GPU_OLD: without a function that each must have.

#ifdef FAKE_CUDA
#define BOTH(cuda, hip, parameters, work) CALL(cuda, parameters, work)
#define BOTH_ON_DEVICE(cuda, hip, parameters, work) ON_DEVICE(cuda, parameters, work)
#else
#define BOTH(cuda, hip, parameters, work) CALL(hip, parameters, work)
#define BOTH_ON_DEVICE(cuda, hip, parameters, work) ON_DEVICE(hip, parameters, work)
#endif

using fake_gpu::Address;
using fake_gpu::Handle;

BOTH(cuDeviceGetName, hipDeviceGetName, (char* name, int bytes, int device), m.device_name(name, bytes, device))
BOTH(cuDeviceGetPCIBusId, hipDeviceGetPCIBusId, (char* text, int bytes, int device), m.pci_address(text, bytes, device))
BOTH(cuDeviceTotalMem_v2, hipDeviceTotalMem, (std::size_t * bytes, int /*device*/), m.total_memory(bytes))
BOTH_ON_DEVICE(cuCtxSynchronize, hipDeviceSynchronize, (), m.synchronize(lock))

BOTH_ON_DEVICE(cuMemGetInfo_v2, hipMemGetInfo, (std::size_t * free_bytes, std::size_t* total),
               m.memory_info(free_bytes, total))
BOTH_ON_DEVICE(cuMemAlloc_v2, hipMalloc, (Address * address, std::size_t bytes), m.allocate(address, bytes))
BOTH_ON_DEVICE(cuMemFree_v2, hipFree, (Address address), m.free(lock, address))
#ifndef FAKE_GPU_OLD
BOTH_ON_DEVICE(cuMemHostRegister_v2, hipHostRegister, (void* address, std::size_t bytes, unsigned flags),
               m.pin(address, bytes, flags))
#endif
BOTH_ON_DEVICE(cuMemHostUnregister, hipHostUnregister, (void* address), m.unpin(lock, address))

BOTH_ON_DEVICE(cuMemcpyHtoDAsync_v2, hipMemcpyHtoDAsync,
               (Address destination, const void* source, std::size_t bytes, api::Stream stream),
               m.copy_in(destination, source, bytes, stream))
BOTH_ON_DEVICE(cuMemcpyDtoHAsync_v2, hipMemcpyDtoHAsync,
               (void* destination, Address source, std::size_t bytes, api::Stream stream),
               m.copy_out(destination, source, bytes, stream))
BOTH_ON_DEVICE(cuMemcpyDtoDAsync_v2, hipMemcpyDtoDAsync,
               (Address destination, Address source, std::size_t bytes, api::Stream stream),
               m.copy_within(destination, source, bytes, stream))
BOTH_ON_DEVICE(cuMemsetD8Async, hipMemsetD8Async,
               (Address destination, unsigned char value, std::size_t bytes, api::Stream stream),
               m.fill(destination, value, bytes, stream))

BOTH_ON_DEVICE(cuStreamCreate, hipStreamCreateWithFlags, (api::Stream * stream, unsigned flags),
               m.create_stream(lock, stream, flags))
BOTH(cuStreamDestroy_v2, hipStreamDestroy, (api::Stream stream), m.destroy_stream(lock, stream))
BOTH_ON_DEVICE(cuEventCreate, hipEventCreateWithFlags, (api::Event * event, unsigned flags),
               m.create_event(event, flags))
BOTH(cuEventDestroy_v2, hipEventDestroy, (api::Event event), m.destroy_event(event))
BOTH_ON_DEVICE(cuEventRecord, hipEventRecord, (api::Event event, api::Stream stream), m.record(event, stream))
BOTH_ON_DEVICE(cuEventQuery, hipEventQuery, (api::Event event), m.query(event))

#ifndef FAKE_GPU_BARE
BOTH(cuDeviceCanAccessPeer, hipDeviceCanAccessPeer, (int* value, int a, int b), m.can_access_peer(value, a, b))
BOTH_ON_DEVICE(cuLaunchHostFunc, hipLaunchHostFunc, (api::Stream stream, void (*function)(void*), void* argument),
               m.call_host(stream, function, argument))
BOTH(cuThreadExchangeStreamCaptureMode, hipThreadExchangeStreamCaptureMode, (int* mode), m.exchange_capture_mode(mode))
BOTH_ON_DEVICE(cuStreamIsCapturing, hipStreamIsCapturing, (api::Stream /*stream*/, int* capturing),
               m.is_capturing(capturing))
BOTH_ON_DEVICE(cuMemHostGetDevicePointer_v2, hipHostGetDevicePointer, (Address * seen, void* address, unsigned flags),
               m.address_of_pinned(seen, address, flags))
BOTH_ON_DEVICE(cuMemGetAddressRange_v2, hipMemGetAddressRange, (Address * start, std::size_t* bytes, Address address),
               m.address_range(start, bytes, address))
BOTH_ON_DEVICE(cuIpcGetMemHandle, hipIpcGetMemHandle, (api::IpcHandle * handle, Address address),
               m.ipc_handle(handle, address))
BOTH_ON_DEVICE(cuIpcOpenMemHandle_v2, hipIpcOpenMemHandle, (Address * address, api::IpcHandle handle, unsigned flags),
               flags == api::kIpcLazyPeerAccess ? m.ipc_open(address, handle) : api::kInvalidValue)
BOTH_ON_DEVICE(cuIpcCloseMemHandle, hipIpcCloseMemHandle, (Address address), m.ipc_close(address))

BOTH(cuMemGetAllocationGranularity, hipMemGetAllocationGranularity,
     (std::size_t * bytes, const api::AllocationProperties* properties, unsigned /*option*/),
     m.granularity(bytes, *properties))
BOTH(cuMemAddressReserve, hipMemAddressReserve,
     (Address * address, std::size_t bytes, std::size_t /*alignment*/, Address /*where*/, std::uint64_t /*flags*/),
     m.reserve(address, bytes))
BOTH(cuMemAddressFree, hipMemAddressFree, (Address address, std::size_t bytes), m.unreserve(address, bytes))
BOTH(cuMemCreate, hipMemCreate,
     (Handle * handle, std::size_t bytes, const api::AllocationProperties* properties, std::uint64_t /*flags*/),
     m.create(handle, bytes, *properties))
BOTH(cuMemRelease, hipMemRelease, (Handle handle), m.release(handle))
BOTH(cuMemMap, hipMemMap,
     (Address address, std::size_t bytes, std::size_t offset, Handle handle, std::uint64_t /*flags*/),
     m.map(address, bytes, offset, handle))
BOTH(cuMemUnmap, hipMemUnmap, (Address address, std::size_t bytes), m.unmap(address, bytes))
BOTH(cuMemSetAccess, hipMemSetAccess,
     (Address address, std::size_t bytes, const api::Access* access, std::size_t count),
     m.set_access(address, bytes, access, count))
BOTH(cuMemRetainAllocationHandle, hipMemRetainAllocationHandle, (Handle * handle, Address address),
     m.retain(handle, address))
BOTH(cuMemExportToShareableHandle, hipMemExportToShareableHandle,
     (void* out, Handle handle, int type, std::uint64_t /*flags*/), m.export_memory(out, handle, type))
#endif
