#include "io/bounce_pool.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include "base/log.h"
#include "base/math.h"
#include "base/scope_guard.h"

namespace gpufs {

namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr int kPreferredPolicy = 1;  // MPOL_PREFERRED
constexpr unsigned long kNodeBits = 1024;

// Memory on another node works too, so failures are ignored.
void prefer_node(void* memory, std::size_t bytes, int node) {
  if (node < 0 || static_cast<unsigned long>(node) >= kNodeBits) return;
  constexpr std::size_t kWordBits = sizeof(unsigned long) * 8;
  unsigned long mask[kNodeBits / kWordBits] = {};
  const auto bit = static_cast<unsigned long>(node);
  mask[bit / kWordBits] |= 1UL << bit % kWordBits;
  (void)::syscall(SYS_mbind, memory, bytes, kPreferredPolicy, mask, kNodeBits, 0);
}

}  // namespace

void ReturnToPool::operator()(BounceMemory* memory) const { pool->give_back(memory); }

std::shared_ptr<BouncePool> BouncePool::create(std::size_t buffer_bytes, std::uint64_t capacity_bytes) {
  const auto capacity = static_cast<std::size_t>(std::max<std::uint64_t>(capacity_bytes / buffer_bytes, 1));
  return std::shared_ptr<BouncePool>(new BouncePool(buffer_bytes, capacity));
}

BouncePool::~BouncePool() { close(); }

Result<BounceMemory*> BouncePool::pin(const std::shared_ptr<DeviceContext>& device) const {
  auto memory = std::make_unique<BounceMemory>();
  // Aligned to huge pages if it fills one: fewer pages to pin.
  const std::size_t align = buffer_bytes_ >= kHugePage ? kHugePage : 0;
  memory->bytes = buffer_bytes_;
  memory->mapped_bytes = buffer_bytes_ + align;
  memory->mapping = ::mmap(nullptr, memory->mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory->mapping == MAP_FAILED) return Status::from_errno(errno, "memory for a bounce buffer");
  ScopeGuard unmap([&] { ::munmap(memory->mapping, memory->mapped_bytes); });
  (void)::madvise(memory->mapping, memory->mapped_bytes, MADV_DONTDUMP);  // users' data
  auto start = reinterpret_cast<std::uintptr_t>(memory->mapping);
  if (align != 0) start = round_up(start, align);
  memory->data = reinterpret_cast<std::byte*>(start);
  memory->node = device->info().numa_node;
  prefer_node(memory->data, buffer_bytes_, memory->node);
  if (align != 0) (void)::madvise(memory->data, buffer_bytes_, MADV_HUGEPAGE);
  // Where the CPU addresses the device's memory nothing copies asynchronously.
  if (!device->info().cpu_addressable) {
    // The driver pins for one thread at a time, so each thread gets its pages before.
    (void)::madvise(memory->data, buffer_bytes_, MADV_POPULATE_WRITE);
    const Status pinned = device->device().pin(memory->data, buffer_bytes_);
    if (!pinned.ok()) return pinned.with_context("pinning a bounce buffer");
    memory->pinned = true;
  }
  memory->device = device;
  unmap.dismiss();
  return memory.release();
}

void BouncePool::unpin(BounceMemory* raw) {
  const std::unique_ptr<BounceMemory> memory(raw);
  if (memory->pinned) {
    // Unpinning waits for blocked streams, and those may wait for the caller of close().
    if (memory->device->device().blocked_streams().any()) return;
    const Status unpinned = memory->device->device().unpin(memory->data);
    if (!unpinned.ok()) {
      // The driver may still use these pages, so they must stay mapped.
      log_warning("a bounce buffer could not be unpinned and stays allocated: ", unpinned.message());
      return;
    }
  }
  ::munmap(memory->mapping, memory->mapped_bytes);
}

// An idle buffer, or a new one if there may be more; null if there is neither. Releases the lock while it pins.
// A buffer on the right node is better than an idle one on another. may_pin: whether pinning is tried.
Result<BounceMemory*> BouncePool::take_locked(std::unique_lock<std::mutex>& lock,
                                              const std::shared_ptr<DeviceContext>& device, bool may_pin) {
  may_pin = may_pin && existing_ < capacity_;
  const int node = device->info().numa_node;
  auto chosen =
      std::find_if(idle_.begin(), idle_.end(), [&](const BounceMemory* memory) { return memory->node == node; });
  if (chosen == idle_.end() && !may_pin) chosen = idle_.begin();
  if (chosen != idle_.end()) {
    BounceMemory* const memory = *chosen;
    idle_.erase(chosen);
    return memory;
  }
  if (!may_pin) return nullptr;
  ++existing_;
  ++pinning_;
  lock.unlock();
  Result<BounceMemory*> pinned = pin(device);
  lock.lock();
  --pinning_;
  if (!pinned.ok()) {
    --existing_;
    ++pin_failures_;
    changed_.notify_all();
  }
  return pinned;
}

Result<BounceBuffer> BouncePool::acquire(const std::shared_ptr<DeviceContext>& device,
                                         const std::atomic<bool>& cancelled) {
  constexpr std::chrono::milliseconds kPoll{20};  // how soon a cancellation is seen
  std::unique_lock lock(mutex_);
  bool waited = false;
  Status failure;  // of pinning: from then on only existing buffers will do
  for (;;) {
    if (closed_) return Status(ESHUTDOWN, "the bounce pool is closed");
    if (cancelled) return Status(ECANCELED, "cancelled while waiting for a bounce buffer");
    const Result<BounceMemory*> taken = take_locked(lock, device, failure.ok());
    if (!taken.ok()) {
      failure = taken.status();
      continue;
    }
    if (taken.value() != nullptr) return BounceBuffer(taken.value(), ReturnToPool{shared_from_this()});
    if (existing_ == 0) return failure;
    if (!std::exchange(waited, true)) ++waits_;
    ++waiting_;
    changed_.wait_for(lock, kPoll);
    --waiting_;
  }
}

BounceBuffer BouncePool::try_acquire(const std::shared_ptr<DeviceContext>& device, std::size_t reserve) {
  std::unique_lock lock(mutex_);
  if (closed_ || waiting_ > 0 || idle_.size() + (capacity_ - existing_) <= reserve) return {};
  // The driver pins one after another, and copies wait during that: at the start of a transfer each thread gets its
  // first buffer before one gets a second.
  const Result<BounceMemory*> taken = take_locked(lock, device, pinning_ == 0);
  if (!taken.ok() || taken.value() == nullptr) return {};
  return {taken.value(), ReturnToPool{shared_from_this()}};
}

void BouncePool::give_back(BounceMemory* memory) {
  {
    const std::lock_guard lock(mutex_);
    if (!closed_) {
      idle_.push_back(memory);
      changed_.notify_all();
      return;
    }
    --existing_;
  }
  unpin(memory);
}

void BouncePool::close() {
  std::vector<BounceMemory*> freed;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    freed.swap(idle_);
    existing_ -= freed.size();
    changed_.notify_all();
  }
  for (BounceMemory* const memory : freed) unpin(memory);
}

BouncePool::Usage BouncePool::statistics() const {
  const std::lock_guard lock(mutex_);
  Usage statistics;
  statistics.slot_bytes = buffer_bytes_;
  statistics.capacity_bytes = capacity_ * buffer_bytes_;
  statistics.pinned_bytes = existing_ * buffer_bytes_;
  statistics.used_bytes = (existing_ - idle_.size()) * buffer_bytes_;
  statistics.waits = waits_;
  statistics.pin_failures = pin_failures_;
  return statistics;
}

}  // namespace gpufs
