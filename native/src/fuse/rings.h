// FUSE over io_uring: requests arrive in memory of this process, and the system call that commits a reply fetches the
// next request.
// Ownership: the Transport's; owns the rings, their threads and their memory. The descriptor of the device is the
// Transport's.
//
// The kernel has a queue for each CPU and puts a request into the queue of the client's CPU. A thread serves it:
// threads that share queues delay each other's requests. An entry is memory for one request, in which it stays until it
// is answered. Requests that wait (for a directory of the host, or for free memory) keep their entries, so a queue has
// many. It has them from the start, because the kernel gives a request that waits for an entry only one that has
// been answered, not one that was added. It takes the entry that has become free last, so few of them ever use memory.
//
// One thread at a time spins before it sleeps, as the Transport's readers do. The threads are not bound to CPUs: on its
// client's CPU, a thread moved 1 MiB blocks at three quarters of the rate (one stream, H200).
//
// The kernel sends INIT, FORGET and INTERRUPT to readers of the device, and takes notifications only there.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "fuse/payload_memory.h"
#include "fuse/request.h"
#include "fuse/statistics.h"

namespace gpufs::fuse {

class RequestHandler;
class RingThread;

constexpr unsigned kLongWaits = 2;  // in a row: a thread no longer spins

class Rings {
 public:
  // Creates the rings, their threads and the memory, and touches no connection. Fails where the kernel has no such
  // rings, or does not allow them.
  // spin: how long a thread spins before it sleeps.
  static Result<std::unique_ptr<Rings>> create(int device, std::size_t payload_bytes, std::chrono::nanoseconds spin,
                                               const std::shared_ptr<HostLocks>& locks, Statistics& statistics);
  ~Rings();
  Rings(const Rings&) = delete;
  Rings& operator=(const Rings&) = delete;

  // Registers entries for all queues of the connection, whose INIT has granted rings, and serves them.
  void serve(RequestHandler& handler);
  // Ends the threads. Replies fail with ENODEV from then on. May be called twice.
  void stop();

  // Any thread: the reply to the request in an entry. 0 or an errno.
  int reply(RingEntry& entry, std::uint64_t unique, int error, std::span<const iovec> body);

  void write_statistics(JsonWriter& json) const;

 private:
  friend class RingThread;

  Rings(int device, std::size_t payload_bytes, std::chrono::nanoseconds spin, const std::shared_ptr<HostLocks>& locks,
        Statistics& statistics);

  const int device_;
  const std::size_t payload_bytes_;
  const std::chrono::nanoseconds spin_;
  const std::shared_ptr<HostLocks> locks_;
  Statistics& statistics_;
  std::atomic<bool> spinning_{false};  // one of the threads is
  std::vector<std::unique_ptr<RingThread>> threads_;
};

}  // namespace gpufs::fuse
