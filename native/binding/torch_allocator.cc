// The two functions by which torch.cuda.memory.CUDAPluggableAllocator allocates in a pool of addresses. torch opens the
// Python module as a library and looks them up, so they alone are visible besides the module's entry.
#include <dlfcn.h>
#include <sys/types.h>

#include <cstdint>
#include <initializer_list>

#include "memory/address_pool.h"

namespace {

// The vendor's library that torch has loaded, or null.
void* loaded(std::initializer_list<const char*> names) {
  for (const char* const name : names) {
    if (void* const library = ::dlopen(name, RTLD_NOW | RTLD_NOLOAD); library != nullptr) return library;
  }
  return nullptr;
}

void wait_for_cuda(int device) {
  void* const cuda = loaded({"libcuda.so.1"});
  if (cuda == nullptr) return;
  const auto symbol = [cuda](const char* name) { return ::dlsym(cuda, name); };
  const auto retain = reinterpret_cast<int (*)(void**, int)>(symbol("cuDevicePrimaryCtxRetain"));
  const auto push = reinterpret_cast<int (*)(void*)>(symbol("cuCtxPushCurrent_v2"));
  const auto synchronize = reinterpret_cast<int (*)()>(symbol("cuCtxSynchronize"));
  const auto pop = reinterpret_cast<int (*)(void**)>(symbol("cuCtxPopCurrent_v2"));
  const auto release = reinterpret_cast<int (*)(int)>(symbol("cuDevicePrimaryCtxRelease_v2"));
  void* context = nullptr;
  if (retain != nullptr && push != nullptr && synchronize != nullptr && pop != nullptr && release != nullptr &&
      retain(&context, device) == 0) {
    if (push(context) == 0) {
      static_cast<void>(synchronize());  // a failed context has no work left
      static_cast<void>(pop(&context));
    }
    static_cast<void>(release(device));
  }
  ::dlclose(cuda);
}

void wait_for_hip(int device) {
  void* const hip = loaded({"libamdhip64.so.8", "libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"});
  if (hip == nullptr) return;
  const auto get = reinterpret_cast<int (*)(int*)>(::dlsym(hip, "hipGetDevice"));
  const auto set = reinterpret_cast<int (*)(int)>(::dlsym(hip, "hipSetDevice"));
  const auto synchronize = reinterpret_cast<int (*)()>(::dlsym(hip, "hipDeviceSynchronize"));
  int current = 0;
  if (get != nullptr && set != nullptr && synchronize != nullptr && get(&current) == 0 && set(device) == 0) {
    static_cast<void>(synchronize());
    static_cast<void>(set(current));
  }
  ::dlclose(hip);
}

// Waits for all work on a device, as cudaFree() does: kernels in flight may still use memory that is freed, and its
// next user may be on another stream.
void wait_for_device(int device) {
  wait_for_cuda(device);
  wait_for_hip(device);
}

}  // namespace

extern "C" {

// Null makes torch report that the device is out of memory.
__attribute__((visibility("default"))) void* gpufs_torch_allocate(ssize_t bytes, int device, void* stream);
__attribute__((visibility("default"))) void gpufs_torch_free(void* address, ssize_t bytes, int device, void* stream);

void* gpufs_torch_allocate(ssize_t bytes, int /*device*/, void* /*stream*/) {
  if (bytes < 0) return nullptr;
  return reinterpret_cast<void*>(gpufs::address_pools::allocate(static_cast<std::uint64_t>(bytes)));
}

void gpufs_torch_free(void* address, ssize_t /*bytes*/, int device, void* /*stream*/) {
  wait_for_device(device);
  gpufs::address_pools::release(reinterpret_cast<std::uint64_t>(address));
}
}
