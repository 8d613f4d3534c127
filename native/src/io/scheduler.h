// The threads that serve all transfers near one NUMA node, shared fairly between clients and disks. Only the scheduler
// knows clients, groups and turns.
// Thread-safe. Ownership: shared with its threads, so that one that hangs in a file can be left behind.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
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
    static constexpr std::uint64_t kMayHang = 1;      // behind a network or a user's process
    struct Owner {
      std::uint64_t client = 0;
      std::uint64_t group = kNeverStalls;  // other groups are local disks
      // One of many: at most kMostQueued of these compete for threads, the others wait in their order.
      bool queued = false;
    };

    explicit Job(const Owner& owner) : owner_(owner) {}
    virtual ~Job() = default;
    Job(const Job&) = delete;
    Job& operator=(const Job&) = delete;

    [[nodiscard]] const Owner& owner() const { return owner_; }
    // How many threads it could use, including those that serve it; 0 once it needs none any more.
    [[nodiscard]] int useful_threads() const { return useful_threads_.load(std::memory_order_relaxed); }
    // Serves it until nothing is left or the turn is over. May hang in a file.
    virtual void serve(const Turn& turn) = 0;

   protected:
    // Call Scheduler::update() after it has grown or become 0, without locks.
    void set_useful_threads(int count) { useful_threads_.store(count, std::memory_order_relaxed); }

   private:
    friend class Scheduler;
    const Owner owner_;
    std::atomic<int> useful_threads_{1};
    bool listed_ = false;  // in the scheduler, which guards this
  };

  // Enough to keep all threads busy.
  static constexpr std::size_t kMostQueued = 64;

  // share: threads that one client has at most; spare: additional threads for other clients. node: -1 for no affinity.
  // Threads start when they are needed for the first time.
  static std::shared_ptr<Scheduler> create(int node, int share, int spare);
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // ESHUTDOWN after shutdown(); EAGAIN if there is no thread to serve it.
  Status submit(std::shared_ptr<Job> job);
  void update();
  // Drops a reference to one of their jobs without waiting, even if it is the last one and closing its file hangs.
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
    // One that is finished needs a thread to close its file, if that may hang.
    [[nodiscard]] int wanted() const { return std::max(job->useful_threads(), 1); }
  };
  using Entries = std::list<Entry>;  // the one that got a thread longest ago first

  Scheduler(int node, int share, int spare) : node_(node), share_(share), spare_(spare) {}

  void thread_main();
  [[nodiscard]] bool turn_over(const Job& job, Clock::time_point since);
  Entries::iterator choose_locked();
  void start_missing_locked();
  void add_locked(std::shared_ptr<Job> job);
  // Moves an entry to `removed`, which is destroyed without the lock, and adds the next one of its queue.
  void remove_locked(Entries::iterator entry, Entries* removed);
  // Removes finished jobs that any thread may destroy.
  void remove_finished_locked(Entries* removed);
  // Jobs with Owner::queued. Those of files that may hang have a queue of their own.
  struct Queue {
    std::size_t listed = 0;                    // in entries_
    std::deque<std::shared_ptr<Job>> waiting;  // for a place there
  };
  Queue& queue_of(const Job& job) { return queues_[job.owner().group == Job::kMayHang ? 1 : 0]; }

  const int node_;
  const int share_;
  const int spare_;

  // Guards all below. No lock of a job is taken under it.
  std::mutex mutex_;
  std::condition_variable changed_;   // jobs for idle threads, or the end
  std::condition_variable finished_;  // a thread left its job or ended
  Entries entries_;
  std::array<Queue, 2> queues_;
  std::map<std::uint64_t, int> clients_;  // threads that serve each client
  std::map<std::uint64_t, int> groups_;   // threads in jobs of each group
  std::vector<std::thread> threads_;
  int alive_ = 0;
  int idle_ = 0;
  bool ending_ = false;
};

}  // namespace gpufs
