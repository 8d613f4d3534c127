// The table behind gpufs_handle: numbers given to the other side of the C interface, each standing for one object.
// One table for the process, which shares the objects' ownership; a lookup gives a shared pointer, so closing a handle
// never destroys what another thread is using.
// Any thread may call any function.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "base/status.h"
#include "gpufs.h"

namespace gpufs {

class HandleTable {
 public:
  static HandleTable& instance();

  // owner: the handle of the engine or mount that this object belongs to (0: none). closing: what to do with the object
  // when its owner is closed while the handle is still open (null: only the reference is dropped).
  template <typename T>
  Result<gpufs_handle> put(std::shared_ptr<T> object, gpufs_handle owner = 0,
                           std::function<void(T&)> closing = nullptr) {
    std::function<void()> close;
    if (closing) close = [object, closing = std::move(closing)] { closing(*object); };
    return put_entry(std::move(object), &kTag<T>, owner, std::move(close));
  }

  // EBADF for 0, a closed handle, a number never given out, and a handle of another type.
  template <typename T>
  Result<std::shared_ptr<T>> get(gpufs_handle handle) {
    Result<std::shared_ptr<void>> found = find(handle, &kTag<T>, /*remove=*/false);
    if (!found.ok()) return found.status();
    return std::static_pointer_cast<T>(found.take());
  }

  // As get(), and the handle is closed: of several callers exactly one gets the object. `closing` does not run.
  template <typename T>
  Result<std::shared_ptr<T>> take(gpufs_handle handle) {
    Result<std::shared_ptr<void>> found = find(handle, &kTag<T>, /*remove=*/true);
    if (!found.ok()) return found.status();
    return std::static_pointer_cast<T>(found.take());
  }

  // Closes every handle that belongs to `owner`, youngest first, and refuses new ones for it from now on: the owner's
  // own handle must have been taken before.
  void close_owned(gpufs_handle owner);

 private:
  // One object a type; its address is the type's identity.
  template <typename T>
  static inline constexpr char kTag = 0;

  struct Entry {
    std::uint32_t generation = 1;  // counts the objects that this slot has named
    const char* tag = nullptr;     // null: free
    std::shared_ptr<void> object;
    gpufs_handle owner = 0;
    std::uint64_t order = 0;  // of creation
    std::function<void()> close;
  };

  Result<gpufs_handle> put_entry(std::shared_ptr<void> object, const char* tag, gpufs_handle owner,
                                 std::function<void()> close);
  Result<std::shared_ptr<void>> find(gpufs_handle handle, const char* tag, bool remove);
  Entry* lookup_locked(gpufs_handle handle);
  void vacate_locked(Entry& entry, std::uint32_t index);

  // Guards all below; innermost: nothing is called and nothing destroyed under it.
  std::mutex mutex_;
  std::vector<Entry> entries_;
  std::vector<std::uint32_t> free_;
  std::uint64_t next_order_ = 0;
};

}  // namespace gpufs
