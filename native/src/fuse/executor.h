// Threads for requests that may take long. They start as they are needed and end when they have been idle for a while.
// Owned by the Session; the threads share its state, so that one that hangs can be left behind.
// Thread-safe, except stop(), which is the Session's.
//
// Jobs compete in lanes: a lane has a limit of its own and never waits for another one. Jobs on the same subject (a
// file) have a smaller limit, so that one file that makes no progress does not fill its lane. A job that finds the
// device full holds no thread: it is parked until memory is freed or its deadline passes.
#pragma once

#include <chrono>
#include <compare>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <type_traits>
#include <utility>

#include "fuse/statistics.h"

namespace gpufs::fuse {

class Executor {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  // What jobs wait for, apart from each other.
  struct Lane {
    enum class Kind : std::uint8_t {
      kBuffers,  // memory of one device
      kFiles,    // files of one file system of the host; these jobs may be left behind
      kCopies,   // transfers between the two
    };
    Kind kind = Kind::kBuffers;
    std::int32_t device = -1;
    std::uint64_t file_system = 0;  // st_dev
    friend auto operator<=>(const Lane&, const Lane&) = default;
  };

  // One operation. run() is called with 0 on a thread of the executor, or once, on any thread, with the errno that it
  // ends with instead: EINTR after discard() and stop(), ENOMEM if no thread can be started, ENOSPC at its deadline.
  class Job {
   public:
    virtual ~Job() = default;
    // Returns nothing when it is done, or the deadline until which it waits for memory of the lane's device to be
    // freed; it is run again then.
    virtual std::optional<TimePoint> run(int refusal) = 0;
  };

  struct Limits {
    std::size_t buffers = 64;
    std::size_t files = 8;  // these wait for disks rather than work
    std::size_t copies = 32;
    std::size_t same_subject = 4;
  };

  Executor(const Limits& limits, Statistics& statistics) : limits_(limits), statistics_(statistics) {}
  ~Executor() { stop(std::chrono::milliseconds::zero()); }
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // id: what discard() finds the job by. subject: null, or the file that the job is about.
  void submit(const Lane& lane, const void* subject, std::uint64_t id, std::unique_ptr<Job> job);
  // The same with a function of the refusal, which returns nothing or as Job::run().
  template <typename Body>
  void submit(const Lane& lane, const void* subject, std::uint64_t id, Body body) {
    submit(lane, subject, id, std::unique_ptr<Job>(new BodyJob<Body>(std::move(body))));
  }

  // Ends a job that is queued or parked; false if it is neither.
  bool discard(std::uint64_t id);

  // Runs the parked jobs of a device again.
  void memory_freed(std::int32_t device);

  // Discards what is queued or parked and waits for what runs, for jobs of files up to `patience`; how many of these
  // are left behind. They must use nothing that the executor's owner takes with it. May be called twice.
  std::size_t stop(std::chrono::milliseconds patience);

  struct Counts {
    std::size_t threads = 0;
    std::size_t running = 0;
    std::size_t queued = 0;
    std::size_t parked = 0;
  };
  [[nodiscard]] Counts counts() const;
  [[nodiscard]] const Limits& limits() const { return limits_; }

 private:
  template <typename Body>
  class BodyJob : public Job {
   public:
    explicit BodyJob(Body body) : body_(std::move(body)) {}
    std::optional<TimePoint> run(int refusal) override {
      if constexpr (std::is_void_v<std::invoke_result_t<Body&, int>>) {
        body_(refusal);
        return std::nullopt;
      } else {
        return body_(refusal);
      }
    }

   private:
    Body body_;
  };

  struct Entry {
    Lane lane;
    const void* subject = nullptr;
    std::uint64_t id = 0;
    std::unique_ptr<Job> job;
    int refusal = 0;          // what to run it with
    TimePoint deadline;       // of a parked job
    std::uint64_t freed = 0;  // State::freed when it was last started
  };
  using Entries = std::list<Entry>;

  // What the threads use.
  struct State {
    explicit State(const Limits& chosen) : limits(chosen) {}

    const Limits limits;
    // Guards all below. No job runs or is destroyed under it.
    std::mutex mutex;
    std::condition_variable wanted;
    std::condition_variable ended;  // a job or a thread has
    Entries queue;
    Entries parked;
    Entries active;
    std::size_t threads = 0;
    std::size_t idle = 0;     // of these, those that wait
    std::size_t coming = 0;   // and those that have been started and look at the queue next
    std::uint64_t freed = 0;  // calls of memory_freed()
    bool stopping = false;
    bool complained = false;  // in the log, that no thread can be started; once, until one could

    [[nodiscard]] bool may_run(const Entry& entry) const;
    // Moves the next job to `active`; its place, or the end of `active` where the thread has to end.
    Entries::iterator next(std::unique_lock<std::mutex>& lock);
    void park(Entries::iterator entry, TimePoint deadline);
  };

  static void work_loop(const std::shared_ptr<State>& state);
  // With the mutex held: wakes or starts a thread if more jobs may run than threads come to look for them.
  static void provide_thread(const std::shared_ptr<State>& state);
  static void start_thread_for(const std::shared_ptr<State>& state);

  const Limits limits_;
  Statistics& statistics_;
  const std::shared_ptr<State> state_ = std::make_shared<State>(limits_);
};

}  // namespace gpufs::fuse
