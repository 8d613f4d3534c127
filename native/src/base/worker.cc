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
  return notify([&] { state_->tasks.push_back(std::move(task)); });
}

void Worker::wake() {
  notify([&] { state_->due = {}; });
}

template <typename Change>
bool Worker::notify(Change change) {
  Status started;
  {
    const std::lock_guard lock(state_->mutex);
    change();
    started = start_locked();
  }
  state_->changed.notify_all();
  if (!started.ok() && started.error() != ESHUTDOWN) log_warning(started.message());
  return started.error() != ESHUTDOWN;
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
  std::vector<Task> running;
  std::unique_lock lock(mutex);
  while (!stopping || !tasks.empty()) {
    if (!tasks.empty()) {
      running.swap(tasks);
      lock.unlock();
      for (Task& task : running) std::exchange(task, nullptr)();
      running.clear();
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
