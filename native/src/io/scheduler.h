// The threads that serve all transfers near one NUMA node, shared fairly between clients and disks. Only the scheduler
// knows clients, groups and turns.
// Thread-safe. Ownership: shared with its threads, so that one that hangs in a file can be left behind.
#pragma once

#include <algorithm>
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

class Scheduler : public std::enable_shared_from_this<Scheduler> {
 public:
  class Job;

  // A job's time on a thread.
  class Turn {
   public:
    Turn(Scheduler& scheduler, const Job& job) : scheduler_(scheduler), job_(job) {}
    // Whether the thread should leave its job after the current chunk: a job with fewer threads waits for one.
    [[nodiscard]] bool over() const { return scheduler_.turn_over(job_, since_); }

   private:
    Scheduler& scheduler_;
    const Job& job_;
    const std::chrono::steady_clock::time_point since_ = std::chrono::steady_clock::now();
  };

  // What several threads can serve at once: a transfer.
  class Job {
   public:
    // Jobs whose files share one device form a group. A group gets at most as many threads as one client.
    static constexpr std::uint64_t kNeverStalls = 0;  // no group
    static constexpr std::uint64_t kMayHang = 1;      // behind a network or a user's process; others are local disks

    Job(std::uint64_t client, std::uint64_t group) : client_(client), group_(group) {}
    virtual ~Job() = default;

    [[nodiscard]] std::uint64_t client() const { return client_; }
    [[nodiscard]] std::uint64_t group() const { return group_; }
    // How many threads it could use, including those that serve it; 0 once it needs none any more.
    [[nodiscard]] int useful_threads() const { return useful_threads_.load(std::memory_order_relaxed); }
    // Serves the job until nothing is left or the turn is over. May hang in a file.
    virtual void serve(const Turn& turn) = 0;

   protected:
    // Call Scheduler::update() after it has grown or become 0, without locks.
    void set_useful_threads(int count) { useful_threads_.store(count, std::memory_order_relaxed); }

   private:
    const std::uint64_t client_;
    const std::uint64_t group_;
    std::atomic<int> useful_threads_{1};
  };

  // share: threads that one client has at most; spare: additional threads for other clients. node: -1 for no affinity.
  // Threads start when they are needed for the first time.
  static std::shared_ptr<Scheduler> create(int node, int share, int spare);

  // ESHUTDOWN after shutdown(); EAGAIN if there is no thread to serve it.
  Status submit(std::shared_ptr<Job> job);
  // A job needs more threads, or none any more.
  void update();
  // Drops a reference to one of its jobs without waiting, even if it is the last one and closing its file hangs.
  void release(std::shared_ptr<Job> job);

  // Waits until every thread has left its job and joins them: up to `grace`, and up to `hang_grace` once only threads
  // that may hang are left. Threads that hang are left behind; returns their number. The jobs must have been cancelled.
  // Nothing is served afterwards.
  int shutdown(std::chrono::milliseconds grace, std::chrono::milliseconds hang_grace);

  [[nodiscard]] int share() const { return share_; }
  [[nodiscard]] int threads() const { return share_ + spare_; }

 private:
  using Clock = std::chrono::steady_clock;

  struct Entry {
    std::shared_ptr<Job> job;
    int running = 0;
    Clock::time_point waiting_since = Clock::now();  // when it last had no thread

    [[nodiscard]] bool finished() const { return running == 0 && job->useful_threads() == 0; }
    // A job that is finished needs a thread to close its file, if that may hang.
    [[nodiscard]] int needed_threads() const { return std::max(job->useful_threads(), 1); }
  };
  using Entries = std::list<Entry>;  // the one that got a thread longest ago first

  Scheduler(int node, int share, int spare) : node_(node), share_(share), spare_(spare) {}

  void thread_main();
  [[nodiscard]] bool turn_over(const Job& job, Clock::time_point since);
  Entries::iterator choose_locked();
  void start_missing_locked();
  // Finished jobs that any thread may destroy, without the lock.
  Entries take_finished_locked();

  const int node_;
  const int share_;
  const int spare_;

  // Guards all below. No lock of a job is taken under it.
  std::mutex mutex_;
  std::condition_variable changed_;   // jobs for idle threads, or the end
  std::condition_variable finished_;  // a thread left its job or ended
  Entries entries_;
  std::map<std::uint64_t, int> clients_;  // threads that serve each client
  std::map<std::uint64_t, int> groups_;   // threads in jobs of each group
  std::vector<std::thread> threads_;
  int alive_ = 0;
  int idle_ = 0;
  bool ending_ = false;
};

}  // namespace gpufs
