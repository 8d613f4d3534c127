// libcuda, opened at run time, and the one way to call it.
// Owned by shared pointers: everything of the driver that could still make a call holds one. The library itself stays
// loaded until the process ends.
// Any thread.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "base/status.h"
#include "drivers/cuda/cuda_api.h"
#include "drivers/gpu/context.h"
#include "drivers/gpu/vendor_library.h"

namespace gpufs::cuda {

class Library {
 public:
  static constexpr const char* kSoname = "libcuda.so.1";

  // Opens the library, resolves its symbols and initialises it. ENODEV, with a text for users, when there is none, it
  // is too old, or it finds no working device. `path` is kSoname but in tests.
  static Result<std::shared_ptr<const Library>> load(const std::string& path);

  // library.call<&Functions::init>(0). Once the process has begun to run its exit handlers nothing is called any more
  // (libcuda takes itself down there, in no order that we know): the answer is kCuDeinitialized.
  template <auto Function, typename... Arguments>
  CuResult call(Arguments&&... arguments) const {
    if (gpu::process_is_ending()) return kCuDeinitialized;
    return (functions_.*Function)(std::forward<Arguments>(arguments)...);
  }

  [[nodiscard]] bool has_virtual_memory() const { return has_virtual_memory_; }
  // Whether an optional function is there.
  template <auto Function>
  [[nodiscard]] bool has() const {
    return functions_.*Function != nullptr;
  }
  // "CUDA_ERROR_OUT_OF_MEMORY (2): out of memory".
  [[nodiscard]] std::string describe(CuResult code) const;

 private:
  Library() = default;

  Functions functions_;
  bool has_virtual_memory_ = false;
};

// The errno that stands for a failed call: what the caller can do about it.
int errno_of(CuResult code, gpu::Purpose purpose);

// True for codes after which nothing works on that device in this process.
bool is_fatal(CuResult code);

}  // namespace gpufs::cuda
