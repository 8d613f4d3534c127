// A transfer between a backing file and memory of a device: load (file to device) or store (device to file).
// Thread-safe. Ownership: shared by its handles, its engine and the scheduler.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "base/status.h"
#include "base/unique_fd.h"
#include "io/backing_file.h"
#include "io/copy_batches.h"
#include "io/io_options.h"
#include "io/plan.h"
#include "io/scheduler.h"
#include "io/store_file.h"
#include "io/target_memory.h"
#include "memory/buffer.h"
#include "observe/counters.h"

namespace gpufs {

class TransferEngine;

enum class SyncMode : int { kNone, kData, kFull };  // after a store: nothing, fdatasync, fsync

// A request of this size goes up to the end of the source.
inline constexpr std::uint64_t kToTheEnd = ~std::uint64_t{0};

struct TransferProgress;

struct TransferRequest {
  Direction direction = Direction::kLoad;
  std::shared_ptr<BackingFile> file;
  std::shared_ptr<TransferTarget> target;
  std::uint64_t file_offset = 0;
  std::uint64_t target_offset = 0;
  std::uint64_t bytes = kToTheEnd;

  SyncMode sync = SyncMode::kNone;
  // Holes of the source become holes of the destination if both can have them; otherwise zeros are read and written.
  // The range reads as zeros either way. Does not apply to memory that a program allocated itself.
  bool sparse = true;
  std::optional<FastpathMode> fastpath;  // instead of the engine's option
  // The user or process that the transfer is for. Clients share the threads evenly, and no client gets more than its
  // share, even if its files hang.
  std::uint64_t client = 0;
  int share = 0;               // threads at most; 0: the client's share
  std::uint64_t trace_id = 0;  // its number in traces; 0: the next one
  // Called once with the outcome, on the thread that ends the transfer (inside start() only for a request of no
  // bytes). Must not block. Not called if start() fails.
  std::function<void(const TransferProgress&)> done;
};

// Memory that a program allocated itself, and keeps.
std::shared_ptr<TransferTarget> program_memory(std::shared_ptr<DeviceContext> device, DeviceAddress address,
                                               std::uint64_t bytes);

enum class TransferState : int { kQueued, kRunning, kDone };

struct TransferProgress {
  TransferState state = TransferState::kQueued;
  std::uint64_t total = 0;  // bytes to move, as far as is known
  std::uint64_t moved = 0;  // anywhere in the range
  // From the start without a gap; once done, the transfer's count: after a failure or a cancellation only these bytes
  // count. A buffer never ends up larger than it was or than this reaches.
  std::uint64_t prefix = 0;
  std::array<std::uint64_t, kPathCount> path_bytes{};
  std::uint64_t hole_bytes = 0;  // moved by no path: holes that stayed holes
  RefusalMask refusals = 0;      // why fastpath did not take all of it
  // Once done: what went wrong, also after progress. ECANCELED if it was cancelled before its end.
  Status status;
  bool sync_failed = false;  // status is that of the requested sync: nothing is known to be durable
};

// A chunk, and what of it has been moved.
struct ChunkProgress {
  Chunk chunk;
  std::uint64_t done = 0;     // bytes at its front
  std::uint64_t skipped = 0;  // of them: holes that stayed holes
  std::array<std::uint64_t, kPathCount> path_bytes{};
};

// The facts for the threads that move a transfer's bytes; constant while they do.
struct TransferFacts {
  TransferRequest request;  // its target is in the TargetMemory
  const std::shared_ptr<DeviceContext> device;
  const observe::DeviceCounters& counters;  // the device's
  observe::TransferDetails& details;
  const observe::Flow flow;
  const std::uint64_t trace_id;
  const std::uint32_t trace_name;
  std::uint64_t total = 0;                // bytes to move
  FastpathFile* fastpath_file = nullptr;  // if the plan uses the fastpath

  [[nodiscard]] bool load() const { return request.direction == Direction::kLoad; }
  [[nodiscard]] BackingFile& file() const { return *request.file; }
};

class Transfer : public Scheduler::Job, public std::enable_shared_from_this<Transfer> {
 public:
  Transfer(std::shared_ptr<TransferEngine> engine, std::shared_ptr<Scheduler> scheduler,
           const TransferRequest& request);

  [[nodiscard]] TransferProgress progress() const;
  // Stops the transfer at its next chunk; one that no thread has served yet is over at once. Does not block and may be
  // called again. A thread that hangs in a file of a network or user file system is left behind: nothing it still does
  // reaches the device, but a write under way may still reach the file.
  void cancel();
  // Blocks until it is done, up to `timeout`; true if it is.
  bool wait(std::chrono::milliseconds timeout);
  void wait();
  // Cancels and waits for the end. ETIMEDOUT if it has not ended within 10 s; its memory is in use until it does.
  Status close();
  // The transfer's eventfd, readable once it is done; lives as long as the transfer.
  Result<int> event_fd();

  // ---- for the TransferEngine ----

  // Ends a request of no bytes, which no thread serves.
  void conclude_empty() { conclude(0, Status{}, false); }
  // Ends a transfer that no thread will serve, without a call of request.done. False if it is over already.
  bool refuse(const Status& why);
  // Ends a cancelled transfer whose threads have not returned for a while, if their file is one that may be left.
  // force: now, and whatever the file is.
  void abandon(bool force);
  // Scheduler::release() of its scheduler.
  static void release(std::shared_ptr<Transfer> transfer);

  // ---- for the Scheduler ----

  void serve(const Scheduler::Turn& turn) override;

  // ---- for the Pipeline ----

  [[nodiscard]] const TransferFacts& facts() const { return facts_; }
  [[nodiscard]] TransferEngine& engine() const { return *engine_; }
  [[nodiscard]] const Scheduler& scheduler() const { return *scheduler_; }
  [[nodiscard]] TargetMemory& memory() { return memory_; }
  [[nodiscard]] const StoreFile& store_file() const { return store_file_; }
  [[nodiscard]] const std::atomic<bool>& cancelled() const { return cancelled_; }
  // The batches that all of its Pipelines use, made for the first one. Fails for lack of a stream or an event.
  Result<std::shared_ptr<CopyBatches>> copy_batches();
  // The next chunk, or nothing once there is none or the transfer was cancelled.
  std::optional<Chunk> next_chunk();
  // How a chunk ended, see PlanCursor::complete().
  void complete(const ChunkProgress& progress, const Status& status);
  // Counts and reports why fastpath does not take a part. False: all of that was known.
  bool refuse_fastpath(RefusalMask causes);
  // Fastpath failed on a chunk in a way that sends the rest by fallback, if that is allowed.
  void give_up_fastpath(const Status& why, RefusalMask causes);
  [[nodiscard]] bool may_change_path() const { return fastpath_mode() != FastpathMode::kRequire; }

 private:
  enum class Phase { kQueued, kPreparing, kRunning, kFinishing, kDone };

  // Serving, in this order: the first thread prepares, all of them run a Pipeline, the last one finishes.
  bool enter();
  void leave();

  Result<Plan> prepare();
  Result<std::uint64_t> total_bytes(std::uint64_t file_size);
  Result<Plan> make_plan(std::uint64_t total);
  Result<Plan> leave_holes_out(std::uint64_t file_size, const Plan& plan);
  Status preallocate(std::uint64_t file_size, const Plan& plan);

  void finish();
  void conclude(std::uint64_t count, const Status& status, bool sync_failed);
  void update_useful_threads_locked();
  void trace_phases(std::uint64_t bytes, int error) const;

  [[nodiscard]] bool load() const { return facts_.load(); }
  [[nodiscard]] BackingFile& file() const { return facts_.file(); }
  [[nodiscard]] const TransferRequest& request() const { return facts_.request; }
  [[nodiscard]] const IoOptions& options() const;
  [[nodiscard]] FastpathMode fastpath_mode() const { return request().fastpath.value_or(options().fastpath); }

  const std::shared_ptr<TransferEngine> engine_;
  const std::shared_ptr<Scheduler> scheduler_;
  TransferFacts facts_;         // prepare() sets the rest, before there is a second thread
  const std::uint64_t queued_;  // when
  TargetMemory memory_;
  StoreFile store_file_;

  // When prepare() began and ended, for traces; 0: not yet.
  std::atomic<std::uint64_t> prepare_start_{0};
  std::atomic<std::uint64_t> prepare_end_{0};

  std::atomic<bool> cancelled_{false};

  std::mutex copy_batches_mutex_;  // a lock of its own, since making them calls the driver
  std::weak_ptr<CopyBatches> copy_batches_;

  // Guards all below. Taken before TargetMemory's lock.
  mutable std::mutex mutex_;
  std::condition_variable done_;  // phase_ is kDone
  Phase phase_ = Phase::kQueued;
  PlanCursor cursor_;
  TransferProgress progress_;  // without its state, and without its prefix until it is done
  std::uint64_t counted_ = 0;  // bytes that the counters have
  int serving_ = 0;            // threads inside serve()
  bool syncing_ = false;
  bool abandoned_ = false;
  std::chrono::steady_clock::time_point cancel_time_;
  UniqueFd event_;
};

}  // namespace gpufs
