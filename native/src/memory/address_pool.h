// Allocation within a range of addresses that somebody else owns: the memory of a file, in which a program's allocator
// places its own objects.
// Ownership: shared by its handle and, through the list of pools, by what is allocated in it.
// Thread-safe. Nothing waits for anything but the mutex.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "base/status.h"

namespace gpufs {

class AddressPool {
 public:
  static constexpr std::uint64_t kAlignment = 512;  // as the vendors' allocators have it

  // address and bytes are rounded inwards to the alignment.
  AddressPool(std::uint64_t address, std::uint64_t bytes);

  // The address of the first free range that is large enough; 0 if there is none. 0 bytes take as much as 1.
  std::uint64_t allocate(std::uint64_t bytes);
  // EINVAL if nothing is allocated at this address.
  Status release(std::uint64_t address);

  struct Usage {
    std::uint64_t used = 0;
    std::uint64_t largest_free = 0;
  };
  [[nodiscard]] Usage usage() const;

  [[nodiscard]] bool contains(std::uint64_t address) const { return address - address_ < bytes_; }

 private:
  const std::uint64_t address_;
  const std::uint64_t bytes_;
  mutable std::mutex mutex_;                     // guards all below
  std::map<std::uint64_t, std::uint64_t> free_;  // bytes by address; neighbours are joined
  std::map<std::uint64_t, std::uint64_t> used_;
  std::uint64_t used_bytes_ = 0;
};

// The pools of this process, for allocation functions that have no argument for one. Memory is taken from the pool that
// the calling thread has entered, and returned to the pool that contains its address.
namespace address_pools {

void add(std::shared_ptr<AddressPool> pool);
// EBUSY while something is allocated in it.
Status remove(const std::shared_ptr<AddressPool>& pool);
// Null: the thread leaves its pool.
void enter(std::shared_ptr<AddressPool> pool);
// 0: the thread has no pool, or that is full.
std::uint64_t allocate(std::uint64_t bytes);
// Addresses of no pool are ignored.
void release(std::uint64_t address);

}  // namespace address_pools

}  // namespace gpufs
