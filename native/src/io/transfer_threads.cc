#include "io/transfer_threads.h"

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <tuple>
#include <utility>

#include "base/cpus.h"
#include "base/log.h"
#include "base/thread.h"

namespace gpufs {
namespace {

// How long a thread stays with its work although another one that has no thread waits.
constexpr std::chrono::milliseconds kTurn{100};

}  // namespace

bool Turn::over() { return threads_.should_yield(work_, start_); }

std::shared_ptr<TransferThreads> TransferThreads::create(int node, int share, int spare) {
  return std::shared_ptr<TransferThreads>(new TransferThreads(node, std::max(share, 1), std::max(spare, 0)));
}

Status TransferThreads::submit(const std::shared_ptr<TransferWork>& work) {
  std::list<Entry> finished;  // destroyed without the lock
  {
    const std::lock_guard lock(mutex_);
    if (ending_) return Status(ESHUTDOWN, "the engine is being closed");
    entries_.push_back({work, 0, Clock::now(), 0});
    finished = take_finished_locked();
    start_missing_locked();
    if (alive_ == 0) {
      entries_.clear();  // without a thread there is no other work
      return Status(EAGAIN, "no thread could be started for the transfer");
    }
  }
  changed_.notify_one();
  return {};
}

// Starts as many threads as are wanted beyond those that are free. A thread that was woken for a work and has not taken
// it yet is free for that work alone: the next one needs a thread of its own, since the first may hang.
void TransferThreads::start_missing_locked() {
  if (alive_ >= threads()) return;
  int missing = -alive_;
  for (const Entry& entry : entries_) missing += std::max(entry.work->wanted(), entry.running);
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

void TransferThreads::update() {
  std::list<Entry> finished;  // destroyed without the lock
  {
    const std::lock_guard lock(mutex_);
    finished = take_finished_locked();
    if (!ending_) start_missing_locked();
  }
  changed_.notify_all();
}

std::list<TransferThreads::Entry> TransferThreads::take_finished_locked() {
  std::list<Entry> finished;
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    const auto next = std::next(entry);
    if (entry->running == 0 && entry->work->wanted() == 0) finished.splice(finished.end(), entries_, entry);
    entry = next;
  }
  if (entries_.empty()) clients_.clear();
  return finished;
}

// The client with the fewest threads, of its works the one with the fewest, and among equals the one that was served
// longest ago.
TransferThreads::Entry* TransferThreads::choose_locked() {
  const auto rank = [this](const Entry& entry) {
    const Client& client = clients_[entry.work->client()];
    return std::make_tuple(client.running, client.served, entry.running, entry.served);
  };
  Entry* best = nullptr;
  for (Entry& entry : entries_) {
    const std::uint64_t group = entry.work->group();
    if (entry.running >= entry.work->wanted() || clients_[entry.work->client()].running >= share_) continue;
    if (group != TransferWork::kNeverStalls && groups_[group] >= share_) continue;
    if (best == nullptr || rank(entry) < rank(*best)) best = &entry;
  }
  return best;
}

bool TransferThreads::should_yield(const TransferWork& work, Clock::time_point since) {
  const std::lock_guard lock(mutex_);
  if (ending_) return true;
  // If a group has all the threads it may have, its other works wait for this thread even if other threads are idle.
  int& together = groups_[work.group()];
  const bool full = work.group() != TransferWork::kNeverStalls && together >= share_;
  if (!full && (idle_ > 0 || alive_ < threads())) return false;
  if (full) --together;
  const Entry* const next = choose_locked();
  if (full) ++together;
  if (next == nullptr) return false;
  if (next->work->client() != work.client()) {
    if (clients_[next->work->client()].running + 1 < clients_[work.client()].running) return true;
  } else {
    const auto is_mine = [&](const Entry& entry) { return entry.work.get() == &work; };
    if (next->running + 1 < std::find_if(entries_.begin(), entries_.end(), is_mine)->running) return true;
  }
  // More works than threads: they take turns.
  const Clock::time_point now = Clock::now();
  return next->running == 0 && now - since >= kTurn && now - next->waiting_since >= kTurn;
}

void TransferThreads::thread_main() {
  run_on_node(node_);
  std::unique_lock lock(mutex_);
  while (!ending_) {
    Entry* const entry = choose_locked();
    if (entry == nullptr) {
      ++idle_;
      changed_.wait(lock);
      --idle_;
      continue;
    }
    std::shared_ptr<TransferWork> work = entry->work;
    // They keep their addresses: entries and clients are removed only while no thread serves them.
    Client& client = clients_[work->client()];
    ++client.running;
    ++entry->running;
    client.served = entry->served = ++serial_;
    int& together = groups_[work->group()];
    ++together;
    lock.unlock();
    Turn turn(*this, *work);
    work->serve(turn);
    lock.lock();
    --together;
    if (ending_) finished_.notify_all();
    --client.running;
    --entry->running;
    if (entry->running == 0) entry->waiting_since = Clock::now();
    std::list<Entry> finished = take_finished_locked();
    const bool more = !entries_.empty();
    lock.unlock();
    if (more) changed_.notify_one();
    finished.clear();
    work.reset();
    lock.lock();
  }
  --alive_;
  finished_.notify_all();
}

int TransferThreads::shutdown(std::chrono::milliseconds grace, std::chrono::milliseconds hang_grace) {
  std::vector<std::thread> threads;
  std::list<Entry> dropped;  // destroyed without the lock
  int hung = 0;
  {
    std::unique_lock lock(mutex_);
    ending_ = true;
    changed_.notify_all();
    const int& hanging = groups_[TransferWork::kMayHang];
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
