#include "io/transfer.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <limits>
#include <utility>

#include "base/caught.h"
#include "base/log.h"
#include "base/math.h"
#include "base/thread.h"
#include "io/transfer_job.h"

namespace gpufs {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kSmallestChunk = std::size_t{64} << 10;
constexpr std::size_t kLargestChunk = std::size_t{64} << 20;
constexpr int kMostWorkers = 256;
constexpr int kFewestAutomatic = 4;  // a disk wants several requests at a time, however few the CPUs are
// Each copies some 6.5 GB/s out of the page cache (an H200's host): 8 do not fill a bus of 55 GB/s, 14 are slower
// again.
constexpr int kMostAutomatic = 12;
constexpr auto kLargestOffset = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
// How soon a cancelled transfer that cannot be left behind yet is looked at again.
constexpr std::chrono::milliseconds kLookAgain{20};

Status check_options(const IoOptions& options) {
  if (!std::has_single_bit(options.chunk_bytes) || options.chunk_bytes < kSmallestChunk ||
      options.chunk_bytes > kLargestChunk) {
    return Status(EINVAL, "chunk_bytes must be a power of two from 64 KiB to 64 MiB");
  }
  if (options.pinned_bytes < options.chunk_bytes) return Status(EINVAL, "pinned_bytes must hold at least one chunk");
  if (options.workers < 0 || options.workers > kMostWorkers) return Status(EINVAL, "workers must be from 0 to 256");
  if (options.slots < 1 || options.slots > 64) return Status(EINVAL, "slots must be from 1 to 64");
  if (options.fastpath == FastpathMode::kOff && !options.fallback) {
    return Status(EINVAL, "fastpath and fallback are both off: nothing could be moved");
  }
  return {};
}

Status check_request(const TransferRequest& request) {
  if (request.file == nullptr || !request.target.valid()) return Status(EINVAL, "a transfer needs a file and memory");
  const BackingFacts& facts = request.file->facts();
  const bool load = request.direction == Direction::kLoad;
  if (load && !facts.readable) return Status(EBADF, "the backing file is not open for reading");
  if (!load && !facts.writable) return Status(EBADF, "the backing file is not open for writing");
  if (!load && facts.append) return Status(EBADF, "the backing file is open for appending: its offsets mean nothing");
  if (request.file_offset > kLargestOffset) return Status(EINVAL, "the file offset is too large");
  std::uint64_t end = 0;
  if (request.bytes != kToTheEnd) {
    if (add_overflows(request.file_offset, request.bytes, &end) || end > kLargestOffset) {
      return Status(EINVAL, "file offset and size overflow");
    }
    if (add_overflows(request.target_offset, request.bytes, &end)) {
      return Status(EINVAL, "buffer offset and size overflow");
    }
  }
  if (request.target.buffer() == nullptr) {
    const std::uint64_t limit = request.target.limit();
    if (request.target_offset > limit || (request.bytes != kToTheEnd && end > limit)) {
      return Status(EINVAL, "the range leaves the device memory");
    }
  } else if (load && request.target_offset > request.target.limit()) {
    return Status(EFBIG, "the range starts beyond the largest buffer");
  }
  return {};
}

}  // namespace

// What the outside holds: when the last copy goes, the threads end on the thread that let it go, and never on one of
// their own, which hold the engine itself.
struct TransferEngine::Owner {
  explicit Owner(std::shared_ptr<TransferEngine> engine) : inner(std::move(engine)) {}
  ~Owner() { inner->shutdown(); }
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;
  std::shared_ptr<TransferEngine> inner;
};

TransferEngine::TransferEngine(const IoOptions& options, std::vector<observe::DeviceCounters> counters,
                               std::shared_ptr<DirectPath> direct_path)
    : options_(options),
      direct_path_(std::move(direct_path)),
      bounce_pool_(BouncePool::create(options.chunk_bytes, options.pinned_bytes)),
      statistics_(std::move(counters)) {}

Result<std::shared_ptr<TransferEngine>> TransferEngine::create(
    const IoOptions& options, const std::vector<std::shared_ptr<DeviceContext>>& devices,
    std::shared_ptr<DirectPath> direct_path) {
  const Status checked = check_options(options);
  if (!checked.ok()) return checked;
  std::vector<observe::DeviceCounters> counters;
  counters.reserve(devices.size());
  for (const std::shared_ptr<DeviceContext>& device : devices) counters.push_back(device->counters());
  std::shared_ptr<TransferEngine> inner(new TransferEngine(options, std::move(counters), std::move(direct_path)));
  TransferEngine* const raw = inner.get();
  auto owner = std::make_shared<Owner>(std::move(inner));
  return std::shared_ptr<TransferEngine>(std::move(owner), raw);
}

std::shared_ptr<WorkerPool> TransferEngine::pool_for(int node) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<WorkerPool>& pool = pools_[node];
  if (pool == nullptr) {
    int share =
        options_.workers > 0 ? options_.workers : std::clamp(usable_cpus(node), kFewestAutomatic, kMostAutomatic);
    // Each thread must find a slot, also those of others while a client's hang with theirs.
    const auto slots = static_cast<int>(std::min(bounce_pool_->capacity(), std::size_t{2} * kMostWorkers));
    share = std::min(share, std::max(slots * 2 / 3, 1));
    const int spare = std::min((share + 1) / 2, std::max(slots - share, 1));
    pool = WorkerPool::create(node, share, spare);
  }
  return pool;
}

Status TransferEngine::check(const TransferRequest& request) { return check_request(request); }

Result<std::shared_ptr<Transfer>> TransferEngine::start(const TransferRequest& request) {
  const Status checked = check_request(request);
  if (!checked.ok()) return checked;
  const std::shared_ptr<WorkerPool> pool = pool_for(request.target.device()->info().numa_node);
  auto job = std::make_shared<TransferJob>(shared_from_this(), pool, request);
  if (request.bytes == 0 && request.sync == SyncMode::kNone) {
    job->conclude_empty();
    return std::shared_ptr<Transfer>(std::move(job));
  }
  const Status submitted = caught([&] {
    {
      const std::lock_guard lock(mutex_);
      if (closed_) return Status(ESHUTDOWN, "the engine is being closed");
      jobs_.emplace(job.get(), job);
    }
    return pool->submit(job);
  });
  // Unless shutdown() has ended it meanwhile, as any other.
  if (!submitted.ok() && job->refuse(submitted)) return submitted;
  return std::shared_ptr<Transfer>(std::move(job));
}

void TransferEngine::finished(const TransferJob& job) {
  std::shared_ptr<TransferJob> last;  // destroyed without the lock
  {
    const std::lock_guard lock(mutex_);
    const auto found = jobs_.find(&job);
    if (found == jobs_.end()) return;
    last = std::move(found->second);
    jobs_.erase(found);
  }
  changed_.notify_all();
}

void TransferEngine::supervise(std::shared_ptr<TransferJob> job, std::chrono::milliseconds delay) {
  const std::lock_guard lock(mutex_);
  if (closed_) return;  // shutdown() sees to all of them
  if (!supervisor_.joinable()) {
    Result<std::thread> started =
        start_thread("gpufs-io-stop", [self = shared_from_this()] { self->supervisor_main(); });
    if (!started.ok()) {
      log_warning("cancelled transfers end only by themselves: ", started.status().message());
      return;
    }
    supervisor_ = started.take();
  }
  try {
    cancelled_.emplace(Clock::now() + delay, std::move(job));
  } catch (const std::bad_alloc&) {
    log_warning("a cancelled transfer ends only by itself: no memory");
  }
  changed_.notify_all();
}

void TransferEngine::supervisor_main() {
  std::unique_lock lock(mutex_);
  while (!supervisor_ending_) {
    if (cancelled_.empty()) {
      changed_.wait(lock);
      continue;
    }
    const auto first = cancelled_.begin();
    const Clock::time_point due = first->first;  // the entry itself may go while we wait
    if (due > Clock::now()) {
      changed_.wait_until(lock, due);
      continue;
    }
    auto entry = cancelled_.extract(first);  // which comes back without memory
    lock.unlock();
    const bool ended = entry.mapped()->abandon(/*forced=*/false);
    lock.lock();
    if (!ended) {
      entry.key() = Clock::now() + kLookAgain;
      cancelled_.insert(std::move(entry));
      continue;
    }
    lock.unlock();
    entry = {};
    lock.lock();
  }
}

void TransferEngine::shutdown() {
  std::vector<std::shared_ptr<TransferJob>> jobs;
  std::vector<std::shared_ptr<WorkerPool>> pools;
  std::thread supervisor;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
    for (const auto& [key, job] : jobs_) jobs.push_back(job);
    for (const auto& [node, pool] : pools_) pools.push_back(pool);
  }
  for (const std::shared_ptr<TransferJob>& job : jobs) job->cancel();
  const Clock::time_point end = Clock::now() + options_.shutdown_grace;
  const Clock::time_point enough = Clock::now() + options_.cancel_grace;
  for (bool last = false; !last;) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, kLookAgain, [&] { return jobs_.empty(); });
      if (jobs_.empty()) break;
    }
    const Clock::time_point now = Clock::now();
    last = now >= end;
    if (now < enough) continue;
    for (const std::shared_ptr<TransferJob>& job : jobs) (void)job->abandon(/*forced=*/last);
  }
  jobs.clear();
  const auto rest = std::max(end - Clock::now(), Clock::duration(options_.cancel_grace));
  for (const std::shared_ptr<WorkerPool>& pool : pools) {
    const int hung = pool->shutdown(std::chrono::duration_cast<std::chrono::milliseconds>(rest), options_.cancel_grace);
    if (hung > 0) log_warning(hung, " threads hang in files and are left behind");
  }
  decltype(cancelled_) cancelled;  // destroyed without the lock
  {
    const std::lock_guard lock(mutex_);
    supervisor_ending_ = true;
    cancelled.swap(cancelled_);
    supervisor.swap(supervisor_);
  }
  changed_.notify_all();
  if (supervisor.joinable()) supervisor.join();
  bounce_pool_->close();
}

std::size_t TransferEngine::active() const {
  const std::lock_guard lock(mutex_);
  return jobs_.size();
}

std::string TransferEngine::statistics_json() const {
  return statistics_.to_json(bounce_pool_->statistics(), active());
}

Result<std::uint64_t> run_transfer(TransferEngine& engine, const TransferRequest& request, CancelToken* cancel) {
  // A small one could be over before it heard.
  if (cancel != nullptr && cancel->cancelled()) return Status(ECANCELED, "cancelled");
  Result<std::shared_ptr<Transfer>> started = engine.start(request);
  if (!started.ok()) return started.status();
  Transfer& transfer = *started.value();
  try {
    const CancelToken::Registration registration(cancel, [&] { transfer.cancel(); });
    transfer.wait();
  } catch (const std::bad_alloc&) {  // one that could not be cancelled is not left to itself
    transfer.cancel();
    transfer.wait();
    throw;
  }
  const TransferProgress outcome = transfer.progress();
  if (outcome.status.ok() || (outcome.prefix > 0 && !outcome.sync_failed)) return outcome.prefix;
  return outcome.status;
}

}  // namespace gpufs
