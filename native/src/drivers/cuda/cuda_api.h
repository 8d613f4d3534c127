// What only CUDA's driver interface has, beside gpu/api.h: types, codes and attributes. Declared here so that neither
// the build nor the import needs CUDA's own headers.
#pragma once

#include <array>

#include "drivers/gpu/api.h"

namespace gpufs::cuda {

namespace api = gpu::api;

// The types of the driver's binary interface on 64-bit Linux.
using CuDevice = int;
using CuAddress = unsigned long long;       // NOLINT(google-runtime-int): the interface says so
using CuMemoryHandle = unsigned long long;  // NOLINT(google-runtime-int)
using CuContext = struct CuContextObject*;
using CuUuid = std::array<unsigned char, 16>;
static_assert(sizeof(CuUuid) == 16);

enum : api::Code {
  kCuInvalidContext = 201,
  kCuNvlinkUncorrectable = 220,
  kCuContained = 226,
  kCuHardwareStackError = 714,
};

enum : int {
  kCuAttributeSameHostAddresses = 91,
  kCuAttributeVirtualMemory = 102,
  kCuAttributeExportDescriptor = 103,
  kCuAttributeDirectRdmaWithVirtualMemory = 110,
  kCuAttributeReadOnlyHostRegister = 113,
  kCuAttributeHostNode = 134,  // -1: the machine has no NUMA nodes
  kCuAttributeHostVirtualMemory = 141,

  kCuPointerContext = 1,
  kCuPointerMemoryType = 2,
  kCuPointerIsManaged = 8,
  kCuPointerDeviceOrdinal = 9,
};

enum : unsigned {
  kCuHostRegisterReadOnly = 8,
};

// How the copies of a batch may read their sources.
struct CuCopyAttributes {
  int source_order;
  api::Location source_hint;
  api::Location destination_hint;
  unsigned flags;
};
static_assert(sizeof(CuCopyAttributes) == 24);
inline constexpr int kCuSourceInStreamOrder = 1;

}  // namespace gpufs::cuda
