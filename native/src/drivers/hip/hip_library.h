// libamdhip64, opened at run time, and the one way to call it.
// Owned by shared pointers: everything of the driver that could still make a call holds one. The library itself stays
// loaded until the process ends.
// Any thread.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "drivers/gpu/vendor_library.h"
#include "drivers/hip/hip_api.h"

namespace gpufs::hip {

class Library : public gpu::VendorLibrary<Functions> {
 public:
  using Address = void*;
  using Memory = HipMemoryHandle;
  using Granularity = int;
  static constexpr const char* kSoftware = "this version of ROCm";

  // The names under which ROCm's versions install it, the newest first, and where it lies when the loader does not
  // know.
  static const std::vector<std::string>& names();

  // Opens the first of these libraries that can be used, resolves its symbols and initialises it. ENODEV, with a text
  // for users, when there is none, it lacks something, or it does not start.
  static Result<std::shared_ptr<const Library>> load(const std::vector<std::string>& candidates);

  // hipInit(0), once on each thread: some of the runtime's calls fail on a thread that has not made it.
  api::Code prepare_thread() const;

  [[nodiscard]] const std::string& name() const { return name_; }  // "libamdhip64.so.6"
  [[nodiscard]] int version() const { return version_; }           // 0: it does not say
  [[nodiscard]] bool has_peers() const { return has_peers_; }
  // A function that the runtime gives out only on demand; null where it has none, or cannot say.
  [[nodiscard]] void* find_hidden(const char* symbol) const;
  // Whether it has the calls for files, and this process may use the kernel's driver.
  [[nodiscard]] bool moves_files() const;

  // True for codes after which nothing works on that device in this process. Not kUnknown, which the runtime gives for
  // many a harmless failure.
  static bool is_fatal(api::Code code);

  // "hipErrorOutOfMemory (2): out of memory".
  [[nodiscard]] std::string describe(api::Code code) const;

 private:
  Library() = default;
  Status resolve(void* handle);

  std::string name_;
  int version_ = 0;
  bool has_peers_ = false;
};

}  // namespace gpufs::hip
