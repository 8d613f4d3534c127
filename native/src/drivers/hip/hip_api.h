// What only AMD's HIP runtime has, beside gpu/api.h: types, codes, attributes and the calls for files. Declared here so
// that neither the build nor the import needs ROCm's own headers.
#pragma once

#include <array>
#include <cstdint>

#include "drivers/gpu/api.h"

namespace gpufs::hip {

namespace api = gpu::api;

// The types of the runtime's binary interface on 64-bit Linux. A device is its ordinal.
using HipMemoryHandle = struct HipMemoryHandleObject*;
using HipUuid = std::array<char, 16>;  // 16 hexadecimal digits as text
static_assert(sizeof(HipUuid) == 16);

enum : api::Code {
  kHipPriorLaunchFailure = 53,
};

// hipRuntimeGetVersion() answers major * 10,000,000 + minor * 100,000 + patch.
inline constexpr int kHipVersion6 = 60'000'000;
// Since then hipMemImportFromShareableHandle() takes a descriptor by value, before by its address.
inline constexpr int kHipVersion71 = 70'100'000;

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

}  // namespace gpufs::hip
