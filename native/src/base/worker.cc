#include "base/worker.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/log.h"
#include "base/thread.h"

namespace gpufs {

Worker::Worker(std::string name, Check check) : name_(std::move(name)) {
  if (!check) state_->due = kNever;
  state_->check = std::move(check);
}

Status Worker::start() {
  const std::lock_guard lock(state_->mutex);
  return start_locked();
}

Status Worker::start_locked() {
  if (state_->stopping) return Status(ESHUTDOWN, name_ + " has been stopped");
  if (thread_.joinable()) return {};
  Result<std::thread> started = start_thread(name_, [state = state_] { state->run(); });
  if (started.ok()) thread_ = started.take();
  return started.status();
}

bool Worker::post(Task task) {
  const std::lock_guard lock(state_->mutex);
  state_->tasks.push_back(std::move(task));
  return notify_locked();
}

void Worker::wake() {
  const std::lock_guard lock(state_->mutex);
  state_->due = {};
  notify_locked();
}

bool Worker::notify_locked() {
  const Status started = start_locked();
  if (started.error() == ESHUTDOWN) return false;
  if (!started.ok()) log_warning(started.message());
  state_->changed.notify_all();
  return true;
}

bool Worker::stop(std::optional<std::chrono::milliseconds> grace) {
  std::unique_lock lock(state_->mutex);
  if (std::exchange(state_->stopping, true)) return true;
  state_->changed.notify_all();
  if (grace && thread_.joinable() && !state_->changed.wait_for(lock, *grace, [this] { return state_->ended; })) {
    thread_.detach();
    return false;
  }
  lock.unlock();
  if (thread_.joinable()) {
    thread_.join();
  } else {
    state_->run();
  }
  return true;
}

void Worker::State::run() {
  std::unique_lock lock(mutex);
  while (!stopping || !tasks.empty()) {
    if (!tasks.empty()) {
      Task task = std::move(tasks.front());
      tasks.pop_front();
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
    } else if (due == kNever) {
      changed.wait(lock);
    } else if (Clock::now() < due) {
      changed.wait_until(lock, due);
    } else {
      due = kNever;
      lock.unlock();
      const Clock::time_point next = check();
      lock.lock();
      due = std::min(due, next);  // wake() may have come
    }
  }
  ended = true;
  changed.notify_all();
}

}  // namespace gpufs
