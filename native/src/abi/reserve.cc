#include <malloc.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>

#include "abi/barrier.h"
#include "base/reserve.h"
#include "gpufs.h"

namespace gpufs {
namespace {

// What stood there before. Constant once a caller has got functions that use it, and there to the end of the process.
struct Before {
  std::mutex mutex;  // guards against two callers at once
  bool taken = false;
  gpufs_allocator memory{};
  gpufs_page_allocator pages{};
};

Before& before() {
  static Before& instance = *new Before;
  return instance;
}

const gpufs_allocator& memory_of(void* context) { return static_cast<const Before*>(context)->memory; }
const gpufs_page_allocator& pages_of(void* context) { return static_cast<const Before*>(context)->pages; }

void* allocate(void* context, size_t bytes) {
  const gpufs_allocator& ordinary = memory_of(context);
  void* const block = ordinary.allocate(ordinary.context, bytes);
  return block != nullptr ? block : Reserve::instance().allocate(bytes);
}

void* allocate_zeroed(void* context, size_t count, size_t bytes) {
  const gpufs_allocator& ordinary = memory_of(context);
  if (void* const block = ordinary.allocate_zeroed(ordinary.context, count, bytes); block != nullptr) return block;
  if (bytes != 0 && count > Reserve::kLargest / bytes) return nullptr;
  void* const block = Reserve::instance().allocate(count * bytes);
  if (block != nullptr) std::memset(block, 0, count * bytes);
  return block;
}

void release(void* context, void* block) {
  Reserve& reserve = Reserve::instance();
  if (reserve.owns(block)) return reserve.release(block);
  const gpufs_allocator& ordinary = memory_of(context);
  ordinary.release(ordinary.context, block);
}

void* reallocate(void* context, void* old, size_t bytes) {
  const gpufs_allocator& ordinary = memory_of(context);
  Reserve& reserve = Reserve::instance();
  std::size_t room = 0;
  void* fresh = nullptr;
  if (reserve.owns(old)) {
    room = Reserve::room_of(old);
    fresh = ordinary.allocate(ordinary.context, bytes);  // out of the reserve as soon as it can be
    if (fresh == nullptr && bytes <= room) return old;
  } else {
    if (void* const grown = ordinary.reallocate(ordinary.context, old, bytes); grown != nullptr) return grown;
    room = ::malloc_usable_size(old);
  }
  if (fresh == nullptr) fresh = reserve.allocate(bytes);
  if (fresh == nullptr) return nullptr;
  if (old != nullptr) {
    std::memcpy(fresh, old, std::min<std::size_t>(room, bytes));
    release(context, old);
  }
  return fresh;
}

void* allocate_pages(void* context, size_t bytes) {
  const gpufs_page_allocator& ordinary = pages_of(context);
  void* const pages = ordinary.allocate(ordinary.context, bytes);
  return pages != nullptr ? pages : Reserve::instance().allocate(bytes);
}

void release_pages(void* context, void* pages, size_t bytes) {
  Reserve& reserve = Reserve::instance();
  if (reserve.owns(pages)) return reserve.release(pages);
  const gpufs_page_allocator& ordinary = pages_of(context);
  ordinary.release(ordinary.context, pages, bytes);
}

}  // namespace
}  // namespace gpufs

extern "C" {

gpufs_status gpufs_reserve_behind(gpufs_allocator* memory, gpufs_page_allocator* pages) {
  return gpufs::guarded([&] {
    gpufs::Before& kept = gpufs::before();
    const std::lock_guard lock(kept.mutex);
    if (kept.taken) return gpufs::Status(EBUSY, "memory is set aside already");
    if (gpufs::Status status = gpufs::Reserve::instance().open(); !status.ok()) return status;
    kept.taken = true;
    kept.memory = *memory;
    kept.pages = *pages;
    *memory = {&kept, gpufs::allocate, gpufs::allocate_zeroed, gpufs::reallocate, gpufs::release};
    *pages = {&kept, gpufs::allocate_pages, gpufs::release_pages};
    return gpufs::Status();
  });
}
}
