// One transfer under way: what is claimed, what is done, how far it reaches without a gap, and how it ends.
// Shared by its Transfer handles, its engine's list, and the pool threads that serve it.
// Any thread may call any function unless it says "session": those are for the threads inside serve().
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
#include <set>

#include "base/unique_fd.h"
#include "io/transfer.h"
#include "observe/trace.h"

namespace gpufs {

// One piece of work. Offsets are relative to the request; done: bytes at its front that have been moved already.
struct Chunk {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::uint64_t done = 0;
  Path path = Path::kFallback;
  bool hole = false;          // all of it is a hole of a load's file
  std::uint64_t skipped = 0;  // of done: holes that stayed holes
  // For the statistics: when the path took it over, and how much of it was done by then.
  std::uint64_t started = 0;
  std::uint64_t before = 0;
};

class TransferJob final : public Transfer, public Work, public std::enable_shared_from_this<TransferJob> {
 public:
  TransferJob(std::shared_ptr<TransferEngine> engine, std::shared_ptr<WorkerPool> pool, TransferRequest request);
  ~TransferJob() override = default;

  // Transfer
  [[nodiscard]] TransferProgress progress() const override;
  void cancel() override;
  bool wait(std::chrono::milliseconds patience) override;
  void wait() override;
  Status close() override;
  Result<int> event_fd() override;

  // Work
  [[nodiscard]] std::uint64_t client() const override { return request_.client; }
  [[nodiscard]] std::uint64_t group() const override {
    const BackingFacts& facts = request_.file->facts();
    return facts.may_hang ? kMayHang : facts.always_hot ? kNeverStalls : facts.device;
  }
  [[nodiscard]] int wanted() const override { return wanted_.load(std::memory_order_relaxed); }
  void serve(Turn& turn) override;

  // Session: the next piece, or nothing when there is none (any more).
  std::optional<Chunk> claim();
  // Session: how a claimed piece ended; chunk.done bytes of it are in place. Fewer than chunk.bytes end the transfer
  // there, with this status (success: the end of the source).
  void complete(const Chunk& chunk, const Status& status);

  // Session: nothing further is claimed.
  void stop(const Status& why);

  // Session: brackets every use of target(), which is false once the transfer was left behind. Between the two nothing
  // may wait for a file that may hang.
  bool begin_use();
  void end_use();
  [[nodiscard]] const Target& target() const { return request_.target; }

  // Session: a good moment for this session to take memory ahead of the pieces. `settle` as in pin_window().
  void take_ahead(const std::function<void()>& settle);

  // Session, in use: the target's memory around `bytes` at a piece's chunk.done, pinned together with that of many
  // pieces and shared with other sessions. May wait for others who wait for pins to go: `settle` is called before that
  // and must let go of all that the calling session holds.
  Result<std::shared_ptr<const PinnedRange>> pin_window(const Chunk& chunk, std::uint64_t bytes,
                                                        const std::function<void()>& settle);

  // Session: a path starts on a piece, or on what another left of it; and ends. complete() ends the last one.
  void start_path(Chunk& chunk) const;
  void end_path(const Chunk& chunk, bool failed) const;

  // Session: fastpath failed on a piece in a way that lets the rest go by fallback, if that may be.
  void give_up_fastpath(const Status& why, RefusalMask causes);
  // Whether bytes that fastpath was chosen for may go by fallback after all.
  [[nodiscard]] bool may_change_path() const { return fallback_allowed() && fastpath_mode() != FastpathMode::kRequire; }

  void count_moved(Path path, std::uint64_t bytes);
  void count_skipped(Chunk& chunk, std::uint64_t bytes);
  void count_pagecache(std::uint64_t bytes);

  // In traces.
  [[nodiscard]] std::uint64_t trace_id() const { return trace_id_; }
  [[nodiscard]] std::uint32_t trace_name() const { return trace_name_; }

  [[nodiscard]] const TransferRequest& request() const { return request_; }
  [[nodiscard]] TransferEngine& engine() const { return *engine_; }
  [[nodiscard]] const IoOptions& options() const { return engine_->options(); }
  [[nodiscard]] const std::shared_ptr<DeviceContext>& device() const { return device_; }
  [[nodiscard]] BackingFile& file() const { return *request_.file; }
  [[nodiscard]] observe::TransferDetails& details() const { return details_; }
  [[nodiscard]] DirectFile* direct_file() const { return direct_file_; }
  [[nodiscard]] const std::atomic<bool>& cancelled() const { return cancelled_; }
  [[nodiscard]] bool pagecache() const { return pagecache_.load(std::memory_order_relaxed); }
  // A store that may write the file's pages side by side.
  [[nodiscard]] bool by_pages() const { return by_pages_; }
  void give_up_pagecache() { pagecache_.store(false, std::memory_order_relaxed); }
  // Session: how much there is to move.
  [[nodiscard]] std::uint64_t total() const { return total_; }
  // Threads that could hold a bounce slot.
  [[nodiscard]] std::size_t threads() const { return static_cast<std::size_t>(pool_->threads()); }

  // For a request of no bytes, which nobody serves: done at once.
  void conclude_empty() { conclude(0, Status{}, false); }
  // For one that nobody will serve, of which nobody is told. False if it is over already and that was told.
  bool refuse(const Status& why);

  // Ends a cancelled transfer whose threads do not come back, if what they hang in allows that. forced: whatever the
  // file is. True if it is done (now or before), false: ask again.
  bool abandon(bool forced);
  [[nodiscard]] std::chrono::milliseconds abandon_delay() const;

 private:
  [[nodiscard]] FastpathMode fastpath_mode() const { return request_.fastpath.value_or(options().fastpath); }
  [[nodiscard]] bool fallback_allowed() const { return request_.fallback.value_or(options().fallback); }

  enum class Phase { kQueued, kPreparing, kRunning, kFinishing, kDone };

  Status prepare();
  Result<std::uint64_t> extent();
  Status leave_holes_out(std::uint64_t total, Plan* plan);
  Status clear_holes(const Plan& plan);
  Status populate(std::uint64_t needed, const std::function<void()>& settle);
  [[nodiscard]] bool short_of_memory_locked(std::uint64_t needed) const;
  [[nodiscard]] std::uint64_t next_step_locked() const;
  Status populate_step(std::unique_lock<std::mutex>& lock, std::uint64_t needed);
  Status populate_data(std::uint64_t start, std::uint64_t end);
  [[nodiscard]] Plan::const_iterator segment_at(std::uint64_t offset) const;
  Status preallocate(std::uint64_t total, const Plan& plan);
  Result<Plan> make_plan(std::uint64_t total);
  void leave();
  void finish();
  Status finish_load(const Target& target, std::uint64_t reached, std::uint64_t touched);
  Status finish_store(std::uint64_t reached, std::uint64_t touched);
  Status sync_file();
  std::uint64_t chunk_bytes(Path path) const;
  bool enter();
  bool claimable_locked() const;
  void update_wanted_locked();
  std::uint64_t prefix_locked() const;
  void trace_phases(std::uint64_t bytes, int error) const;
  void conclude(std::uint64_t count, const Status& status, bool sync_failed);

  const std::shared_ptr<TransferEngine> engine_;
  const std::shared_ptr<WorkerPool> pool_;
  TransferRequest request_;  // its target is given up when the transfer is left behind; the rest is constant
  const bool of_buffer_;     // the target is a buffer
  const std::shared_ptr<DeviceContext> device_;
  const observe::DeviceCounters& counters_;  // the device's
  const observe::Flow flow_;
  observe::TransferDetails& details_;
  const std::uint64_t queued_;  // when
  const std::uint64_t trace_id_;
  const std::uint32_t trace_name_;
  // Set by prepare(), before there is a second session.
  DirectFile* direct_file_ = nullptr;
  std::uint64_t original_file_size_ = 0;
  std::uint64_t preallocated_end_ = 0;
  bool by_pages_ = false;
  std::uint64_t noted_shrinks_ = 0;  // of a load's buffer, before its first byte was written
  std::shared_ptr<void> kept_;       // a load's Buffer::keep_unpublished(), until its end

  // When prepare() began and ended, for traces; 0: not yet.
  std::atomic<std::uint64_t> bind_start_{0};
  std::atomic<std::uint64_t> bind_end_{0};

  std::atomic<bool> cancelled_{false};
  std::atomic<int> wanted_{1};
  std::atomic<bool> pagecache_{false};
  std::atomic<std::uint64_t> moved_{0};
  std::array<std::atomic<std::uint64_t>, kPathCount> path_bytes_{};
  std::atomic<std::uint64_t> pagecache_bytes_{0};
  std::atomic<std::uint64_t> hole_bytes_{0};

  // Guards all below; nothing but memory is touched under it.
  mutable std::mutex mutex_;
  std::condition_variable done_;            // phase_ is kDone
  std::condition_variable memory_changed_;  // populating_ or pinning_ is false again
  Phase phase_ = Phase::kQueued;
  Plan plan_;  // constant once prepared, as is total_
  RefusalMask refusals_ = 0;
  bool fastpath_given_up_ = false;
  std::uint64_t total_ = 0;      // before there is a second session
  std::uint64_t unclaimed_ = 0;  // of the plan, holes aside
  std::size_t segment_ = 0;      // the one that cursor_ is in
  std::uint64_t cursor_ = 0;     // all before it is claimed
  std::uint64_t stop_ = 0;       // nothing at or after it is claimed; where the transfer ends as known so far
  Status stop_status_;
  std::set<std::uint64_t> in_flight_;  // starts of claimed pieces that are not complete
  std::uint64_t populated_end_ = 0;
  std::uint64_t largest_step_ = 0;  // that the device has had room for
  bool populating_ = false;
  std::weak_ptr<const PinnedRange> window_;  // [window_start_, window_end_), as long as some session uses it
  std::uint64_t window_start_ = 0;
  std::uint64_t window_end_ = 0;
  bool pinning_ = false;
  int sessions_ = 0;
  int uses_ = 0;
  bool syncing_ = false;
  bool abandoned_ = false;
  std::uint64_t count_ = 0;  // the outcome, once done
  Status status_;
  bool sync_failed_ = false;
  UniqueFd event_;
};

}  // namespace gpufs
