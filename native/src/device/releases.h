// What a call needs to know that finds a device full: which buffers can release memory, which memory is about to be
// released, and how to wait for a release. DeviceContext::released() reports each release here, and whatever waits is
// woken here.
// Ownership: the DeviceContext's.
// Thread-safe. Listeners run under the mutex.
//
// A call for memory first has unused memory released (ExtentBuffer::retry_when_full, on its own thread); a request of
// the mount that still finds none waits for memory of removed files (fuse/long_requests.h, without a thread).
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace gpufs {

class ExtentBuffer;  // memory/extent_buffer.h

class Releases {
  struct Pending;
  using PendingReleases = std::list<Pending>;

 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  explicit Releases(std::uint64_t device_bytes) : device_bytes_(device_bytes) {}

  // ---- buffers that may hold memory which trim() releases ----

  void list_trimmable(const ExtentBuffer* key, std::weak_ptr<ExtentBuffer> buffer);
  void unlist_trimmable(const ExtentBuffer* key);
  [[nodiscard]] std::vector<std::weak_ptr<ExtentBuffer>> trimmable() const;

  // ---- memory of removed files that nothing has open: the kernel forgets the file, then it is released ----

  // One such file. Destroyed when its memory has been released, or is in use again.
  class Expected {
   public:
    // bytes: what the file holds; called until the release begins. The Releases must live as long.
    Expected(Releases& releases, std::function<std::uint64_t()> bytes);
    ~Expected();
    Expected(const Expected&) = delete;
    Expected& operator=(const Expected&) = delete;

    // The kernel has forgotten the file: the memory comes for certain.
    void confirm();
    // The file goes now; until then its bytes are counted as they are.
    void begin_release();

   private:
    Releases& releases_;
    PendingReleases::iterator place_;
  };
  // Until when it is worth waiting for memory of such files; nullopt: none is coming. A file that the kernel has not
  // forgotten for a second is kept by somebody, who may keep it for ever.
  [[nodiscard]] std::optional<TimePoint> expected_until() const;
  // Bytes of all such files.
  [[nodiscard]] std::uint64_t expected_bytes() const;
  [[nodiscard]] std::size_t expected_files() const;
  // Whether so much memory of files that were removed before a time is likely to be free soon that it is worth waiting.
  // Files that are removed but kept by somebody do not count.
  [[nodiscard]] bool expects_since(TimePoint before) const;

  // ---- files that nobody uses now ----

  // Has `evict` move such a file elsewhere when nothing else makes space for so many bytes; it returns whether it has.
  // Null: no longer, and none is being moved on return.
  void set_evictor(std::function<bool(std::uint64_t)> evict);
  // Called by whoever finds the device full, without any lock, with the bytes that it needs. True: memory has been
  // released.
  bool evict(std::uint64_t needed);

  // ---- waiting ----

  // How often memory has been released.
  [[nodiscard]] std::uint64_t count() const;
  // Blocks until count() is not `seen` any more, or the deadline.
  void wait_for_next(std::uint64_t seen, TimePoint deadline) const;
  // Blocks until enough() returns true, no memory is expected any more, or the deadline. Asks it after each release.
  void wait_for_expected(TimePoint deadline, const std::function<bool()>& enough) const;
  // Calls `action` after each release, for as long as the result lives. It must neither block nor call this object.
  [[nodiscard]] std::shared_ptr<void> on_release(std::function<void()> action);

 private:
  friend class DeviceContext;
  struct Pending {
    std::function<std::uint64_t()> bytes;
    TimePoint since;  // the removal
    bool certain = false;
  };
  // Memory has been released; see DeviceContext::released().
  void released();
  void released_locked();

  const std::uint64_t device_bytes_;
  mutable std::mutex mutex_;  // guards all below; order 9 of docs/design/requests.md#locks
  mutable std::condition_variable changed_;
  std::map<const ExtentBuffer*, std::weak_ptr<ExtentBuffer>> trimmable_;
  PendingReleases pending_;
  std::uint64_t count_ = 0;
  std::list<std::function<void()>> listeners_;

  // Guards evictor_; held while a file is moved: one at a time. The host tier's is a leaf, since nothing is moved from
  // there. Order 1 of docs/design/requests.md#locks
  std::mutex evictor_mutex_;
  std::function<bool(std::uint64_t)> evictor_;
};

}  // namespace gpufs
