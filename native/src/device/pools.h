// What the engine keeps of one device for its next users: driver objects, and pinned host memory in small blocks.
// Ownership: the DeviceContext's. An object in use keeps the driver open, but not the context.
// Thread-safe.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/status.h"
#include "drivers/driver.h"

namespace gpufs {

// A free list of driver objects (events or streams), so that they are not created for each use.
template <typename T>
class DevicePool {
 public:
  using Create = Result<std::unique_ptr<T>> (Device::*)();

  // capacity: how many idle objects are kept. Any number may be in use.
  DevicePool(const std::shared_ptr<Driver>& driver, Device& device, Create create, std::size_t capacity)
      : device_(device), create_(create), list_(std::make_shared<FreeList>()) {
    list_->driver = driver;
    list_->capacity = capacity;
  }

  // An object that is the caller's alone until the last copy of the pointer is gone, which returns it to the pool.
  // An event may still show the recording of its last user: record it before asking it anything. A stream is idle: the
  // work that its last user left in it is waited for here. Fails as creating an object does.
  Result<std::shared_ptr<T>> acquire() {
    while (std::unique_ptr<T> object = list_->pop()) {
      if (usable(*object)) return lease(std::move(object));
      list_->count(-1);
    }
    std::unique_ptr<T> created = TRY((device_.*create_)());
    list_->count(1);
    return lease(std::move(created));
  }

  [[nodiscard]] std::size_t existing() const {
    const std::lock_guard lock(list_->mutex);
    return list_->existing;
  }
  [[nodiscard]] std::size_t idle() const {
    const std::lock_guard lock(list_->mutex);
    return list_->idle.size();
  }

 private:
  // Shared with the objects in use, which may return after the context is gone.
  struct FreeList {
    std::shared_ptr<Driver> driver;  // destroyed after the idle objects
    std::size_t capacity;
    mutable std::mutex mutex;  // guards the two below; innermost
    std::vector<std::unique_ptr<T>> idle;
    std::size_t existing = 0;  // idle or in use

    std::unique_ptr<T> pop() {
      const std::lock_guard lock(mutex);
      if (idle.empty()) return nullptr;
      std::unique_ptr<T> object = std::move(idle.back());
      idle.pop_back();
      return object;
    }
    void push(std::unique_ptr<T> object) {
      const std::lock_guard lock(mutex);
      if (idle.size() < capacity) {
        idle.push_back(std::move(object));
      } else {
        --existing;
      }
    }
    void count(int change) {
      const std::lock_guard lock(mutex);
      existing += static_cast<std::size_t>(change);
    }
  };

  static bool usable(T& object) {
    if constexpr (std::is_same_v<T, Stream>) return object.synchronize().ok();
    return true;
  }

  std::shared_ptr<T> lease(std::unique_ptr<T> object) {
    return {object.release(), [list = list_](T* returned) { list->push(std::unique_ptr<T>(returned)); }};
  }

  Device& device_;
  const Create create_;
  const std::shared_ptr<FreeList> list_;
};

struct PinnedBlock {
  std::byte* data = nullptr;
  DeviceAddress address = 0;  // of data, as the device sees it
  std::size_t bytes = 0;
};

// Memory for the words that a program, its kernels and its streams share. Unpinning waits for all streams of the
// device, so a released block is kept for the next one of its size, and all is unpinned with the pool.
class PinnedPool {
 public:
  explicit PinnedPool(Device& device) : device_(device) {}
  ~PinnedPool();

  // Zeroed, and a cache line of its own at least. ENOMEM, or what the driver returned, if no more can be pinned.
  Result<PinnedBlock> take(std::size_t bytes);
  // Neither a device nor a kernel may use it any more.
  void release(const PinnedBlock& block);

 private:
  // Pins at least so many bytes as the new chunk to cut blocks from. mutex_ is held.
  Status pin_chunk(std::size_t bytes);

  Device& device_;
  std::mutex mutex_;  // guards all below
  std::vector<PinnedBlock> chunks_;
  PinnedBlock rest_;                                      // of the last chunk
  std::map<std::size_t, std::vector<PinnedBlock>> free_;  // by size
};

}  // namespace gpufs
