// What every vendor's library needs that is opened at run time: its symbols, a look at the process's end, and where a
// PCI device is attached.
// Owned by nobody (functions only).
// Any thread.
#pragma once

#include <string>

#include "base/status.h"

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

// "FFFF:A0:00.0" as the kernel writes it.
std::string kernel_pci_address(std::string address);
// The NUMA node that the kernel gives for a PCI device, -1 where it gives none.
int numa_node_of(const std::string& pci_address);

}  // namespace gpufs::gpu
