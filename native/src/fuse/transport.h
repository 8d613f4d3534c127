// The connection to the kernel: threads that read one /dev/fuse descriptor.
// Ownership: the Mount's; owns the descriptor and its threads.
// Any thread may call send() and notify(); the Mount alone calls start(), initialized() and stop().
//
// How many threads read. Every request wakes the reader that has waited longest, so with many readers each request runs
// on a cold thread with cold memory (8 readers moved less than half of what one moved). Only `allowed` readers
// therefore call read(); the others sleep outside. A watcher checks once a millisecond while there is traffic: requests
// that wait while every reader is busy let one more in, and a reader that was not needed for a while goes to sleep. The
// data path pays two counters for this and no system call. Without traffic nothing runs.
//
// Before it sleeps in read(), the one free reader spins for the next request: to be woken costs more than serving a
// small request, most of all in a virtual machine, and the next request of a client that works through a file comes
// soon after the reply. Two long waits in a row end that, one short wait starts it again.
//
// Where a device copies from and to the memory of requests, a reader has two and takes them in turn: the bus is slow at
// memory that the cache of a CPU holds since the kernel's last copy (8 streams read 1 MiB blocks at 1.3 times the
// rate).
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <semaphore>
#include <span>
#include <thread>
#include <vector>

#include "base/status.h"
#include "base/unique_fd.h"
#include "base/worker.h"
#include "fuse/request.h"
#include "memory/host_locks.h"
#include "observe/counters.h"

namespace gpufs::fuse {

// Memory that requests are read into: a header part, and after it a page-aligned payload. A reader thread's, which
// alone uses it.
class PayloadMemory {
 public:
  // payload_bytes is rounded up to pages. The memory is populated, and locked in RAM (best effort). locks: locks it for
  // devices as well, or fails if that is mandatory; null: no device copies from and to it.
  static Result<PayloadMemory> create(std::size_t payload_bytes, const std::shared_ptr<HostLocks>& locks);

  PayloadMemory(PayloadMemory&& other) noexcept;
  PayloadMemory& operator=(PayloadMemory&& other) = delete;
  ~PayloadMemory();

  // For a whole message: a WRITE's payload then starts on a page.
  [[nodiscard]] std::span<std::byte> message() const;
  [[nodiscard]] std::span<std::byte> payload() const;

 private:
  PayloadMemory(std::byte* base, std::size_t bytes) : base_(base), bytes_(bytes) {}

  std::byte* base_;
  std::size_t bytes_;
  std::shared_ptr<HostLocks> locks_;  // they have locked the memory; null: nothing has
};

struct TransportOptions {
  std::size_t reader_threads = 0;       // at most; 0: chosen by the number of CPUs
  std::size_t payload_bytes = 1 << 20;  // max_write
  std::chrono::nanoseconds spin{0};     // how long a reader spins before it sleeps; not with only one CPU
  std::shared_ptr<HostLocks> locks;     // of the memory of requests; null: no device copies from and to it
};

class RequestHandler {
 public:
  virtual ~RequestHandler() = default;
  // Serves the request or hands it on, on a thread of the transport, several at a time. Must not block on a disk, a
  // device's queue or another request.
  virtual void handle(Request& request) = 0;
  // The connection has ended: unmounted, aborted or failed. Called on threads of the transport, perhaps several times.
  virtual void connection_ended() = 0;
};

class Transport {
 public:
  Transport(UniqueFd device, const TransportOptions& options, observe::EngineCounters& counters);
  ~Transport() { stop(); }

  // Starts reading, with one thread until initialized() reports that the INIT reply has been written.
  Status start(RequestHandler& handler);
  void initialized() { ready_.store(true); }
  // Ends the threads, whatever the state of the connection; not to be called from handle(). May be called twice.
  void stop();
  // Closes the connection; after stop(). send() and notify() return ENODEV from then on.
  void close() { device_.reset(); }

  // One reply; 0 or the errno of the failure (ENOENT: the kernel does not know the request, ENODEV: it is gone).
  int send(std::uint64_t unique, int error, std::span<const iovec> body) { return write_message(unique, -error, body); }
  // One notification; may block as long as the kernel likes, so only the notification lane calls it.
  int notify(std::int32_t code, std::span<const std::byte> body);

  [[nodiscard]] observe::EngineCounters& counters() const { return counters_; }

 private:
  static constexpr unsigned kLongWaits = 2;  // in a row: a reader no longer spins

  struct Reader {
    std::vector<PayloadMemory> memory;   // used in turn
    std::counting_semaphore<4> wake{0};  // released by allow_one_more(), and once more by stop()
    std::atomic<bool> finished{false};
    std::thread thread;
    // Used by its thread alone.
    std::size_t turn = 0;  // which memory the next message takes
    bool bulk = false;     // its last message was large
    unsigned long_waits = kLongWaits;
  };

  Status spawn_reader();
  void read_loop(Reader& reader);
  // False: the connection has ended.
  bool read_one(Reader& reader);
  // read() of the device, after spinning if that pays.
  ssize_t wait_and_read(Reader& reader, std::span<std::byte> memory);
  // Until a request is there, the time is up, or another reader sleeps in read().
  void spin_for_request(std::chrono::steady_clock::time_point until);
  void serve(Reader& reader, const PayloadMemory& memory, std::size_t bytes);
  void pause_if_surplus(Reader& reader);
  void allow_one_more();
  // The watcher's check.
  Worker::Clock::time_point watch();
  // False when there has been no traffic for long.
  bool watch_tick();
  int write_message(std::uint64_t unique, std::int32_t error, std::span<const iovec> body);

  UniqueFd device_;  // constant until close(), which runs alone
  const std::size_t reader_limit_;
  const std::size_t payload_bytes_;
  const std::chrono::nanoseconds spin_;
  const std::shared_ptr<HostLocks> locks_;
  observe::EngineCounters& counters_;
  RequestHandler* handler_ = nullptr;  // constant once start() has been called

  std::atomic<bool> stopping_{false};
  std::atomic<bool> ended_{false};
  std::atomic<bool> start_failed_{false};  // logged once, until a reader could be started again
  std::atomic<bool> ready_{false};         // the INIT reply has been written

  // Written by the watcher, read by every reader before each read.
  alignas(64) std::atomic<std::size_t> allowed_{1};
  // Readers inside serve(), counted in kServing, and readers in read() whose last message was large, in kBulk: half of
  // a large WRITE's time passes there, in the kernel's copy. Then the most inside serve() at once since the watcher
  // last asked, and the requests served.
  static constexpr std::uint64_t kServing = 1;
  static constexpr std::uint64_t kBulk = std::uint64_t{1} << 32;
  alignas(64) std::atomic<std::uint64_t> busy_{0};
  std::atomic<std::uint64_t> busy_peak_{0};
  std::atomic<std::uint64_t> served_{0};
  // Readers inside read(): while there is one, it is woken for the next request and spinning is useless. And whether a
  // reader spins.
  alignas(64) std::atomic<std::size_t> sleeping_{0};
  std::atomic<bool> spinning_{false};
  // The watcher sleeps until a reader finds this set and clears it.
  alignas(64) std::atomic<bool> watcher_asleep_{false};

  // Guards the lists below; nothing is called under it.
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Reader>> readers_;
  std::vector<Reader*> idle_;  // the last one has slept for the shortest time, so its memory is the warmest
  std::size_t active_ = 0;     // readers that are not idle

  Worker watcher_{"gpufs-watch", [this] { return watch(); }};
  // Used by the watcher alone.
  std::uint64_t seen_served_ = 0;
  unsigned idle_ticks_ = 0;
  unsigned backlog_ticks_ = 0;
  unsigned window_ticks_ = 0;
  std::uint64_t window_peak_ = 0;
};

}  // namespace gpufs::fuse
