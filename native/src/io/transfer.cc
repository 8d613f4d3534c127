#include "io/transfer.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <limits>
#include <utility>
#include <vector>

#include "base/cpus.h"
#include "base/log.h"
#include "device/device_context.h"
#include "io/copy_loop.h"
#include "io/file_holes.h"
#include "io/file_moves.h"
#include "io/transfer_engine.h"
#include "observe/trace.h"

namespace gpufs {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kLargestOffset = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
// From here on writing a file's pages side by side is faster than writing it: measured 0.6 of it with 2 CPUs, 1.4
// with 16.
constexpr int kCpusForPages = 4;
// A cancelled transfer waits this many times longer before it leaves a thread behind in two cases: a store to a file
// that may hang, since its last write may still arrive afterwards, and a load from a file that cannot hang, whose
// threads return as soon as they get a CPU or the disk.
constexpr int kPatience = 20;

bool allocation_unsupported(int error) {
  return error == EOPNOTSUPP || error == ENOSYS || error == EINVAL || error == EPERM || error == ENODEV;
}

bool uses_fastpath(const Plan& plan) {
  return std::any_of(plan.begin(), plan.end(), [](const Segment& segment) { return segment.path == Path::kFastpath; });
}

bool has_hole(TransferTarget& target, std::uint64_t offset, std::uint64_t bytes) {
  Result<std::uint64_t> hole = target.seek_hole(offset);
  return hole.ok() && hole.value() < offset + bytes;
}

Status cancelled_status() { return Status(ECANCELED, "cancelled"); }

// Memory that a program allocated itself, and keeps. Transfers stay within it: see TransferEngine::check().
class ProgramMemory final : public TransferTarget {
 public:
  ProgramMemory(std::shared_ptr<DeviceContext> device, DeviceAddress address, std::uint64_t bytes)
      : device_(std::move(device)), address_(address), bytes_(bytes) {}

  [[nodiscard]] const std::shared_ptr<DeviceContext>& device() const override { return device_; }
  [[nodiscard]] std::uint64_t size() const override { return bytes_; }
  [[nodiscard]] std::uint64_t limit() const override { return bytes_; }
  Result<Pin> pin_for_read(std::uint64_t offset, std::uint64_t bytes) override {
    return Pin{{{address_ + offset, offset, bytes}}, nullptr};
  }
  Result<Pin> pin_for_write(std::uint64_t offset, std::uint64_t bytes) override { return pin_for_read(offset, bytes); }
  Result<std::uint64_t> seek_hole(std::uint64_t /*offset*/) override { return bytes_; }

 private:
  const std::shared_ptr<DeviceContext> device_;
  const DeviceAddress address_;
  const std::uint64_t bytes_;
};

}  // namespace

void TransferRequest::set_range(std::shared_ptr<DeviceContext> device, DeviceAddress start, std::uint64_t size) {
  address = start;
  target = std::make_shared<ProgramMemory>(std::move(device), start, size);
}

Transfer::Transfer(std::shared_ptr<TransferEngine> engine, std::shared_ptr<TransferThreads> threads,
                   TransferRequest request)
    : engine_(std::move(engine)),
      threads_(std::move(threads)),
      request_(std::move(request)),
      of_buffer_(request_.address == 0),
      device_(request_.target->device()),
      counters_(device_->counters()),
      flow_(flow_of(request_.direction)),
      details_(counters_.region()->details(counters_.device(), flow_)),
      queued_(observe::now_ns()),
      trace_id_(request_.trace_id != 0 ? request_.trace_id : observe::trace::next_id()),
      trace_name_(observe::trace::on() ? observe::trace::name_of_file(request_.file->buffered_fd()) : 0),
      limit_(request_.limit()),
      memory_(std::exchange(request_.target, nullptr), request_.target_offset, request_.direction,
              engine_->options().chunk_bytes) {
  counters_.begin(observe::Backend::kTransfer, flow_);
}

const IoOptions& Transfer::options() const { return engine_->options(); }

TransferProgress Transfer::progress() const {
  TransferProgress progress;
  const std::lock_guard lock(mutex_);
  switch (phase_) {
    case Phase::kQueued:
      progress.state = TransferState::kQueued;
      break;
    case Phase::kDone:
      progress.state = TransferState::kDone;
      progress.status = status_;
      break;
    default:
      progress.state = TransferState::kRunning;
  }
  progress.total = total_;
  progress.moved = moved_.load(std::memory_order_relaxed);
  progress.prefix = phase_ == Phase::kDone ? count_ : cursor_.prefix();
  for (std::size_t path = 0; path < path_bytes_.size(); ++path) {
    progress.path_bytes[path] = path_bytes_[path].load(std::memory_order_relaxed);
  }
  progress.hole_bytes = hole_bytes_.load(std::memory_order_relaxed);
  progress.refusals = refusals_;
  progress.sync_failed = sync_failed_;
  return progress;
}

void Transfer::cancel() {
  {
    const std::lock_guard lock(mutex_);
    if (cancelled_.exchange(true) || phase_ == Phase::kDone) return;
    cancel_time_ = Clock::now();
  }
  engine_->watch_cancelled();
}

bool Transfer::wait(std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  return done_.wait_for(lock, patience, [&] { return phase_ == Phase::kDone; });
}

void Transfer::wait() {
  std::unique_lock lock(mutex_);
  done_.wait(lock, [&] { return phase_ == Phase::kDone; });
}

Status Transfer::close() {
  cancel();
  if (wait(device_->device().blocked_streams().stall_timeout())) return {};
  return Status(
      ETIMEDOUT,
      "a cancelled transfer has not ended in time: its device or its file does not respond, and its memory is in use");
}

Result<int> Transfer::event_fd() {
  const std::lock_guard lock(mutex_);
  if (!event_.valid()) {
    event_ = UniqueFd(::eventfd(phase_ == Phase::kDone ? 1 : 0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!event_.valid()) return Status::from_errno(errno, "an eventfd for the transfer");
  }
  return event_.get();
}

// ---- serving ----

std::uint64_t Transfer::group() const {
  const BackingFacts& facts = request_.file->facts();
  return facts.may_hang ? kMayHang : facts.always_hot ? kNeverStalls : facts.device;
}

void Transfer::release(std::shared_ptr<Transfer> transfer) {
  const std::shared_ptr<TransferThreads> threads = transfer->threads_;
  threads->release(std::move(transfer));
}

void Transfer::serve() {
  if (!enter()) return;
  CopyLoop(*this).run();
  leave();
}

bool Transfer::enter() {
  {
    const std::lock_guard lock(mutex_);
    if (phase_ == Phase::kRunning && cursor_.has_next()) {
      ++serving_;
      return true;
    }
    if (phase_ != Phase::kQueued) return false;
    phase_ = Phase::kPreparing;
    ++serving_;
  }
  bind_start_.store(observe::now_ns(), std::memory_order_relaxed);
  Result<PlanCursor> prepared = prepare();
  bind_end_.store(observe::now_ns(), std::memory_order_relaxed);
  {
    const std::lock_guard lock(mutex_);
    // Otherwise it was left behind in the meantime, and leave() finds it done.
    if (phase_ == Phase::kPreparing) {
      phase_ = Phase::kRunning;
      cursor_ = prepared.ok() ? prepared.take() : PlanCursor(prepared.status());
      total_ = cursor_.end();
      update_wanted_locked();
    }
  }
  threads_->update();
  return true;
}

void Transfer::leave() {
  {
    const std::lock_guard lock(mutex_);
    --serving_;
    update_wanted_locked();
    if (serving_ > 0 || phase_ != Phase::kRunning || cursor_.has_next()) return;
    phase_ = Phase::kFinishing;
  }
  finish();
}

// ---- preparing: what is to be moved, and by which path ----

Result<PlanCursor> Transfer::prepare() {
  if (cancelled_) return cancelled_status();
  Status health = device_->device().health();
  if (!health.ok()) return health;
  Status bound = device_->device().bind_thread();
  if (!bound.ok()) return bound;
  Result<std::uint64_t> total = total_bytes();
  if (!total.ok()) return total.status();
  if (total.value() == 0) return PlanCursor();
  Result<Plan> plan = make_plan(total.value());
  if (!plan.ok()) return plan.status();
  if (load()) {
    plan = leave_holes_out(total.value(), plan.value());
    if (!plan.ok()) return plan.status();
  } else {
    Status ready = preallocate(total.value(), plan.value());
    if (!ready.ok()) return ready;
  }
  memory_.set_total(total.value());
  const std::uint64_t chunk = options().chunk_bytes;
  // Chunks of the fastpath stay aligned whatever alignment the file asks for.
  const PlanCursor::ChunkSizes sizes{std::max<std::uint64_t>(chunk, file().facts().unit), chunk};
  return PlanCursor(plan.take(), total.value(), request_.file_offset, sizes);
}

// The request, clipped at the end of its source.
Result<std::uint64_t> Transfer::total_bytes() {
  BackingFile& backing = file();
  if ((load() || !backing.facts().block_device) &&
      backing.operations().size(backing.buffered_fd(), &original_file_size_) != 0) {
    return Status::from_errno(errno, "the backing file's size");
  }
  std::uint64_t available = 0;
  if (load()) {
    available = original_file_size_ > request_.file_offset ? original_file_size_ - request_.file_offset : 0;
    if (original_file_size_ == 0 && request_.bytes > 0) {
      // Empty, or a file that has bytes and reports no size (/proc): then one chunk is read.
      std::byte probe;
      const Moved first = read_buffered(backing, &probe, 1, request_.file_offset);
      if (!first.status.ok()) return first.status;
      if (first.bytes > 0) available = options().chunk_bytes;
    }
  }
  const TargetMemory::Use use = memory_.use();
  if (!use) return cancelled_status();
  if (!load()) {
    const std::uint64_t size = memory_.target().size();
    available = size > request_.target_offset ? size - request_.target_offset : 0;
  } else if (!of_buffer_) {
    // A range is filled as far as it goes; a buffer reports EFBIG when it grows too large.
    available = std::min(available, limit_ - request_.target_offset);
  }
  const std::uint64_t total = std::min(request_.bytes, available);
  if (total > kLargestOffset - request_.file_offset) {
    return Status(EFBIG, "the range ends beyond the largest file offset");
  }
  if (load()) memory_.expect(total);
  return total;
}

Result<Plan> Transfer::make_plan(std::uint64_t total) {
  ScoredRequest scored;
  scored.file = &file().facts();
  scored.file_offset = request_.file_offset;
  scored.bytes = total;
  scored.vendor_refusals = engine_->direct_path().refusals();
  if (options().file_systems.allow(file().facts().file_system)) scored.waived = mask_of(Refusal::kFileSystem);
  scored.fastpath = fastpath_mode();
  scored.fastpath_min_bytes = options().fastpath_min_bytes;
  scored.fallback = fallback_allowed();
  // A buffer's memory begins at a granule.
  scored.memory_phase = (request_.address + request_.target_offset) % file().facts().memory_align;
  const bool reached = of_buffer_ ? device_->info().files_reach_memory
                                  : device_->device().holds(request_.address + request_.target_offset);
  if (!reached) scored.vendor_refusals |= mask_of(Refusal::kMemoryKind);
  RefusalMask refusals = 0;
  Result<Plan> plan = plan_request(scored, &refusals);
  if (plan.ok() && uses_fastpath(plan.value())) {
    Result<DirectFile*> attached = file().direct_file(engine_->direct_path());
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

// Holes of a load's file are not read and get no memory.
Result<Plan> Transfer::leave_holes_out(std::uint64_t total, const Plan& plan) {
  if (!request_.sparse) return plan;
  {
    const TargetMemory::Use use = memory_.use();
    if (!use) return cancelled_status();
    if (memory_.target().growing() == nullptr) return plan;
  }
  HoleSearch search;
  search.file_offset = request_.file_offset;
  search.file_size = original_file_size_;
  search.target_offset = request_.target_offset;
  search.bytes = total;
  search.granule = device_->info().granule;
  Result<std::vector<HoleRange>> holes = holes_of(file(), search, cancelled_);
  if (!holes.ok()) return holes.status();
  if (holes.value().empty()) return plan;
  Plan cut = without_holes(plan, holes.value());
  const TargetMemory::Use use = memory_.use();
  if (!use) return cancelled_status();
  // Before the first chunk is handed out, since freeing memory waits for its users.
  Status punched = memory_.punch(holes.take(), cancelled_);
  if (!punched.ok()) return punched;
  return cut;
}

// Of a store to a file in memory: sets the size, so that several threads can write its pages. Of a store by O_DIRECT:
// allocates, so that chunks written out of order do not wait for each other at the file's end, and a full disk is
// reported before the work starts.
Status Transfer::preallocate(std::uint64_t total, const Plan& plan) {
  BackingFile& backing = file();
  const BackingFacts& facts = backing.facts();
  const std::uint64_t end = request_.file_offset + total;
  if (end <= original_file_size_ || total <= options().chunk_bytes) return {};
  const Switch wish = options().write_pages;
  const bool side_by_side =
      wish == Switch::kOn || (wish == Switch::kAuto && usable_cpus(device_->info().numa_node) >= kCpusForPages);
  if (side_by_side && facts.always_hot && facts.readable) {
    // A byte of the store's own range: setting the size would cut off what another writer has appended by now.
    const std::byte last{};
    by_pages_ = backing.operations().write_at(backing.buffered_fd(), &last, 1, end - 1) == 1;
    if (by_pages_) preallocated_end_ = end;
    return {};
  }
  if (facts.block_device || facts.may_hang || backing.direct_fd() < 0) return {};
  if (options().direct == Switch::kOff && !uses_fastpath(plan)) return {};
  {
    const TargetMemory::Use use = memory_.use();
    if (!use) return cancelled_status();
    if (request_.sparse && has_hole(memory_.target(), request_.target_offset, total)) return {};
  }
  int outcome = 0;
  do {
    outcome = backing.operations().allocate(backing.buffered_fd(), 0, request_.file_offset, total);
  } while (outcome != 0 && errno == EINTR && !cancelled_);
  const int error = outcome == 0 ? 0 : errno;
  if (allocation_unsupported(error)) return {};
  preallocated_end_ = end;  // after a failure, some of it may be there
  if (error == EINTR) return cancelled_status();
  return error == 0 ? Status{} : Status::from_errno(error, "space in the backing file");
}

// ---- chunks ----

std::optional<Chunk> Transfer::next_chunk() {
  const std::lock_guard lock(mutex_);
  if (phase_ != Phase::kRunning) return std::nullopt;
  if (cancelled_) cursor_.stop(cancelled_status());
  std::optional<Chunk> chunk = cursor_.next();
  if (chunk && fastpath_given_up_) chunk->path = Path::kFallback;
  update_wanted_locked();
  return chunk;
}

void Transfer::complete(const Chunk& chunk, const Status& status) {
  moved_.fetch_add(chunk.done, std::memory_order_relaxed);
  if (!chunk.hole) end_path(chunk, !status.ok() && status.error() != ECANCELED);
  const std::lock_guard lock(mutex_);
  cursor_.complete(chunk, status);
  if (phase_ == Phase::kRunning) {  // not if it was left behind
    const std::uint64_t prefix = cursor_.prefix();
    counters_.advance(observe::Backend::kTransfer, flow_, prefix - counted_);
    counted_ = prefix;
  }
  update_wanted_locked();
}

void Transfer::start_path(Chunk& chunk) const {
  chunk.started = observe::now_ns();
  chunk.before = chunk.done;
  counters_.begin(backend_of(chunk.path), flow_);
}

void Transfer::end_path(const Chunk& chunk, bool failed) const {
  const std::uint64_t moved = chunk.done - chunk.before - chunk.skipped;
  counters_.end(backend_of(chunk.path), flow_, moved, failed, observe::now_ns() - chunk.started);
  memory_.note(backend_of(chunk.path), flow_, moved);
}

void Transfer::give_up_fastpath(const Status& why, RefusalMask causes) {
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

void Transfer::count_moved(Path path, std::uint64_t bytes) {
  path_bytes_[static_cast<std::size_t>(path)].fetch_add(bytes, std::memory_order_relaxed);
}

void Transfer::count_skipped(Chunk& chunk, std::uint64_t bytes) {
  chunk.skipped += bytes;
  hole_bytes_.fetch_add(bytes, std::memory_order_relaxed);
}

// How many threads could serve it: those that do, and one for each remaining chunk. Never 0 before the end, since the
// last thread still has to finish it.
void Transfer::update_wanted_locked() {
  if (phase_ == Phase::kDone) {
    wanted_ = 0;
    return;
  }
  if (phase_ != Phase::kRunning) {
    wanted_ = std::max(serving_, 1);
    return;
  }
  const std::uint64_t chunk = options().chunk_bytes;
  const std::uint64_t chunks = (cursor_.remaining() + chunk - 1) / chunk;
  const int limit = request_.share > 0 ? std::min(request_.share, threads_->share()) : threads_->share();
  const auto useful = static_cast<int>(std::min<std::uint64_t>(chunks, static_cast<std::uint64_t>(limit)));
  wanted_ = std::max(std::min(serving_ + useful, limit), 1);
}

// ---- the end ----

void Transfer::finish() {
  std::uint64_t reached = 0;
  std::uint64_t touched = 0;
  Status status;
  {
    const std::lock_guard lock(mutex_);
    reached = cursor_.end();
    touched = cursor_.position();
    status = cursor_.status();
  }
  bool sync_failed = false;
  if (load()) {
    TargetMemory::Use use = memory_.use();
    if (!use) return;  // left behind at this moment: abandon() does the rest
    const Status finished = memory_.finish_load(reached, touched);
    use.end();
    if (status.ok()) status = finished;
  } else {
    const Status finished = finish_store(reached, touched);
    if (status.ok()) status = finished;
    if (status.ok() && request_.sync != SyncMode::kNone) {
      {
        const std::lock_guard lock(mutex_);
        syncing_ = true;
      }
      status = sync_file();
      sync_failed = !status.ok();
    }
  }
  conclude(reached, status, sync_failed);
}

// The file ends where the store ended: neither short of a hole that was left at its end, nor extended by what was
// preallocated or written beyond a failure.
Status Transfer::finish_store(std::uint64_t reached, std::uint64_t touched) {
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
  // A larger size was set by another writer.
  const bool too_long = size > wanted_size && size <= highest;
  const bool too_short = reached > 0 && size < end;
  // Written pages do not update the modification time; setting the size does.
  const bool unmarked = by_pages_ && reached > 0 && size == wanted_size;
  if (!too_long && !too_short && !unmarked) return {};
  while (backing.operations().truncate(backing.buffered_fd(), wanted_size) != 0) {
    if (errno != EINTR) return Status::from_errno(errno, "setting the backing file's size");
  }
  return {};
}

Status Transfer::sync_file() {
  BackingFile& backing = file();
  while (backing.operations().sync(backing.buffered_fd(), request_.sync == SyncMode::kData) != 0) {
    if (errno != EINTR) return Status::from_errno(errno, "syncing the backing file");
  }
  return {};
}

bool Transfer::refuse(const Status& why) {
  decltype(request_.done) unused;  // destroyed without the lock
  {
    const std::lock_guard lock(mutex_);
    if (phase_ == Phase::kDone) return false;
    unused.swap(request_.done);
  }
  conclude(0, why, false);
  return true;
}

void Transfer::conclude(std::uint64_t count_reached, const Status& status, bool sync_failed) {
  {
    const std::lock_guard lock(mutex_);
    if (phase_ == Phase::kDone) return;
  }
  memory_.release();         // the handle of a finished transfer keeps no memory
  engine_->finished(*this);  // before it is done, so that it is gone for whoever waited for it
  {
    const std::lock_guard lock(mutex_);
    if (phase_ == Phase::kDone) return;
    phase_ = Phase::kDone;
    count_ = count_reached;
    status_ = status;
    sync_failed_ = sync_failed;
    update_wanted_locked();
    counters_.end(observe::Backend::kTransfer, flow_, count_reached, !status.ok(), observe::now_ns() - queued_,
                  counted_);
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
  // Destroyed afterwards: it may own the owner of this transfer.
  if (const auto report = std::exchange(request_.done, nullptr)) report(progress());
}

void Transfer::trace_phases(std::uint64_t bytes, int error) const {
  observe::TraceRecord record;
  record.id = trace_id_;
  record.name = trace_name_;
  record.device = device_->info().index;
  record.flow = static_cast<std::uint8_t>(flow_);
  record.offset = request_.file_offset;
  record.bytes = bytes;
  record.error = error;
  const auto add = [&](observe::TraceKind kind, std::uint64_t start, std::uint64_t end) {
    record.kind = kind;
    record.start = start;
    record.end = end;
    observe::trace::record(record);
  };
  const std::uint64_t now = observe::now_ns();
  const std::uint64_t bind_start = bind_start_.load(std::memory_order_relaxed);
  const std::uint64_t bind_end = bind_end_.load(std::memory_order_relaxed);
  add(observe::TraceKind::kTransfer, queued_, now);
  add(observe::TraceKind::kQueued, queued_, bind_start == 0 ? now : bind_start);
  if (bind_end != 0) add(observe::TraceKind::kBind, bind_start, bind_end);
}

bool Transfer::abandon(bool force) {
  std::uint64_t reached = 0;
  std::uint64_t touched = 0;
  {
    const std::lock_guard lock(mutex_);
    if (phase_ == Phase::kDone || abandoned_) return true;
    const bool may_hang = file().facts().may_hang;
    const auto grace = options().cancel_grace * (load() != may_hang ? kPatience : 1);
    // A store to a disk returns, and its last write must not arrive after the end was reported. A load that is
    // finishing waits for no file.
    const bool harmless = load() ? phase_ != Phase::kFinishing : may_hang || syncing_ || phase_ == Phase::kQueued;
    if (!force && (!harmless || Clock::now() < cancel_time_ + grace)) return false;
    if (!memory_.close(force)) return false;
    abandoned_ = true;
    phase_ = Phase::kFinishing;
    reached = cursor_.prefix();
    touched = cursor_.position();
    count(details_.abandoned);
  }
  const bool in_use = memory_.in_use();
  if (in_use) {
    engine_->count_left_in_use();
    device_->device().blocked_streams().add_lost();
  }
  log_warning("a cancelled ", direction_name(request_.direction), " was left behind by threads that ",
              in_use ? "still use its memory" : "hang in its file");
  // What hangs must not hold the device's memory.
  if (load() && !in_use) {
    const Status finished = memory_.finish_load(reached, touched);
    if (!finished.ok()) log_warning("after a cancelled load: ", finished.message());
  }
  conclude(reached, cancelled_status(), false);
  threads_->update();
  return true;
}

}  // namespace gpufs
