#include "abi/handles.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

namespace gpufs {
namespace {

// Set in a child of fork(): the engine's threads are not there, and any of its locks may be held for ever.
std::atomic<bool> forked_child{false};

constexpr std::uint32_t kLastGeneration = 0xffffffff;

gpufs_handle make_handle(std::uint32_t generation, std::uint32_t index) {
  return (static_cast<gpufs_handle>(generation) << 32) | index;
}

}  // namespace

HandleTable& HandleTable::instance() {
  // Never destroyed: threads that outlive main() must not find a dead table, and no driver is called after main.
  static HandleTable* const table = [] {
    ::pthread_atfork(nullptr, nullptr, [] { forked_child.store(true, std::memory_order_relaxed); });
    return new HandleTable;
  }();
  return *table;
}

HandleTable::Entry* HandleTable::lookup_locked(gpufs_handle handle) {
  const auto index = static_cast<std::uint32_t>(handle & 0xffffffff);
  if (index >= entries_.size()) return nullptr;
  Entry& entry = entries_[index];
  if (entry.tag == nullptr || entry.generation != static_cast<std::uint32_t>(handle >> 32)) return nullptr;
  return &entry;
}

void HandleTable::vacate_locked(Entry& entry, std::uint32_t index) {
  entry.tag = nullptr;
  entry.owner = 0;
  // A slot whose generations are used up is left empty for ever, so that no number ever names a second object.
  if (entry.generation == kLastGeneration) return;
  ++entry.generation;
  free_.push_back(index);
}

Result<gpufs_handle> HandleTable::put_entry(std::shared_ptr<void> object, const char* tag, gpufs_handle owner,
                                            std::function<void()> close) {
  if (forked_child.load(std::memory_order_relaxed)) return Status(EBADF, "the engine does not survive fork()");
  const std::lock_guard lock(mutex_);
  if (owner != 0 && lookup_locked(owner) == nullptr) return Status(EBADF, "the handle's owner is closed");
  // Room for every index is made here, so that closing a handle never needs memory.
  if (free_.empty()) {
    if (entries_.size() >= 0xffffffff) return Status(EMFILE, "too many handles");
    entries_.emplace_back();
    free_.reserve(entries_.size());
    free_.push_back(static_cast<std::uint32_t>(entries_.size() - 1));
  }
  const std::uint32_t index = free_.back();
  free_.pop_back();
  Entry& entry = entries_[index];
  entry.tag = tag;
  entry.object = std::move(object);
  entry.owner = owner;
  entry.order = next_order_++;
  entry.close = std::move(close);
  return make_handle(entry.generation, index);
}

Result<std::shared_ptr<void>> HandleTable::find(gpufs_handle handle, const char* tag, bool remove) {
  if (forked_child.load(std::memory_order_relaxed)) return Status(EBADF, "the engine does not survive fork()");
  std::function<void()> close;  // destroyed after the lock is released: it holds a reference too
  const std::lock_guard lock(mutex_);
  Entry* entry = lookup_locked(handle);
  if (entry == nullptr) return Status(EBADF, "the handle is not open");
  if (entry->tag != tag) return Status(EBADF, "the handle names an object of another kind");
  if (!remove) return entry->object;
  std::shared_ptr<void> object = std::move(entry->object);
  close = std::move(entry->close);
  entry->object = nullptr;
  entry->close = nullptr;
  vacate_locked(*entry, static_cast<std::uint32_t>(handle & 0xffffffff));
  return object;
}

void HandleTable::close_owned(gpufs_handle owner) {
  if (owner == 0 || forked_child.load(std::memory_order_relaxed)) return;
  for (;;) {
    std::shared_ptr<void> object;
    std::function<void()> close;
    gpufs_handle handle = 0;
    {
      const std::lock_guard lock(mutex_);
      std::uint64_t youngest = 0;
      std::uint32_t found = 0;
      bool any = false;
      for (std::uint32_t index = 0; index < entries_.size(); ++index) {
        const Entry& entry = entries_[index];
        if (entry.tag == nullptr || entry.owner != owner || (any && entry.order < youngest)) continue;
        any = true;
        youngest = entry.order;
        found = index;
      }
      if (!any) return;
      Entry& entry = entries_[found];
      handle = make_handle(entry.generation, found);
      object = std::move(entry.object);
      close = std::move(entry.close);
      entry.object = nullptr;
      entry.close = nullptr;
      vacate_locked(entry, found);
    }
    close_owned(handle);
    if (close) close();
  }
}

}  // namespace gpufs
