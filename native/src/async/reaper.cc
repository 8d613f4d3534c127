#include "async/reaper.h"

#include <iterator>
#include <utility>

#include "base/log.h"
#include "base/thread.h"

namespace gpufs {

void Reaper::drop(References references) {
  {
    const std::lock_guard lock(mutex_);
    std::move(references.begin(), references.end(), std::back_inserter(waiting_));
    if (!thread_.joinable() && !ending_) {
      Result<std::thread> started = start_thread("gpufs-reaper", [self = shared_from_this()] { self->thread_main(); });
      if (started.ok()) {
        thread_ = started.take();
      } else {
        log_warning("no thread to free what operations held: ", started.status().message());
      }
    }
  }
  changed_.notify_all();
}

bool Reaper::shutdown(std::chrono::milliseconds grace) {
  std::thread thread;
  References rest;  // dropped without the lock
  std::unique_lock lock(mutex_);
  ending_ = true;
  changed_.notify_all();
  thread.swap(thread_);
  if (!thread.joinable()) {
    rest.swap(waiting_);
    lock.unlock();
    return true;
  }
  const bool ended = changed_.wait_for(lock, grace, [&] { return ended_; });
  lock.unlock();
  if (ended) {
    thread.join();
  } else {
    thread.detach();
  }
  return ended;
}

void Reaper::thread_main() {
  std::unique_lock lock(mutex_);
  while (!ending_ || !waiting_.empty()) {
    if (waiting_.empty()) {
      changed_.wait(lock);
      continue;
    }
    References dropping = std::exchange(waiting_, {});
    lock.unlock();
    for (std::shared_ptr<void>& reference : dropping) reference.reset();
    lock.lock();
  }
  ended_ = true;
  changed_.notify_all();
}

}  // namespace gpufs
