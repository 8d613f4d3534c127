#include "base/pages.h"

#include <unistd.h>

#include <cstring>

namespace gpufs {
namespace {

alignas(kPageBytes) std::byte memory[std::size_t{1} << 20];

}  // namespace

std::uint64_t page_bytes() {
  static const auto bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

std::span<const std::byte> zeros() {
  // Memory that was never written is the kernel's page of zeros, which counts as a page that is not there where the
  // kernel copies from it. If SIGKILL comes meanwhile, it fails the READ of a hole with EIO.
  static const void* const written = std::memset(memory, 0, sizeof(memory));
  static_cast<void>(written);
  return memory;
}

}  // namespace gpufs
