// TransferEngine starts transfers, ends those that were cancelled and hang, and owns their threads (TransferThreads)
// and pinned memory. Thread-safe. There is one TransferEngine for each Engine, and one TransferThreads for each NUMA
// node.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"
#include "device/device_context.h"
#include "io/bounce_pool.h"
#include "io/direct_path.h"
#include "io/io_options.h"
#include "io/transfer.h"
#include "observe/counters.h"

namespace gpufs {

// The threads that move the bytes of all transfers near one NUMA node, shared fairly between clients and disks. They
// keep this alive, so that one that hangs in a file can be left behind.
class TransferThreads : public std::enable_shared_from_this<TransferThreads> {
 public:
  // share: threads that one client has at most; spare: additional threads for other clients. node: -1 for no affinity.
  // Threads start when they are needed for the first time.
  static std::shared_ptr<TransferThreads> create(int node, int share, int spare);
  TransferThreads(const TransferThreads&) = delete;
  TransferThreads& operator=(const TransferThreads&) = delete;

  // ESHUTDOWN after shutdown(); EAGAIN if there is no thread to serve it.
  Status submit(const std::shared_ptr<Transfer>& transfer);
  // Call it when Transfer::wanted() has grown or become 0, without locks of the transfer.
  void update();
  // Drops a reference to one of their transfers without waiting, even if it is the last one and closing the file hangs.
  void release(std::shared_ptr<Transfer> transfer);

  // Waits until every thread has left its transfer and joins them: up to `grace`, and up to `hang_grace` once only
  // threads that may hang are left. Threads that hang are left behind; returns their number. The transfers must have
  // been cancelled. Nothing is served afterwards.
  int shutdown(std::chrono::milliseconds grace, std::chrono::milliseconds hang_grace);

  // Whether a thread that serves this transfer `since` then should leave after its current chunk: a transfer with fewer
  // threads waits for one.
  [[nodiscard]] bool should_yield(const Transfer& transfer, std::chrono::steady_clock::time_point since);

  [[nodiscard]] int share() const { return share_; }
  [[nodiscard]] int threads() const { return share_ + spare_; }

 private:
  using Clock = std::chrono::steady_clock;

  struct ServedTransfer {
    std::shared_ptr<Transfer> transfer;
    int running = 0;
    Clock::time_point waiting_since;  // when it last had no thread

    [[nodiscard]] bool finished() const;
    // How many threads it could use. One that is finished needs one to close its file, if that may hang.
    [[nodiscard]] int wanted() const;
  };
  using Entries = std::list<ServedTransfer>;  // the one that got a thread longest ago first

  TransferThreads(int node, int share, int spare) : node_(node), share_(share), spare_(spare) {}

  void thread_main();
  Entries::iterator choose_locked();
  void start_missing_locked();
  // Finished transfers that any thread may destroy, without the lock.
  Entries take_finished_locked();

  const int node_;
  const int share_;
  const int spare_;

  // Guards all below. No lock of a transfer is taken under it.
  std::mutex mutex_;
  std::condition_variable changed_;   // transfers for idle threads, or the end
  std::condition_variable finished_;  // a thread left its transfer or ended
  Entries entries_;
  std::map<std::uint64_t, int> clients_;  // threads that serve each client
  std::vector<std::thread> threads_;
  int alive_ = 0;
  int idle_ = 0;
  std::map<std::uint64_t, int> groups_;  // threads in transfers of each group
  bool ending_ = false;
};

class TransferEngine : public std::enable_shared_from_this<TransferEngine> {
 public:
  // EINVAL names the option that is out of range. Starts no thread. When the last copy of the pointer is destroyed,
  // shutdown() runs on that thread.
  static Result<std::shared_ptr<TransferEngine>> create(const IoOptions& options,
                                                        std::shared_ptr<DirectPath> direct_path);
  TransferEngine(const TransferEngine&) = delete;
  TransferEngine& operator=(const TransferEngine&) = delete;

  // EINVAL: offsets and sizes that overflow or leave the device memory. EBADF: the file is not open for this direction,
  // or a destination is open for appending. ESHUTDOWN after shutdown(). All other failures are the transfer's.
  Result<std::shared_ptr<Transfer>> start(const TransferRequest& request);

  // Cancels all transfers and ends the threads; those that hang in a file are left behind. Blocks for little more than
  // IoOptions::shutdown_grace, unless the device itself hangs. May be called twice.
  void shutdown();

  // The errors of start() that depend on the request alone.
  static Status check(const TransferRequest& request);

  [[nodiscard]] const IoOptions& options() const { return options_; }
  [[nodiscard]] const std::shared_ptr<BouncePool>& bounce_pool() const { return bounce_pool_; }
  [[nodiscard]] DirectPath& direct_path() const { return *direct_path_; }
  [[nodiscard]] std::size_t active() const;
  // Transfers that shutdown() gave up on while a device or a file may still use their memory. They keep the engine's
  // memory alive themselves; the program must keep its own.
  [[nodiscard]] std::size_t left_in_use() const { return left_in_use_; }

  // ---- for Transfer ----

  void finished(const Transfer& transfer);
  // Looks after cancelled transfers until they end.
  void watch_cancelled();
  void count_left_in_use() { ++left_in_use_; }

 private:
  TransferEngine(const IoOptions& options, std::shared_ptr<DirectPath> direct_path);
  std::shared_ptr<TransferThreads> threads_for(int node);
  void watch_main();

  const IoOptions options_;
  const std::shared_ptr<DirectPath> direct_path_;
  const std::shared_ptr<BouncePool> bounce_pool_;
  std::atomic<std::size_t> left_in_use_{0};

  // Guards all below; no other lock is taken under it.
  mutable std::mutex mutex_;
  std::condition_variable changed_;                          // a transfer ended or was cancelled, or the engine ends
  std::map<int, std::shared_ptr<TransferThreads>> threads_;  // by NUMA node
  std::map<const Transfer*, std::shared_ptr<Transfer>> transfers_;
  std::thread watch_;  // started for the first cancelled transfer
  bool closed_ = false;
  bool watch_ending_ = false;
};

}  // namespace gpufs
