#include "drivers/cuda/cuda_library.h"

#include <dlfcn.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>

namespace gpufs::cuda {
namespace {

std::atomic<bool> ending{false};

void note_the_end() { ending.store(true, std::memory_order_release); }

Status unavailable(const std::string& why, int code = 0) { return {ENODEV, "cuda is not available: " + why, code}; }

template <typename Function>
bool resolve(void* library, const char* symbol, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, symbol));
  return function != nullptr;
}

}  // namespace

bool Library::process_is_ending() { return ending.load(std::memory_order_acquire); }

Result<std::shared_ptr<const Library>> Library::load(const std::string& path) {
  // Never closed: threads and exit handlers of the driver's own live in it.
  void* handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (handle == nullptr) {
    const char* why = ::dlerror();
    return unavailable(path + " was not found (" + (why != nullptr ? why : "no reason given") + ")");
  }
  // make_shared cannot reach the private constructor.
  std::shared_ptr<Library> library(new Library);
  Functions& functions = library->functions_;
#define GPUFS_CUDA_RESOLVE(member, symbol, ...)                                       \
  if (!resolve(handle, symbol, functions.member)) {                                   \
    return unavailable(path + " has no " symbol "; a newer NVIDIA driver is needed"); \
  }
  GPUFS_CUDA_REQUIRED(GPUFS_CUDA_RESOLVE)
#undef GPUFS_CUDA_RESOLVE
  library->has_virtual_memory_ = true;
#define GPUFS_CUDA_RESOLVE(member, symbol, ...) \
  if (!resolve(handle, symbol, functions.member)) library->has_virtual_memory_ = false;
  GPUFS_CUDA_VIRTUAL_MEMORY(GPUFS_CUDA_RESOLVE)
#undef GPUFS_CUDA_RESOLVE

  const CuResult code = library->call<&Functions::init>(0U);
  if (code != kCuSuccess) return unavailable("cuInit: " + library->describe(code), code);
  // Registered after cuInit, so that it runs before whatever libcuda has registered for the end.
  static const int registered = std::atexit(note_the_end);
  if (registered != 0) return Status{ENOMEM, "cuda: no room for an exit handler"};
  return std::shared_ptr<const Library>(std::move(library));
}

std::string Library::describe(CuResult code) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (call<&Functions::error_name>(code, &name) != kCuSuccess || name == nullptr) name = "unknown CUDA error";
  std::string description = std::string(name) + " (" + std::to_string(code) + ")";
  if (call<&Functions::error_text>(code, &text) == kCuSuccess && text != nullptr) {
    description += ": ";
    description += text;
  }
  return description;
}

int errno_of(CuResult code, Purpose purpose) {
  switch (code) {
    case kCuSuccess:
      return 0;
    case kCuOutOfMemory:
      return purpose == Purpose::kMemory ? ENOSPC : ENOMEM;
    case kCuHostMemoryAlreadyRegistered:
      return EEXIST;
    case kCuHostMemoryNotRegistered:
      return ENOENT;
    case kCuNotSupported:
      return EOPNOTSUPP;
    default:
      return EIO;
  }
}

bool is_fatal(CuResult code) {
  switch (code) {
    case kCuEccUncorrectable:
    case kCuNvlinkUncorrectable:
    case kCuContained:
    case kCuIllegalAddress:
    case kCuLaunchTimeout:
    case kCuContextIsDestroyed:
    case kCuAssert:
    case kCuUnknown:
      return true;
    default:
      return code >= kCuHardwareStackError && code <= kCuLaunchFailed;
  }
}

}  // namespace gpufs::cuda
