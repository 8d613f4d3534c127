// The table behind gpufs_handle: numbers that name objects on the other side of the C interface.
// Ownership: shared. A lookup returns a shared pointer, so closing a handle never destroys an object in use.
// Thread-safe.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <typeindex>
#include <typeinfo>
#include <utility>

#include "base/status.h"
#include "gpufs.h"

namespace gpufs {

class HandleTable {
 public:
  // The table of the process.
  static HandleTable& instance();

  // owner: the handle of the engine or mount that the object belongs to (0: none). close: what closing the handle, or
  // its owner, does to the object.
  template <typename T>
  Result<gpufs_handle> put(std::shared_ptr<T> object, gpufs_handle owner = 0,
                           std::function<Status(T&)> close = nullptr) {
    std::function<Status()> closing;
    if (close) closing = [object, close = std::move(close)] { return close(*object); };
    return put_entry({typeid(T), std::move(object), owner, std::move(closing)});
  }

  // EBADF for 0, a closed handle, a number that is not a handle, and a handle of another type.
  template <typename T>
  Result<std::shared_ptr<T>> get(gpufs_handle handle) {
    std::shared_ptr<void> found = TRY(find(handle, typeid(T), /*remove=*/false));
    return std::static_pointer_cast<T>(std::move(found));
  }

  // Does what get() does, and removes the handle: of several callers exactly one gets the object. Does not close the
  // object.
  template <typename T>
  Result<std::shared_ptr<T>> take(gpufs_handle handle) {
    std::shared_ptr<void> found = TRY(find(handle, typeid(T), /*remove=*/true));
    return std::static_pointer_cast<T>(std::move(found));
  }

  // The owner that put() was called with. EBADF: the handle is not open.
  Result<gpufs_handle> owner_of(gpufs_handle handle);

  // Closes a handle of any type, and those that belong to it. It stays open if closing its object fails.
  Status close(gpufs_handle handle);

  // Closes every handle that belongs to `owner`, youngest first. The owner's own handle must have been removed before,
  // so that no new ones are added.
  void close_owned(gpufs_handle owner);

 private:
  struct OpenHandle {
    std::type_index type;
    std::shared_ptr<void> object;
    gpufs_handle owner;
    std::function<Status()> close;
  };

  using Entries = std::map<gpufs_handle, OpenHandle>;

  Result<gpufs_handle> put_entry(OpenHandle entry);
  // Removes a handle; empty if it is not open. Destroy the result after the lock is released.
  Entries::node_type extract_locked(gpufs_handle handle);
  Result<std::shared_ptr<void>> find(gpufs_handle handle, std::type_index type, bool remove);

  // Guards all below. Innermost: nothing is called or destroyed while it is held.
  std::mutex mutex_;
  Entries entries_;
  std::set<std::pair<gpufs_handle, gpufs_handle>> owned_;  // an owner, and what belongs to it
  gpufs_handle last_ = 0;                                  // handles are never reused
};

}  // namespace gpufs
