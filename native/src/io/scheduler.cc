#include "io/scheduler.h"

#include <cerrno>
#include <iterator>
#include <utility>

#include "base/cpus.h"
#include "base/log.h"
#include "base/thread.h"

namespace gpufs {
namespace {

// How long a thread stays with its job although another one that has no thread waits.
constexpr std::chrono::milliseconds kTurn{100};

}  // namespace

std::shared_ptr<Scheduler> Scheduler::create(int node, int share, int spare) {
  return std::shared_ptr<Scheduler>(new Scheduler(node, std::max(share, 1), std::max(spare, 0)));
}

// ---- the list of jobs ----

Status Scheduler::submit(std::shared_ptr<Job> job) {
  {
    const std::lock_guard lock(mutex_);
    if (ending_) return Status(ESHUTDOWN, "the engine is being closed");
    entries_.push_back({std::move(job)});
    start_missing_locked();
    if (alive_ == 0) {
      entries_.pop_back();  // the caller has a reference
      return Status(EAGAIN, "no thread could be started for the transfer");
    }
  }
  changed_.notify_one();
  return {};
}

void Scheduler::update() {
  Entries finished;  // destroyed without the lock
  {
    const std::lock_guard lock(mutex_);
    finished = take_finished_locked();
    start_missing_locked();
  }
  changed_.notify_all();
}

Scheduler::Entries Scheduler::take_finished_locked() {
  Entries finished;
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    const auto next = std::next(entry);
    // A thread that counts as its client's closes a file that may hang.
    if (entry->finished() && entry->job->group() != Job::kMayHang) {
      finished.splice(finished.end(), entries_, entry);
    }
    entry = next;
  }
  if (entries_.empty()) std::erase_if(clients_, [](const auto& client) { return client.second == 0; });
  return finished;
}

void Scheduler::release(std::shared_ptr<Job> job) {
  if (job->group() != Job::kMayHang) return;
  {
    const std::lock_guard lock(mutex_);
    if (ending_) return;  // the lock is released first
    // While it is in the list, this is not the last reference.
    if (std::any_of(entries_.begin(), entries_.end(), [&](const Entry& entry) { return entry.job == job; })) {
      job.reset();
      return;
    }
    entries_.push_back({std::move(job)});
    start_missing_locked();
  }
  changed_.notify_one();
}

// ---- threads ----

// Starts as many threads as are wanted beyond those that are free. A thread that was woken for a job and has not taken
// it yet is free for that one alone: the next one needs a thread of its own, since the first may hang.
void Scheduler::start_missing_locked() {
  if (ending_ || alive_ >= threads()) return;
  int missing = -alive_;
  for (const Entry& entry : entries_) missing += std::max(entry.needed_threads(), entry.running);
  for (; missing > 0 && alive_ < threads(); --missing) {
    Result<std::thread> started = start_thread("gpufs-io", [self = shared_from_this()] { self->thread_main(); });
    if (!started.ok()) {
      if (alive_ == 0) log_warning("no thread for transfers: ", started.status().message());
      return;
    }
    ++alive_;
    threads_.push_back(started.take());
  }
}

// The client with the fewest threads, of its jobs the one with the fewest, and among equals the one that got a thread
// longest ago.
Scheduler::Entries::iterator Scheduler::choose_locked() {
  const auto rank = [this](const Entry& entry) { return std::make_pair(clients_[entry.job->client()], entry.running); };
  auto best = entries_.end();
  for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
    const Job& job = *entry->job;
    if (ending_ && !entry->finished()) continue;
    if (entry->running >= entry->needed_threads() || clients_[job.client()] >= share_) continue;
    if (job.group() != Job::kNeverStalls && groups_[job.group()] >= share_) continue;
    if (best == entries_.end() || rank(*entry) < rank(*best)) best = entry;
  }
  return best;
}

bool Scheduler::turn_over(const Job& job, Clock::time_point since) {
  const std::lock_guard lock(mutex_);
  if (ending_) return true;
  // If a group has all the threads it may have, its other jobs wait for this thread even if other threads are idle.
  int& together = groups_[job.group()];
  const bool full = job.group() != Job::kNeverStalls && together >= share_;
  if (!full && (idle_ > 0 || alive_ < threads())) return false;
  if (full) --together;
  const auto next = choose_locked();
  if (full) ++together;
  if (next == entries_.end()) return false;
  const std::uint64_t next_client = next->job->client();
  if (next_client != job.client()) {
    if (clients_[next_client] + 1 < clients_[job.client()]) return true;
  } else {
    const auto is_mine = [&](const Entry& entry) { return entry.job.get() == &job; };
    if (next->running + 1 < std::find_if(entries_.begin(), entries_.end(), is_mine)->running) return true;
  }
  // More jobs than threads: they take turns.
  const Clock::time_point now = Clock::now();
  return next->running == 0 && now - since >= kTurn && now - next->waiting_since >= kTurn;
}

void Scheduler::thread_main() {
  run_on_node(node_);
  std::unique_lock lock(mutex_);
  for (;;) {
    const auto entry = choose_locked();
    if (entry == entries_.end()) {
      if (ending_) break;
      ++idle_;
      changed_.wait(lock);
      --idle_;
      continue;
    }
    std::shared_ptr<Job> job = entry->job;
    // Entries and clients keep their addresses: they are removed only while no thread counts for them.
    entries_.splice(entries_.end(), entries_, entry);
    int& client = clients_[job->client()];
    int& together = groups_[job->group()];
    ++client;
    ++together;
    ++entry->running;
    lock.unlock();
    job->serve(Turn(*this, *job));
    lock.lock();
    --entry->running;
    if (entry->running == 0) entry->waiting_since = Clock::now();
    Entries finished;
    if (entry->finished()) finished.splice(finished.end(), entries_, entry);
    finished.splice(finished.end(), take_finished_locked());
    const bool more = !entries_.empty();
    lock.unlock();
    if (more) changed_.notify_one();
    // The thread still counts: the last reference closes the file, which may hang.
    finished.clear();
    job.reset();
    lock.lock();
    --client;
    --together;
    if (ending_) finished_.notify_all();
  }
  --alive_;
  finished_.notify_all();
}

int Scheduler::shutdown(std::chrono::milliseconds grace, std::chrono::milliseconds hang_grace) {
  std::vector<std::thread> threads;
  Entries dropped;  // destroyed without the lock
  int hung = 0;
  {
    std::unique_lock lock(mutex_);
    ending_ = true;
    changed_.notify_all();
    const int& hanging = groups_[Job::kMayHang];
    finished_.wait_for(lock, grace, [&] { return alive_ <= hanging; });
    finished_.wait_for(lock, std::min(grace, hang_grace), [&] { return alive_ == 0; });
    hung = alive_;
    threads.swap(threads_);
    if (hung == 0) dropped.swap(entries_);
  }
  for (std::thread& thread : threads) {
    // Threads that hang keep this object alive themselves.
    if (hung == 0) {
      thread.join();
    } else {
      thread.detach();
    }
  }
  return hung;
}

}  // namespace gpufs
