#include "io/bounce_pool.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/caught.h"
#include "base/log.h"
#include "base/math.h"

namespace gpufs {

struct BounceLease::Slot {
  std::byte* memory = nullptr;
  std::size_t mapped_bytes = 0;
  void* mapping = nullptr;
  int node = -1;
  bool pinned = false;
  std::shared_ptr<DeviceContext> device;  // that pinned it
};

namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr int kPreferredPolicy = 1;  // MPOL_PREFERRED
constexpr unsigned long kNodeBits = 1024;

// A wish: memory on another node works too.
void prefer_node(void* memory, std::size_t bytes, int node) {
  if (node < 0 || static_cast<unsigned long>(node) >= kNodeBits) return;
  constexpr std::size_t kWordBits = sizeof(unsigned long) * 8;
  unsigned long mask[kNodeBits / kWordBits] = {};
  const auto bit = static_cast<unsigned long>(node);
  mask[bit / kWordBits] |= 1UL << bit % kWordBits;
  (void)::syscall(SYS_mbind, memory, bytes, kPreferredPolicy, mask, kNodeBits, 0);
}

}  // namespace

std::byte* BounceLease::data() const { return slot_->memory; }
std::size_t BounceLease::bytes() const { return pool_->slot_bytes(); }

void BounceLease::reset() {
  if (slot_ != nullptr) pool_->give_back(std::exchange(slot_, nullptr));
  pool_.reset();
}

std::shared_ptr<BouncePool> BouncePool::create(std::size_t slot_bytes, std::uint64_t capacity_bytes) {
  const auto capacity = static_cast<std::size_t>(std::max<std::uint64_t>(capacity_bytes / slot_bytes, 1));
  return std::shared_ptr<BouncePool>(new BouncePool(slot_bytes, capacity));
}

BouncePool::~BouncePool() { close(); }

Result<BouncePool::Slot*> BouncePool::make_slot(const std::shared_ptr<DeviceContext>& device) const {
  auto slot = std::make_unique<Slot>();
  // Aligned to huge pages where it fills one: fewer pages to pin.
  const std::size_t align = slot_bytes_ >= kHugePage ? kHugePage : 0;
  slot->mapped_bytes = slot_bytes_ + align;
  slot->mapping = ::mmap(nullptr, slot->mapped_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (slot->mapping == MAP_FAILED) return Status::from_errno(errno, "memory for a bounce slot");
  (void)::madvise(slot->mapping, slot->mapped_bytes, MADV_DONTDUMP);  // users' data
  auto start = reinterpret_cast<std::uintptr_t>(slot->mapping);
  if (align != 0) start = round_up(start, align);
  slot->memory = reinterpret_cast<std::byte*>(start);
  slot->node = device->info().numa_node;
  prefer_node(slot->memory, slot_bytes_, slot->node);
  if (align != 0) (void)::madvise(slot->memory, slot_bytes_, MADV_HUGEPAGE);
  // Nothing copies asynchronously from memory where the CPU itself reaches the device's.
  if (!device->info().cpu_addressable) {
    const Status pinned = device->device().pin(slot->memory, slot_bytes_);
    if (!pinned.ok()) {
      ::munmap(slot->mapping, slot->mapped_bytes);
      return pinned.with_context("pinning a bounce slot");
    }
    slot->pinned = true;
  }
  slot->device = device;
  return slot.release();
}

void BouncePool::destroy_slot(Slot* raw) const {
  const std::unique_ptr<Slot> slot(raw);
  if (slot->pinned) {
    // Unpinning waits for blocked streams, which may wait for the thread that closes this.
    if (slot->device->device().blocked_streams().any()) return;
    const Status unpinned = slot->device->device().unpin(slot->memory);
    if (!unpinned.ok()) {
      // The driver may still use these pages: better never to give them to somebody else.
      log_warning("a bounce slot could not be unpinned and is left as it is: ", unpinned.message());
      return;
    }
  }
  ::munmap(slot->mapping, slot->mapped_bytes);
}

BouncePool::Slot* BouncePool::take_idle_locked(int node) {
  if (idle_.empty()) return nullptr;
  auto chosen = std::find_if(idle_.begin(), idle_.end(), [&](const Slot* slot) { return slot->node == node; });
  if (chosen == idle_.end()) {
    if (existing_ < capacity_) return nullptr;  // make one on the right node
    chosen = idle_.begin();
  }
  Slot* const slot = *chosen;
  idle_.erase(chosen);
  return slot;
}

Result<BounceLease> BouncePool::acquire(const std::shared_ptr<DeviceContext>& device,
                                        std::chrono::milliseconds patience, const std::atomic<bool>* cancelled) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kLook{20};  // how soon a cancellation is seen
  const Clock::time_point end = Clock::now() + patience;
  const auto wanted = [&] { return cancelled == nullptr || !cancelled->load(std::memory_order_relaxed); };
  std::unique_lock lock(mutex_);
  if (closed_) return Status(ESHUTDOWN, "the bounce pool is closed");
  if (waiters_.empty()) {
    if (Slot* const slot = take_idle_locked(device->info().numa_node)) return BounceLease(shared_from_this(), slot);
    if (existing_ < capacity_) {
      ++existing_;
      lock.unlock();
      Result<Slot*> made = caught([&] { return make_slot(device); });
      if (made.ok()) return BounceLease(shared_from_this(), made.value());
      lock.lock();
      --existing_;
      ++pin_failures_;
      if (existing_ == 0) {
        // Others may have queued for the slot that did not come to be, and nothing would ever wake them.
        for (Waiter* const waiter : waiters_) waiter->changed.notify_one();
        return made.status();
      }
      if (Slot* const slot = idle_.empty() || !waiters_.empty() ? nullptr : idle_.back()) {
        idle_.pop_back();
        return BounceLease(shared_from_this(), slot);
      }
    }
  }
  ++waits_;
  Waiter self;
  const auto place = waiters_.insert(waiters_.end(), &self);
  Status outcome;
  while (self.slot == nullptr) {
    if (closed_) {
      outcome = Status(ESHUTDOWN, "the bounce pool is closed");
      break;
    }
    if (!wanted()) {
      outcome = Status(ECANCELED, "cancelled while waiting for a bounce slot");
      break;
    }
    if (existing_ == 0) {
      outcome = Status(ENOMEM, "no bounce slot could be pinned");
      break;
    }
    if (Clock::now() >= end) {
      outcome = Status(ETIMEDOUT, "all bounce slots are in use");
      break;
    }
    self.changed.wait_until(lock, std::min(end, Clock::now() + kLook));
  }
  if (self.slot != nullptr) return BounceLease(shared_from_this(), self.slot);
  waiters_.erase(place);
  return outcome;
}

BounceLease BouncePool::try_acquire(const std::shared_ptr<DeviceContext>& device, std::size_t reserve) {
  std::unique_lock lock(mutex_);
  if (closed_ || !waiters_.empty() || idle_.size() + (capacity_ - existing_) <= reserve) return {};
  if (Slot* const slot = take_idle_locked(device->info().numa_node)) return {shared_from_this(), slot};
  if (existing_ >= capacity_) return {};
  ++existing_;
  lock.unlock();
  Result<Slot*> made = caught([&] { return make_slot(device); });
  if (made.ok()) return {shared_from_this(), made.value()};
  lock.lock();
  --existing_;
  ++pin_failures_;
  for (Waiter* const waiter : waiters_) waiter->changed.notify_one();
  return {};
}

void BouncePool::give_back(Slot* slot) {
  {
    const std::lock_guard lock(mutex_);
    if (!closed_) {
      if (waiters_.empty()) {
        idle_.push_back(slot);
      } else {
        Waiter* const next = waiters_.front();
        waiters_.pop_front();
        next->slot = slot;
        next->changed.notify_one();
      }
      return;
    }
    --existing_;
  }
  destroy_slot(slot);
}

void BouncePool::close() {
  std::vector<Slot*> doomed;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    doomed.swap(idle_);
    existing_ -= doomed.size();
    for (Waiter* const waiter : waiters_) waiter->changed.notify_one();
  }
  for (Slot* const slot : doomed) destroy_slot(slot);
}

BouncePool::Statistics BouncePool::statistics() const {
  const std::lock_guard lock(mutex_);
  Statistics statistics;
  statistics.slot_bytes = slot_bytes_;
  statistics.capacity_bytes = capacity_ * slot_bytes_;
  statistics.pinned_bytes = existing_ * slot_bytes_;
  statistics.used_bytes = (existing_ - idle_.size()) * slot_bytes_;
  statistics.waits = waits_;
  statistics.pin_failures = pin_failures_;
  return statistics;
}

}  // namespace gpufs
