// Starts transfers, ends those that were cancelled and hang, and owns what they share: schedulers, one for each NUMA
// node, and pinned memory. Thread-safe. There is one TransferEngine for each Engine.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>

#include "base/status.h"
#include "base/worker.h"
#include "device/device_context.h"
#include "io/bounce_pool.h"
#include "io/fastpath.h"
#include "io/io_options.h"
#include "io/scheduler.h"
#include "io/transfer.h"

namespace gpufs {

class TransferEngine : public std::enable_shared_from_this<TransferEngine> {
 public:
  // EINVAL names the option that is out of range. Starts no thread. When the last copy of the pointer is destroyed,
  // shutdown() runs on that thread.
  static Result<std::shared_ptr<TransferEngine>> create(const IoOptions& options, std::shared_ptr<Fastpath> fastpath);

  // EINVAL: offsets and sizes that overflow or leave the device memory. EBADF: the file is not open for this direction,
  // or a destination is open for appending. ESHUTDOWN after shutdown(). All other failures are the transfer's.
  Result<std::shared_ptr<Transfer>> start(TransferRequest request);

  // Cancels all transfers and ends the threads; those that hang in a file are left behind. Blocks for little more than
  // IoOptions::shutdown_grace, unless the device itself hangs. May be called twice.
  void shutdown();

  // The errors of start() that depend on the request alone.
  static Status check(const TransferRequest& request);

  [[nodiscard]] const IoOptions& options() const { return options_; }
  [[nodiscard]] const std::shared_ptr<BouncePool>& bounce_pool() const { return bounce_pool_; }
  [[nodiscard]] Fastpath& fastpath() const { return *fastpath_; }
  [[nodiscard]] std::size_t active() const;
  // Transfers that shutdown() gave up on while a device or a file may still use their memory. They keep the engine's
  // memory alive themselves; the program must keep its own.
  [[nodiscard]] std::size_t left_in_use() const { return left_in_use_; }

  // ---- for Transfer ----

  void finished(const Transfer& transfer);
  // Looks after cancelled transfers until they end.
  void watch_cancelled() { watch_.wake(); }
  void count_left_in_use() { ++left_in_use_; }

 private:
  TransferEngine(const IoOptions& options, std::shared_ptr<Fastpath> fastpath);
  std::shared_ptr<Scheduler> scheduler_for(int node);
  // Ends cancelled transfers that hang; returns when to do so again.
  Worker::Clock::time_point abandon_cancelled();

  const IoOptions options_;
  const std::shared_ptr<Fastpath> fastpath_;
  const std::shared_ptr<BouncePool> bounce_pool_;
  std::atomic<std::size_t> left_in_use_{0};

  // Guards all below; no other lock is taken under it.
  mutable std::mutex mutex_;
  std::condition_variable changed_;                       // a transfer ended
  std::map<int, std::shared_ptr<Scheduler>> schedulers_;  // by NUMA node
  std::map<const Transfer*, std::shared_ptr<Transfer>> transfers_;
  bool closed_ = false;

  Worker watch_{"gpufs-io-stop", [this] { return abandon_cancelled(); }};  // started for the first cancelled transfer
};

}  // namespace gpufs
