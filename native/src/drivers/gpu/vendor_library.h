// What every vendor's library needs that is opened at run time: its symbols and the one way to call them, what its
// codes mean, a look at the process's end, and where a PCI device is attached.
// Owned by shared pointers: everything of a driver that could still make a call holds its library.
// Any thread.
#pragma once

#include <string>
#include <utility>

#include "base/status.h"
#include "drivers/gpu/api.h"
#include "drivers/gpu/context.h"

namespace gpufs::gpu {

// Opens a library for the rest of the process: threads and exit handlers of its own live in it. Null where it cannot be
// opened; `why` then says so.
void* open_library(const std::string& path, std::string* why);

void* find_symbol(void* library, const char* symbol);
template <typename Function>
bool resolve(void* library, const char* symbol, Function& function) {
  function = reinterpret_cast<Function>(find_symbol(library, symbol));
  return function != nullptr;
}

// True once the process runs its exit handlers: a vendor's library takes itself down there, in no order that we know,
// so it is not called any more. Exit handlers run in the reverse order of their registration: watch_process_end() is
// called once for each library, when that has registered its own.
bool process_is_ending();
Status watch_process_end();

// The vendor's functions, from Functions, a struct of pointers to them.
template <typename FunctionTable>
class VendorLibrary {
 public:
  using Functions = FunctionTable;

  // library.call<&Functions::init>(0). Once the process has begun to run its exit handlers nothing is called any more:
  // the answer is kDeinitialized.
  template <auto Function, typename... Arguments>
  api::Code call(Arguments&&... arguments) const {
    if (process_is_ending()) return api::kDeinitialized;
    return (functions_.*Function)(std::forward<Arguments>(arguments)...);
  }
  // Whether an optional function is there.
  template <auto Function>
  [[nodiscard]] bool has() const {
    return functions_.*Function != nullptr;
  }
  [[nodiscard]] bool has_virtual_memory() const { return has_virtual_memory_; }

 protected:
  VendorLibrary() = default;

  Functions functions_;
  bool has_virtual_memory_ = false;
};

// The Status of a failed call: the errno says what the caller can do about it.
Status failure_of(api::Code code, Purpose purpose, const std::string& text);

// A function as the vendor's manuals call it: "cuMemAlloc", of which "cuMemAlloc_v2" is the symbol today.
std::string public_name(std::string symbol);

// "FFFF:A0:00.0" as the kernel writes it.
std::string kernel_pci_address(std::string address);
// The NUMA node that the kernel gives for a PCI device, -1 where it gives none.
int numa_node_of(const std::string& pci_address);

}  // namespace gpufs::gpu
