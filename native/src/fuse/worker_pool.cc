#include "fuse/worker_pool.h"

#include <algorithm>
#include <exception>
#include <string>

#include "base/log.h"
#include "base/thread.h"

namespace gpufs::fuse {

void WorkerPool::submit(std::uint64_t id, std::unique_ptr<Job> job) {
  statistics_.worker_jobs.add();
  bool accepted = false;
  {
    const std::lock_guard lock(mutex_);
    if (!stopping_) {
      if (idle_ <= queue_.size() && threads_.size() < limit_) {
        // The new thread waits for the mutex first.
        auto thread = start_thread("gpufs-work-" + std::to_string(threads_.size()), [this] { work_loop(); });
        if (thread.ok()) {
          threads_.push_back(thread.take());
          ++idle_;
        } else {
          log_warning("no further worker thread: " + thread.status().message());
        }
      }
      if (!threads_.empty()) {
        queue_.emplace_back(id, std::move(job));
        statistics_.worker_queue_peak.raise(queue_.size());
        accepted = true;
      }
    }
  }
  if (accepted) {
    wanted_.notify_one();
  } else {
    job->run(true);
  }
}

bool WorkerPool::discard(std::uint64_t id) {
  std::unique_ptr<Job> job;
  {
    const std::lock_guard lock(mutex_);
    const auto found =
        std::find_if(queue_.begin(), queue_.end(), [id](const auto& entry) { return entry.first == id; });
    if (found == queue_.end()) return false;
    job = std::move(found->second);
    queue_.erase(found);
  }
  job->run(true);
  return true;
}

void WorkerPool::stop() {
  std::deque<std::pair<std::uint64_t, std::unique_ptr<Job>>> queue;
  std::vector<std::thread> threads;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    queue.swap(queue_);
    threads.swap(threads_);
  }
  wanted_.notify_all();
  for (auto& [id, job] : queue) job->run(true);
  for (std::thread& thread : threads) thread.join();
}

std::size_t WorkerPool::queued() const {
  const std::lock_guard lock(mutex_);
  return queue_.size();
}

std::size_t WorkerPool::running() const {
  const std::lock_guard lock(mutex_);
  return running_;
}

void WorkerPool::work_loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wanted_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;  // stopping
    std::unique_ptr<Job> job = std::move(queue_.front().second);
    queue_.pop_front();
    --idle_;
    ++running_;
    lock.unlock();
    try {
      job->run(false);  // its responder answers EIO when an exception passes
    } catch (const std::exception& failure) {
      log_error(std::string("a worker's operation failed: ") + failure.what());
    }
    job.reset();
    lock.lock();
    --running_;
    ++idle_;
  }
}

}  // namespace gpufs::fuse
