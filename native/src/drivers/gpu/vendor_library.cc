#include "drivers/gpu/vendor_library.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <fstream>

namespace gpufs::gpu {
namespace {

std::atomic<bool> ending{false};

void note_the_end() { ending.store(true, std::memory_order_release); }

}  // namespace

void* open_library(const std::string& path, std::string* why) {
  void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (library == nullptr) {
    const char* const text = ::dlerror();
    *why = text != nullptr ? text : "no reason given";
  }
  return library;
}

void* find_symbol(void* library, const char* symbol) { return ::dlsym(library, symbol); }

bool process_is_ending() { return ending.load(std::memory_order_acquire); }

Status watch_process_end() {
  if (std::atexit(note_the_end) != 0) return {ENOMEM, "no room for an exit handler"};
  return {};
}

Status failure_of(api::Code code, Purpose purpose, const std::string& text) {
  switch (code) {
    case api::kOutOfMemory:
      if (purpose == Purpose::kMemory) return {ENOSPC, "No space left on device (" + text + ")", code};
      return {ENOMEM, text, code};
    case api::kHostMemoryAlreadyRegistered:
      return {EEXIST, text, code};
    case api::kHostMemoryNotRegistered:
      return {ENOENT, text, code};
    case api::kNotSupported:
      return {EOPNOTSUPP, text, code};
    default:
      return {EIO, text, code};
  }
}

std::string public_name(std::string symbol) {
  if (symbol.ends_with("_v2")) symbol.resize(symbol.size() - 3);
  return symbol;
}

std::string kernel_pci_address(std::string address) {
  std::transform(address.begin(), address.end(), address.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return address;
}

int numa_node_of(const std::string& pci_address) {
  std::ifstream file("/sys/bus/pci/devices/" + pci_address + "/numa_node");
  int node = -1;
  if (!(file >> node)) return -1;
  return node;
}

}  // namespace gpufs::gpu
