// NVIDIA's cuFile as a fastpath. It is used only if GPUDirect Storage is really active, since cuFile's own way
// through the host is far slower than our fallback. Thread-safe. The library stays loaded: it has threads of its own.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "io/fastpath.h"

namespace gpufs {

// The part of the vendor's cufile.h that is used here.
struct CufileError {
  int library;  // 0: success; 5000 and more otherwise
  int driver;   // the CUDA driver's code when the failure is its
};
inline constexpr int kCufileAlreadyOpen = 5026;
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
    unsigned control;    // bits: how the library was set up
  } module;
  unsigned features;
  unsigned device_cache_bytes;
  unsigned buffer_cache_bytes;
  unsigned pinned_bytes;
  unsigned batch_entries;
  unsigned batch_timeout_ms;
  std::byte later[256];  // newer libraries write more
};
// The bits of `supported`, and of `control`.
inline constexpr unsigned kCufileNvme = 1U << 4;
inline constexpr unsigned kCufileNvmeFabrics = 1U << 5;
inline constexpr unsigned kCufileScsi = 1U << 6;
inline constexpr unsigned kCufileMayCopyThroughHost = 1U << 1;

inline constexpr const char* kCufileLibrary = "libcufile.so.0";
// Whether the kernel module is loaded and this process may use it.
bool cufile_module_present();

// Opens the library if the kernel module is loaded. Always returns a path: one that refuses everything, with the
// reason, if it cannot work. If the library may copy through the host, the path takes only files on storage that the
// kernel module serves. file_systems: those it may use in addition to local storage.
std::shared_ptr<Fastpath> open_cufile_path(const FileSystems& file_systems,
                                           bool module_present = cufile_module_present(),
                                           const std::string& library = kCufileLibrary);

// The bit of CufileProperties::module.supported for the way a block device is attached, by its path in sysfs
// ("../../devices/pci0000:00/.../nvme/nvme0/nvme0n1/nvme0n1p1"); 0: none, or unknown.
unsigned cufile_storage(const std::string& place);
// The same for a file system that is not on a local block device, by its type ("nfs4", "lustre").
unsigned cufile_file_system(std::string_view type);

}  // namespace gpufs
