// Which ranges of host memory are locked (pinned), by whom and how often. Devices copy from and to them directly.
// One registry for each engine, shared by the engine and its devices' contexts; it unlocks everything when destroyed.
// Any thread may call any function. Those that call the driver say so. No mutex is held during such a call, and only
// callers that want the same memory wait for it.
#pragma once

#include <sys/types.h>

#include <compare>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/extents.h"
#include "base/status.h"
#include "drivers/driver.h"

namespace gpufs {

// When memory is locked that nobody asked to lock: where it helps and is possible; never; always, or the work fails.
enum class LockPolicy : int { kAuto, kOff, kMandatory };

// Ranges are bytes, not pages: the driver pins the pages that they touch, and two ranges may share one.
//  - A range inside a locked one adds a reference to that. The last reference to go unlocks.
//  - A range that overlaps a locked one and is not inside it is EEXIST, which names both.
//  - Memory that another library pinned (the driver reports it) is recorded whole, as foreign, and never unpinned here.
//  - Memory that is unmapped while it is locked stays pinned, where nobody sees it: unlock it first.
class HostLocks {
 private:
  struct LockedRange;

 public:
  enum class Access { kBoth, kSource };   // kSource: devices only read it; it may be mapped for reading only
  enum class Owner { kProgram, kMount };  // to whom a lock is counted
  struct Range {
    std::uintptr_t start = 0;
    std::uintptr_t end = 0;
    auto operator<=>(const Range&) const = default;  // NOLINT(modernize-use-nullptr): no pointer
    [[nodiscard]] bool contains(const Range& other) const { return start <= other.start && other.end <= end; }
    [[nodiscard]] std::uint64_t bytes() const { return end - start; }
  };

  HostLocks(std::shared_ptr<Driver> driver, LockPolicy policy);
  ~HostLocks();

  [[nodiscard]] LockPolicy policy() const { return policy_; }

  // Calls the driver. EINVAL: empty, or wraps around. EFAULT: not all of it is mapped. EEXIST: see above. EACCES: it is
  // locked as a source only. ENOMEM, with what to do about it: no more can be locked. EPERM in a forked child.
  // ESHUTDOWN after close(). Nothing has changed then.
  Status lock(const void* address, std::size_t bytes, Access access = Access::kBoth, Owner owner = Owner::kProgram);
  // Undoes one lock() of exactly this range; with the last one of all, the driver's pinning. ENOENT: there is none.
  // Other errors are the driver's: the range is still locked as before.
  Status unlock(const void* address, std::size_t bytes);

  struct Info {
    Range whole;  // the locked range around it
    bool foreign = false;
    bool source_only = false;
    std::uint64_t references = 0;
    DeviceAddress device_address = 0;  // where devices see the range in question; 0: the driver gives no address
  };
  // ENOENT unless all of it is locked as one range.
  Result<Info> info(const void* address, std::size_t bytes) const;

  // A part of a range that is locked as one, or not at all: drivers may refuse a copy that crosses the border.
  struct Part : Extent {
    bool locked = false;
  };
  // Keeps the locked parts of a range locked while it lives. Must not outlive the registry.
  class LockUse {
   public:
    LockUse() = default;
    LockUse(LockUse&& other) noexcept
        : locks_(std::exchange(other.locks_, nullptr)),
          entries_(std::move(other.entries_)),
          parts_(std::move(other.parts_)) {}
    LockUse& operator=(LockUse&&) = delete;
    ~LockUse();
    [[nodiscard]] const std::vector<Part>& parts() const { return parts_; }

   private:
    friend class HostLocks;
    HostLocks* locks_ = nullptr;
    std::vector<std::shared_ptr<LockedRange>> entries_;
    std::vector<Part> parts_;
  };
  // The range in parts, in order. EACCES: a device is to write to a part that is locked as a source only.
  Result<LockUse> use(const void* address, std::size_t bytes, Access access);

  // Unlocks everything; ranges in use when that ends. Calls the driver. May be called twice.
  void close();

  struct Totals {
    std::uint64_t bytes = 0;  // of the program's ranges, foreign ones included
    std::uint64_t ranges = 0;
    std::uint64_t mount_bytes = 0;
  };
  [[nodiscard]] Totals statistics() const;

 private:
  using Lock = std::unique_lock<std::mutex>;

  [[nodiscard]] Status check(const void* address, std::size_t bytes, Range* range) const;
  // The first entry that has a byte of the range; null if none has.
  [[nodiscard]] std::shared_ptr<LockedRange> touching_locked(const Range& range) const;
  // The same once it is not busy.
  [[nodiscard]] std::shared_ptr<LockedRange> settled_locked(const Range& range, Lock& lock) const;
  // Calls the driver for an entry that is busy. whole: its range; on return, what another library pinned around it.
  Status pin(LockedRange& entry, Access access, Range* whole) const;
  // Unpins an entry with no reference but the caller's. Releases the lock for that time.
  Status unpin(const std::shared_ptr<LockedRange>& entry, Lock& lock);
  void end_use(const std::vector<std::shared_ptr<LockedRange>>& entries);
  [[nodiscard]] Device& choose_device() const;

  const std::shared_ptr<Driver> driver_;
  const LockPolicy policy_;
  const pid_t process_;

  // Guards all below and every entry. Innermost: the driver is never called under it.
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;                         // an entry is not busy any more
  std::map<std::uintptr_t, std::shared_ptr<LockedRange>> entries_;  // by start; none overlap
  bool closed_ = false;
};

// "0x7f0000000000-0x7f0000001000 (4096 bytes)".
std::string to_text(const HostLocks::Range& range);

}  // namespace gpufs
