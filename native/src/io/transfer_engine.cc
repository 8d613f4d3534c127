#include "io/transfer_engine.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/cpus.h"
#include "base/log.h"
#include "base/math.h"

namespace gpufs {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kLargestChunk = std::size_t{64} << 20;
constexpr int kMaxThreads = 256;
constexpr int kMinAutomatic = 4;  // a disk needs several requests at a time, however few CPUs there are
// Each copies 3 to 6.5 GB/s out of the page cache (hosts of H100 and H200): 12 do not fill a bus of 55 GB/s on the
// slower ones, 16 gain nothing.
constexpr int kMaxAutomatic = 14;
// How often cancelled transfers that have not ended are checked.
constexpr std::chrono::milliseconds kWatchInterval{20};

Status check_options(const IoOptions& options) {
  if (!std::has_single_bit(options.chunk_bytes) || options.chunk_bytes < kSmallestChunk ||
      options.chunk_bytes > kLargestChunk) {
    return Status(EINVAL, "chunk_bytes must be a power of two from 64 KiB to 64 MiB");
  }
  if (options.pinned_bytes < options.chunk_bytes) return Status(EINVAL, "pinned_bytes must hold at least one chunk");
  if (options.workers < 0 || options.workers > kMaxThreads) return Status(EINVAL, "workers must be from 0 to 256");
  if (options.slots < 1 || options.slots > 64) return Status(EINVAL, "slots must be from 1 to 64");
  return {};
}

}  // namespace

Status TransferEngine::check(const TransferRequest& request) {
  if (request.file == nullptr || request.target == nullptr) return Status(EINVAL, "a transfer needs a file and memory");
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
  if (request.target->address() != 0) {
    const std::uint64_t limit = request.target->limit();
    if (request.target_offset > limit || (request.bytes != kToTheEnd && end > limit)) {
      const std::string range = request.bytes == kToTheEnd
                                    ? "offset " + std::to_string(request.target_offset)
                                    : "[" + std::to_string(request.target_offset) + ", " + std::to_string(end) + ")";
      return Status(EINVAL, range + " is outside of the device memory, which has " + std::to_string(limit) + " bytes");
    }
  } else if (load && request.target_offset > Buffer::kMaximumBytes) {
    return Status(EFBIG, "the range starts beyond the largest buffer");
  }
  return {};
}

TransferEngine::TransferEngine(const IoOptions& options, std::shared_ptr<Fastpath> fastpath)
    : options_(options),
      fastpath_(std::move(fastpath)),
      bounce_pool_(BouncePool::create(options.chunk_bytes, options.pinned_bytes)) {}

Result<std::shared_ptr<TransferEngine>> TransferEngine::create(const IoOptions& options,
                                                               std::shared_ptr<Fastpath> fastpath) {
  TRY(check_options(options));
  std::shared_ptr<TransferEngine> inner(new TransferEngine(options, std::move(fastpath)));
  // The threads hold the engine themselves. So the pointers that callers hold are counted apart: with the last of them
  // the threads end, and never on one of their own.
  TransferEngine* const raw = inner.get();
  return std::shared_ptr<TransferEngine>(raw, [inner](TransferEngine* engine) { engine->shutdown(); });
}

std::shared_ptr<Scheduler> TransferEngine::scheduler_for(int node) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<Scheduler>& scheduler = schedulers_[node];
  if (scheduler == nullptr) {
    int share = options_.workers > 0 ? options_.workers : std::clamp(usable_cpus(node), kMinAutomatic, kMaxAutomatic);
    // Each thread must find a slot, also those of other clients while one client's threads hang with theirs.
    const auto slots = static_cast<int>(std::min(bounce_pool_->capacity(), std::size_t{2} * kMaxThreads));
    share = std::min(share, std::max(slots * 2 / 3, 1));
    const int spare = std::min((share + 1) / 2, std::max(slots - share, 1));
    scheduler = Scheduler::create(node, share, spare);
  }
  return scheduler;
}

Result<std::shared_ptr<Transfer>> TransferEngine::start(TransferRequest request) {
  TRY(check(request));
  const std::shared_ptr<Scheduler> scheduler = scheduler_for(request.target->device()->info().numa_node);
  auto transfer = std::make_shared<Transfer>(shared_from_this(), scheduler, request);
  if (request.bytes == 0 && request.sync == SyncMode::kNone) {
    transfer->conclude_empty();
    return transfer;
  }
  bool closed = false;
  {
    const std::lock_guard lock(mutex_);
    closed = closed_;
    if (!closed) transfers_.emplace(transfer.get(), transfer);
  }
  const Status submitted = closed ? Status(ESHUTDOWN, "the engine is being closed") : scheduler->submit(transfer);
  // A shutdown() at the same time may have ended it already, as it ends any other.
  if (!submitted.ok() && transfer->refuse(submitted)) return submitted;
  return transfer;
}

void TransferEngine::finished(const Transfer& transfer) {
  std::shared_ptr<Transfer> last;  // destroyed without the lock
  {
    const std::lock_guard lock(mutex_);
    const auto found = transfers_.find(&transfer);
    if (found == transfers_.end()) return;
    last = std::move(found->second);
    transfers_.erase(found);
  }
  changed_.notify_all();
}

Worker::Clock::time_point TransferEngine::abandon_cancelled() {
  std::vector<std::shared_ptr<Transfer>> cancelled;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [key, transfer] : transfers_) {
      if (transfer->cancelled()) cancelled.push_back(transfer);
    }
  }
  if (cancelled.empty()) return Worker::kNever;
  for (std::shared_ptr<Transfer>& transfer : cancelled) {
    transfer->abandon(/*force=*/false);
    Transfer::release(std::move(transfer));
  }
  return Clock::now() + kWatchInterval;
}

void TransferEngine::shutdown() {
  std::vector<std::shared_ptr<Transfer>> transfers;
  std::vector<std::shared_ptr<Scheduler>> schedulers;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
    for (const auto& [key, transfer] : transfers_) transfers.push_back(transfer);
    for (const auto& [node, scheduler] : schedulers_) schedulers.push_back(scheduler);
  }
  for (const std::shared_ptr<Transfer>& transfer : transfers) transfer->cancel();
  const Clock::time_point end = Clock::now() + options_.shutdown_grace;
  bool ended = false;
  {
    std::unique_lock lock(mutex_);
    ended = changed_.wait_until(lock, end, [&] { return transfers_.empty(); });
  }
  if (!ended) {
    for (const std::shared_ptr<Transfer>& transfer : transfers) transfer->abandon(/*force=*/true);
  }
  watch_.stop();
  for (std::shared_ptr<Transfer>& transfer : transfers) Transfer::release(std::move(transfer));
  const auto rest = std::max(end - Clock::now(), Clock::duration(options_.cancel_grace));
  for (const std::shared_ptr<Scheduler>& scheduler : schedulers) {
    const int hung =
        scheduler->shutdown(std::chrono::duration_cast<std::chrono::milliseconds>(rest), options_.cancel_grace);
    if (hung > 0) log_warning(hung, " threads hang in files and are left behind");
  }
  bounce_pool_->close();
}

std::size_t TransferEngine::active() const {
  const std::lock_guard lock(mutex_);
  return transfers_.size();
}

}  // namespace gpufs
