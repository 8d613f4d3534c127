// The two functions by which torch.cuda.memory.CUDAPluggableAllocator allocates in a pool of addresses. torch opens the
// Python module as a library and looks them up, so they alone are visible besides the module's entry.
#include <sys/types.h>

#include <cstdint>

#include "memory/address_pool.h"

extern "C" {

// Null makes torch report that the device is out of memory.
__attribute__((visibility("default"))) void* gpufs_torch_allocate(ssize_t bytes, int device, void* stream);
__attribute__((visibility("default"))) void gpufs_torch_free(void* address, ssize_t bytes, int device, void* stream);

void* gpufs_torch_allocate(ssize_t bytes, int /*device*/, void* /*stream*/) {
  if (bytes < 0) return nullptr;
  return reinterpret_cast<void*>(gpufs::address_pools::allocate(static_cast<std::uint64_t>(bytes)));
}

void gpufs_torch_free(void* address, ssize_t /*bytes*/, int /*device*/, void* /*stream*/) {
  gpufs::address_pools::release(reinterpret_cast<std::uint64_t>(address));
}
}
