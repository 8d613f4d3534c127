// NVIDIA's cuFile as a direct path: taken only where GPUDirect Storage is really active, since cuFile's own way through
// the host is far slower than our fallback.
// The path belongs to the TransferEngine. The library, once opened, stays loaded: it has threads of its own.
// Any thread may call any function.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "io/direct_path.h"

namespace gpufs {

// What cufile.h of the vendor declares, as far as it is used here.
struct CufileError {
  int library;  // 0: success; 5000 and more otherwise
  int driver;   // the CUDA driver's code when the failure is its
};
struct CufileDescriptor {
  int type;  // 1: a file descriptor
  union {
    int fd;
    void* handle;
  } handle;
  const void* operations;
};
struct CufileProperties {
  struct {
    unsigned major_version;
    unsigned minor_version;
    std::size_t poll_threshold_bytes;
    std::size_t largest_direct_bytes;
    unsigned supported;  // bits: which storage the kernel module serves
    unsigned control;
  } module;
  unsigned features;
  unsigned device_cache_bytes;
  unsigned buffer_cache_bytes;
  unsigned pinned_bytes;
  unsigned batch_entries;
  unsigned batch_timeout_ms;
  std::byte later[256];  // newer libraries write more
};

// The library's functions; tests fill this in with their own.
struct CufileCalls {
  CufileError (*driver_open)() = nullptr;
  CufileError (*driver_properties)(CufileProperties*) = nullptr;
  CufileError (*handle_register)(void** handle, CufileDescriptor*) = nullptr;
  void (*handle_deregister)(void* handle) = nullptr;
  ssize_t (*read)(void* handle, void* device_base, std::size_t bytes, off_t file_offset, off_t device_offset) = nullptr;
  ssize_t (*write)(void* handle, const void* device_base, std::size_t bytes, off_t file_offset,
                   off_t device_offset) = nullptr;
};

// Looks for the kernel module first and opens the library only if it is there. Always a path; one that refuses
// everything, with the reason, where it cannot work.
std::shared_ptr<DirectPath> open_cufile_path();

// The same after the library has been found. module_present: the kernel module's device node is there.
std::shared_ptr<DirectPath> make_cufile_path(const CufileCalls& calls, bool module_present);

}  // namespace gpufs
