#include "io/transfer_job.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <utility>

#include "base/caught.h"
#include "base/log.h"
#include "base/math.h"
#include "io/file_holes.h"
#include "io/file_moves.h"
#include "io/pipeline.h"
#include "memory/extents.h"

namespace gpufs {
namespace {

constexpr auto kLargestOffset = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
// Device memory is pinned in parts of this size: one call for many pieces.
constexpr std::uint64_t kWindowBytes = std::uint64_t{256} << 20;
// It is taken ahead of the pieces in steps, each as large as what is there already, from the first to the largest: the
// first bytes wait for little, and the calls, which others' copies may have to wait for, become few.
constexpr std::uint64_t kFirstStep = std::uint64_t{64} << 20;
constexpr std::uint64_t kLargestStep = std::uint64_t{1} << 30;
// From here on writing a file's pages side by side is faster than writing it: measured 0.6 of it with 2 CPUs, 1.4
// with 16.
constexpr int kCpusForPages = 4;
// So many times as long is waited for a store to a file that may hang, since its last write may still arrive
// afterwards, and for a load from one that cannot: its threads come back as soon as they get a CPU or the disk.
constexpr int kPatience = 20;

bool allocation_unsupported(int error) {
  return error == EOPNOTSUPP || error == ENOSYS || error == EINVAL || error == EPERM || error == ENODEV;
}

bool is_hole(const Segment& segment) { return segment.hole; }
bool by_fastpath(const Segment& segment) { return segment.path == Path::kFastpath; }

bool has_hole(const Target& target, std::uint64_t offset, std::uint64_t bytes) {
  if (target.buffer() == nullptr) return false;
  Result<std::uint64_t> hole = target.buffer()->seek_hole(offset);
  return hole.ok() && hole.value() < offset + bytes;
}

}  // namespace

TransferJob::TransferJob(std::shared_ptr<TransferEngine> engine, std::shared_ptr<WorkerPool> pool,
                         TransferRequest request)
    : engine_(std::move(engine)),
      pool_(std::move(pool)),
      request_(std::move(request)),
      of_buffer_(request_.target.buffer() != nullptr),
      device_(request_.target.device()),
      counters_(device_->counters()),
      flow_(flow_of(request_.direction)),
      details_(counters_.region()->details(counters_.device(), flow_)),
      queued_(observe::now_ns()),
      trace_id_(request_.trace_id != 0 ? request_.trace_id : observe::trace::next_id()),
      trace_name_(observe::trace::on() ? observe::trace::name_of_file(request_.file->buffered_fd()) : 0) {
  const Switch wish = engine_->options().pagecache;
  pagecache_ = request_.direction == Direction::kLoad && !device_->info().cpu_addressable &&
               (wish == Switch::kOn || (wish == Switch::kAuto && usable_cpus(device_->info().numa_node) == 1));
  counters_.begin(observe::Backend::kTransfer, flow_);
}

TransferProgress TransferJob::progress() const {
  TransferProgress progress;
  const std::lock_guard lock(mutex_);
  switch (phase_) {
    case Phase::kQueued:
      progress.state = TransferState::kQueued;
      break;
    case Phase::kDone:
      progress.state = TransferState::kDone;
      keep(progress.status, status_);
      break;
    default:
      progress.state = TransferState::kRunning;
  }
  progress.total = total_;
  progress.moved = moved_.load(std::memory_order_relaxed);
  progress.prefix = phase_ == Phase::kDone ? count_ : prefix_locked();
  for (std::size_t path = 0; path < path_bytes_.size(); ++path) {
    progress.path_bytes[path] = path_bytes_[path].load(std::memory_order_relaxed);
  }
  progress.pagecache_bytes = pagecache_bytes_.load(std::memory_order_relaxed);
  progress.hole_bytes = hole_bytes_.load(std::memory_order_relaxed);
  progress.refusals = refusals_;
  progress.sync_failed = sync_failed_;
  return progress;
}

void TransferJob::cancel() {
  if (cancelled_.exchange(true)) return;
  {
    const std::lock_guard lock(mutex_);
    if (phase_ == Phase::kDone) return;
  }
  engine_->supervise(shared_from_this(), abandon_delay());
}

bool TransferJob::wait(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  return done_.wait_for(lock, patience, [&] { return phase_ == Phase::kDone; });
}

void TransferJob::wait() {
  std::unique_lock lock(mutex_);
  done_.wait(lock, [&] { return phase_ == Phase::kDone; });
}

Status TransferJob::close() {
  cancel();
  if (wait(device_->device().blocked_streams().stall_timeout())) return {};
  return Status(
      ETIMEDOUT,
      "a cancelled transfer has not ended in time: its device or its file does not respond, and its memory is in use");
}

Result<int> TransferJob::event_fd() {
  const std::lock_guard lock(mutex_);
  if (!event_.valid()) {
    event_ = UniqueFd(::eventfd(phase_ == Phase::kDone ? 1 : 0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!event_.valid()) return Status::from_errno(errno, "an eventfd for the transfer");
  }
  return event_.get();
}

// ---- serving ----

void TransferJob::serve(Turn& turn) {
  if (!enter()) return;
  run_session(*this, turn);  // ends each piece that it claims, whatever it lacks
  leave();
}

bool TransferJob::enter() {
  {
    const std::lock_guard lock(mutex_);
    if (phase_ == Phase::kRunning && claimable_locked()) {
      ++sessions_;
      return true;
    }
    if (phase_ != Phase::kQueued) return false;
    phase_ = Phase::kPreparing;
    ++sessions_;
  }
  bind_start_.store(observe::now_ns(), std::memory_order_relaxed);
  const Status prepared = caught([this] { return prepare(); });
  bind_end_.store(observe::now_ns(), std::memory_order_relaxed);
  {
    const std::lock_guard lock(mutex_);
    // Left behind in the meantime: leave() finds it done.
    if (phase_ == Phase::kPreparing) {
      phase_ = Phase::kRunning;
      if (!prepared.ok()) {
        stop_ = cursor_ = 0;
        keep(stop_status_, prepared);
      }
      update_wanted_locked();
    }
  }
  pool_->update();
  return true;
}

void TransferJob::leave() {
  {
    const std::lock_guard lock(mutex_);
    --sessions_;
    update_wanted_locked();
    if (sessions_ > 0 || phase_ != Phase::kRunning || claimable_locked()) return;
    phase_ = Phase::kFinishing;
  }
  finish();
}

Status TransferJob::prepare() {
  if (cancelled_) return Status(ECANCELED, "cancelled");
  Status health = device_->device().health();
  if (!health.ok()) return health;
  Status bound = device_->device().bind_thread();
  if (!bound.ok()) return bound;
  Result<std::uint64_t> total = extent();
  if (!total.ok()) return total.status();
  Result<Plan> plan = Plan{};
  if (total.value() > 0) {
    plan = make_plan(total.value());
    if (!plan.ok()) return plan.status();
    Status ready = request_.direction == Direction::kStore ? preallocate(total.value(), plan.value())
                                                           : leave_holes_out(total.value(), &plan.value());
    if (!ready.ok()) return ready;
  }
  std::uint64_t data = 0;
  for (const Segment& segment : plan.value()) data += segment.hole ? 0 : segment.bytes;
  const std::lock_guard lock(mutex_);
  total_ = stop_ = total.value();
  unclaimed_ = data;
  largest_step_ = kLargestStep;
  plan_ = plan.take();
  return {};
}

// How much there is to move: the request, clipped at the end of its source.
Result<std::uint64_t> TransferJob::extent() {
  BackingFile& backing = file();
  std::uint64_t file_size = 0;
  if (request_.direction == Direction::kLoad || !backing.facts().block_device) {
    if (backing.operations().size(backing.buffered_fd(), &file_size) != 0) {
      return Status::from_errno(errno, "the backing file's size");
    }
  }
  std::uint64_t available = 0;
  if (request_.direction == Direction::kLoad) {
    available = file_size > request_.file_offset ? file_size - request_.file_offset : 0;
    if (file_size == 0 && request_.bytes > 0) {
      // Empty, or a file that has bytes and states no size (/proc): then as much as one piece.
      std::byte probe;
      const Moved first = read_buffered(backing, &probe, 1, request_.file_offset);
      if (!first.status.ok()) return first.status;
      if (first.bytes > 0) available = options().chunk_bytes;
    }
  }
  if (!begin_use()) return Status(ECANCELED, "cancelled");
  if (request_.direction == Direction::kLoad) {
    // A range is filled as far as it goes; a buffer that is asked for too much says so when it grows.
    if (target().buffer() == nullptr) {
      available = std::min(available, target().limit() - request_.target_offset);
    } else {
      noted_shrinks_ = target().buffer()->shrinks();
      target().buffer()->expect(request_.target_offset + std::min(request_.bytes, available));
    }
  } else {
    const std::uint64_t size = target().size();
    available = size > request_.target_offset ? size - request_.target_offset : 0;
  }
  end_use();
  const std::uint64_t total = std::min(request_.bytes, available);
  if (total > kLargestOffset - request_.file_offset) {
    return Status(EFBIG, "the range ends beyond the largest file offset");
  }
  original_file_size_ = file_size;
  return total;
}

// Of a load: what is a hole in the file is neither read nor given memory.
Status TransferJob::leave_holes_out(std::uint64_t total, Plan* plan) {
  if (!request_.sparse || !of_buffer_) return {};
  HoleSearch search;
  search.file_offset = request_.file_offset;
  search.file_size = original_file_size_;
  search.target_offset = request_.target_offset;
  search.bytes = total;
  search.granule = device_->info().granule;
  Result<std::vector<HoleRange>> holes = holes_of(file(), search, cancelled_);
  if (!holes.ok()) return holes.status();
  if (holes.value().empty()) return {};
  *plan = without_holes(*plan, holes.value());
  if (!begin_use()) return Status(ECANCELED, "cancelled");
  Status cleared = clear_holes(*plan);
  end_use();
  return cleared;
}

// What the buffer held there goes. Before the first piece is claimed: who takes memory away waits for its users.
Status TransferJob::clear_holes(const Plan& plan) {
  Buffer& buffer = *target().buffer();
  for (const Segment& segment : plan) {
    const std::uint64_t start = request_.target_offset + segment.offset;
    const std::uint64_t end = std::min(start + segment.bytes, buffer.size());
    if (!segment.hole || start >= end) continue;
    if (cancelled_) return Status(ECANCELED, "cancelled");
    const Result<std::uint64_t> held = buffer.seek_data(start);
    if (!held.ok() || held.value() >= end) continue;
    Status punched = buffer.punch(start, end - start);
    if (!punched.ok()) return punched;
  }
  return {};
}

// The size for a store to a file in memory, whose pages several threads can then write at once; and room for a store by
// O_DIRECT, so that pieces written out of order do not wait for each other at the file's end, and
// a full disk is found before the work. What is cached anyway gains nothing from it.
Status TransferJob::preallocate(std::uint64_t total, const Plan& plan) {
  BackingFile& backing = file();
  const std::uint64_t end = request_.file_offset + total;
  const Switch wish = options().write_pages;
  const bool side_by_side =
      wish == Switch::kOn || (wish == Switch::kAuto && usable_cpus(device_->info().numa_node) >= kCpusForPages);
  if (side_by_side && backing.facts().always_hot && backing.facts().readable && end > original_file_size_ &&
      total > options().chunk_bytes) {
    by_pages_ = backing.operations().truncate(backing.buffered_fd(), end) == 0;
    if (by_pages_) preallocated_end_ = end;
    return {};
  }
  if (backing.facts().block_device || backing.facts().may_hang || backing.direct_fd() < 0) return {};
  if (options().direct == Switch::kOff && std::none_of(plan.begin(), plan.end(), by_fastpath)) return {};
  if (end <= original_file_size_ || total <= options().chunk_bytes) return {};
  if (!begin_use()) return Status(ECANCELED, "cancelled");
  const bool leave_holes = request_.sparse && has_hole(target(), request_.target_offset, total);
  end_use();
  if (leave_holes) return {};
  int outcome = 0;
  do {
    outcome = backing.operations().allocate(backing.buffered_fd(), 0, request_.file_offset, total);
  } while (outcome != 0 && errno == EINTR && !cancelled_);
  if (outcome == 0) {
    preallocated_end_ = end;
    return {};
  }
  const int error = errno;
  if (allocation_unsupported(error)) return {};
  preallocated_end_ = end;  // some of it may be there
  if (error == EINTR) return Status(ECANCELED, "cancelled");
  return Status::from_errno(error, "room in the backing file");
}

Result<Plan> TransferJob::make_plan(std::uint64_t total) {
  ScoredRequest scored;
  scored.file = &file().facts();
  scored.file_offset = request_.file_offset;
  scored.bytes = total;
  if (!begin_use()) return Status(ECANCELED, "cancelled");
  scored.memory_phase = target().phase(request_.target_offset, file().facts().memory_align);
  scored.vendor_refusals = engine_->direct_path_->refusals();
  if (!target().reached_by_files(request_.target_offset)) scored.vendor_refusals |= mask_of(Refusal::kMemoryKind);
  if (options().file_systems.allow(file().facts().file_system)) scored.waived = mask_of(Refusal::kFileSystem);
  end_use();
  scored.fastpath = fastpath_mode();
  scored.fallback = fallback_allowed();
  RefusalMask refusals = 0;
  Result<Plan> plan = plan_request(scored, &refusals);
  if (plan.ok() && std::any_of(plan.value().begin(), plan.value().end(), by_fastpath)) {
    Result<DirectFile*> attached = file().direct_file(*engine_->direct_path_);
    if (attached.ok()) {
      direct_file_ = attached.value();
    } else {
      log_info("fastpath does not take a file: ", attached.status().message());
      scored.vendor_refusals |= mask_of(Refusal::kNotAccepted);
      plan = plan_request(scored, &refusals);
    }
  }
  counters_.refuse(observe::Backend::kFastpath, flow_, refusals);
  const std::lock_guard lock(mutex_);
  refusals_ = refusals;
  return plan;
}

// ---- pieces ----

std::uint64_t TransferJob::chunk_bytes(Path path) const {
  const std::uint64_t bytes = options().chunk_bytes;
  // Pieces of the fastpath stay aligned, whatever the file asks for.
  return path == Path::kFastpath ? std::max<std::uint64_t>(bytes, file().facts().unit) : bytes;
}

bool TransferJob::claimable_locked() const { return cursor_ < stop_; }

std::optional<Chunk> TransferJob::claim() {
  const std::lock_guard lock(mutex_);
  if (phase_ != Phase::kRunning || !claimable_locked()) return std::nullopt;
  if (cancelled_) {
    stop_ = cursor_;
    stop_status_ = Status(ECANCELED, "cancelled");
    update_wanted_locked();
    return std::nullopt;
  }
  while (cursor_ >= plan_[segment_].offset + plan_[segment_].bytes) ++segment_;
  const Segment& segment = plan_[segment_];
  Chunk chunk;
  chunk.offset = cursor_;
  // The edges of pieces are multiples in the file, so that a slot holds all that O_DIRECT must read for one.
  const std::uint64_t unit = chunk_bytes(segment.path);
  const std::uint64_t position = request_.file_offset + cursor_;
  const std::uint64_t edge = position - position % unit + unit - request_.file_offset;
  const std::uint64_t end = std::min(segment.offset + segment.bytes, stop_);
  chunk.hole = segment.hole;
  chunk.bytes = (segment.hole ? end : std::min(edge, end)) - cursor_;
  chunk.path = fastpath_given_up_ ? Path::kFallback : segment.path;
  in_flight_.insert(chunk.offset);  // before it is claimed: there may be no memory
  cursor_ += chunk.bytes;
  if (!segment.hole) unclaimed_ -= chunk.bytes;
  update_wanted_locked();
  return chunk;
}

void TransferJob::stop(const Status& why) {
  const std::lock_guard lock(mutex_);
  if (phase_ != Phase::kRunning || !claimable_locked()) return;
  stop_ = cursor_;
  keep(stop_status_, why);
  update_wanted_locked();
}

void TransferJob::complete(const Chunk& chunk, const Status& status) {
  moved_.fetch_add(chunk.done, std::memory_order_relaxed);
  if (!chunk.hole) end_path(chunk, !status.ok() && status.error() != ECANCELED);
  const std::lock_guard lock(mutex_);
  in_flight_.erase(chunk.offset);
  if (chunk.done < chunk.bytes && chunk.offset + chunk.done < stop_) {
    stop_ = chunk.offset + chunk.done;
    keep(stop_status_, status);
  } else if (chunk.done < chunk.bytes && chunk.offset + chunk.done == stop_ && stop_status_.error() == ECANCELED &&
             !status.ok()) {
    keep(stop_status_, status);  // the reason why it ended there, rather than that nobody went on
  }
  update_wanted_locked();
}

void TransferJob::update_wanted_locked() {
  if (phase_ == Phase::kDone) {
    wanted_ = 0;
    return;
  }
  if (phase_ != Phase::kRunning) {
    wanted_ = std::max(sessions_, 1);
    return;
  }
  const std::uint64_t chunk = options().chunk_bytes;
  // Holes are nobody's work.
  const std::uint64_t rest = claimable_locked() ? (std::min(stop_ - cursor_, unclaimed_) + chunk - 1) / chunk : 0;
  const int limit = request_.share > 0 ? std::min(request_.share, pool_->share()) : pool_->share();
  const auto useful = static_cast<int>(std::min<std::uint64_t>(rest, static_cast<std::uint64_t>(limit)));
  // Never 0 before the end: the last session still has to finish it.
  wanted_ = std::max(std::min(sessions_ + useful, limit), 1);
}

std::uint64_t TransferJob::prefix_locked() const {
  const std::uint64_t claimed = std::min(stop_, cursor_);
  return in_flight_.empty() ? claimed : std::min(claimed, *in_flight_.begin());
}

bool TransferJob::begin_use() {
  const std::lock_guard lock(mutex_);
  if (abandoned_) return false;
  ++uses_;
  return true;
}

void TransferJob::end_use() {
  const std::lock_guard lock(mutex_);
  --uses_;
}

std::uint64_t TransferJob::next_step_locked() const {
  return std::min(std::clamp(populated_end_, kFirstStep, kLargestStep), largest_step_);
}

// Half a step ahead, so that the others need not wait while one of them takes memory.
bool TransferJob::short_of_memory_locked(std::uint64_t needed) const {
  return populated_end_ < total_ && needed + next_step_locked() / 2 > populated_end_;
}

// Takes memory from populated_end_ on: a step where there is room for it, and up to `needed` at least. The lock is
// given up meanwhile; the session holds no pins.
Status TransferJob::populate_step(std::unique_lock<std::mutex>& lock, std::uint64_t needed) {
  populating_ = true;
  const std::uint64_t start = populated_end_;
  Status status;
  for (;;) {
    const std::uint64_t end = std::min(total_, std::max(start + next_step_locked(), needed));
    lock.unlock();
    status = caught([&] { return populate_data(start, end); });
    lock.lock();
    if (status.ok()) populated_end_ = end;
    if (status.error() != ENOSPC && status.error() != EFBIG) break;
    // Smaller steps, up to the last piece that there is room for.
    largest_step_ = (end - start) / 2 < options().chunk_bytes ? 0 : (end - start) / 2;
    if (needed <= start || end == needed) break;
  }
  populating_ = false;
  memory_changed_.notify_all();
  return status;
}

Plan::const_iterator TransferJob::segment_at(std::uint64_t offset) const {
  return std::partition_point(plan_.begin(), plan_.end(),
                              [&](const Segment& segment) { return segment.offset + segment.bytes <= offset; });
}

// Holes stay without memory.
Status TransferJob::populate_data(std::uint64_t start, std::uint64_t end) {
  for (auto segment = segment_at(start); segment != plan_.end() && segment->offset < end;) {
    const auto hole = std::find_if(segment, plan_.cend(), is_hole);
    const std::uint64_t from = std::max(start, segment->offset);
    const std::uint64_t to = std::min(end, hole == plan_.end() ? total_ : hole->offset);
    if (to > from) {
      Status status = target().buffer()->populate(request_.target_offset + from, to - from, &made_);
      if (!status.ok()) return status;
    }
    segment = std::find_if_not(hole, plan_.cend(), is_hole);
  }
  return {};
}

void TransferJob::take_ahead(const std::function<void()>& settle) {
  if (request_.direction != Direction::kLoad || !begin_use()) return;
  if (target().buffer() != nullptr) {
    std::unique_lock lock(mutex_);
    if (phase_ == Phase::kRunning && !populating_ && largest_step_ > 0 && short_of_memory_locked(cursor_)) {
      populating_ = true;  // ours, while the lock is given up
      lock.unlock();
      settle();
      lock.lock();
      // Whoever needs memory that is not to be had says so.
      (void)populate_step(lock, 0);
    }
  }
  end_use();
}

Status TransferJob::populate(std::uint64_t needed, const std::function<void()>& settle) {
  std::unique_lock lock(mutex_);
  while (needed > populated_end_) {
    lock.unlock();
    settle();
    lock.lock();
    if (populating_) {
      memory_changed_.wait(lock, [&] { return !populating_; });
      continue;
    }
    if (needed <= populated_end_) break;
    Status status = populate_step(lock, needed);
    if (!status.ok()) return status;
  }
  return {};
}

Result<std::shared_ptr<const PinnedRange>> TransferJob::pin_window(const Chunk& chunk, std::uint64_t bytes,
                                                                   const std::function<void()>& settle) {
  const bool load = request_.direction == Direction::kLoad;
  const std::uint64_t start = chunk.offset + chunk.done;
  const std::uint64_t end = start + bytes;
  if (load && target().buffer() != nullptr) {
    const Status populated = populate(end, settle);
    if (!populated.ok()) return populated;
  }
  std::unique_lock lock(mutex_);
  for (;;) {
    std::shared_ptr<const PinnedRange> window = window_.lock();
    if (window != nullptr && window_start_ <= start && end <= window_end_) return window;
    lock.unlock();
    window.reset();
    settle();
    lock.lock();
    if (!pinning_) break;
    memory_changed_.wait(lock, [&] { return !pinning_; });
  }
  pinning_ = true;
  // What there is no memory for yet is no part of it, nor are holes.
  const auto here = segment_at(start);
  const auto before = std::find_if(std::make_reverse_iterator(here), plan_.crend(), is_hole);
  const auto after = std::find_if(here, plan_.cend(), is_hole);
  const std::uint64_t first = before == plan_.crend() ? 0 : before->offset + before->bytes;
  const std::uint64_t last = after == plan_.cend() ? total_ : after->offset;
  const std::uint64_t limit = load && target().buffer() != nullptr ? std::max(populated_end_, end) : total_;
  std::uint64_t from = std::max(first, round_down(start, kWindowBytes));
  std::uint64_t to = std::min({limit, last, std::max(round_down(start, kWindowBytes) + kWindowBytes, end)});
  lock.unlock();
  const auto pin = [&]() -> Result<std::shared_ptr<const PinnedRange>> {
    const std::uint64_t offset = request_.target_offset + from;
    Result<PinnedRange> range = load ? pin_for_write(offset, to - from) : target().pin_for_read(offset, to - from);
    if (!range.ok()) return range.status();
    return std::shared_ptr<const PinnedRange>(std::make_shared<PinnedRange>(range.take()));
  };
  Result<std::shared_ptr<const PinnedRange>> pinned = caught(pin);
  if (pinned.error() == ENOSPC) {
    // Somebody took memory away around it, for which there is no room any more.
    from = start;
    to = end;
    pinned = caught(pin);
  }
  lock.lock();
  pinning_ = false;
  memory_changed_.notify_all();
  if (!pinned.ok()) return pinned;
  window_ = pinned.value();
  window_start_ = from;
  window_end_ = to;
  return pinned;
}

Result<PinnedRange> TransferJob::pin_for_write(std::uint64_t offset, std::uint64_t bytes) {
  Buffer::Made made;
  Result<PinnedRange> pinned = target().pin_for_write(offset, bytes, &made);
  if (made.extents.empty()) return pinned;
  const std::lock_guard lock(mutex_);
  if (made.shrinks > pin_made_.shrinks) pin_made_ = {{}, made.shrinks};
  if (made.shrinks == pin_made_.shrinks) {
    pin_made_.extents = joined(pin_made_.extents, without(made.extents, pin_made_.extents));
  }
  return pinned;
}

void TransferJob::start_path(Chunk& chunk) const {
  chunk.started = observe::now_ns();
  chunk.before = chunk.done;
  counters_.begin(backend_of(chunk.path), flow_);
}

void TransferJob::end_path(const Chunk& chunk, bool failed) const {
  const std::uint64_t moved = chunk.done - chunk.before - chunk.skipped;
  counters_.end(backend_of(chunk.path), flow_, moved, failed, observe::now_ns() - chunk.started);
  // The piece does not use the target any more, which may be let go at this moment.
  const std::lock_guard lock(mutex_);
  if (const auto& buffer = request_.target.buffer()) buffer->activity().note(backend_of(chunk.path), flow_, moved);
}

void TransferJob::give_up_fastpath(const Status& why, RefusalMask causes) {
  {
    const std::lock_guard lock(mutex_);
    if ((refusals_ & mask_of(Refusal::kFailedBefore)) != 0) return;
    causes |= mask_of(Refusal::kFailedBefore);
    refusals_ |= causes;
    fastpath_given_up_ = may_change_path();
    counters_.refuse(observe::Backend::kFastpath, flow_, causes);
  }
  log_info("fastpath gave up on a ", direction_name(request_.direction), ": ", why.message());
}

void TransferJob::count_moved(Path path, std::uint64_t bytes) {
  path_bytes_[static_cast<std::size_t>(path)].fetch_add(bytes, std::memory_order_relaxed);
}

void TransferJob::count_skipped(Chunk& chunk, std::uint64_t bytes) {
  chunk.skipped += bytes;
  hole_bytes_.fetch_add(bytes, std::memory_order_relaxed);
}

void TransferJob::count_pagecache(std::uint64_t bytes) {
  pagecache_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  count(details_.pagecache_bytes, bytes);
}

// ---- the end ----

void TransferJob::finish() {
  std::uint64_t reached = 0;
  std::uint64_t touched = 0;
  Status status;
  {
    const std::lock_guard lock(mutex_);
    reached = stop_;
    touched = std::max(populated_end_, cursor_);
    keep(status, stop_status_);
  }
  bool sync_failed = false;
  if (request_.direction == Direction::kLoad) {
    if (!begin_use()) return;  // left behind at this very moment: abandon() sees to the rest
    Status finished = caught([&] { return finish_load(target(), reached, touched); });
    end_use();
    if (status.ok()) status = std::move(finished);
  } else {
    Status finished = caught([&] { return finish_store(reached, touched); });
    if (status.ok()) status = std::move(finished);
    if (status.ok() && request_.sync != SyncMode::kNone) {
      {
        const std::lock_guard lock(mutex_);
        syncing_ = true;
      }
      status = caught([this] { return sync_file(); });
      sync_failed = !status.ok();
    }
  }
  conclude(reached, status, sync_failed);
}

// A buffer that was made smaller meanwhile stays so, as if that had come after all that was loaded: what it took away
// must not come back as zeros.
Status TransferJob::finish_load(const Target& target, std::uint64_t reached, std::uint64_t touched) const {
  if (target.buffer() == nullptr) return {};
  const std::uint64_t start = request_.target_offset;
  const bool published = reached == 0 || target.buffer()->publish_since(start + reached, noted_shrinks_);
  const std::uint64_t kept = published ? reached : 0;
  if (touched <= kept) return {};
  target.buffer()->release_unused(made_);
  target.buffer()->release_unused(pin_made_);
  return target.buffer()->discard_above_size(start + kept, touched - kept);
}

// The file ends where the store ended: neither short of a hole that was left at its end, nor long by what was made
// ready or written beyond a failure.
Status TransferJob::finish_store(std::uint64_t reached, std::uint64_t touched) {
  BackingFile& backing = file();
  if (backing.facts().block_device) return {};
  const std::uint64_t highest = std::max(preallocated_end_, touched == 0 ? 0 : request_.file_offset + touched);
  const std::uint64_t end = reached == 0 ? original_file_size_ : request_.file_offset + reached;
  if (highest == 0) return {};
  std::uint64_t size = 0;
  if (backing.operations().size(backing.buffered_fd(), &size) != 0) {
    return Status::from_errno(errno, "the backing file's size");
  }
  const std::uint64_t wanted_size = std::max(end, original_file_size_);
  // A size that we cannot have caused is somebody else's.
  const bool too_long = size > wanted_size && size <= highest;
  const bool too_short = reached > 0 && size < end;
  // Written pages leave the time of modification as it was; setting the size sets it.
  const bool unmarked = by_pages_ && reached > 0 && size == wanted_size;
  if (!too_long && !too_short && !unmarked) return {};
  while (backing.operations().truncate(backing.buffered_fd(), wanted_size) != 0) {
    if (errno != EINTR) return Status::from_errno(errno, "setting the backing file's size");
  }
  return {};
}

Status TransferJob::sync_file() {
  BackingFile& backing = file();
  while (backing.operations().sync(backing.buffered_fd(), request_.sync == SyncMode::kData) != 0) {
    if (errno != EINTR) return Status::from_errno(errno, "syncing the backing file");
  }
  return {};
}

// Its life in phases, told at its end.
void TransferJob::trace_phases(std::uint64_t bytes, int error) const {
  observe::TraceRecord record;
  record.id = trace_id_;
  record.name = trace_name_;
  record.device = device_->info().index;
  record.flow = static_cast<std::uint8_t>(flow_);
  record.offset = request_.file_offset;
  record.bytes = bytes;
  record.error = error;
  const auto tell = [&](observe::TraceKind kind, std::uint64_t start, std::uint64_t end) {
    record.kind = kind;
    record.start = start;
    record.end = end;
    observe::trace::record(record);
  };
  const std::uint64_t now = observe::now_ns();
  const std::uint64_t bind_start = bind_start_.load(std::memory_order_relaxed);
  const std::uint64_t bind_end = bind_end_.load(std::memory_order_relaxed);
  tell(observe::TraceKind::kTransfer, queued_, now);
  tell(observe::TraceKind::kQueued, queued_, bind_start == 0 ? now : bind_start);
  if (bind_end != 0) tell(observe::TraceKind::kBind, bind_start, bind_end);
}

bool TransferJob::refuse(const Status& why) {
  decltype(request_.done) untold;  // let go without the lock
  {
    const std::lock_guard lock(mutex_);
    if (phase_ == Phase::kDone) return false;
    untold.swap(request_.done);
  }
  conclude(0, why, false);
  return true;
}

void TransferJob::conclude(std::uint64_t count_reached, const Status& status, bool sync_failed) {
  Target released;
  {
    const std::lock_guard lock(mutex_);
    if (phase_ == Phase::kDone) return;
    // Nobody will use it any more, and who keeps a finished transfer does not mean to keep the memory.
    if (uses_ == 0) released = std::exchange(request_.target, Target{});
  }
  released = Target{};
  engine_->finished(*this);  // before it is said to be done, so that who waited for it finds it gone
  {
    const std::lock_guard lock(mutex_);
    if (phase_ == Phase::kDone) return;
    phase_ = Phase::kDone;
    count_ = count_reached;
    keep(status_, status);
    sync_failed_ = sync_failed;
    update_wanted_locked();
    counters_.end(observe::Backend::kTransfer, flow_, count_reached, !status.ok(), observe::now_ns() - queued_);
    if (observe::trace::on()) trace_phases(count_reached, status.error());
    if (status.error() == ECANCELED) {
      count(details_.cancelled);
    } else if (!status.ok()) {
      count(details_.failed);
    }
    if (event_.valid()) {
      const std::uint64_t one = 1;
      (void)!::write(event_.get(), &one, sizeof one);
    }
    done_.notify_all();
  }
  // Let go afterwards: it may hold who holds this.
  if (const auto tell = std::exchange(request_.done, nullptr)) tell(progress());
}

std::chrono::milliseconds TransferJob::abandon_delay() const {
  const bool patient = (request_.direction == Direction::kStore) == file().facts().may_hang;
  return options().cancel_grace * (patient ? kPatience : 1);
}

bool TransferJob::abandon(bool forced) {
  std::uint64_t reached = 0;
  std::uint64_t touched = 0;
  bool in_use = false;
  Target target;
  {
    const std::lock_guard lock(mutex_);
    if (phase_ == Phase::kDone || abandoned_) return true;
    // A store to a disk comes back, and its last write must not arrive after somebody was told that it ended.
    // And a load that has come to its end waits for no file any more.
    const bool harmless = request_.direction == Direction::kLoad
                              ? phase_ != Phase::kFinishing
                              : file().facts().may_hang || syncing_ || phase_ == Phase::kQueued;
    if (!forced && (!harmless || uses_ > 0)) return false;
    abandoned_ = true;
    phase_ = Phase::kFinishing;
    reached = prefix_locked();
    touched = std::max(populated_end_, cursor_);
    // What hangs must not hold the device's memory.
    in_use = uses_ > 0;
    if (!in_use) target = std::exchange(request_.target, Target{});
    count(details_.abandoned);
  }
  if (in_use) {
    ++engine_->left_in_use_;
    device_->device().blocked_streams().add_lost();
  }
  log_warning("a cancelled ", direction_name(request_.direction), " was left behind by threads that ",
              in_use ? "still use its memory" : "hang in its file");
  if (request_.direction == Direction::kLoad && target.valid()) {
    const Status finished = caught([&] { return finish_load(target, reached, touched); });
    if (!finished.ok()) log_warning("after a cancelled load: ", finished.message());
  }
  target = Target{};
  conclude(reached, Status(ECANCELED, "cancelled"), false);
  pool_->update();
  return true;
}

}  // namespace gpufs
