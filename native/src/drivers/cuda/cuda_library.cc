#include "drivers/cuda/cuda_library.h"

#include <cerrno>

#include "drivers/gpu/vendor_library.h"

namespace gpufs::cuda {
namespace {

Status unavailable(const std::string& why, int code = 0) { return {ENODEV, "cuda is not available: " + why, code}; }

}  // namespace

Result<std::shared_ptr<const Library>> Library::load(const std::string& path) {
  std::string why;
  void* const handle = gpu::open_library(path, &why);
  if (handle == nullptr) return unavailable(path + " was not found (" + why + ")");
  // make_shared cannot reach the private constructor.
  std::shared_ptr<Library> library(new Library);
  Functions& functions = library->functions_;
#define GPUFS_CUDA_RESOLVE(member, symbol, ...)                                       \
  if (!gpu::resolve(handle, symbol, functions.member)) {                              \
    return unavailable(path + " has no " symbol "; a newer NVIDIA driver is needed"); \
  }
  GPUFS_CUDA_REQUIRED(GPUFS_CUDA_RESOLVE)
#undef GPUFS_CUDA_RESOLVE
  library->has_virtual_memory_ = true;
#define GPUFS_CUDA_RESOLVE(member, symbol, ...) \
  if (!gpu::resolve(handle, symbol, functions.member)) library->has_virtual_memory_ = false;
  GPUFS_CUDA_VIRTUAL_MEMORY(GPUFS_CUDA_RESOLVE)
#undef GPUFS_CUDA_RESOLVE
#define GPUFS_CUDA_RESOLVE(member, symbol, ...) gpu::resolve(handle, symbol, functions.member);
  GPUFS_CUDA_OPTIONAL(GPUFS_CUDA_RESOLVE)
#undef GPUFS_CUDA_RESOLVE

  const CuResult code = library->call<&Functions::init>(0U);
  if (code != kCuSuccess) return unavailable("cuInit: " + library->describe(code), code);
  static const Status watching = gpu::watch_process_end();
  if (!watching.ok()) return watching.with_context("cuda");
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

int errno_of(CuResult code, gpu::Purpose purpose) {
  switch (code) {
    case kCuSuccess:
      return 0;
    case kCuOutOfMemory:
      return purpose == gpu::Purpose::kMemory ? ENOSPC : ENOMEM;
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
