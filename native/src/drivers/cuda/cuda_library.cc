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

  const api::Code code = library->call<&Functions::init>(0U);
  if (code != api::kSuccess) return unavailable("cuInit: " + library->describe(code), code);
  static const Status watching = gpu::watch_process_end();
  if (!watching.ok()) return watching.with_context("cuda");
  return std::shared_ptr<const Library>(std::move(library));
}

std::string Library::describe(api::Code code) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (call<&Functions::error_name>(code, &name) != api::kSuccess || name == nullptr) name = "unknown CUDA error";
  std::string description = std::string(name) + " (" + std::to_string(code) + ")";
  if (call<&Functions::error_text>(code, &text) == api::kSuccess && text != nullptr) {
    description += ": ";
    description += text;
  }
  return description;
}

bool Library::is_fatal(api::Code code) {
  switch (code) {
    case api::kEccUncorrectable:
    case kCuNvlinkUncorrectable:
    case kCuContained:
    case api::kIllegalAddress:
    case api::kLaunchTimeout:
    case api::kContextIsDestroyed:
    case api::kAssert:
    case api::kUnknown:
      return true;
    default:
      return code >= kCuHardwareStackError && code <= api::kLaunchFailed;
  }
}

}  // namespace gpufs::cuda
