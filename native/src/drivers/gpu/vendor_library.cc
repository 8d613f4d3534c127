#include "drivers/gpu/vendor_library.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>

namespace gpufs::gpu {
namespace {

std::atomic<bool> ending{false};

}  // namespace

void* open_library(const std::string& path, std::string* why) {
  void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (library == nullptr) {
    const char* const text = ::dlerror();
    *why = text != nullptr ? text : "no reason given";
  }
  return library;
}

void* find_symbol(void* library, const char* symbol) { return ::dlsym(library, symbol); }

bool process_is_ending() { return ending.load(std::memory_order_acquire); }

void watch_process_end() {
  std::atexit([] { ending.store(true, std::memory_order_release); });
}

// Symbols that end in _v2 are those whose 64-bit form superseded an older one.
const char* VendorLibrary::resolve(void* handle, Vendor vendor) {
  const char* missing = nullptr;
  const auto optional = [&](auto& function, const char* cuda, const char* hip) {
    return function.resolve(handle, vendor == Vendor::kCuda ? cuda : hip);
  };
  const auto required = [&](auto& function, const char* cuda, const char* hip) {
    if (!optional(function, cuda, hip) && missing == nullptr) missing = function.symbol();
  };
  has_virtual_memory_ = true;
  const auto virtual_memory = [&](auto& function, const char* cuda, const char* hip) {
    if (!optional(function, cuda, hip)) has_virtual_memory_ = false;
  };
  Functions& f = functions_;
  required(f.init, "cuInit", "hipInit");
  required(f.device_count, "cuDeviceGetCount", "hipGetDeviceCount");
  required(f.device_name, "cuDeviceGetName", "hipDeviceGetName");
  required(f.device_attribute, "cuDeviceGetAttribute", "hipDeviceGetAttribute");
  required(f.device_pci_address, "cuDeviceGetPCIBusId", "hipDeviceGetPCIBusId");
  required(f.device_total_memory, "cuDeviceTotalMem_v2", "hipDeviceTotalMem");
  required(f.synchronize, "cuCtxSynchronize", "hipDeviceSynchronize");
  required(f.memory_info, "cuMemGetInfo_v2", "hipMemGetInfo");
  required(f.memory_allocate, "cuMemAlloc_v2", "hipMalloc");
  required(f.memory_free, "cuMemFree_v2", "hipFree");
  required(f.host_register, "cuMemHostRegister_v2", "hipHostRegister");
  required(f.host_unregister, "cuMemHostUnregister", "hipHostUnregister");
  required(f.copy_to_device, "cuMemcpyHtoDAsync_v2", "hipMemcpyHtoDAsync");
  required(f.copy_to_host, "cuMemcpyDtoHAsync_v2", "hipMemcpyDtoHAsync");
  required(f.copy_on_device, "cuMemcpyDtoDAsync_v2", "hipMemcpyDtoDAsync");
  required(f.fill, "cuMemsetD8Async", "hipMemsetD8Async");
  required(f.stream_create, "cuStreamCreate", "hipStreamCreateWithFlags");
  required(f.stream_destroy, "cuStreamDestroy_v2", "hipStreamDestroy");
  required(f.stream_synchronize, "cuStreamSynchronize", "hipStreamSynchronize");
  required(f.event_create, "cuEventCreate", "hipEventCreateWithFlags");
  required(f.event_destroy, "cuEventDestroy_v2", "hipEventDestroy");
  required(f.event_record, "cuEventRecord", "hipEventRecord");
  required(f.event_query, "cuEventQuery", "hipEventQuery");
  required(f.event_synchronize, "cuEventSynchronize", "hipEventSynchronize");

  virtual_memory(f.granularity, "cuMemGetAllocationGranularity", "hipMemGetAllocationGranularity");
  virtual_memory(f.address_reserve, "cuMemAddressReserve", "hipMemAddressReserve");
  virtual_memory(f.address_free, "cuMemAddressFree", "hipMemAddressFree");
  virtual_memory(f.memory_create, "cuMemCreate", "hipMemCreate");
  virtual_memory(f.memory_release, "cuMemRelease", "hipMemRelease");
  virtual_memory(f.memory_map, "cuMemMap", "hipMemMap");
  virtual_memory(f.memory_unmap, "cuMemUnmap", "hipMemUnmap");
  virtual_memory(f.memory_set_access, "cuMemSetAccess", "hipMemSetAccess");

  optional(f.device_can_access_peer, "cuDeviceCanAccessPeer", "hipDeviceCanAccessPeer");
  optional(f.memory_export, "cuMemExportToShareableHandle", "hipMemExportToShareableHandle");
  optional(f.memory_import, "cuMemImportFromShareableHandle", "hipMemImportFromShareableHandle");
  optional(f.launch_host, "cuLaunchHostFunc", "hipLaunchHostFunc");
  optional(f.stream_capturing, "cuStreamIsCapturing", "hipStreamIsCapturing");
  optional(f.exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", "hipThreadExchangeStreamCaptureMode");
  optional(f.host_address, "cuMemHostGetDevicePointer_v2", "hipHostGetDevicePointer");
  optional(f.pointer_attribute, "cuPointerGetAttribute", "hipPointerGetAttribute");
  optional(f.address_range, "cuMemGetAddressRange_v2", "hipMemGetAddressRange");
  optional(f.ipc_open, "cuIpcOpenMemHandle_v2", "hipIpcOpenMemHandle");
  optional(f.ipc_close, "cuIpcCloseMemHandle", "hipIpcCloseMemHandle");
  return missing;
}

std::string public_name(std::string symbol) {
  if (symbol.ends_with("_v2")) symbol.resize(symbol.size() - 3);
  return symbol;
}

}  // namespace gpufs::gpu
