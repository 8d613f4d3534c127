// A bounded pool of threads for operations that may take long, with a queue of its own.
// Owned by the Session.
// Any thread may call submit() and discard(); stop() is the Session's.
#pragma once

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
  // One operation. run() is called exactly once, on a worker, or with discarded = true on the thread that discarded it.
  class Job {
   public:
    virtual ~Job() = default;
    virtual void run(bool discarded) = 0;
  };

  WorkerPool(std::size_t threads, Statistics& statistics) : limit_(threads), statistics_(statistics) {}
  ~WorkerPool() { stop(); }
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // Threads are started as they are needed. Discards the job at once when there can be none or after stop().
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

  [[nodiscard]] std::size_t queued() const;
  [[nodiscard]] std::size_t running() const;
  [[nodiscard]] std::size_t limit() const { return limit_; }

 private:
  template <typename Body>
  class BodyJob : public Job {
   public:
    explicit BodyJob(Body body) : body_(std::move(body)) {}
    void run(bool discarded) override { body_(discarded); }

   private:
    Body body_;
  };

  void work_loop();

  const std::size_t limit_;
  Statistics& statistics_;

  // Guards all below; no job runs or is destroyed under it.
  mutable std::mutex mutex_;
  std::condition_variable wanted_;
  std::deque<std::pair<std::uint64_t, std::unique_ptr<Job>>> queue_;
  std::vector<std::thread> threads_;
  std::size_t idle_ = 0;
  std::size_t running_ = 0;
  bool stopping_ = false;
};

}  // namespace gpufs::fuse
