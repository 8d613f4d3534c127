#include "base/reserve.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cerrno>

namespace gpufs {
namespace {

constexpr std::size_t kHeader = 16;  // keeps what follows aligned for everything

}  // namespace

Reserve& Reserve::instance() {
  static Reserve& instance = *new Reserve;
  return instance;
}

Status Reserve::open() {
  if (bytes() == 0 && !add_region()) return Status::from_errno(ENOMEM, "setting memory aside");
  return {};
}

bool Reserve::add_region() noexcept {
  // Not touched before it is needed: then the system has promised it, and nothing more.
  void* base = ::mmap(nullptr, kRegionBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return false;
  {
    const std::lock_guard lock(mutex_);
    const std::size_t count = regions_.load(std::memory_order_relaxed);
    if (count < kRegions) {
      region_[count].base = static_cast<std::byte*>(base);
      regions_.store(count + 1, std::memory_order_release);
      return true;
    }
  }
  ::munmap(base, kRegionBytes);
  return false;
}

void* Reserve::allocate(std::size_t bytes) noexcept {
  if (bytes > kLargest) return nullptr;
  const unsigned size_class = std::max(kSmallestClass, static_cast<unsigned>(std::bit_width(bytes + kHeader - 1)));
  const std::size_t size = std::size_t{1} << size_class;
  uses_.fetch_add(1, std::memory_order_relaxed);
  const std::lock_guard lock(mutex_);
  const std::size_t count = regions_.load(std::memory_order_relaxed);
  for (std::size_t number = 0; number < count; ++number) {
    Region& region = region_[number];
    std::byte* block = nullptr;
    if (Free*& first = region.free[size_class]; first != nullptr) {
      block = reinterpret_cast<std::byte*>(first) - kHeader;
      first = first->next;
    } else if (kRegionBytes - region.used >= size) {
      block = region.base + region.used;
      region.used += size;
    } else {
      continue;
    }
    ++region.live;
    taken_.fetch_add(size, std::memory_order_relaxed);
    *reinterpret_cast<Header*>(block) = {size_class, static_cast<std::uint32_t>(number)};
    return block + kHeader;
  }
  return nullptr;
}

void Reserve::release(void* block) noexcept {
  const auto* const header = reinterpret_cast<const Header*>(static_cast<std::byte*>(block) - kHeader);
  const unsigned size_class = header->size_class;
  Region& region = region_[header->region];
  taken_.fetch_sub(std::size_t{1} << size_class, std::memory_order_relaxed);
  const std::lock_guard lock(mutex_);
  if (--region.live == 0) {  // the next shortage may want other sizes
    region.used = 0;
    region.free = {};
    return;
  }
  auto* const free = static_cast<Free*>(block);
  free->next = region.free[size_class];
  region.free[size_class] = free;
}

bool Reserve::owns(const void* block) const noexcept {
  const std::size_t count = regions_.load(std::memory_order_acquire);
  const auto address = reinterpret_cast<std::uintptr_t>(block);
  for (std::size_t number = 0; number < count; ++number) {
    if (address - reinterpret_cast<std::uintptr_t>(region_[number].base) < kRegionBytes) return true;
  }
  return false;
}

std::size_t Reserve::room_of(const void* block) noexcept {
  const auto* const header = reinterpret_cast<const Header*>(static_cast<const std::byte*>(block) - kHeader);
  return (std::size_t{1} << header->size_class) - kHeader;
}

bool Reserve::low() noexcept { return taken() > bytes() / 2 && !add_region(); }

}  // namespace gpufs
