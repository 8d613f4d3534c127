#include "fuse/worker_pool.h"

#include <algorithm>
#include <cerrno>
#include <exception>
#include <string>
#include <utility>

#include "base/log.h"
#include "base/thread.h"

namespace gpufs::fuse {

void WorkerPool::submit(std::uint64_t id, std::unique_ptr<Job> job) {
  statistics_.worker_jobs.add();
  if (const int refusal = queue(id, job); refusal != 0) {
    job->run(refusal);
  } else {
    state_->wanted.notify_one();
  }
}

int WorkerPool::queue(std::uint64_t id, std::unique_ptr<Job>& job) {
  State& state = *state_;
  const std::lock_guard lock(state.mutex);
  if (state.stopping) return EINTR;
  if (state.idle <= state.queue.size() && state.threads.size() < limit_) {
    // The new thread waits for the mutex first.
    auto thread =
        start_thread("gpufs-work-" + std::to_string(state.threads.size()), [shared = state_] { work_loop(*shared); });
    if (thread.ok()) {
      state.threads.push_back(thread.take());
      ++state.alive;
      ++state.idle;
      state.complained = false;
    } else if (!std::exchange(state.complained, true)) {
      log_warning("no further worker thread: ", thread.status().message());
    }
  }
  if (state.threads.empty()) return ENOMEM;
  state.queue.emplace_back(id, std::move(job));
  statistics_.worker_queue_peak.raise(state.queue.size());
  return 0;
}

bool WorkerPool::discard(std::uint64_t id) {
  std::unique_ptr<Job> job;
  {
    State& state = *state_;
    const std::lock_guard lock(state.mutex);
    const auto found =
        std::find_if(state.queue.begin(), state.queue.end(), [id](const auto& entry) { return entry.first == id; });
    if (found == state.queue.end()) return false;
    job = std::move(found->second);
    state.queue.erase(found);
  }
  job->run(EINTR);
  return true;
}

std::vector<std::thread> WorkerPool::begin_stop() {
  decltype(State::queue) queue;
  std::vector<std::thread> threads;
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
    queue.swap(state_->queue);
    threads.swap(state_->threads);
  }
  state_->wanted.notify_all();
  for (auto& [id, job] : queue) job->run(EINTR);
  return threads;
}

void WorkerPool::stop() {
  for (std::thread& thread : begin_stop()) thread.join();
}

std::size_t WorkerPool::stop(std::chrono::milliseconds patience) {
  std::vector<std::thread> threads = begin_stop();
  std::size_t hung = 0;
  {
    std::unique_lock lock(state_->mutex);
    state_->ended.wait_for(lock, patience, [this] { return state_->alive == 0; });
    hung = state_->alive;
  }
  for (std::thread& thread : threads) {
    // All of them where one hangs: which one does not matter, since they own what they use.
    if (hung == 0) {
      thread.join();
    } else {
      thread.detach();
    }
  }
  return hung;
}

std::size_t WorkerPool::queued() const {
  const std::lock_guard lock(state_->mutex);
  return state_->queue.size();
}

std::size_t WorkerPool::running() const {
  const std::lock_guard lock(state_->mutex);
  return state_->running;
}

void WorkerPool::work_loop(State& state) {
  std::unique_lock lock(state.mutex);
  for (;;) {
    state.wanted.wait(lock, [&state] { return state.stopping || !state.queue.empty(); });
    if (state.queue.empty()) break;  // stopping
    std::unique_ptr<Job> job = std::move(state.queue.front().second);
    state.queue.pop_front();
    --state.idle;
    ++state.running;
    lock.unlock();
    try {
      job->run(0);
    } catch (const std::exception& failure) {
      log_error("a worker's operation failed: ", failure.what());
    }
    job.reset();
    lock.lock();
    --state.running;
    ++state.idle;
  }
  --state.alive;
  state.ended.notify_all();
}

}  // namespace gpufs::fuse
