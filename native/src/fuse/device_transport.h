// The transport over the device file: threads that read one /dev/fuse descriptor.
// Owned by the Session; owns the descriptor and its threads.
// Any thread may call send() and notify(); start(), initialized() and stop() are the Session's.
//
// How many threads read. Every request wakes the reader that has waited longest, so with many of them each request
// lands on a cold thread with cold memory ("stealing": 8 readers moved less than half of what one moved). Only
// `allowed` readers are therefore let into read(); the others sleep outside. A watcher looks once a millisecond while
// there is traffic: requests waiting while every reader is busy lets one more in, and a reader that was not needed for
// a while is sent to sleep. The data path pays two counters for this and no system call. Without traffic nothing runs.
//
// Before it sleeps in read(), the one reader that is free looks for the next request for a moment: see SpinPolicy.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <semaphore>
#include <thread>
#include <vector>

#include "base/status.h"
#include "base/unique_fd.h"
#include "fuse/payload_memory.h"
#include "fuse/spin_policy.h"
#include "fuse/statistics.h"
#include "fuse/transport.h"

namespace gpufs::fuse {

struct DeviceTransportOptions {
  std::size_t reader_threads = 0;       // at most; 0: chosen by the number of CPUs
  std::size_t payload_bytes = 1 << 20;  // max_write
  bool adaptive = true;                 // false: all readers always wait in read()
  // How long a reader may look for a request before it sleeps; none do where there is only one CPU.
  std::chrono::nanoseconds spin{0};
  PinHooks pin_hooks;
};

class DeviceTransport final : public Transport {
 public:
  DeviceTransport(UniqueFd device, const DeviceTransportOptions& options, Statistics& statistics);
  ~DeviceTransport() override;

  [[nodiscard]] const char* name() const override { return "device"; }
  Status start(RequestHandler& handler) override;
  void initialized() override;
  void stop() override;
  void close() override;
  int send(std::uint64_t unique, int error, std::span<const iovec> body) override;
  int notify(std::int32_t code, std::span<const std::byte> body) override;
  void write_statistics(JsonWriter& json) const override;

 private:
  struct Reader {
    Reader(PayloadMemory payload, std::chrono::nanoseconds spin) : memory(std::move(payload)), spin_policy(spin) {}
    PayloadMemory memory;
    SpinPolicy spin_policy;              // used by its thread alone
    std::counting_semaphore<4> wake{0};  // released by allow_one_more(), and once more by stop()
    std::atomic<bool> finished{false};
    std::thread thread;
    bool bulk = false;  // its last message was large; used by its thread alone
  };

  Status spawn_reader();
  void read_loop(Reader& reader);
  // False: the connection has ended.
  bool read_one(Reader& reader);
  // read() of the device, after a moment of looking where that pays.
  ssize_t wait_and_read(Reader& reader, std::span<std::byte> memory);
  // Looks until a request is there, the time is up, or looking is of no use.
  void look_for_request(std::chrono::steady_clock::time_point until);
  bool serve(Reader& reader, std::size_t bytes);
  void park_if_surplus(Reader& reader);
  void allow_one_more();
  void watch_loop();
  // One look at the traffic; returns false when there has been none for long.
  bool watch_tick();
  void end_connection();
  int write_message(std::uint64_t unique, std::int32_t error, std::span<const iovec> body);

  UniqueFd device_;  // constant until close(), which nothing else may run beside
  const std::size_t reader_limit_;
  const std::size_t payload_bytes_;
  const bool adaptive_;
  const std::chrono::nanoseconds spin_;
  const PinHooks pin_hooks_;
  Statistics& statistics_;
  RequestHandler* handler_ = nullptr;  // constant once start() has been called

  std::atomic<bool> stopping_{false};
  std::atomic<bool> ended_{false};
  std::atomic<bool> complained_{false};  // in the log, that no reader can be added; once, until one could
  std::atomic<bool> ready_{false};       // the INIT reply has been written

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
  // Readers inside read(): while there is one, it is woken for the next request and looking for it is in vain. And
  // whether somebody looks.
  alignas(64) std::atomic<std::size_t> sleeping_{0};
  std::atomic<bool> looking_{false};
  // The watcher sleeps until a reader finds this set and clears it.
  alignas(64) std::atomic<bool> watcher_asleep_{false};

  // Guards the lists below; nothing is called under it.
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Reader>> readers_;
  std::vector<Reader*> parked_;  // the last one has slept for the shortest time: its memory is the warmest
  std::size_t active_ = 0;       // readers that are not parked

  // Used by the watcher alone, but for the condition, which stop() and readers signal under its mutex.
  std::mutex watch_mutex_;
  std::condition_variable watch_condition_;
  std::thread watcher_;
  std::uint64_t seen_served_ = 0;
  unsigned idle_ticks_ = 0;
  unsigned backlog_ticks_ = 0;
  unsigned window_ticks_ = 0;
  std::uint64_t window_peak_ = 0;
};

}  // namespace gpufs::fuse
