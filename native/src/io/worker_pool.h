// The threads that move bytes for all transfers near one NUMA node, and who of the clients gets the next one.
// Owned by the TransferEngine; its threads share its state, so that one which hangs can be left behind.
// Any thread may call any function; Work's functions say for themselves.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/status.h"

namespace gpufs {

class WorkerPool;
class Work;

// What a thread serving a Work can ask its pool.
class Turn {
 public:
  // True when the thread should leave after the piece in hand, since somebody with fewer threads waits for one.
  [[nodiscard]] bool over();

 private:
  friend class WorkerPool;
  Turn(WorkerPool& pool, const Work& work) : pool_(pool), work_(work) {}
  WorkerPool& pool_;
  const Work& work_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// Something that up to wanted() threads can serve at once.
class Work {
 public:
  virtual ~Work() = default;
  // Whose it is: clients share the threads evenly, whatever each has under way. Constant.
  [[nodiscard]] virtual std::uint64_t client() const = 0;
  // What it may stall with: works of one group, all together, never have more threads than one client. Constant.
  static constexpr std::uint64_t kNeverStalls = 0;
  static constexpr std::uint64_t kMayHang = 1;  // what is behind a network or a user's process; else a local disk
  [[nodiscard]] virtual std::uint64_t group() const = 0;
  // How many threads it could use now, those that it has included; 0 when it needs none any more (then for ever).
  // Takes no lock: called with the pool's lock held.
  [[nodiscard]] virtual int wanted() const = 0;
  // Serves it on a pool thread until nothing is left or turn.over(). May hang in a file.
  virtual void serve(Turn& turn) = 0;
};

class WorkerPool : public std::enable_shared_from_this<WorkerPool> {
 public:
  // share: threads that one client has at most; spare: threads beyond that, for the others. node: -1 for no affinity.
  // The threads start when they are needed for the first time.
  static std::shared_ptr<WorkerPool> create(int node, int share, int spare);
  ~WorkerPool() = default;  // after shutdown()
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // ESHUTDOWN after shutdown(); EAGAIN (or what starting a thread gave) when there is no thread to serve it.
  Status submit(std::shared_ptr<Work> work);
  // Call when wanted() has grown or become 0, without locks of the Work's own.
  void update();

  // Waits until every thread has left its Work and joins them: up to `grace`, and up to `hang_grace` where only those
  // are left that may hang. Threads that hang are left behind (their number is returned). The works must have been told
  // to end. Nothing is served afterwards.
  int shutdown(std::chrono::milliseconds grace, std::chrono::milliseconds hang_grace);

  [[nodiscard]] int share() const { return share_; }
  [[nodiscard]] int threads() const { return share_ + spare_; }

 private:
  friend class Turn;
  using Clock = std::chrono::steady_clock;

  struct Entry {
    std::shared_ptr<Work> work;
    int running = 0;
    Clock::time_point waiting_since;  // when it last had no thread
    std::uint64_t served = 0;         // serial number of the last thread it got
  };
  struct Client {
    int running = 0;
    std::uint64_t served = 0;
    std::list<Entry> entries;
  };

  WorkerPool(int node, int share, int spare) : node_(node), share_(share), spare_(spare) {
    threads_.reserve(static_cast<std::size_t>(threads()));  // one that runs must find its place
  }

  void thread_main();
  Entry* choose_locked(Client** owner);
  void start_thread_locked(std::unique_lock<std::mutex>& lock);
  void start_missing_locked(std::unique_lock<std::mutex>& lock);
  void drop_finished_locked(std::list<Entry>& dropped);
  bool should_yield(const Work& work, Clock::time_point since);

  const int node_;
  const int share_;
  const int spare_;

  // Guards all below. A Work's locks are never taken under it.
  std::mutex mutex_;
  std::condition_variable changed_;   // work for idle threads, or the end
  std::condition_variable finished_;  // a thread has ended
  std::map<std::uint64_t, Client> clients_;
  std::vector<std::thread> threads_;
  int alive_ = 0;
  int idle_ = 0;
  std::map<std::uint64_t, int> groups_;  // threads in works of each group that has ever been here
  std::uint64_t serial_ = 0;
  bool ending_ = false;
};

// The CPUs of this process on a node (all of its CPUs for -1); at least 1.
int usable_cpus(int node);

}  // namespace gpufs
