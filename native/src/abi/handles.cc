#include "abi/handles.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <vector>

#include "abi/barrier.h"

namespace gpufs {
namespace {

// Set in a child of fork(): the engine's threads do not exist there, and any of its locks may be held for ever.
std::atomic<bool> forked_child{false};
constexpr char kForked[] = "the engine does not survive fork(): start the process with spawn or forkserver";

}  // namespace

HandleTable& HandleTable::instance() {
  // Never destroyed: threads that outlive main() still use the table, and no driver is called after main().
  static HandleTable* const table = [] {
    ::pthread_atfork(nullptr, nullptr, [] { forked_child.store(true, std::memory_order_relaxed); });
    return new HandleTable;
  }();
  return *table;
}

Result<gpufs_handle> HandleTable::put_entry(OpenHandle entry) {
  if (forked_child.load(std::memory_order_relaxed)) return Status(EBADF, kForked);
  {
    const std::lock_guard lock(mutex_);
    if (entry.owner == 0 || entries_.contains(entry.owner)) {
      if (entry.owner != 0) owned_.emplace(entry.owner, last_ + 1);
      entries_.emplace(++last_, std::move(entry));
      return last_;
    }
  }
  if (entry.close) (void)entry.close();  // nobody else can
  return Status(EBADF, "the handle's owner is closed");
}

HandleTable::Entries::node_type HandleTable::extract_locked(gpufs_handle handle) {
  Entries::node_type extracted = entries_.extract(handle);
  if (!extracted.empty()) owned_.erase({extracted.mapped().owner, handle});
  return extracted;
}

Result<std::shared_ptr<void>> HandleTable::find(gpufs_handle handle, std::type_index type, bool remove) {
  if (forked_child.load(std::memory_order_relaxed)) return Status(EBADF, kForked);
  Entries::node_type removed;  // destroyed after the lock is released
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(handle);
  if (found == entries_.end()) return Status(EBADF, "the handle is not open");
  if (found->second.type != type) return Status(EBADF, "the handle names an object of another kind");
  std::shared_ptr<void> object = found->second.object;
  if (remove) removed = extract_locked(handle);
  return object;
}

Result<gpufs_handle> HandleTable::owner_of(gpufs_handle handle) {
  const std::lock_guard lock(mutex_);
  const auto found = entries_.find(handle);
  if (found == entries_.end()) return Status(EBADF, "the handle is not open");
  return found->second.owner;
}

Status HandleTable::close(gpufs_handle handle) {
  if (forked_child.load(std::memory_order_relaxed)) return Status(EBADF, kForked);
  std::function<Status()> close;
  {
    const std::lock_guard lock(mutex_);
    const auto found = entries_.find(handle);
    if (found == entries_.end()) return Status(EBADF, "the handle is not open");
    close = found->second.close;
  }
  if (close) {
    TRY(close());
  }
  Entries::node_type closed;
  {
    const std::lock_guard lock(mutex_);
    closed = extract_locked(handle);
  }
  if (closed.empty()) return Status(EBADF, "the handle is not open");  // closed by another thread at the same time
  close_owned(handle);
  return {};
}

void HandleTable::close_owned(gpufs_handle owner) {
  if (owner == 0 || forked_child.load(std::memory_order_relaxed)) return;
  std::vector<gpufs_handle> owned;
  {
    const std::lock_guard lock(mutex_);
    for (auto each = owned_.lower_bound({owner, 0}); each != owned_.end() && each->first == owner; ++each) {
      owned.push_back(each->second);
    }
  }
  std::ranges::reverse(owned);
  for (const gpufs_handle handle : owned) {
    Entries::node_type closing;
    {
      const std::lock_guard lock(mutex_);
      closing = extract_locked(handle);
    }
    if (closing.empty()) continue;  // closed by its user at the same time
    if (closing.mapped().close) (void)closing.mapped().close();
    close_owned(handle);
  }
}

}  // namespace gpufs

extern "C" gpufs_status gpufs_close(gpufs_handle handle) {
  return gpufs::catch_all([&] { return gpufs::HandleTable::instance().close(handle); });
}
