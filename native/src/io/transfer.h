// Transfers between backing files and device memory: load (file to device) and store (device to file).
// A TransferEngine belongs to the Engine; a Transfer is shared by its handle and the threads that serve it.
// Any thread may call any function; those that block say so.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"
#include "io/backing_file.h"
#include "io/bounce_pool.h"
#include "io/cancel_token.h"
#include "io/direct_path.h"
#include "io/io_options.h"
#include "io/io_statistics.h"
#include "io/scoring.h"
#include "io/target.h"
#include "io/worker_pool.h"

namespace gpufs {

enum class SyncMode : int { kNone, kData, kFull };  // after a store: nothing, fdatasync, fsync

// As a request's size: up to the end of the source.
inline constexpr std::uint64_t kToTheEnd = ~std::uint64_t{0};

struct TransferProgress;

struct TransferRequest {
  Direction direction = Direction::kLoad;
  std::shared_ptr<BackingFile> file;
  Target target;
  std::uint64_t file_offset = 0;
  std::uint64_t target_offset = 0;
  std::uint64_t bytes = kToTheEnd;

  SyncMode sync = SyncMode::kNone;
  // Holes of the source become holes of the destination, where both can have them, instead of zeros that are read and
  // written. What the destination held there before reads as zeros either way. Not for memory of the program's own.
  bool sparse = true;
  std::optional<FastpathMode> fastpath;  // instead of the engine's option
  std::optional<bool> fallback;
  // Whose transfer it is (a user's or process's number): threads are shared evenly between clients, and no client
  // holds more than its share, even if its files hang.
  std::uint64_t client = 0;
  int share = 0;               // threads at most; 0: the client's share
  std::uint64_t trace_id = 0;  // its number in traces; 0: the next one
  // Told once how it ended, on whichever thread ends it (never inside start() but for a request of no bytes). It must
  // not wait. Not called where start() fails.
  std::function<void(const TransferProgress&)> done;
};

enum class TransferState : int { kQueued, kRunning, kDone };

struct TransferProgress {
  TransferState state = TransferState::kQueued;
  std::uint64_t total = 0;  // what there is to move, as known so far
  std::uint64_t moved = 0;  // anywhere in the range
  // From the start on without a gap; once done, the transfer's count: all that counts after a failure or a
  // cancellation. A buffer is never left larger than it was or than this reaches.
  std::uint64_t prefix = 0;
  std::array<std::uint64_t, kPathCount> path_bytes{};
  std::uint64_t pagecache_bytes = 0;  // the part of fallback's that was copied straight from the page cache
  std::uint64_t hole_bytes = 0;       // moved by no path: holes that stayed holes
  RefusalMask refusals = 0;           // why fastpath did not take all of it
  // Once done: what went wrong, also after progress. ECANCELED if it was cancelled before its end.
  Status status;
  bool sync_failed = false;  // status is that of the sync that was asked for: nothing is known to be durable
};

class Transfer {
 public:
  virtual ~Transfer() = default;
  [[nodiscard]] virtual TransferProgress progress() const = 0;
  // Asks it to stop at its next piece; does not block and may be called again. A thread that hangs in a file of a
  // network or user file system is left behind; nothing of what it still does reaches the device. A write under way
  // may still reach such a file.
  virtual void cancel() = 0;
  // Blocks until it is done, up to `patience`; true if it is.
  virtual bool wait(std::chrono::milliseconds patience) = 0;
  virtual void wait() = 0;
  // cancel(), and waits for the end. ETIMEDOUT: it has not ended within 10 s; its memory is in use until it does.
  virtual Status close() = 0;
  // An eventfd of the transfer's, readable once it is done; lives as long as the transfer.
  virtual Result<int> event_fd() = 0;
};

class TransferJob;

class TransferEngine : public std::enable_shared_from_this<TransferEngine> {
 public:
  // devices: those of the engine, by index. EINVAL names the option that is out of range. Starts nothing. When the last
  // copy of the pointer goes, shutdown() runs on that thread.
  static Result<std::shared_ptr<TransferEngine>> create(const IoOptions& options,
                                                        const std::vector<std::shared_ptr<DeviceContext>>& devices,
                                                        std::shared_ptr<DirectPath> direct_path);
  ~TransferEngine() = default;
  TransferEngine(const TransferEngine&) = delete;
  TransferEngine& operator=(const TransferEngine&) = delete;

  // EINVAL: offsets and sizes that overflow or leave the device memory. EBADF: the file is not open for this direction,
  // or a destination is open for appending. ESHUTDOWN after shutdown(). All other failures are the transfer's.
  Result<std::shared_ptr<Transfer>> start(const TransferRequest& request);

  // Cancels all transfers and ends the threads; those that hang in a file are left behind. Blocks, for a little more
  // than IoOptions::shutdown_grace at most unless the device itself hangs. May be called twice.
  void shutdown();

  // What start() refuses of a request.
  static Status check(const TransferRequest& request);

  [[nodiscard]] const IoOptions& options() const { return options_; }
  [[nodiscard]] const std::shared_ptr<BouncePool>& bounce_pool() const { return bounce_pool_; }
  [[nodiscard]] std::string statistics_json() const;
  [[nodiscard]] std::size_t active() const;
  // Transfers that shutdown() has given up on while a device or a file may still use their memory: that of the
  // engine's they keep themselves, that of the program must stay.
  [[nodiscard]] std::size_t left_in_use() const { return left_in_use_; }

 private:
  friend class TransferJob;
  struct Owner;

  TransferEngine(const IoOptions& options, std::vector<observe::DeviceCounters> counters,
                 std::shared_ptr<DirectPath> direct_path);
  std::shared_ptr<WorkerPool> pool_for(int node);
  void finished(const TransferJob& job);
  // Sees to a cancelled job later, in case it does not end by itself.
  void supervise(std::shared_ptr<TransferJob> job, std::chrono::milliseconds delay);
  void supervisor_main();

  const IoOptions options_;
  const std::shared_ptr<DirectPath> direct_path_;
  const std::shared_ptr<BouncePool> bounce_pool_;
  const IoStatistics statistics_;
  std::atomic<std::size_t> left_in_use_{0};

  // Guards all below; taken after a CancelToken's lock and before none.
  mutable std::mutex mutex_;
  std::condition_variable changed_;                   // a job has gone, a cancelled one came, or the end
  std::map<int, std::shared_ptr<WorkerPool>> pools_;  // by NUMA node
  std::map<const TransferJob*, std::shared_ptr<TransferJob>> jobs_;
  std::multimap<std::chrono::steady_clock::time_point, std::shared_ptr<TransferJob>> cancelled_;
  std::thread supervisor_;
  bool closed_ = false;
  bool supervisor_ending_ = false;
};

// A whole transfer by other threads while the calling one waits: what answers COPY_FILE_RANGE between a backing file
// and a buffer. `cancel` (may be null) stops it from any thread. The count from the start of the range: short at the
// end of the source, and also when an error or a cancellation came after progress (the next call meets it again). A
// failure only if nothing was moved, or if the sync that was asked for failed; EOPNOTSUPP when no path may take the
// request.
Result<std::uint64_t> run_transfer(TransferEngine& engine, const TransferRequest& request, CancelToken* cancel);

}  // namespace gpufs
