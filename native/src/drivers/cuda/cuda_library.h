// libcuda, opened at run time, and the one way to call it.
// Owned by shared pointers: everything of the driver that could still make a call holds one. The library itself stays
// loaded until the process ends.
// Any thread.
#pragma once

#include <memory>
#include <string>

#include "base/status.h"
#include "drivers/cuda/cuda_api.h"
#include "drivers/gpu/vendor_library.h"

namespace gpufs::cuda {

class Library : public gpu::VendorLibrary<Functions> {
 public:
  using Address = CuAddress;
  using Memory = CuMemoryHandle;
  using Granularity = unsigned;
  static constexpr const char* kSoftware = "this NVIDIA driver";
  static constexpr const char* kSoname = "libcuda.so.1";

  // Opens the library, resolves its symbols and initialises it. ENODEV, with a text for users, when there is none, it
  // is too old, or it finds no working device. `path` is kSoname but in tests.
  static Result<std::shared_ptr<const Library>> load(const std::string& path);

  [[nodiscard]] static bool has_peers() { return true; }

  // True for codes after which nothing works on that device in this process.
  static bool is_fatal(api::Code code);

  // "CUDA_ERROR_OUT_OF_MEMORY (2): out of memory".
  [[nodiscard]] std::string describe(api::Code code) const;

 private:
  Library() = default;
};

}  // namespace gpufs::cuda
