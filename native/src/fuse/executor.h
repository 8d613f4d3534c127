// Threads for the mount's work that may take long, with timers and cancellation.
// Ownership: the Mount's. The threads share its state, so one that hangs can be left behind.
// Thread-safe, except start() and stop(), which the Mount calls.
//
// Jobs compete in lanes: each lane has its own limit and never waits for another one. Jobs of a lane on the same
// subject (an inode) have a smaller limit, so one that makes no progress does not fill its lane, and so have jobs of
// one user; of those that wait the user's with the fewest that run comes first. Files of the host have no subject: one
// that hangs can fill its user's part of the lane of its file system. A job that finds the device full holds no thread:
// it waits until memory is released (device/releases.h) or its time is over. There are as many threads as jobs may
// run side by side, and one more, however many are queued.
#pragma once

#include <atomic>
#include <chrono>
#include <compare>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <type_traits>
#include <utility>

#include "base/status.h"

namespace gpufs::fuse {

// Whether a job has been cancelled. Any thread may call any function.
class Cancellation {
 public:
  [[nodiscard]] bool requested() const { return requested_.load(); }
  [[nodiscard]] const std::atomic<bool>* flag() const { return &requested_; }
  void request();
  // Calls `action` when the cancellation is requested; at once if it has been. Null removes the action: when that
  // returns, it is not running and never will.
  void on_request(std::function<void()> action);

 private:
  std::atomic<bool> requested_{false};
  std::mutex mutex_;  // guards action_, which runs under it
  std::function<void()> action_;
};

class Executor {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  struct Lane {
    enum class Kind : std::uint8_t {
      kBuffers,        // memory of one device
      kFiles,          // files of one file system of the host; these jobs may be left behind
      kCopies,         // transfers between the two
      kRelease,        // freeing memory of one device
      kNotifications,  // about files of one user
      kRelay,          // in their order, by one thread at a time
    };
    Kind kind = Kind::kBuffers;
    std::int32_t device = -1;  // the GPU; its resume() runs the lane's waiting jobs, too; -1: none
    std::uint64_t owner = 0;   // of kFiles and kCopies the disk, see BackingFacts; of kNotifications the user
    friend auto operator<=>(const Lane&, const Lane&) = default;
  };

  struct Limits {
    std::size_t buffers = 64;
    std::size_t same_subject = 4;
  };

  // A job is a function body(int refusal, Cancellation&). `refusal` is 0 on a thread of the executor. If the job is
  // refused or cancelled, the body is called once with EINTR, on any thread.
  // The body returns nothing, or a std::optional<TimePoint>: then the job waits, and runs again at that time, or
  // earlier if its lane's device is resumed.

  explicit Executor(const Limits& limits) : state_(std::make_shared<State>(limits)) {}
  ~Executor() { stop(std::chrono::milliseconds::zero()); }
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Starts the threads that stay: jobs wait for them if the system refuses further ones.
  Status start();

  // What a job is found by, or 0, and for whom it is.
  struct Id {
    Id(std::uint64_t id, std::uint32_t for_client = 0, std::uint32_t for_user = 0)
        : number(id), client(for_client), user(for_user) {}
    std::uint64_t number;
    std::uint32_t client;  // see client_of()
    std::uint32_t user;
  };
  // subject: null, or the file that the job is about. False after stop(): the job has run with EINTR.
  template <typename Body>
  bool submit(const Lane& lane, const void* subject, Id id, Body body) {
    return submit_entry(lane, subject, id, std::nullopt, job_of(std::move(body)));
  }
  // A timer: a job that waits until this time.
  template <typename Body>
  void submit_at(TimePoint time, Body body) {
    submit_entry({}, nullptr, 0, time, job_of(std::move(body)));
  }

  // A job that is queued or waiting ends now. One that runs is asked to end.
  enum class Cancelled : std::uint8_t { kEnded, kRunning, kUnknown };
  Cancelled cancel(std::uint64_t id);
  // The thread whose death alone is a reason to cancel a job; 0: none is named, or the job is unknown.
  [[nodiscard]] std::uint32_t client_of(std::uint64_t id) const;

  // Runs the waiting jobs of a device again, and those that are about to wait.
  void resume(std::int32_t device);

  // Ends what is queued or waiting, cancels what runs and waits for it, for jobs of files up to `timeout`; returns how
  // many of these are left behind. They must use nothing that goes away with the executor's owner. May be called twice.
  std::size_t stop(std::chrono::milliseconds timeout);

  struct JobCounts {
    std::size_t running = 0;
    std::size_t queued = 0;
  };
  [[nodiscard]] JobCounts counts() const;
  [[nodiscard]] const Limits& limits() const { return state_->limits; }

 private:
  using Job = std::function<std::optional<TimePoint>(int refusal, Cancellation& cancellation)>;
  // A body as a job, which can be copied though the body cannot.
  template <typename Body>
  static Job job_of(Body body) {
    return [shared = std::make_shared<Body>(std::move(body))](int refusal,
                                                              Cancellation& cancellation) -> std::optional<TimePoint> {
      if constexpr (std::is_void_v<std::invoke_result_t<Body&, int, Cancellation&>>) {
        (*shared)(refusal, cancellation);
        return std::nullopt;
      } else {
        return (*shared)(refusal, cancellation);
      }
    };
  }

  struct QueuedJob {
    Lane lane;
    const void* subject = nullptr;
    Id id = 0;
    Job job;
    std::shared_ptr<Cancellation> cancellation = std::make_shared<Cancellation>();
    TimePoint time;             // when a waiting job runs again
    std::uint64_t resumes = 0;  // State::resumes when it was last started
    int refusal = 0;            // what it runs with next
  };
  using QueuedJobs = std::list<QueuedJob>;

  // How many jobs run, or would: in each lane, and of these on each subject and for each user.
  struct Load {
    std::map<Lane, std::size_t> lanes;
    std::map<std::pair<Lane, const void*>, std::size_t> subjects;
    std::map<std::pair<Lane, std::uint32_t>, std::size_t> users;

    void add(const QueuedJob& entry);
    void remove(const QueuedJob& entry);
    [[nodiscard]] bool admits(const QueuedJob& entry, const Limits& limits) const;
    [[nodiscard]] std::size_t of_user(const QueuedJob& entry) const;
  };

  // State that the threads use.
  struct State {
    explicit State(const Limits& chosen) : limits(chosen) {}

    const Limits limits;
    // Guards all below. No job runs or is destroyed under it. Order 9 of docs/design/requests.md#locks
    std::mutex mutex;
    std::condition_variable wanted;
    std::condition_variable ended;  // a job or a thread has
    QueuedJobs queue;
    QueuedJobs waiting;
    QueuedJobs active;
    Load load;  // of the active ones
    std::size_t threads = 0;
    std::size_t idle = 0;      // of these, those that wait
    std::size_t starting = 0;  // and those that have been started and look at the queue next
    std::uint64_t resumes = 0;
    bool stopping = false;
    bool start_failed = false;  // logged once, until a thread could be started again

    // How many queued jobs could start now; counts up to `most`.
    [[nodiscard]] std::size_t count_ready(std::size_t most) const;
    // Jobs that may hang never take the last thread: a notification may wait for a request that is a job, too.
    [[nodiscard]] bool leaves_a_thread(const QueuedJob& entry) const;
    // Moves a job to `active`.
    QueuedJobs::iterator activate(QueuedJobs& from, QueuedJobs::iterator entry);
    // The queued job that starts next; the end if none can.
    [[nodiscard]] QueuedJobs::iterator first_ready();
    // Moves the next job to `active` and returns it; the end of `active` if the thread has to end.
    QueuedJobs::iterator next(std::unique_lock<std::mutex>& lock);
    void postpone(QueuedJobs::iterator entry, TimePoint time);
  };

  bool submit_entry(const Lane& lane, const void* subject, Id id, std::optional<TimePoint> time, Job job);
  static void work_loop(const std::shared_ptr<State>& state);
  // The following are called with the mutex held.
  // added: jobs that have just been queued.
  static void wake_for_queue(const std::shared_ptr<State>& state, std::size_t added);
  static void wake_for_waiting(const std::shared_ptr<State>& state);
  static Status start_worker(const std::shared_ptr<State>& state);

  const std::shared_ptr<State> state_;
};

}  // namespace gpufs::fuse
