// An operator new that fails when it is told to: preloaded, it stands before the C++ library's own.
// The file that GPUFS_FAILING_MEMORY names is the order: see Order. The process maps it; who orders writes there.
// Any thread.

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace {

struct Order {
  std::atomic<std::uint64_t> armed;   // 0: nothing fails or is counted
  std::atomic<std::uint64_t> skip;    // allocations that succeed from then on
  std::atomic<std::uint64_t> fail;    // and those after them that fail
  std::atomic<std::uint64_t> seen;    // since armed
  std::atomic<std::uint64_t> failed;  // ever
};

Order* map_order() {
  const char* const path = std::getenv("GPUFS_FAILING_MEMORY");
  if (path == nullptr) return nullptr;
  const int fd = ::open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return nullptr;
  void* const memory = ::mmap(nullptr, sizeof(Order), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  ::close(fd);
  return memory == MAP_FAILED ? nullptr : static_cast<Order*>(memory);
}

bool fails_now() {
  static Order* const order = map_order();
  if (order == nullptr || order->armed.load() == 0) return false;
  const std::uint64_t number = order->seen.fetch_add(1);
  const std::uint64_t skip = order->skip.load();
  if (number < skip || number - skip >= order->fail.load()) return false;
  order->failed.fetch_add(1);
  return true;
}

void* allocate(std::size_t bytes) { return fails_now() ? nullptr : std::malloc(bytes == 0 ? 1 : bytes); }

void* allocate_aligned(std::size_t bytes, std::align_val_t alignment) {
  if (fails_now()) return nullptr;
  const auto align = static_cast<std::size_t>(alignment);
  return std::aligned_alloc(align, (bytes + align - 1) / align * align);
}

void* or_throw(void* block) {
  if (block == nullptr) throw std::bad_alloc();
  return block;
}

}  // namespace

void* operator new(std::size_t bytes) { return or_throw(allocate(bytes)); }
void* operator new[](std::size_t bytes) { return or_throw(allocate(bytes)); }
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return allocate(bytes); }
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept { return allocate(bytes); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return or_throw(allocate_aligned(bytes, alignment));
}
void* operator new[](std::size_t bytes, std::align_val_t alignment) {
  return or_throw(allocate_aligned(bytes, alignment));
}
void operator delete(void* block) noexcept { std::free(block); }
void operator delete[](void* block) noexcept { std::free(block); }
void operator delete(void* block, std::size_t) noexcept { std::free(block); }
void operator delete[](void* block, std::size_t) noexcept { std::free(block); }
void operator delete(void* block, std::align_val_t) noexcept { std::free(block); }
void operator delete[](void* block, std::align_val_t) noexcept { std::free(block); }
void operator delete(void* block, std::size_t, std::align_val_t) noexcept { std::free(block); }
void operator delete[](void* block, std::size_t, std::align_val_t) noexcept { std::free(block); }
