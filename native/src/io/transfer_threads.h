// The threads that move the bytes of all transfers near one NUMA node, shared fairly between clients and disks.
// Thread-safe. Its threads keep it alive, so that one that hangs in a file can be left behind.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/status.h"

namespace gpufs {

class TransferThreads;
class TransferWork;

// How a thread that serves a TransferWork finds out that it should leave.
class Turn {
 public:
  // True if the thread should leave after its current chunk, since a work with fewer threads waits for one.
  [[nodiscard]] bool over();

 private:
  friend class TransferThreads;
  Turn(TransferThreads& threads, const TransferWork& work) : threads_(threads), work_(work) {}
  TransferThreads& threads_;
  const TransferWork& work_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// Something that up to wanted() threads can serve at once: a Transfer.
class TransferWork {
 public:
  virtual ~TransferWork() = default;
  // Clients share the threads evenly, however many works each has. Constant.
  [[nodiscard]] virtual std::uint64_t client() const = 0;
  // What it may stall with: all works of one group together never have more threads than one client. Constant.
  static constexpr std::uint64_t kNeverStalls = 0;
  static constexpr std::uint64_t kMayHang = 1;  // behind a network or a user's process; other groups are local disks
  [[nodiscard]] virtual std::uint64_t group() const = 0;
  // How many threads it could use, including those that serve it; 0 once it needs none any more. Takes no lock.
  [[nodiscard]] virtual int wanted() const = 0;
  // Serves it until nothing is left or turn.over(). May hang in a file.
  virtual void serve(Turn& turn) = 0;
};

class TransferThreads : public std::enable_shared_from_this<TransferThreads> {
 public:
  // share: threads that one client has at most; spare: additional threads for other clients. node: -1 for no affinity.
  // Threads start when they are needed for the first time.
  static std::shared_ptr<TransferThreads> create(int node, int share, int spare);
  TransferThreads(const TransferThreads&) = delete;
  TransferThreads& operator=(const TransferThreads&) = delete;

  // ESHUTDOWN after shutdown(); EAGAIN if there is no thread to serve it.
  Status submit(const std::shared_ptr<TransferWork>& work);
  // Call it when wanted() has grown or become 0, without locks of the work.
  void update();

  // Waits until every thread has left its work and joins them: up to `grace`, and up to `hang_grace` once only threads
  // that may hang are left. Threads that hang are left behind; returns their number. The works must have been told to
  // end. Nothing is served afterwards.
  int shutdown(std::chrono::milliseconds grace, std::chrono::milliseconds hang_grace);

  [[nodiscard]] int share() const { return share_; }
  [[nodiscard]] int threads() const { return share_ + spare_; }

 private:
  friend class Turn;
  using Clock = std::chrono::steady_clock;

  struct Entry {
    std::shared_ptr<TransferWork> work;
    int running = 0;
    Clock::time_point waiting_since;  // when it last had no thread
    std::uint64_t served = 0;         // serial number of the last thread it got
  };
  struct Client {
    int running = 0;
    std::uint64_t served = 0;
  };

  TransferThreads(int node, int share, int spare) : node_(node), share_(share), spare_(spare) {}

  void thread_main();
  Entry* choose_locked();
  void start_missing_locked();
  std::list<Entry> take_finished_locked();
  bool should_yield(const TransferWork& work, Clock::time_point since);

  const int node_;
  const int share_;
  const int spare_;

  // Guards all below. No lock of a work is taken under it.
  std::mutex mutex_;
  std::condition_variable changed_;   // work for idle threads, or the end
  std::condition_variable finished_;  // a thread left its work or ended
  std::list<Entry> entries_;
  std::map<std::uint64_t, Client> clients_;
  std::vector<std::thread> threads_;
  int alive_ = 0;
  int idle_ = 0;
  std::map<std::uint64_t, int> groups_;  // threads in works of each group
  std::uint64_t serial_ = 0;
  bool ending_ = false;
};

}  // namespace gpufs
