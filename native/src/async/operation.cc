#include "async/operation.h"

#include <atomic>

namespace gpufs {

std::uint64_t Parameter::read() const {
  if (cell == nullptr) return value;
  // Whoever writes it does so before the stream comes to the operation; the kernel or thread is none that we know.
  return std::atomic_ref<std::uint64_t>(*const_cast<std::uint64_t*>(cell)).load(std::memory_order_acquire);
}

}  // namespace gpufs
