#include "fuse/executor.h"

#include <algorithm>
#include <cerrno>
#include <exception>
#include <iterator>
#include <string>

#include "base/log.h"
#include "base/thread.h"

namespace gpufs::fuse {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kIdle{10};  // a thread that has had no job for so long ends

}  // namespace

void Executor::submit(const Lane& lane, const void* subject, std::uint64_t id, std::unique_ptr<Job> job) {
  statistics_.worker_jobs.add();
  Entries mine;
  mine.push_back(Entry{lane, subject, id, std::move(job), 0, {}, 0});
  int refusal = 0;
  {
    State& state = *state_;
    const std::lock_guard lock(state.mutex);
    if (state.stopping) {
      refusal = EINTR;
    } else {
      state.queue.splice(state.queue.end(), mine);
      statistics_.worker_queue_peak.raise(state.queue.size());
      provide_thread(state_);
      if (state.threads == 0) {
        mine.splice(mine.end(), state.queue, std::prev(state.queue.end()));
        refusal = ENOMEM;
      }
    }
  }
  if (refusal != 0) static_cast<void>(mine.front().job->run(refusal));
}

void Executor::provide_thread(const std::shared_ptr<State>& state) {
  const std::size_t looking = state->idle + state->coming;
  std::size_t ready = 0;
  for (auto entry = state->queue.begin(); entry != state->queue.end() && ready <= looking; ++entry) {
    if (state->may_run(*entry)) ++ready;
  }
  if (ready > looking) {
    start_thread_for(state);
  } else if (ready > 0) {
    state->wanted.notify_one();
  }
}

void Executor::start_thread_for(const std::shared_ptr<State>& state) {
  // The thread takes the mutex first, so it finds itself counted.
  Result<std::thread> thread =
      start_thread("gpufs-work-" + std::to_string(state->threads), [state] { work_loop(state); });
  if (thread.ok()) {
    thread.take().detach();  // stop() waits for the count
    ++state->threads;
    ++state->coming;
    state->complained = false;
  } else if (!std::exchange(state->complained, true)) {
    log_warning("no further worker thread: ", thread.status().message());
  }
}

bool Executor::discard(std::uint64_t id) {
  Entries mine;
  {
    State& state = *state_;
    const std::lock_guard lock(state.mutex);
    const auto is_it = [id](const Entry& entry) { return entry.id == id; };
    // One that runs just now is not parked any more.
    if (const auto found = std::ranges::find_if(state.active, is_it); found != state.active.end()) {
      found->refusal = EINTR;
      return false;
    }
    for (Entries* const entries : {&state.queue, &state.parked}) {
      const auto found = std::ranges::find_if(*entries, is_it);
      if (found != entries->end()) mine.splice(mine.end(), *entries, found);
    }
  }
  for (Entry& entry : mine) static_cast<void>(entry.job->run(EINTR));
  return !mine.empty();
}

void Executor::memory_freed(std::int32_t device) {
  State& state = *state_;
  const std::lock_guard lock(state.mutex);
  ++state.freed;
  for (auto entry = state.parked.begin(); entry != state.parked.end();) {
    const auto next = std::next(entry);
    if (entry->lane.device == device) {
      state.queue.splice(state.queue.end(), state.parked, entry);
      provide_thread(state_);
    }
    entry = next;
  }
}

std::size_t Executor::stop(std::chrono::milliseconds patience) {
  State& state = *state_;
  Entries mine;
  {
    const std::lock_guard lock(state.mutex);
    state.stopping = true;
    mine.splice(mine.end(), state.queue);
    mine.splice(mine.end(), state.parked);
  }
  state.wanted.notify_all();
  for (Entry& entry : mine) static_cast<void>(entry.job->run(EINTR));

  std::unique_lock lock(state.mutex);
  state.ended.wait(lock, [&state] {
    return std::ranges::all_of(state.active, [](const Entry& entry) { return entry.lane.kind == Lane::Kind::kFiles; });
  });
  state.ended.wait_for(lock, patience, [&state] { return state.active.empty(); });
  if (state.active.empty()) state.ended.wait(lock, [&state] { return state.threads == 0; });
  return state.active.size();
}

Executor::Counts Executor::counts() const {
  const std::lock_guard lock(state_->mutex);
  return {state_->threads, state_->active.size(), state_->queue.size(), state_->parked.size()};
}

bool Executor::State::may_run(const Entry& entry) const {
  std::size_t lane = 0;
  std::size_t subject = 0;
  for (const Entry& other : active) {
    if (other.lane == entry.lane) ++lane;
    if (entry.subject != nullptr && other.subject == entry.subject) ++subject;
  }
  const std::size_t limit = entry.lane.kind == Lane::Kind::kBuffers ? limits.buffers
                            : entry.lane.kind == Lane::Kind::kFiles ? limits.files
                                                                    : limits.copies;
  return lane < limit && subject < limits.same_subject;
}

Executor::Entries::iterator Executor::State::next(std::unique_lock<std::mutex>& lock) {
  const TimePoint idle_end = Clock::now() + kIdle;
  for (;;) {
    const TimePoint now = Clock::now();
    const auto first = std::ranges::min_element(parked, {}, &Entry::deadline);
    if (first != parked.end() && first->deadline <= now) {
      if (first->refusal == 0) first->refusal = ENOSPC;
      active.splice(active.end(), parked, first);
      return std::prev(active.end());
    }
    const auto ready = std::ranges::find_if(queue, [this](const Entry& entry) { return may_run(entry); });
    if (ready != queue.end()) {
      active.splice(active.end(), queue, ready);
      return std::prev(active.end());
    }
    // While something is parked one thread stays to watch its deadline.
    const bool needed = !parked.empty() && idle == 0;
    if (stopping || (now >= idle_end && !needed)) return active.end();
    TimePoint until = now < idle_end ? idle_end : first->deadline;
    if (!parked.empty()) until = std::min(until, first->deadline);
    ++idle;
    wanted.wait_until(lock, until);
    --idle;
  }
}

void Executor::State::park(Entries::iterator entry, TimePoint deadline) {
  if (stopping) entry->refusal = EINTR;
  entry->deadline = entry->refusal == 0 ? deadline : TimePoint::min();  // discarded since: to be run with that at once
  // Memory that was freed during the attempt may have come too late for it.
  const bool again = entry->refusal == 0 && entry->freed != freed;
  Entries& to = again ? queue : parked;
  to.splice(to.end(), active, entry);
}

void Executor::work_loop(const std::shared_ptr<State>& shared) {
  State& state = *shared;
  std::unique_lock lock(state.mutex);
  --state.coming;
  for (auto entry = state.next(lock); entry != state.active.end(); entry = state.next(lock)) {
    if (!state.parked.empty()) {  // somebody else has to watch its deadline now
      if (state.idle > 0) {
        state.wanted.notify_one();
      } else if (state.coming == 0) {
        start_thread_for(shared);
      }
    }
    entry->freed = state.freed;
    const int refusal = entry->refusal;
    Job& job = *entry->job;
    std::optional<TimePoint> deadline;
    lock.unlock();
    try {
      deadline = job.run(refusal);
    } catch (const std::exception& failure) {
      log_error("a worker's operation failed: ", failure.what());
    }
    lock.lock();
    if (refusal == 0 && deadline) {
      state.park(entry, *deadline);
      continue;
    }
    std::unique_ptr<Job> last = std::move(entry->job);
    lock.unlock();
    last.reset();  // while its subject still counts as busy
    lock.lock();
    state.active.erase(entry);
    state.ended.notify_all();
  }
  --state.threads;
  state.ended.notify_all();
}

}  // namespace gpufs::fuse
