#include "base/pages.h"

#include <unistd.h>

namespace gpufs {
namespace {

alignas(kPageBytes) std::byte never_written[std::size_t{1} << 20];

}  // namespace

std::uint64_t page_bytes() {
  static const auto bytes = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

std::span<const std::byte> zeros() { return never_written; }

}  // namespace gpufs
