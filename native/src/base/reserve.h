// Memory set aside for one who must go on where the system gives no more: the control plane's interpreter, whose loop
// ends the mount when an allocation fails in the wrong place.
// One for the process, made by open() and never given back, so that it serves threads to the very end.
// Any thread may call any function but open(); none throws or waits for more than a few instructions of another thread.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "base/status.h"

namespace gpufs {

class Reserve {
 public:
  // Blocks larger than this are not to be had.
  static constexpr std::size_t kLargest = (std::size_t{256} << 10) - 16;
  // What one mmap() sets aside.
  static constexpr std::size_t kRegionBytes = std::size_t{8} << 20;

  static Reserve& instance();

  // Sets the first memory aside. ENOMEM: there is none. Again: no effect.
  Status open();

  // Aligned for everything; null where it is too large or all is taken, as it is before open().
  void* allocate(std::size_t bytes) noexcept;
  // A block of allocate().
  void release(void* block) noexcept;
  [[nodiscard]] bool owns(const void* block) const noexcept;
  // Bytes that a block of allocate() has room for.
  [[nodiscard]] static std::size_t room_of(const void* block) noexcept;

  // Whether more than half of it is taken, and no more can be set aside now: time to begin nothing new.
  [[nodiscard]] bool low() noexcept;

  [[nodiscard]] std::size_t bytes() const noexcept { return regions_.load(std::memory_order_acquire) * kRegionBytes; }
  [[nodiscard]] std::size_t taken() const noexcept { return taken_.load(std::memory_order_relaxed); }
  // Blocks that have been asked for since the start.
  [[nodiscard]] std::uint64_t uses() const noexcept { return uses_.load(std::memory_order_relaxed); }

 private:
  static constexpr std::size_t kRegions = 16;
  static constexpr unsigned kSmallestClass = 5;  // 32 bytes, with the header
  static constexpr unsigned kLargestClass = 18;  // 256 KiB

  struct Header {
    std::uint32_t size_class;
    std::uint32_t region;
  };
  struct Free {
    Free* next;
  };
  struct Region {
    std::byte* base = nullptr;  // constant once the region is counted
    std::size_t used = 0;       // from the base on; what was released is in the lists
    std::size_t live = 0;       // blocks
    std::array<Free*, kLargestClass + 1> free{};
  };

  static_assert(sizeof(Header) <= 16);

  Reserve() = default;
  bool add_region() noexcept;

  std::atomic<std::size_t> regions_{0};
  std::atomic<std::size_t> taken_{0};
  std::atomic<std::uint64_t> uses_{0};
  std::mutex mutex_;  // guards what is in the regions, and the making of further ones
  std::array<Region, kRegions> region_;
};

}  // namespace gpufs
