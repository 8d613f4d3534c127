#include "drivers/gpu/vendor_library.h"

#include <dlfcn.h>
#include <strings.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <numeric>

namespace gpufs::gpu {
namespace {

std::atomic<bool> ending{false};

// "0 = GPU-4f3e... (NVIDIA H200), 1 = ...".
std::string list(const VendorLibrary& library, int found) {
  std::string text;
  for (int ordinal = 0; ordinal < found; ++ordinal) {
    std::array<char, 256> name{};
    library.functions().device_name(name.data(), int{name.size()}, ordinal);
    const std::string uuid = library.uuid(ordinal);
    text += (ordinal == 0 ? "" : ", ") + std::to_string(ordinal);
    if (!uuid.empty()) text += " = " + uuid;
    text += std::string(" (") + name.data() + ")";
  }
  return text;
}

// The devices that a number or the beginning of a UUID stands for.
std::vector<int> matches(const VendorLibrary& library, int found, const std::string& word) {
  constexpr std::size_t kDigits = 4;  // more than any number of devices has
  std::vector<int> ordinals;
  if (std::all_of(word.begin(), word.end(), [](unsigned char letter) { return std::isdigit(letter); })) {
    if (word.empty() || word.size() > kDigits) return {};
    if (const int number = std::stoi(word); number < found) ordinals.push_back(number);
    return ordinals;
  }
  for (int ordinal = 0; ordinal < found; ++ordinal) {
    if (::strncasecmp(library.uuid(ordinal).c_str(), word.c_str(), word.size()) == 0) ordinals.push_back(ordinal);
  }
  return ordinals;
}

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

Result<std::vector<int>> choose_devices(const char* driver, const VendorLibrary& library, int found,
                                        const DriverOptions& options) {
  const std::string prefix = std::string(driver) + ": ";
  if (options.devices < 0) return Status{EINVAL, prefix + "the number of devices cannot be negative"};
  const auto exist = [&] { return ": there are " + list(library, found); };
  if (options.devices > found) {
    return Status{ENXIO, prefix + std::to_string(options.devices) + " GPUs are asked for" + exist()};
  }
  std::vector<int> ordinals;
  if (options.chosen.empty()) {
    ordinals.resize(static_cast<std::size_t>(options.devices != 0 ? options.devices : found));
    std::iota(ordinals.begin(), ordinals.end(), 0);
  }
  for (const std::string& word : options.chosen) {
    const std::vector<int> fitting = matches(library, found, word);
    const auto refusal = [&](int error, const char* before, const char* after) {
      return Status(error, std::string(prefix).append(before).append(word).append(after).append(exist()));
    };
    if (fitting.empty()) return refusal(ENXIO, "there is no GPU \"", "\"");
    if (fitting.size() > 1) return refusal(EINVAL, "several GPUs begin with \"", "\"");
    if (std::find(ordinals.begin(), ordinals.end(), fitting.front()) != ordinals.end()) {
      return refusal(EINVAL, "the GPU \"", "\" is chosen twice");
    }
    ordinals.push_back(fitting.front());
  }
  return ordinals;
}

}  // namespace gpufs::gpu
