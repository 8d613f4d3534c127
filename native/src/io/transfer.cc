#include "io/transfer.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <utility>

#include "base/cpus.h"
#include "base/log.h"
#include "device/device_context.h"
#include "io/file_io.h"
#include "io/pipeline.h"
#include "io/transfer_engine.h"
#include "observe/trace.h"

namespace gpufs {
namespace {

using Clock = std::chrono::steady_clock;

// From here on writing a file's pages side by side is faster than writing it: measured 0.6 of it with 2 CPUs, 1.4
// with 16.
constexpr int kCpusForPages = 4;
// A cancelled transfer waits this many times longer before it leaves a thread behind in two cases: a store to a file
// that may hang, since its last write may still arrive afterwards, and a load from a file that cannot hang, whose
// threads return as soon as they get a CPU or the disk.
constexpr int kPatience = 20;

std::uint64_t group_of(const BackingFacts& file) {
  return file.may_hang ? Scheduler::Job::kMayHang : file.always_hot ? Scheduler::Job::kNeverStalls : file.disk;
}

TransferFacts facts_of(const TransferRequest& request) {
  const std::shared_ptr<DeviceContext>& device = request.target->device();
  const observe::DeviceCounters& counters = device->counters();
  const observe::Flow flow = flow_of(request.direction);
  return {request,
          device,
          counters,
          counters.region().details(counters.device(), flow),
          flow,
          request.trace_id != 0 ? request.trace_id : observe::trace::next_id(),
          observe::trace::on() ? observe::trace::name_of_file(request.file->buffered_fd()) : 0};
}

// Transfers stay within it: see TransferEngine::check().
class ProgramMemory final : public TransferTarget {
 public:
  ProgramMemory(std::shared_ptr<DeviceContext> device, DeviceAddress address, std::uint64_t bytes)
      : device_(std::move(device)), address_(address), bytes_(bytes) {}

  [[nodiscard]] const std::shared_ptr<DeviceContext>& device() const override { return device_; }
  [[nodiscard]] std::uint64_t size() const override { return bytes_; }
  [[nodiscard]] std::uint64_t limit() const override { return bytes_; }
  [[nodiscard]] DeviceAddress address() const override { return address_; }
  Result<Pin> pin_for_read(std::uint64_t offset, std::uint64_t bytes, Wait /*wait*/) override {
    return Pin{{{{offset, bytes}, address_ + offset}}, nullptr, device_.get()};
  }
  Result<Pin> pin_for_write(std::uint64_t offset, std::uint64_t bytes, Wait wait) override {
    return pin_for_read(offset, bytes, wait);
  }
  Result<std::uint64_t> seek_hole(std::uint64_t /*offset*/) override { return bytes_; }

 private:
  const std::shared_ptr<DeviceContext> device_;
  const DeviceAddress address_;
  const std::uint64_t bytes_;
};

}  // namespace

std::shared_ptr<TransferTarget> program_memory(std::shared_ptr<DeviceContext> device, DeviceAddress address,
                                               std::uint64_t bytes) {
  return std::make_shared<ProgramMemory>(std::move(device), address, bytes);
}

Transfer::Transfer(std::shared_ptr<TransferEngine> engine, std::shared_ptr<Scheduler> scheduler,
                   const TransferRequest& request)
    : Job(request.client, group_of(request.file->facts())),
      engine_(std::move(engine)),
      scheduler_(std::move(scheduler)),
      facts_(facts_of(request)),
      queued_(observe::now_ns()),
      memory_(std::exchange(facts_.request.target, nullptr), request.target_offset, request.direction,
              engine_->options().chunk_bytes),
      store_file_(*request.file, request.file_offset) {
  facts_.counters.begin(observe::Backend::kTransfer, facts_.flow);
}

const IoOptions& Transfer::options() const { return engine_->options(); }

TransferProgress Transfer::progress() const {
  const std::lock_guard lock(mutex_);
  TransferProgress progress = progress_;
  progress.state = phase_ == Phase::kQueued ? TransferState::kQueued
                   : phase_ == Phase::kDone ? TransferState::kDone
                                            : TransferState::kRunning;
  if (phase_ != Phase::kDone) progress.prefix = cursor_.prefix();
  return progress;
}

void Transfer::cancel() {
  bool unserved = false;
  {
    const std::lock_guard lock(mutex_);
    if (cancelled_.exchange(true) || phase_ == Phase::kDone) return;
    cancel_time_ = Clock::now();
    unserved = phase_ == Phase::kQueued;
    if (unserved) phase_ = Phase::kFinishing;
  }
  if (unserved) {
    conclude(0, cancelled_status(), false);
    scheduler_->update();
  } else {
    engine_->watch_cancelled();
  }
}

bool Transfer::wait(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  return done_.wait_for(lock, timeout, [&] { return phase_ == Phase::kDone; });
}

void Transfer::wait() {
  std::unique_lock lock(mutex_);
  done_.wait(lock, [&] { return phase_ == Phase::kDone; });
}

Status Transfer::close() {
  cancel();
  if (wait(facts_.device->device().blocked_streams().stall_timeout())) return {};
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

void Transfer::release(std::shared_ptr<Transfer> transfer) {
  const std::shared_ptr<Scheduler> scheduler = transfer->scheduler_;
  scheduler->release(std::move(transfer));
}

void Transfer::serve(const Scheduler::Turn& turn) {
  if (!enter()) return;
  Pipeline(*this).run(turn);
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
  prepare_start_.store(observe::now_ns(), std::memory_order_relaxed);
  Result<Plan> plan = prepare();
  prepare_end_.store(observe::now_ns(), std::memory_order_relaxed);
  {
    const std::lock_guard lock(mutex_);
    // Otherwise the transfer was left behind in the meantime, and leave() finds it done.
    if (phase_ == Phase::kPreparing) {
      phase_ = Phase::kRunning;
      cursor_ = plan.ok() ? PlanCursor(plan.take()) : PlanCursor(plan.status());
      progress_.total = cursor_.end();
      update_useful_threads_locked();
    }
  }
  scheduler_->update();
  return true;
}

void Transfer::leave() {
  {
    const std::lock_guard lock(mutex_);
    --serving_;
    update_useful_threads_locked();
    if (serving_ > 0 || phase_ != Phase::kRunning || cursor_.has_next()) return;
    phase_ = Phase::kFinishing;
  }
  finish();
}

Result<std::shared_ptr<CopyBatches>> Transfer::copy_batches() {
  const std::lock_guard lock(copy_batches_mutex_);
  if (std::shared_ptr<CopyBatches> existing = copy_batches_.lock()) return existing;
  Result<std::shared_ptr<CopyBatches>> made =
      CopyBatches::create(*facts_.device, load() ? CopyDirection::kToDevice : CopyDirection::kToHost);
  if (made.ok()) copy_batches_ = made.value();
  return made;
}

// ---- preparing: the facts, and the plan that follows from them ----

Result<Plan> Transfer::prepare() {
  if (cancelled_) return cancelled_status();
  Status ready = facts_.device->device().health();
  if (ready.ok()) ready = facts_.device->device().bind_thread();
  if (!ready.ok()) return ready;
  std::uint64_t file_size = 0;
  if (load() || !file().facts().block_device) {
    file_size = TRY(size_of(file()));
  }
  const std::uint64_t total = TRY(total_bytes(file_size));
  if (total == 0) return Plan();
  facts_.total = total;
  Result<Plan> plan = make_plan(total);
  if (!plan.ok()) return plan;
  if (load()) return leave_holes_out(file_size, plan.value());
  TRY(preallocate(file_size, plan.value()));
  return plan;
}

// The request, clipped at the end of its source.
Result<std::uint64_t> Transfer::total_bytes(std::uint64_t file_size) {
  std::uint64_t available = 0;
  if (load()) {
    available = file_size > request().file_offset ? file_size - request().file_offset : 0;
    if (file_size == 0 && request().bytes > 0) {
      // Empty, or a file that has bytes and reports no size (/proc): then one chunk is read.
      std::byte probe;
      const Moved first = read_range(file(), IoMode::kBuffered, &probe, 1, request().file_offset);
      if (!first.status.ok()) return first.status;
      if (first.bytes > 0) available = options().chunk_bytes;
    }
  }
  const TargetMemory::AccessGuard access = memory_.access();
  if (!access) return cancelled_status();
  if (!load()) {
    const std::uint64_t size = memory_.target().size();
    available = size > request().target_offset ? size - request().target_offset : 0;
  } else if (memory_.target().address() != 0) {
    // A program's memory is filled as far as it goes; a buffer reports EFBIG when it grows too large.
    available = std::min(available, memory_.target().limit() - request().target_offset);
  }
  const std::uint64_t total = std::min(request().bytes, available);
  if (total > kLargestOffset - request().file_offset) {
    return Status(EFBIG, "the range ends beyond the largest file offset");
  }
  if (load()) memory_.claim(total);
  return total;
}

Result<Plan> Transfer::make_plan(std::uint64_t total) {
  const BackingFacts& known = file().facts();
  // The first granule of a buffer is aligned for every file.
  const TransferTarget& target = memory_.target();
  const std::uint64_t address = target.address() + target.placement() + request().target_offset;
  PlanRequest wanted;
  wanted.file = &known;
  wanted.file_offset = request().file_offset;
  wanted.bytes = total;
  wanted.memory_phase = address % known.memory_align;
  wanted.vendor_refusals = engine_->fastpath().refusals();
  if (options().file_systems.allow(known.file_system)) wanted.waived = mask_of(Refusal::kFileSystem);
  wanted.fastpath = fastpath_mode();
  wanted.chunk_bytes = options().chunk_bytes;
  Device& device = facts_.device->device();
  const bool reached = target.address() == 0 ? target.residence()->info().files_reach_memory : device.holds(address);
  if (!reached) wanted.vendor_refusals |= mask_of(Refusal::kMemoryKind);
  RefusalMask refusals = 0;
  Result<Plan> plan = Plan::make(wanted, &refusals);
  if (plan.ok() && plan.value().uses_fastpath()) {
    Result<FastpathFile*> attached = file().fastpath_file(engine_->fastpath());
    if (attached.ok()) {
      facts_.fastpath_file = attached.value();
    } else {
      log_info("fastpath does not take a file: ", attached.status().message());
      wanted.vendor_refusals |= mask_of(Refusal::kNotAccepted);
      plan = Plan::make(wanted, &refusals);
      if (!plan.ok()) plan = Status(plan.error(), plan.status().message() + ": " + attached.status().message());
    }
  }
  facts_.counters.refuse(observe::Backend::kFastpath, facts_.flow, refusals);
  const std::lock_guard lock(mutex_);
  progress_.refusals = refusals;
  return plan;
}

// Holes of a load's file are not read and get no memory.
Result<Plan> Transfer::leave_holes_out(std::uint64_t file_size, const Plan& plan) {
  if (!request().sparse || !memory_.can_have_holes()) return plan;
  HoleSearch search;
  search.file_offset = request().file_offset;
  search.file_size = file_size;
  search.target_offset = request().target_offset;
  search.bytes = plan.bytes();
  search.granule = facts_.device->info().granule;
  Extents holes = TRY(holes_of(file(), search, cancelled_));
  if (holes.empty()) return plan;
  Plan cut = plan.without_holes(holes);
  const TargetMemory::AccessGuard access = memory_.access();
  if (!access) return cancelled_status();
  // Before the first chunk is handed out, since freeing memory waits for its users.
  TRY(memory_.punch(std::move(holes), cancelled_));
  return cut;
}

Status Transfer::preallocate(std::uint64_t file_size, const Plan& plan) {
  const BackingFacts& known = file().facts();
  store_file_.set_original_size(file_size);
  if (!store_file_.grows_by(plan.bytes()) || plan.bytes() <= options().chunk_bytes) return {};
  const Switch wish = options().write_pages;
  const bool side_by_side =
      wish == Switch::kOn || (wish == Switch::kAuto && usable_cpus(facts_.device->info().numa_node) >= kCpusForPages);
  if (side_by_side && known.always_hot && known.readable) {
    store_file_.prepare_pages(plan.bytes());
    return {};
  }
  if (known.block_device || known.may_hang || file().direct_fd() < 0) return {};
  if (options().direct == Switch::kOff && !plan.uses_fastpath()) return {};
  {
    const TargetMemory::AccessGuard access = memory_.access();
    if (!access) return cancelled_status();
    const std::uint64_t start = request().target_offset;
    if (request().sparse && memory_.target().has_hole(start, start + plan.bytes())) return {};
  }
  return store_file_.preallocate(plan.bytes(), cancelled_);
}

// ---- chunks ----

std::optional<Chunk> Transfer::next_chunk() {
  const std::lock_guard lock(mutex_);
  if (phase_ != Phase::kRunning) return std::nullopt;
  if (cancelled_) cursor_.stop(cancelled_status());
  std::optional<Chunk> chunk = cursor_.next();
  update_useful_threads_locked();
  return chunk;
}

void Transfer::complete(const ChunkProgress& progress, const Status& status) {
  const std::lock_guard lock(mutex_);
  if (phase_ != Phase::kRunning) return;  // the transfer was left behind
  cursor_.complete(progress.chunk, progress.done, status);
  progress_.moved += progress.done;
  progress_.hole_bytes += progress.skipped;
  for (std::size_t path = 0; path < kPathCount; ++path) progress_.path_bytes[path] += progress.path_bytes[path];
  const std::uint64_t prefix = cursor_.prefix();
  facts_.counters.advance(observe::Backend::kTransfer, facts_.flow, prefix - counted_);
  counted_ = prefix;
  update_useful_threads_locked();
}

bool Transfer::refuse_fastpath(RefusalMask causes) {
  const std::lock_guard lock(mutex_);
  if ((causes & ~progress_.refusals) == 0) return false;
  facts_.counters.refuse(observe::Backend::kFastpath, facts_.flow, causes & ~progress_.refusals);
  progress_.refusals |= causes;
  return true;
}

void Transfer::give_up_fastpath(const Status& why, RefusalMask causes) {
  if (!refuse_fastpath(causes | mask_of(Refusal::kFailedBefore))) return;
  {
    const std::lock_guard lock(mutex_);
    if (may_change_path()) cursor_.give_up_fastpath();
  }
  log_info("fastpath gave up on a ", direction_name(request().direction), ": ", why.message());
}

// The threads that serve it, and one for each remaining chunk. Never 0 before the end, since the last thread still has
// to finish it.
void Transfer::update_useful_threads_locked() {
  if (phase_ == Phase::kDone) return set_useful_threads(0);
  if (phase_ != Phase::kRunning) return set_useful_threads(std::max(serving_, 1));
  const std::uint64_t chunk = options().chunk_bytes;
  const std::uint64_t chunks = (cursor_.remaining() + chunk - 1) / chunk;
  const int limit = request().share > 0 ? std::min(request().share, scheduler_->share()) : scheduler_->share();
  const auto useful = static_cast<int>(std::min<std::uint64_t>(chunks, static_cast<std::uint64_t>(limit)));
  set_useful_threads(std::max(std::min(serving_ + useful, limit), 1));
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
    const TargetMemory::AccessGuard access = memory_.access();
    if (!access) return;  // left behind at this moment: abandon() does the rest
    const Status finished = memory_.finish_load(reached, touched);
    if (status.ok()) status = finished;
  } else {
    const Status finished = store_file_.finish(reached, touched);
    if (status.ok()) status = finished;
    if (status.ok() && request().sync != SyncMode::kNone) {
      {
        const std::lock_guard lock(mutex_);
        syncing_ = true;
      }
      status = store_file_.sync(request().sync == SyncMode::kData);
      sync_failed = !status.ok();
    }
  }
  conclude(reached, status, sync_failed);
}

bool Transfer::refuse(const Status& why) {
  std::function<void(const TransferProgress&)> unused;  // destroyed without the lock
  {
    const std::lock_guard lock(mutex_);
    if (phase_ == Phase::kDone) return false;
    unused.swap(facts_.request.done);
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
    progress_.prefix = count_reached;
    progress_.status = status;
    progress_.sync_failed = sync_failed;
    update_useful_threads_locked();
    facts_.counters.end(observe::Backend::kTransfer, facts_.flow, count_reached, !status.ok(),
                        observe::now_ns() - queued_, counted_);
    if (observe::trace::on()) trace_phases(count_reached, status.error());
    if (status.error() == ECANCELED) {
      count(facts_.details.cancelled);
    } else if (!status.ok()) {
      count(facts_.details.failed);
    }
    if (event_.valid()) {
      const std::uint64_t one = 1;
      (void)!::write(event_.get(), &one, sizeof one);
    }
    done_.notify_all();
  }
  // Destroyed afterwards: it may own the owner of this transfer.
  if (const auto report = std::exchange(facts_.request.done, nullptr)) report(progress());
}

void Transfer::trace_phases(std::uint64_t bytes, int error) const {
  observe::TraceRecord record;
  record.id = facts_.trace_id;
  record.name = facts_.trace_name;
  record.device = facts_.device->info().index;
  record.flow = static_cast<std::uint8_t>(facts_.flow);
  record.offset = request().file_offset;
  record.bytes = bytes;
  record.error = error;
  const auto add = [&](observe::TraceKind kind, std::uint64_t start, std::uint64_t end) {
    record.kind = kind;
    record.start = start;
    record.end = end;
    observe::trace::record(record);
  };
  const std::uint64_t now = observe::now_ns();
  const std::uint64_t start = prepare_start_.load(std::memory_order_relaxed);
  const std::uint64_t end = prepare_end_.load(std::memory_order_relaxed);
  add(observe::TraceKind::kTransfer, queued_, now);
  add(observe::TraceKind::kQueued, queued_, start == 0 ? now : start);
  if (end != 0) add(observe::TraceKind::kBind, start, end);
}

void Transfer::abandon(bool force) {
  std::uint64_t reached = 0;
  std::uint64_t touched = 0;
  {
    const std::lock_guard lock(mutex_);
    if (phase_ == Phase::kDone || abandoned_) return;
    const bool may_hang = file().facts().may_hang;
    const auto grace = options().cancel_grace * (load() != may_hang ? kPatience : 1);
    // A store to a disk returns, and its last write must not arrive after the end was reported. A load that is
    // finishing waits for no file.
    const bool harmless = load() ? phase_ != Phase::kFinishing : may_hang || syncing_;
    if (!force && (!harmless || Clock::now() < cancel_time_ + grace)) return;
    if (!memory_.close(force)) return;
    abandoned_ = true;
    phase_ = Phase::kFinishing;
    reached = cursor_.prefix();
    touched = cursor_.position();
    count(facts_.details.abandoned);
  }
  const bool in_use = memory_.in_use();
  if (in_use) {
    engine_->count_left_in_use();
    facts_.device->device().blocked_streams().add_lost();
  }
  log_warning("a cancelled ", direction_name(request().direction), " was left behind by threads that ",
              in_use ? "still use its memory" : "hang in its file");
  // A transfer that hangs must not hold the device's memory.
  if (load() && !in_use) {
    const Status finished = memory_.finish_load(reached, touched);
    if (!finished.ok()) log_warning("after a cancelled load: ", finished.message());
  }
  conclude(reached, cancelled_status(), false);
  scheduler_->update();
}

}  // namespace gpufs
