// A vendor's library, opened at run time: the table of its functions, and what its result codes mean.
// Ownership: shared by everything that may still call it; the library itself stays loaded until the process ends.
// Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "drivers/driver.h"
#include "drivers/gpu/api.h"

namespace gpufs::gpu {

// Opens a library for the rest of the process, because it may have threads and exit handlers of its own. Null if it
// cannot be opened; `why` then has the reason.
void* open_library(const std::string& path, std::string* why);

void* find_symbol(void* library, const char* symbol);
template <typename Pointer>
bool resolve(void* library, const char* symbol, Pointer& pointer) {
  pointer = reinterpret_cast<Pointer>(find_symbol(library, symbol));
  return pointer != nullptr;
}

// True once the process runs its exit handlers. The vendor's library shuts down in one of them, in an order that we do
// not know, so it must not be called any more. Exit handlers run in the reverse order of their registration: call
// watch_process_end() once the library has registered its own.
bool process_is_ending();
void watch_process_end();

// A function of the vendor's library. Optional functions convert to false where the library has none.
template <typename... Parameters>
class Function {
 public:
  explicit operator bool() const { return pointer_ != nullptr; }
  [[nodiscard]] const char* symbol() const { return symbol_; }
  // kDeinitialized, without a call, once the process runs its exit handlers.
  api::Code operator()(Parameters... arguments) const {
    return process_is_ending() ? api::Code{api::kDeinitialized} : pointer_(arguments...);
  }
  bool resolve(void* library, const char* symbol) {
    symbol_ = symbol;
    return gpu::resolve(library, symbol, pointer_);
  }

 private:
  const char* symbol_ = nullptr;
  api::Code (*pointer_)(Parameters...) = nullptr;
};

// The functions that both vendors have in the same form. HIP declares addresses and memory handles as pointers, CUDA as
// numbers of 64 bits; on 64-bit Linux both are passed alike.
struct Functions {
  using Handle = std::uint64_t;      // of physical memory
  using Flags = unsigned long long;  // NOLINT(google-runtime-int): the interface says so

  Function<unsigned> init;
  Function<int*> device_count;
  Function<char*, int, int> device_name;
  Function<int*, int, int> device_attribute;
  Function<char*, int, int> device_pci_address;
  Function<std::size_t*, int> device_total_memory;
  Function<> synchronize;  // the current device, with all its streams
  Function<std::size_t*, std::size_t*> memory_info;
  Function<DeviceAddress*, std::size_t> memory_allocate;
  Function<DeviceAddress> memory_free;
  Function<void*, std::size_t, unsigned> host_register;
  Function<void*> host_unregister;
  Function<DeviceAddress, const void*, std::size_t, api::Stream> copy_to_device;
  Function<void*, DeviceAddress, std::size_t, api::Stream> copy_to_host;
  Function<DeviceAddress, DeviceAddress, std::size_t, api::Stream> copy_on_device;
  Function<DeviceAddress, unsigned char, std::size_t, api::Stream> fill;
  Function<api::Stream*, unsigned> stream_create;
  Function<api::Stream> stream_destroy;
  Function<api::Stream> stream_synchronize;
  Function<api::Event*, unsigned> event_create;
  Function<api::Event> event_destroy;
  Function<api::Event, api::Stream> event_record;
  Function<api::Event> event_query;

  // Virtual memory management. Without it memory is allocated plainly.
  Function<std::size_t*, const api::AllocationProperties*, unsigned> granularity;
  Function<DeviceAddress*, std::size_t, std::size_t, DeviceAddress, Flags> address_reserve;
  Function<DeviceAddress, std::size_t> address_free;
  Function<Handle*, std::size_t, const api::AllocationProperties*, Flags> memory_create;
  Function<Handle> memory_release;
  Function<DeviceAddress, std::size_t, std::size_t, Handle, Flags> memory_map;
  Function<DeviceAddress, std::size_t> memory_unmap;
  Function<DeviceAddress, std::size_t, const api::Access*, std::size_t> memory_set_access;

  // Optional, each on its own.
  Function<int*, int, int> device_can_access_peer;
  Function<void*, Handle, int, Flags> memory_export;
  Function<Handle*, void*, int> memory_import;
  Function<api::Stream, HostFunction, void*> launch_host;
  Function<api::Stream, int*> stream_capturing;
  Function<int*> exchange_capture_mode;  // of the calling thread
  Function<DeviceAddress*, void*, unsigned> host_address;
  Function<void*, int, DeviceAddress> pointer_attribute;
  Function<DeviceAddress*, std::size_t*, DeviceAddress> address_range;
  Function<DeviceAddress*, api::IpcHandle, unsigned> ipc_open;
  Function<DeviceAddress> ipc_close;
};

class VendorLibrary {
 public:
  virtual ~VendorLibrary() = default;

  [[nodiscard]] const Functions& functions() const { return functions_; }
  [[nodiscard]] bool has_virtual_memory() const { return has_virtual_memory_; }

  // A device's identity as the vendor's tools print it: "GPU-4f3e...". Empty if the library reports none.
  [[nodiscard]] virtual std::string uuid(int ordinal) const = 0;
  // What messages call the vendor's software: "this NVIDIA driver".
  [[nodiscard]] virtual const char* software() const = 0;
  // "CUDA_ERROR_OUT_OF_MEMORY (2): out of memory".
  [[nodiscard]] virtual std::string describe(api::Code code) const = 0;
  // Whether nothing works on the device in this process after this code.
  [[nodiscard]] virtual bool is_fatal(api::Code code) const = 0;

 protected:
  enum class Vendor { kCuda, kHip };
  // Fills the table. Returns the symbol of a required function that the library lacks, or null.
  const char* resolve(void* handle, Vendor vendor);

  Functions functions_;  // constant once the library is loaded, as is the next
  bool has_virtual_memory_ = false;
};

// A function as the vendor's manuals call it: "cuMemAlloc", although the symbol is "cuMemAlloc_v2".
std::string public_name(std::string symbol);

// The ordinals of the devices that the options choose among `found`, in the options' order. ENXIO, with a list of what
// there is, for a device that does not exist; EINVAL for one that is chosen twice, and for a UUID's beginning that
// several devices share.
Result<std::vector<int>> choose_devices(const char* driver, const VendorLibrary& library, int found,
                                        const DriverOptions& options);

}  // namespace gpufs::gpu
