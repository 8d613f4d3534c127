#include "io/worker_pool.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>

#include "base/log.h"
#include "base/thread.h"

namespace gpufs {
namespace {

// How long a thread stays with its work although somebody who has none waits.
constexpr std::chrono::milliseconds kTurn{100};

// "0-7,16-23" from sysfs, restricted to what this process may use. False where the node is unknown.
bool cpus_of_node(int node, cpu_set_t* cpus) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return false;
  *cpus = allowed;
  if (node < 0) return true;
  std::ifstream file("/sys/devices/system/node/node" + std::to_string(node) + "/cpulist");
  std::string text;
  if (!std::getline(file, text)) return false;
  cpu_set_t listed;
  CPU_ZERO(&listed);
  std::string_view rest = text;
  while (!rest.empty()) {
    const std::string_view item = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(item.size() + 1, rest.size()));
    std::size_t first = 0;
    const std::from_chars_result start = std::from_chars(item.data(), item.data() + item.size(), first);
    if (start.ec != std::errc()) return false;
    std::size_t last = first;
    if (start.ptr != item.data() + item.size()) {
      if (std::from_chars(start.ptr + 1, item.data() + item.size(), last).ec != std::errc()) return false;
    }
    for (std::size_t cpu = first; cpu <= last && cpu < CPU_SETSIZE; ++cpu) CPU_SET(cpu, &listed);
  }
  CPU_AND(cpus, &allowed, &listed);
  return CPU_COUNT(cpus) > 0;
}

}  // namespace

int usable_cpus(int node) {
  cpu_set_t cpus;
  if (cpus_of_node(node, &cpus) || cpus_of_node(-1, &cpus)) return std::max(CPU_COUNT(&cpus), 1);
  return 1;
}

bool Turn::over() { return pool_.should_yield(work_, start_); }

std::shared_ptr<WorkerPool> WorkerPool::create(int node, int share, int spare) {
  return std::shared_ptr<WorkerPool>(new WorkerPool(node, std::max(share, 1), std::max(spare, 0)));
}

Status WorkerPool::submit(std::shared_ptr<Work> work) {
  std::list<Entry> dropped;
  const std::uint64_t client = work->client();
  const Work* const raw = work.get();
  std::list<Entry> fresh(1);
  fresh.front().work = std::move(work);
  fresh.front().waiting_since = Clock::now();
  std::unique_lock lock(mutex_);
  if (ending_) return Status(ESHUTDOWN, "the engine is being closed");
  groups_.try_emplace(raw->group());
  std::list<Entry>& entries = clients_[client].entries;
  entries.splice(entries.end(), fresh);  // what may find no memory is behind us
  drop_finished_locked(dropped);
  start_missing_locked(lock);
  if (alive_ == 0) {
    Client& owner = clients_[client];
    const auto mine = std::find_if(owner.entries.begin(), owner.entries.end(),
                                   [&](const Entry& candidate) { return candidate.work.get() == raw; });
    if (mine != owner.entries.end()) dropped.splice(dropped.end(), owner.entries, mine);
    if (owner.entries.empty()) clients_.erase(client);
    return Status(EAGAIN, "no thread could be started for the transfer");
  }
  lock.unlock();
  changed_.notify_one();
  return {};
}

void WorkerPool::start_thread_locked(std::unique_lock<std::mutex>& lock) {
  // The thread takes the lock first thing, so it sees itself counted.
  (void)lock;
  Result<std::thread> started = start_thread("gpufs-io", [self = shared_from_this()] { self->thread_main(); });
  if (!started.ok()) {
    if (alive_ == 0) log_warning("no thread for transfers: ", started.status().message());
    return;
  }
  ++alive_;
  threads_.push_back(started.take());
}

// As many as are wanted beyond those that are free. One that was woken for a work and has not taken it yet is free, but
// for that work alone: what comes meanwhile needs a thread of its own, for the first work may hang.
void WorkerPool::start_missing_locked(std::unique_lock<std::mutex>& lock) {
  if (alive_ >= threads()) return;  // as under load, where there are many to look at
  int missing = -alive_;
  for (const auto& [key, client] : clients_) {
    for (const Entry& entry : client.entries) missing += std::max(entry.work->wanted(), entry.running);
  }
  for (; missing > 0 && alive_ < threads(); --missing) start_thread_locked(lock);
}

void WorkerPool::update() {
  std::list<Entry> dropped;
  {
    std::unique_lock lock(mutex_);
    drop_finished_locked(dropped);
    if (!ending_) start_missing_locked(lock);
  }
  changed_.notify_all();
}

void WorkerPool::drop_finished_locked(std::list<Entry>& dropped) {
  for (auto client = clients_.begin(); client != clients_.end();) {
    std::list<Entry>& entries = client->second.entries;
    for (auto entry = entries.begin(); entry != entries.end();) {
      if (entry->running == 0 && entry->work->wanted() == 0) {
        const auto next = std::next(entry);
        dropped.splice(dropped.end(), entries, entry);  // destroyed by the caller, without the lock
        entry = next;
      } else {
        ++entry;
      }
    }
    client = entries.empty() ? clients_.erase(client) : std::next(client);
  }
}

// The client with the fewest threads, of its works the one with the fewest, whoever was served longest ago among
// equals.
WorkerPool::Entry* WorkerPool::choose_locked(Client** owner) {
  Entry* best = nullptr;
  for (auto& [key, client] : clients_) {
    if (client.running >= share_) continue;
    if (best != nullptr) {
      const Client& other = **owner;
      if (client.running > other.running) continue;
      if (client.running == other.running && client.served > other.served) continue;
    }
    Entry* own = nullptr;
    for (Entry& entry : client.entries) {
      if (entry.running >= entry.work->wanted()) continue;
      const std::uint64_t group = entry.work->group();
      if (group != Work::kNeverStalls && groups_.at(group) >= share_) continue;
      if (own == nullptr || entry.running < own->running ||
          (entry.running == own->running && entry.served < own->served)) {
        own = &entry;
      }
    }
    if (own == nullptr) continue;
    best = own;
    *owner = &client;
  }
  return best;
}

bool WorkerPool::should_yield(const Work& work, Clock::time_point since) {
  const std::lock_guard lock(mutex_);
  if (ending_) return true;
  // Of a group that has all its threads, the others wait for this one, whether other threads are idle or not.
  int& together = groups_.at(work.group());
  const bool full = work.group() != Work::kNeverStalls && together >= share_;
  if (!full && (idle_ > 0 || alive_ < threads())) return false;
  Client* owner = nullptr;
  if (full) --together;
  const Entry* const next = choose_locked(&owner);
  if (full) ++together;
  if (next == nullptr) return false;
  const auto mine = clients_.find(work.client());
  if (mine == clients_.end()) return false;
  const Client& client = mine->second;
  if (&client != owner && owner->running + 1 < client.running) return true;
  if (&client == owner) {
    for (const Entry& entry : client.entries) {
      if (entry.work.get() == &work && next->running + 1 < entry.running) return true;
    }
  }
  // More works than threads: they take turns.
  const Clock::time_point now = Clock::now();
  return next->running == 0 && now - since >= kTurn && now - next->waiting_since >= kTurn;
}

void WorkerPool::thread_main() {
  cpu_set_t cpus;
  // A wish: a thread on the wrong node works too.
  if (node_ >= 0 && cpus_of_node(node_, &cpus)) (void)::sched_setaffinity(0, sizeof cpus, &cpus);
  std::list<Entry> dropped;
  std::unique_lock lock(mutex_);
  while (!ending_) {
    Client* owner = nullptr;
    Entry* const entry = choose_locked(&owner);
    if (entry == nullptr) {
      ++idle_;
      changed_.wait(lock);
      --idle_;
      continue;
    }
    ++owner->running;
    ++entry->running;
    owner->served = entry->served = ++serial_;
    // Entry and client stay where they are: both are dropped only when nothing runs.
    std::shared_ptr<Work> work = entry->work;
    int& together = groups_.at(work->group());
    ++together;
    lock.unlock();
    {
      Turn turn(*this, *work);
      work->serve(turn);
    }
    lock.lock();
    --together;
    if (ending_) finished_.notify_all();
    --owner->running;
    --entry->running;
    if (entry->running == 0) entry->waiting_since = Clock::now();
    drop_finished_locked(dropped);
    const bool more = !clients_.empty();
    lock.unlock();
    if (more) changed_.notify_one();
    dropped.clear();
    work.reset();
    lock.lock();
  }
  --alive_;
  finished_.notify_all();
}

int WorkerPool::shutdown(std::chrono::milliseconds grace, std::chrono::milliseconds hang_grace) {
  std::vector<std::thread> threads;
  std::list<Entry> dropped;
  int hung = 0;
  {
    std::unique_lock lock(mutex_);
    ending_ = true;
    changed_.notify_all();
    const int& hanging = groups_[Work::kMayHang];
    finished_.wait_for(lock, grace, [&] { return alive_ <= hanging; });
    finished_.wait_for(lock, std::min(grace, hang_grace), [&] { return alive_ == 0; });
    hung = alive_;
    threads.swap(threads_);
    if (hung == 0) {
      for (auto& [key, client] : clients_) {
        dropped.splice(dropped.end(), client.entries);
      }
      clients_.clear();
    }
  }
  for (std::thread& thread : threads) {
    // Threads that hang keep the pool alive by their own reference.
    if (hung == 0) {
      thread.join();
    } else {
      thread.detach();
    }
  }
  return hung;
}

}  // namespace gpufs
