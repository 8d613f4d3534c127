#include "memory/address_pool.h"

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <utility>
#include <vector>

#include "base/math.h"

namespace gpufs {

namespace {

std::uint64_t whole_bytes(std::uint64_t address, std::uint64_t bytes) {
  const std::uint64_t lost = round_up(address, AddressPool::kAlignment) - address;
  return lost >= bytes ? 0 : round_down(bytes - lost, AddressPool::kAlignment);
}

}  // namespace

AddressPool::AddressPool(std::uint64_t address, std::uint64_t bytes)
    : address_(round_up(address, kAlignment)), bytes_(whole_bytes(address, bytes)) {
  if (bytes_ != 0) free_.emplace(address_, bytes_);
}

std::uint64_t AddressPool::allocate(std::uint64_t bytes) {
  if (bytes > bytes_) return 0;
  const std::uint64_t wanted = round_up(std::max<std::uint64_t>(bytes, 1), kAlignment);
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find_if(free_, [wanted](const auto& range) { return range.second >= wanted; });
  if (found == free_.end()) return 0;
  const auto [address, size] = *found;
  used_.emplace(address, wanted);
  free_.erase(found);
  if (size > wanted) free_.emplace(address + wanted, size - wanted);
  used_bytes_ += wanted;
  return address;
}

Status AddressPool::release(std::uint64_t address) {
  const std::lock_guard lock(mutex_);
  const auto found = used_.find(address);
  if (found == used_.end()) return Status(EINVAL, "nothing is allocated at this address of the pool");
  std::uint64_t bytes = found->second;
  used_bytes_ -= bytes;
  used_.erase(found);
  auto next = free_.lower_bound(address);
  if (next != free_.end() && next->first == address + bytes) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == address) {
      before->second += bytes;
      return {};
    }
  }
  free_.emplace(address, bytes);
  return {};
}

AddressPool::Usage AddressPool::usage() const {
  const std::lock_guard lock(mutex_);
  Usage usage{used_bytes_, 0};
  for (const auto& [address, bytes] : free_) usage.largest_free = std::max(usage.largest_free, bytes);
  return usage;
}

namespace address_pools {

namespace {

struct List {
  std::mutex mutex;
  std::vector<std::shared_ptr<AddressPool>> pools;  // guarded by the mutex
};

// Never destroyed: memory is released until the process has ended.
List& list() {
  static List* const pools = new List;
  return *pools;
}

thread_local std::shared_ptr<AddressPool> entered;

}  // namespace

void add(std::shared_ptr<AddressPool> pool) {
  const std::lock_guard lock(list().mutex);
  list().pools.push_back(std::move(pool));
}

Status remove(const std::shared_ptr<AddressPool>& pool) {
  const std::lock_guard lock(list().mutex);
  if (pool->usage().used != 0) return Status(EBUSY, "memory of the pool is in use");
  std::erase(list().pools, pool);
  return {};
}

void enter(std::shared_ptr<AddressPool> pool) { entered = std::move(pool); }

std::uint64_t allocate(std::uint64_t bytes) { return entered ? entered->allocate(bytes) : 0; }

void release(std::uint64_t address) {
  std::shared_ptr<AddressPool> owner;
  {
    const std::lock_guard lock(list().mutex);
    const auto found =
        std::ranges::find_if(list().pools, [address](const auto& pool) { return pool->contains(address); });
    if (found != list().pools.end()) owner = *found;
  }
  if (owner) static_cast<void>(owner->release(address));
}

}  // namespace address_pools

}  // namespace gpufs
