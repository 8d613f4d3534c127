// libamdhip64, opened at run time, and the one way to call it.
// Owned by shared pointers: everything of the driver that could still make a call holds one. The library itself stays
// loaded until the process ends.
// Any thread.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "drivers/gpu/context.h"
#include "drivers/gpu/vendor_library.h"
#include "drivers/hip/hip_api.h"

namespace gpufs::hip {

class Library {
 public:
  // The names under which ROCm's versions install it, the newest first, and where it lies when the loader does not
  // know.
  static const std::vector<std::string>& names();

  // Opens the first of these libraries that can be used, resolves its symbols and initialises it. ENODEV, with a text
  // for users, when there is none, it lacks something, or it does not start.
  static Result<std::shared_ptr<const Library>> load(const std::vector<std::string>& candidates);

  // library.call<&Functions::device_set>(0). Once the process has begun to run its exit handlers nothing is called any
  // more: the answer is kHipDeinitialized.
  template <auto Function, typename... Arguments>
  HipResult call(Arguments&&... arguments) const {
    if (gpu::process_is_ending()) return kHipDeinitialized;
    return (functions_.*Function)(std::forward<Arguments>(arguments)...);
  }

  // hipInit(0), once on each thread: some of the runtime's calls fail on a thread that has not made it.
  HipResult prepare_thread() const;

  [[nodiscard]] const std::string& name() const { return name_; }  // "libamdhip64.so.6"
  [[nodiscard]] int version() const { return version_; }           // 0: it does not say
  [[nodiscard]] bool has_virtual_memory() const { return has_virtual_memory_; }
  [[nodiscard]] bool has_peers() const { return has_peers_; }
  // Whether an optional function is there.
  template <auto Function>
  [[nodiscard]] bool has() const {
    return functions_.*Function != nullptr;
  }
  [[nodiscard]] bool has_export() const { return functions_.memory_export != nullptr; }
  // A function that the runtime gives out only on demand; null where it has none, or cannot say.
  [[nodiscard]] void* find_hidden(const char* symbol) const;

  // "hipErrorOutOfMemory (2): out of memory".
  [[nodiscard]] std::string describe(HipResult code) const;

 private:
  Library() = default;
  Status resolve(void* handle);

  std::string name_;
  Functions functions_;
  int version_ = 0;
  bool has_virtual_memory_ = false;
  bool has_peers_ = false;
};

// The errno that stands for a failed call: what the caller can do about it.
int errno_of(HipResult code, gpu::Purpose purpose);

// True for codes after which nothing works on that device in this process. Not hipErrorUnknown, which the runtime gives
// for many a harmless failure.
bool is_fatal(HipResult code);

}  // namespace gpufs::hip
