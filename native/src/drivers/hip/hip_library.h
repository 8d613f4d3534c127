// libamdhip64, opened at run time: the functions that only HIP has, and what its versions lack.
// Ownership: shared by everything that may still call it; the library itself stays loaded until the process ends.
// Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "drivers/gpu/vendor_library.h"
#include "drivers/hip/hip_api.h"

namespace gpufs::hip {

class Library final : public gpu::VendorLibrary {
 public:
  template <typename... Parameters>
  using Function = gpu::Function<Parameters...>;

  // Libraries that this process has loaded already, under whatever name (PyTorch brings its own): a second HIP runtime
  // beside it would not share its devices' memory. Then the names under which ROCm's versions install it, the newest
  // first, and its paths for a loader that does not know it, below `rocm`.
  static std::vector<std::string> names(const std::string& rocm = "/opt/rocm");

  // Opens the first of these libraries that can be used, and initialises it. ENODEV, with a text for users, if there is
  // none, it lacks something, or it does not start.
  static Result<std::shared_ptr<const Library>> load(const std::vector<std::string>& candidates);

  // hipInit(0), once on each thread: some of the runtime's functions fail on a thread that has not called it.
  [[nodiscard]] api::Code prepare_thread() const;

  [[nodiscard]] const std::string& name() const { return name_; }  // "libamdhip64.so.6"
  [[nodiscard]] int version() const { return version_; }           // 0: unknown
  // A function that the runtime gives out only on demand; null if it has none.
  [[nodiscard]] void* find_hidden(const char* symbol) const;
  // Whether the library has the calls for files, and this process may use the kernel's driver.
  [[nodiscard]] bool moves_files() const;

  [[nodiscard]] std::string uuid(int ordinal) const override;
  [[nodiscard]] const char* software() const override { return "this version of ROCm"; }
  [[nodiscard]] std::string describe(api::Code code) const override;
  // Not kUnknown, which the runtime returns for many harmless failures.
  [[nodiscard]] bool is_fatal(api::Code code) const override;

  Function<int*> device_current;
  Function<int> device_set;
  // Optional.
  Function<int, unsigned> device_enable_peer;
  Function<DeviceAddress, int, DeviceAddress, int, std::size_t, api::Stream> copy_to_peer;
  Function<HipPointerAttributes*, DeviceAddress> pointer_attributes;
  Function<api::Stream, DeviceAddress, std::uint32_t, unsigned, std::uint32_t> stream_wait_value;
  Function<api::Stream, int*> stream_device;
  Function<HipUuid*, int> device_uuid;

 private:
  Status resolve(void* handle);

  std::string name_;
  const void* handle_ = nullptr;
  int version_ = 0;
  const char* (*error_name_)(api::Code) = nullptr;
  const char* (*error_text_)(api::Code) = nullptr;
  Function<const char*, void**, int, std::uint64_t, int*> symbol_address_;
};

}  // namespace gpufs::hip
