// A bounded pool of threads for operations that may take long, with a queue of its own.
// Owned by the Session; its threads share its state, so that one which hangs can be left behind.
// Any thread may call submit() and discard(); stop() is the Session's.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "fuse/statistics.h"

namespace gpufs::fuse {

class WorkerPool {
 public:
  // One operation. run() is called exactly once: with 0 on a worker, or with the errno that it ends with instead on the
  // thread that refused it. EINTR: it was discarded. ENOMEM: there is no thread, and none can be started.
  class Job {
   public:
    virtual ~Job() = default;
    virtual void run(int refusal) = 0;
  };

  WorkerPool(std::size_t threads, Statistics& statistics) : limit_(threads), statistics_(statistics) {
    state_->threads.reserve(threads);  // one that runs must find its place
  }
  ~WorkerPool() { stop(); }
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // Threads are started as they are needed. Refuses the job at once when there can be none or after stop().
  // id: what discard() finds the job by.
  void submit(std::uint64_t id, std::unique_ptr<Job> job);
  template <typename Body>
  void submit(std::uint64_t id, Body body) {
    submit(id, std::unique_ptr<Job>(new BodyJob<Body>(std::move(body))));
  }

  // Takes the job out of the queue and runs it discarded; false if it is not queued (any more).
  bool discard(std::uint64_t id);

  // Discards what is queued and waits for what runs. May be called twice.
  void stop();
  // The same, but threads that have not come back within `patience` are left behind; their number. What they run must
  // use nothing that goes with the pool's owner, which is the caller's to see to.
  std::size_t stop(std::chrono::milliseconds patience);

  [[nodiscard]] std::size_t queued() const;
  [[nodiscard]] std::size_t running() const;
  [[nodiscard]] std::size_t limit() const { return limit_; }

 private:
  template <typename Body>
  class BodyJob : public Job {
   public:
    explicit BodyJob(Body body) : body_(std::move(body)) {}
    void run(int refusal) override { body_(refusal); }

   private:
    Body body_;
  };

  // What the threads use.
  struct State {
    // Guards all below; no job runs or is destroyed under it.
    std::mutex mutex;
    std::condition_variable wanted;
    std::condition_variable ended;  // a thread has
    std::deque<std::pair<std::uint64_t, std::unique_ptr<Job>>> queue;
    std::vector<std::thread> threads;
    std::size_t alive = 0;
    std::size_t idle = 0;
    std::size_t running = 0;
    bool stopping = false;
    bool complained = false;  // in the log, that no thread can be started; once, until one could
  };

  static void work_loop(State& state);
  // Takes the job over and returns 0, or the errno that it is refused with.
  int queue(std::uint64_t id, std::unique_ptr<Job>& job);
  // Ends the pool for new jobs and gives out its threads.
  std::vector<std::thread> begin_stop();

  const std::size_t limit_;
  Statistics& statistics_;
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace gpufs::fuse
