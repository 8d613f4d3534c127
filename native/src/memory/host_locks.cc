// The registry of locked host memory, and the calls of the driver that lock and unlock it.

#include "memory/host_locks.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <iterator>
#include <thread>

#include "base/log.h"
#include "base/math.h"

namespace gpufs {

struct HostLocks::LockedRange {
  LockedRange(const Range& locked, Owner in_account) : range(locked), owner(in_account), locks{{locked, 1}} {}

  Range range;  // a foreign one may grow to the whole of what another library pinned
  const Owner owner;
  bool busy = true;          // a thread is in a call of the driver for it, and alone uses it
  Device* device = nullptr;  // which pinned the range; null: foreign
  bool source_only = false;
  DeviceAddress device_address = 0;      // of the range's start; 0: there is none
  std::map<Range, std::uint64_t> locks;  // by the range that was asked for: how often
  std::uint64_t uses = 0;

  [[nodiscard]] std::uint64_t lock_count() const {
    std::uint64_t total = 0;
    for (const auto& [range_locked, times] : locks) total += times;
    return total;
  }
};

namespace {

// Whether every page of it is mapped. MS_ASYNC only checks the mappings.
bool is_mapped(const HostLocks::Range& range) {
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const std::uintptr_t start = range.start / page * page;
  return ::msync(reinterpret_cast<void*>(start), range.end - start, MS_ASYNC) == 0;
}

std::string remedy() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    return "; this process may lock " + std::to_string(limit.rlim_cur) +
           " bytes (RLIMIT_MEMLOCK): raise it with `ulimit -l unlimited`, LimitMEMLOCK=infinity in its unit, or lock "
           "less";
  }
  return "; the machine or the process's cgroup has no more memory to lock: lock less, or in smaller parts";
}

// Drivers unpin once no stream is blocked, and would wait for ever on a stalled device. closing: the streams that are
// still blocked were given up on.
Status may_unpin(Device& device, bool closing) {
  constexpr std::chrono::milliseconds kLook{2};
  constexpr std::chrono::seconds kAlert{1};
  constexpr std::chrono::milliseconds kNotice{200};  // a stream may be about to go on
  const auto earliest = std::chrono::steady_clock::now() + kNotice;
  const BlockedStreams& streams = device.blocked_streams();
  for (;; std::this_thread::sleep_for(kLook)) {
    const std::chrono::milliseconds stalled = streams.stalled_for();
    if (stalled < kAlert && !(closing && streams.any())) return {};
    const bool waited = std::chrono::steady_clock::now() >= earliest;
    if (closing || (waited && stalled >= streams.stall_timeout())) {
      return Status(ETIMEDOUT, "streams that wait for operations are blocked, and unlocking waits for all streams");
    }
  }
}

}  // namespace

std::string to_text(const HostLocks::Range& range) {
  char text[96] = {};
  std::snprintf(text, sizeof text, "0x%zx-0x%zx (%zu bytes)", static_cast<std::size_t>(range.start),
                static_cast<std::size_t>(range.end), static_cast<std::size_t>(range.end - range.start));
  return text;
}

HostLocks::HostLocks(std::shared_ptr<Driver> driver, LockPolicy policy)
    : driver_(std::move(driver)), policy_(policy), process_(::getpid()) {}

HostLocks::~HostLocks() { close(); }

HostLocks::LockUse::~LockUse() {
  if (locks_ != nullptr) locks_->end_use(entries_);
}

Status HostLocks::check(const void* address, std::size_t bytes, Range* range) const {
  range->start = reinterpret_cast<std::uintptr_t>(address);
  if (address == nullptr || bytes == 0) return Status(EINVAL, "an empty range cannot be locked");
  // The last page must have an end, too.
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  if (add_overflows(range->start, bytes, &range->end) || range->end > ~std::uintptr_t{0} - page) {
    return Status(EINVAL, "the range to lock wraps around the end of the address space");
  }
  // The child has a copy of this list, but neither the driver nor the pinned pages.
  if (::getpid() != process_) return Status(EPERM, "only the process that opened the engine can lock memory");
  return {};
}

std::shared_ptr<HostLocks::LockedRange> HostLocks::touching_locked(const Range& range) const {
  auto next = entries_.upper_bound(range.start);
  if (next != entries_.begin() && std::prev(next)->second->range.end > range.start) return std::prev(next)->second;
  return next != entries_.end() && next->first < range.end ? next->second : nullptr;
}

std::shared_ptr<HostLocks::LockedRange> HostLocks::settled_locked(const Range& range, Lock& lock) const {
  for (;;) {
    std::shared_ptr<LockedRange> entry = touching_locked(range);
    if (entry == nullptr || !entry->busy) return entry;
    changed_.wait(lock);
  }
}

Device& HostLocks::choose_device() const {
  // Memory that one device pinned is pinned for all of its driver; it must be one that works and copies by itself.
  const auto& devices = driver_->devices();
  const auto good = std::find_if(devices.begin(), devices.end(), [](const std::shared_ptr<Device>& device) {
    return !device->info().cpu_addressable && device->health().ok();
  });
  return good == devices.end() ? *devices.front() : **good;
}

Status HostLocks::pin(LockedRange& entry, Access access, Range* whole) const {
  const Range range = *whole;
  if (driver_->devices().empty()) return Status(ENODEV, "there is no device to lock memory for");
  if (!is_mapped(range)) return Status(EFAULT, to_text(range) + " is not all mapped: it cannot be locked");
  Device& device = choose_device();
  auto* const start = reinterpret_cast<void*>(range.start);
  Status status;
  if (access == Access::kSource) {
    status = device.pin_read_only(start, range.bytes());
    entry.source_only = status.ok();
  }
  if (access == Access::kBoth || status.error() == EOPNOTSUPP) status = device.pin(start, range.bytes());
  if (status.ok()) {
    entry.device = &device;
  } else if (status.error() == EEXIST) {
    for (const std::uintptr_t at : {range.start, range.end - 1}) {
      const Result<PinnedHostRange> known = device.pinned_range(reinterpret_cast<void*>(at));
      if (!known.ok()) continue;
      const Range theirs{known.value().start, known.value().end};
      if (theirs.start > at || at >= theirs.end) continue;  // about something else
      if (!theirs.contains(range)) {
        return Status(EEXIST, to_text(range) + " overlaps " + to_text(theirs) +
                                  ", which another library has locked, and is not inside it");
      }
      *whole = theirs;
      break;
    }
  } else {
    status = status.with_context("locking " + to_text(range));
    if (status.error() != ENOMEM) return status;
    return Status(ENOMEM, status.message() + remedy(), status.device_code());
  }
  // One device's answer serves all of its driver: they share the address space of the process.
  const Result<DeviceAddress> seen = device.address_of_pinned(reinterpret_cast<void*>(whole->start));
  if (seen.ok()) entry.device_address = seen.value();
  return {};
}

Status HostLocks::lock(const void* address, std::size_t bytes, Access access, Owner owner) {
  Range range;
  TRY(check(address, bytes, &range));
  std::shared_ptr<LockedRange> mine;
  {
    Lock lock(mutex_);
    const std::shared_ptr<LockedRange> there = settled_locked(range, lock);
    if (closed_) return Status(ESHUTDOWN, "the engine is being closed");
    if (there != nullptr) {
      if (!there->range.contains(range)) {
        return Status(EEXIST,
                      to_text(range) + " overlaps the locked range " + to_text(there->range) + " and is not inside it");
      }
      if (access == Access::kBoth && there->source_only) {
        return Status(EACCES, to_text(there->range) + " is locked for devices to read only");
      }
      ++there->locks[range];
      return {};
    }
    mine = std::make_shared<LockedRange>(range, owner);
    entries_.emplace(range.start, mine);
  }
  Range whole = range;
  Status status = pin(*mine, access, &whole);
  {
    const Lock lock(mutex_);
    entries_.erase(range.start);
    if (status.ok()) {
      // Listed whole, unless a part of it is listed already.
      if (touching_locked(whole) == nullptr) {
        mine->range = whole;
      } else if (mine->device_address != 0) {
        mine->device_address += range.start - whole.start;
      }
      entries_.emplace(mine->range.start, mine);
    }
    mine->busy = false;
  }
  changed_.notify_all();
  return status;
}

Status HostLocks::unpin(const std::shared_ptr<LockedRange>& entry, Lock& lock) {
  Status status;
  if (entry->device != nullptr) {
    entry->busy = true;
    const bool closing = closed_;
    lock.unlock();
    status = may_unpin(*entry->device, closing);
    if (status.ok()) status = entry->device->unpin(reinterpret_cast<void*>(entry->range.start));
    if (status.error() == ENOENT) {
      log_warning("another library has unlocked ", to_text(entry->range));
      status = Status();
    }
    lock.lock();
    entry->busy = false;
  }
  if (status.ok()) entries_.erase(entry->range.start);
  changed_.notify_all();
  return status;
}

Status HostLocks::unlock(const void* address, std::size_t bytes) {
  Range range;
  TRY(check(address, bytes, &range));
  Lock lock(mutex_);
  const std::shared_ptr<LockedRange> entry = settled_locked(range, lock);
  if (entry == nullptr) return Status(ENOENT, to_text(range) + " is not locked");
  const auto found = entry->locks.find(range);
  if (found == entry->locks.end()) {
    return Status(ENOENT, to_text(range) + " was not locked as such, only " + to_text(entry->range));
  }
  if (found->second == 1 && entry->locks.size() == 1 && entry->uses == 0) {
    const Status status = unpin(entry, lock);
    return status.ok() ? status : status.with_context("unlocking " + to_text(entry->range));
  }
  if (--found->second == 0) entry->locks.erase(found);
  return {};
}

Result<HostLocks::Info> HostLocks::info(const void* address, std::size_t bytes) const {
  Range range;
  TRY(check(address, bytes, &range));
  Lock lock(mutex_);
  const std::shared_ptr<LockedRange> entry = settled_locked(range, lock);
  if (entry == nullptr || !entry->range.contains(range)) return Status(ENOENT, to_text(range) + " is not locked");
  const DeviceAddress base = entry->device_address;
  return Info{entry->range, entry->device == nullptr, entry->source_only, entry->lock_count(),
              base == 0 ? 0 : base + (range.start - entry->range.start)};
}

Result<HostLocks::LockUse> HostLocks::use(const void* address, std::size_t bytes, Access access) {
  LockUse found;
  if (bytes == 0) {
    found.parts_.push_back({{}, false});
    return found;
  }
  const auto start = reinterpret_cast<std::uintptr_t>(address);
  const Range range{start, start + bytes};
  Lock lock(mutex_);
  for (std::uintptr_t at = start; at < range.end;) {
    const std::shared_ptr<LockedRange> entry = settled_locked({at, range.end}, lock);
    const bool here = entry != nullptr && entry->range.start <= at;
    const std::uintptr_t end =
        entry == nullptr ? range.end : std::min(here ? entry->range.end : entry->range.start, range.end);
    if (here) {
      if (access == Access::kBoth && entry->source_only) {
        lock.unlock();  // for ~LockUse()
        return Status(EACCES, to_text(entry->range) + " is locked for devices to read only");
      }
      found.entries_.push_back(entry);
      found.locks_ = this;
      ++entry->uses;
    }
    found.parts_.push_back({{at - start, end - at}, here});
    at = end;
  }
  return found;
}

void HostLocks::end_use(const std::vector<std::shared_ptr<LockedRange>>& entries) {
  Lock lock(mutex_);
  for (const std::shared_ptr<LockedRange>& entry : entries) {
    if (--entry->uses > 0 || !entry->locks.empty()) continue;
    // The range was unlocked while in use.
    if (const Status status = unpin(entry, lock); !status.ok()) {
      log_error("unlocking ", to_text(entry->range), ": ", status.message());
    }
  }
}

void HostLocks::close() {
  if (::getpid() != process_) return;
  Lock lock(mutex_);
  closed_ = true;
  for (std::uintptr_t at = 0;;) {
    const std::shared_ptr<LockedRange> entry = settled_locked({at, ~std::uintptr_t{0}}, lock);
    if (entry == nullptr) return;
    at = entry->range.end;
    entry->locks.clear();
    if (entry->uses > 0) continue;
    if (const Status status = unpin(entry, lock); !status.ok()) {
      log_warning(to_text(entry->range), " stays locked: ", status.message());
    }
  }
}

HostLocks::Totals HostLocks::statistics() const {
  const Lock lock(mutex_);
  Totals statistics;
  for (const auto& [start, entry] : entries_) {
    if (entry->owner == Owner::kMount) {
      statistics.mount_bytes += entry->range.bytes();
    } else {
      statistics.bytes += entry->range.bytes();
      ++statistics.ranges;
    }
  }
  return statistics;
}

}  // namespace gpufs
