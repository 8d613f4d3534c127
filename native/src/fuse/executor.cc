#include "fuse/executor.h"

#include <algorithm>
#include <cerrno>
#include <exception>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "base/log.h"
#include "base/thread.h"

namespace gpufs::fuse {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kIdle{10};  // a thread without a job for so long ends
constexpr std::size_t kFileJobs = 8;       // of one lane; these wait for disks rather than work
constexpr std::size_t kCopyJobs = 32;
constexpr std::size_t kReleaseJobs = 2;
constexpr std::size_t kNotificationJobs = 4;

std::size_t limit_of(const Executor::Lane& lane, const Executor::Limits& limits) {
  switch (lane.kind) {
    case Executor::Lane::Kind::kBuffers:
      return limits.buffers;
    case Executor::Lane::Kind::kFiles:
      return kFileJobs;
    case Executor::Lane::Kind::kCopies:
      return kCopyJobs;
    case Executor::Lane::Kind::kRelease:
      return kReleaseJobs;
    case Executor::Lane::Kind::kNotifications:
      return kNotificationJobs;
    default:
      return 1;
  }
}

// A second notification about an inode would wait for the same as the first one.
std::size_t subject_limit_of(const Executor::Lane& lane, const Executor::Limits& limits) {
  return lane.kind == Executor::Lane::Kind::kNotifications ? 1 : limits.same_subject;
}

// The jobs of one user leave a quarter of a lane to others.
std::size_t user_limit_of(const Executor::Lane& lane, const Executor::Limits& limits) {
  using Kind = Executor::Lane::Kind;
  const std::size_t limit = limit_of(lane, limits);
  const bool shared = lane.kind == Kind::kBuffers || lane.kind == Kind::kFiles || lane.kind == Kind::kCopies;
  return shared ? limit - limit / 4 : limit;
}

// So many threads stay, so that the system's refusal of further threads delays jobs but does not stop them.
constexpr std::size_t kPermanentThreads = 2;

}  // namespace

void Cancellation::request() {
  const std::lock_guard lock(mutex_);
  requested_ = true;
  if (action_) action_();
}

void Cancellation::on_request(std::function<void()> action) {
  const std::lock_guard lock(mutex_);
  action_ = std::move(action);
  if (action_ && requested_) action_();
}

Status Executor::start() {
  const std::lock_guard lock(state_->mutex);
  while (state_->threads < kPermanentThreads) {
    TRY(start_worker(state_));
  }
  return {};
}

bool Executor::submit_entry(const Lane& lane, const void* subject, Id id, std::optional<TimePoint> time, Job job) {
  State& state = *state_;
  QueuedJobs mine(1);
  QueuedJob& entry = mine.front();
  entry.lane = lane;
  entry.subject = subject;
  entry.id = id;
  entry.job = std::move(job);
  bool stopped = false;
  {
    const std::lock_guard lock(state.mutex);
    stopped = state.stopping;
    if (!stopped) {
      if (time) {
        entry.time = *time;
        state.waiting.splice(state.waiting.end(), mine);
        wake_for_waiting(state_);
      } else {
        state.queue.splice(state.queue.end(), mine);
        wake_for_queue(state_, 1);
      }
      return true;
    }
  }
  entry.cancellation->request();
  static_cast<void>(entry.job(EINTR, *entry.cancellation));
  return false;
}

void Executor::wake_for_queue(const std::shared_ptr<State>& state, std::size_t added) {
  const std::size_t ready = state->count_ready(state->idle + state->starting + added);
  if (ready == 0) return;
  // One thread more than jobs, see leaves_a_thread().
  while (state->idle + state->starting <= ready && start_worker(state).ok()) {
  }
  added == 1 ? state->wanted.notify_one() : state->wanted.notify_all();
}

void Executor::wake_for_waiting(const std::shared_ptr<State>& state) {
  if (state->waiting.empty()) return;
  if (state->idle > 0) {
    state->wanted.notify_one();
  } else if (state->starting == 0) {
    static_cast<void>(start_worker(state));
  }
}

Status Executor::start_worker(const std::shared_ptr<State>& state) {
  // The thread takes the mutex first, so it finds itself counted.
  Result<std::thread> thread =
      start_thread("gpufs-work-" + std::to_string(state->threads), [state] { work_loop(state); });
  if (!thread.ok()) {
    if (!std::exchange(state->start_failed, true)) {
      log_warning("cannot start another worker thread: ", thread.status().message());
    }
    return thread.status();
  }
  thread.take().detach();  // stop() waits for the count
  ++state->threads;
  ++state->starting;
  state->start_failed = false;
  return {};
}

Executor::Cancelled Executor::cancel(std::uint64_t id) {
  State& state = *state_;
  QueuedJobs mine;
  std::shared_ptr<Cancellation> running;
  {
    const std::lock_guard lock(state.mutex);
    const auto has_id = [id](const QueuedJob& entry) { return entry.id.number == id; };
    if (const auto found = std::ranges::find_if(state.active, has_id); found != state.active.end()) {
      found->refusal = EINTR;  // the job must not be waiting any more
      running = found->cancellation;
    } else {
      for (QueuedJobs* const entries : {&state.queue, &state.waiting}) {
        const auto entry = std::ranges::find_if(*entries, has_id);
        if (entry != entries->end()) mine.splice(mine.end(), *entries, entry);
      }
      if (mine.empty()) return Cancelled::kUnknown;
    }
  }
  if (running) {
    running->request();
    return Cancelled::kRunning;
  }
  mine.front().cancellation->request();
  static_cast<void>(mine.front().job(EINTR, *mine.front().cancellation));
  return Cancelled::kEnded;
}

std::uint32_t Executor::client_of(std::uint64_t id) const {
  const std::lock_guard lock(state_->mutex);
  for (const QueuedJobs* const entries : {&state_->active, &state_->queue, &state_->waiting}) {
    const auto found = std::ranges::find(*entries, id, [](const QueuedJob& entry) { return entry.id.number; });
    if (found != entries->end()) return found->id.client;
  }
  return 0;
}

void Executor::resume(std::int32_t device) {
  State& state = *state_;
  const std::lock_guard lock(state.mutex);
  ++state.resumes;
  std::size_t resumed = 0;
  for (auto entry = state.waiting.begin(); entry != state.waiting.end();) {
    const auto next = std::next(entry);
    if (entry->lane.device == device) {
      state.queue.splice(state.queue.end(), state.waiting, entry);
      ++resumed;
    }
    entry = next;
  }
  if (resumed > 0) wake_for_queue(state_, resumed);
}

std::size_t Executor::stop(std::chrono::milliseconds timeout) {
  State& state = *state_;
  QueuedJobs mine;
  std::vector<std::shared_ptr<Cancellation>> running;
  {
    const std::lock_guard lock(state.mutex);
    state.stopping = true;
    mine.splice(mine.end(), state.queue);
    mine.splice(mine.end(), state.waiting);
    for (const QueuedJob& entry : state.active) running.push_back(entry.cancellation);
  }
  state.wanted.notify_all();
  for (const auto& cancellation : running) cancellation->request();
  for (QueuedJob& entry : mine) {
    entry.cancellation->request();
    static_cast<void>(entry.job(EINTR, *entry.cancellation));
  }

  std::unique_lock lock(state.mutex);
  state.ended.wait(lock, [&state] {
    return std::ranges::all_of(state.active,
                               [](const QueuedJob& entry) { return entry.lane.kind == Lane::Kind::kFiles; });
  });
  state.ended.wait_for(lock, timeout, [&state] { return state.active.empty(); });
  if (state.active.empty()) state.ended.wait(lock, [&state] { return state.threads == 0; });
  return state.active.size();
}

Executor::JobCounts Executor::counts() const {
  const std::lock_guard lock(state_->mutex);
  return {state_->active.size(), state_->queue.size()};
}

void Executor::Load::add(const QueuedJob& entry) {
  ++lanes[entry.lane];
  ++users[{entry.lane, entry.id.user}];
  if (entry.subject != nullptr) ++subjects[{entry.lane, entry.subject}];
}

void Executor::Load::remove(const QueuedJob& entry) {
  if (const auto lane = lanes.find(entry.lane); --lane->second == 0) lanes.erase(lane);
  if (const auto user = users.find({entry.lane, entry.id.user}); --user->second == 0) users.erase(user);
  if (entry.subject == nullptr) return;
  if (const auto subject = subjects.find({entry.lane, entry.subject}); --subject->second == 0) subjects.erase(subject);
}

bool Executor::Load::admits(const QueuedJob& entry, const Limits& limits) const {
  const auto lane = lanes.find(entry.lane);
  if (lane == lanes.end()) return true;
  if (lane->second >= limit_of(entry.lane, limits) || of_user(entry) >= user_limit_of(entry.lane, limits)) return false;
  const auto subject = subjects.find({entry.lane, entry.subject});
  return subject == subjects.end() || subject->second < subject_limit_of(entry.lane, limits);
}

std::size_t Executor::Load::of_user(const QueuedJob& entry) const {
  const auto user = users.find({entry.lane, entry.id.user});
  return user == users.end() ? 0 : user->second;
}

std::size_t Executor::State::count_ready(std::size_t most) const {
  if (queue.size() == 1) return load.admits(queue.front(), limits) ? 1 : 0;
  Load together = load;
  std::size_t ready = 0;
  for (auto entry = queue.begin(); entry != queue.end() && ready < most; ++entry) {
    if (!together.admits(*entry, limits)) continue;
    together.add(*entry);
    ++ready;
  }
  return ready;
}

Executor::QueuedJobs::iterator Executor::State::activate(QueuedJobs& from, QueuedJobs::iterator entry) {
  load.add(*entry);
  active.splice(active.end(), from, entry);
  return entry;
}

bool Executor::State::leaves_a_thread(const QueuedJob& entry) const {
  const auto may_hang = [](const QueuedJob& each) {
    return each.lane.kind == Lane::Kind::kFiles || each.lane.kind == Lane::Kind::kNotifications;
  };
  return !may_hang(entry) || static_cast<std::size_t>(std::ranges::count_if(active, may_hang)) + 1 < threads;
}

Executor::QueuedJobs::iterator Executor::State::first_ready() {
  auto first = queue.end();
  for (auto entry = queue.begin(); entry != queue.end(); ++entry) {
    if (!load.admits(*entry, limits) || !leaves_a_thread(*entry)) continue;
    if (first == queue.end() || load.of_user(*entry) < load.of_user(*first)) first = entry;
    if (load.of_user(*first) == 0) break;
  }
  return first;
}

Executor::QueuedJobs::iterator Executor::State::next(std::unique_lock<std::mutex>& lock) {
  const TimePoint idle_end = Clock::now() + kIdle;
  for (;;) {
    const TimePoint now = Clock::now();
    const auto first = std::ranges::min_element(waiting, {}, &QueuedJob::time);
    if (first != waiting.end() && first->time <= now) {
      if (first->refusal != 0 || load.admits(*first, limits)) return activate(waiting, first);
      queue.splice(queue.end(), waiting, first);  // the end of a job of its lane makes space for it
      continue;
    }
    const auto ready = first_ready();
    if (ready != queue.end()) return activate(queue, ready);
    // While something is waiting one thread stays to watch the time.
    const bool needed = threads <= kPermanentThreads || (!waiting.empty() && idle == 0);
    if (stopping || (now >= idle_end && !needed)) return active.end();
    ++idle;
    if (!waiting.empty()) {
      // A copy: wait_until() reads it again at the end, when the entry may be gone.
      const TimePoint end = now < idle_end ? std::min(idle_end, first->time) : first->time;
      wanted.wait_until(lock, end);
    } else if (now < idle_end) {
      wanted.wait_until(lock, idle_end);
    } else {
      wanted.wait(lock);
    }
    --idle;
  }
}

void Executor::State::postpone(QueuedJobs::iterator entry, TimePoint time) {
  if (stopping) entry->refusal = EINTR;
  entry->time = entry->refusal == 0 ? time : TimePoint::min();  // cancelled since: it runs with that at once
  // Memory that was released during the attempt may have come too late for it.
  const bool again = entry->refusal == 0 && entry->resumes != resumes && entry->lane.device >= 0;
  QueuedJobs& to = again ? queue : waiting;
  load.remove(*entry);
  to.splice(to.end(), active, entry);
}

void Executor::work_loop(const std::shared_ptr<State>& shared) {
  State& state = *shared;
  std::unique_lock lock(state.mutex);
  --state.starting;
  for (auto entry = state.next(lock); entry != state.active.end(); entry = state.next(lock)) {
    wake_for_waiting(shared);  // another thread has to watch the time now
    entry->resumes = state.resumes;
    const int refusal = entry->refusal;
    const Job& job = entry->job;
    std::optional<TimePoint> again;
    lock.unlock();
    try {
      again = job(refusal, *entry->cancellation);
    } catch (const std::exception& failure) {
      log_error("a worker's job failed: ", failure.what());
    }
    lock.lock();
    if (refusal == 0 && again) {
      state.postpone(entry, *again);
      continue;
    }
    Job last = std::move(entry->job);
    lock.unlock();
    last = nullptr;  // while its subject still counts as busy
    lock.lock();
    state.load.remove(*entry);
    state.active.erase(entry);
    state.ended.notify_all();
  }
  --state.threads;
  state.ended.notify_all();
}

}  // namespace gpufs::fuse
