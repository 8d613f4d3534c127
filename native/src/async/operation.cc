#include "async/operation.h"

#include <algorithm>
#include <cerrno>
#include <limits>
#include <string>
#include <utility>

#include "async/async_engine.h"
#include "async/completion_queue.h"
#include "base/scope_guard.h"
#include "observe/trace.h"

namespace gpufs {
namespace {

constexpr auto kLargestNumber = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());

Status check_number(std::uint64_t value, const char* what, bool aligned) {
  if (value > kLargestNumber) return Status(EINVAL, std::string("the ") + what + " is negative or too large");
  if (aligned && value % OperationStream::kAlignment != 0) {
    return Status(EINVAL, std::string("the ") + what + " is not a multiple of 4096, as was promised for the stream");
  }
  return {};
}

// Replaces a number by that of its cell, if it has one.
void read_cell(const std::uint64_t* cell, std::uint64_t* number) {
  if (cell == nullptr) return;
  // The kernel or thread that writes it does so before the stream reaches the operation.
  *number = std::atomic_ref<std::uint64_t>(*const_cast<std::uint64_t*>(cell)).load(std::memory_order_acquire);
}

Status check_numbers(const OperationRequest& request, const OperationStream* stream) {
  const TransferRequest& transfer = request.transfer;
  const bool aligned = stream != nullptr && stream->promises().aligned;
  Status status = check_number(transfer.file_offset, "file offset", aligned);
  if (status.ok()) status = check_number(transfer.target_offset, "buffer offset", aligned);
  const bool to_the_end = request.bytes_cell == nullptr && transfer.bytes == kToTheEnd;
  if (status.ok() && !to_the_end) status = check_number(transfer.bytes, "size", aligned);
  return status.ok() ? TransferEngine::check(transfer) : status;
}

// Writes the outcome to where the program wants it.
void publish(std::int64_t* count, const Status& status, std::uint64_t bytes) {
  if (count == nullptr) return;
  const bool nothing = !status.ok() && bytes == 0;
  std::atomic_ref<std::int64_t>(*count).store(nothing ? -status.error() : static_cast<std::int64_t>(bytes),
                                              std::memory_order_release);
}

}  // namespace

Operation::Operation(std::uint64_t id, OperationRequest request, std::shared_ptr<AsyncEngine> engine,
                     std::shared_ptr<OperationStream> stream, std::shared_ptr<CompletionQueue> queue)
    : id_(id),
      engine_(std::move(engine)),
      stream_(std::move(stream)),
      queue_(std::move(queue)),
      device_(request.transfer.target->device()),
      may_hang_(request.transfer.file->facts().may_hang),
      request_(std::move(request)) {
  if (!observe::trace::on()) return;
  trace_name_ = observe::trace::name_of_file(request_.transfer.file->buffered_fd());
  submitted_at_ = observe::now_ns();
}

Status Operation::check(OperationRequest& request, const OperationStream* stream) {
  TransferRequest& transfer = request.transfer;
  if (transfer.target == nullptr) return Status(EINVAL, "an operation needs a file and memory");
  const DeviceContext& device = *transfer.target->device();
  if (stream != nullptr) {
    if (stream->device().get() != &device) {
      return Status(EINVAL, "the memory is on " + name_of(device) + ", the stream on " + name_of(*stream->device()));
    }
    const auto fix = [](const std::uint64_t*& cell, std::uint64_t* number) {
      read_cell(std::exchange(cell, nullptr), number);
    };
    if (stream->promises().fixed_target_offset) fix(request.target_offset_cell, &transfer.target_offset);
    if (stream->promises().fixed_file_offset) fix(request.file_offset_cell, &transfer.file_offset);
    if (stream->promises().fixed_bytes) fix(request.bytes_cell, &transfer.bytes);
  }
  read_cell(request.bytes_cell, &transfer.bytes);
  // Late offsets are not known yet.
  if (request.file_offset_cell != nullptr) transfer.file_offset = 0;
  if (request.target_offset_cell != nullptr) transfer.target_offset = 0;
  const Status status = check_numbers(request, stream);
  return status.ok() ? device.device().health() : status;
}

bool Operation::reach() {
  const std::lock_guard lock(mutex_);
  reached_ = true;
  if (submitted_at_ != 0) reached_at_ = observe::now_ns();
  return phase_ != Phase::kDone;
}

Result<Operation::Bound> Operation::bind() {
  const std::lock_guard lock(mutex_);
  if (phase_ != Phase::kQueued) return Bound::kOver;
  phase_ = Phase::kReady;
  TransferRequest& transfer = request_.transfer;
  const std::uint64_t most = transfer.bytes;
  read_cell(request_.file_offset_cell, &transfer.file_offset);
  read_cell(request_.target_offset_cell, &transfer.target_offset);
  read_cell(request_.bytes_cell, &transfer.bytes);
  if (transfer.bytes > most) {
    return Status(EINVAL, "the size has grown from " + std::to_string(most) + " to " + std::to_string(transfer.bytes) +
                              " since the operation was submitted");
  }
  TRY(check_numbers(request_, stream_.get()));
  return transfer.bytes == 0 && transfer.sync == SyncMode::kNone ? Bound::kNothingToMove : Bound::kReady;
}

Result<bool> Operation::start(TransferEngine& transfers, std::function<void(const TransferProgress&)> moved,
                              std::shared_ptr<void>* leftover) {
  // This thread, too, holds what the transfer needs while it is started.
  struct Held {
    TransferRequest request;
    std::shared_ptr<Transfer> transfer;
  };
  const auto held = std::make_shared<Held>();
  {
    const std::lock_guard lock(mutex_);
    if (phase_ != Phase::kReady) return false;
    phase_ = Phase::kRunning;
    held->request = request_.transfer;
    if (submitted_at_ != 0) {
      started_at_ = observe::now_ns();
      transfer_id_ = held->request.trace_id = observe::trace::next_id();
    }
  }
  held->request.done = std::move(moved);
  Result<std::shared_ptr<Transfer>> started = transfers.start(held->request);
  held->request.done = nullptr;
  if (!started.ok()) return started.status();
  held->transfer = started.take();
  bool cancelled = false;
  {
    const std::lock_guard lock(mutex_);
    if (!over()) {
      transfer_ = held->transfer;
      // The operation has references of its own, which nobody drops while this lock is held.
      held->request = TransferRequest{};
      cancelled = cancelled_;
      if (!cancelled) {
        held->transfer.reset();
        return true;
      }
    }
  }
  if (cancelled) held->transfer->cancel();
  *leftover = held;
  return true;
}

void Operation::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return phase_ == Phase::kDone || released_early_; });
}

bool Operation::end(Completion completion, bool unless_running) {
  OperationRequest request;
  std::shared_ptr<Transfer> transfer;
  {
    const std::lock_guard lock(mutex_);
    if (over() || (unless_running && phase_ == Phase::kRunning)) return false;
    phase_ = Phase::kEnding;
    request = std::exchange(request_, OperationRequest{});
    transfer = std::move(transfer_);
    if (completion.status.error() == ECANCELED && !cancel_reason_.ok()) completion.status = cancel_reason_;
  }
  completion.cookie = request.cookie;
  completion.id = id_;
  if (submitted_at_ != 0) trace_phases(request, completion);
  publish(request.count, completion.status, completion.prefix);
  // Before the stream goes on, so that the operations of a stream are collected in its order.
  queue_->deliver(std::move(completion));
  bool holds_stream = false;
  {
    const std::lock_guard lock(mutex_);
    phase_ = Phase::kDone;
    holds_stream = reached_ && !released_early_;
  }
  changed_.notify_all();
  if (holds_stream) stream_->release(*this);
  engine_->unreserve(1);
  engine_->drop(may_hang_, std::move(request.transfer.target), std::move(transfer), std::move(request.transfer.file));
  return true;
}

bool Operation::cancel(const Status& why) {
  for (;;) {
    std::shared_ptr<Transfer> transfer;
    bool running = false;
    {
      const std::lock_guard lock(mutex_);
      if (over()) return false;
      if (!cancelled_) cancel_reason_ = why;
      cancelled_ = true;
      running = phase_ == Phase::kRunning;
      transfer = transfer_;
    }
    if (running) {
      // Without a transfer it is being started, and start() finds it cancelled.
      if (transfer != nullptr) transfer->cancel();
      return true;
    }
    Completion completion;
    completion.status = Status(ECANCELED, "cancelled");
    if (end(std::move(completion), /*unless_running=*/true)) return true;
  }
}

bool Operation::retract() {
  {
    const std::lock_guard lock(mutex_);
    if (over()) return false;
    phase_ = Phase::kDone;
  }
  queue_->remove(id_);
  engine_->unreserve(1);
  return true;
}

bool Operation::release_stream_early() {
  {
    const std::lock_guard lock(mutex_);
    if (stream_ == nullptr || phase_ != Phase::kRunning || !reached_ || released_early_) return false;
    released_early_ = true;
    publish(std::exchange(request_.count, nullptr), Status(ETIMEDOUT, ""), 0);
  }
  changed_.notify_all();
  stream_->release(*this);
  return true;
}

void Operation::trace_phases(const OperationRequest& request, const Completion& completion) const {
  observe::TraceRecord record;
  record.id = id_;
  record.name = trace_name_;
  record.device = device_->info().index;
  record.flow = static_cast<std::uint8_t>(flow_of(request.transfer.direction));
  record.error = completion.status.error();
  const auto write = [&](observe::TraceKind kind, std::uint64_t start, std::uint64_t end, std::uint64_t offset,
                         std::uint64_t bytes) {
    record.kind = kind;
    record.start = start;
    record.end = end;
    record.offset = offset;
    record.bytes = bytes;
    observe::trace::record(record);
  };
  const std::uint64_t now = observe::now_ns();
  write(observe::TraceKind::kOperation, submitted_at_, now, request.trace_cookie, completion.prefix);
  if (stream_ != nullptr) {
    write(observe::TraceKind::kStreamWait, submitted_at_, reached_at_ != 0 ? reached_at_ : now, request.trace_cookie,
          0);
  }
  if (started_at_ != 0) write(observe::TraceKind::kMove, started_at_, now, transfer_id_, completion.prefix);
}

// ==== streams ====

OperationStream::OperationStream(std::shared_ptr<AsyncEngine> engine, std::shared_ptr<DeviceContext> device,
                                 std::unique_ptr<Stream> stream, std::unique_ptr<Event> passed, PinnedBlock counter,
                                 StreamPromises promises, Origin origin)
    : engine_(std::move(engine)),
      device_(std::move(device)),
      stream_(std::move(stream)),
      passed_(std::move(passed)),
      counter_(counter),
      promises_(promises),
      origin_(origin),
      used_(std::chrono::steady_clock::now()) {}

OperationStream::~OperationStream() {
  if (waits_for_values()) device_->pinned().release(counter_);
}

std::size_t OperationStream::outstanding() const {
  const std::lock_guard lock(mutex_);
  return outstanding_;
}

Status OperationStream::call(HostFunction function, void* argument) {
  const std::lock_guard submitting(submit_mutex_);
  if (closed()) return Status(EBADF, "the stream is closed");
  return stream_->call(function, argument);
}

void OperationStream::close() {
  const std::lock_guard submitting(submit_mutex_);
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
    changed_.notify_all();
  }
  if (origin_ != Origin::kOwn) return;
  // The stream is destroyed only after the work that the program itself queued here.
  const Status recorded = stream_->record(*passed_);
  const std::lock_guard lock(mutex_);
  if (recorded.ok()) ever_recorded_ = true;
}

// ---- submitting ----

Status OperationStream::reserve(std::size_t depth, std::chrono::milliseconds timeout) {
  BlockedStreams& blocked = device_->device().blocked_streams();
  const auto end = std::chrono::steady_clock::now() + timeout;
  std::unique_lock lock(mutex_);
  if (!changed_.wait_until(lock, end, [&] { return closed_ || outstanding_ < depth; })) {
    return Status(EAGAIN,
                  std::to_string(outstanding_) + " operations are outstanding on the stream, and it is blocked");
  }
  if (outstanding_ == 0) {
    lock.unlock();
    if (!blocked.add(end - std::chrono::steady_clock::now())) {
      return Status(EAGAIN, std::to_string(BlockedStreams::kMost) +
                                " other streams of the device have outstanding operations, which is the maximum: wait"
                                " for some of those first");
    }
    lock.lock();
    if (closed_ || outstanding_ > 0) blocked.remove();
  }
  if (closed_) return Status(EBADF, "the stream is closed");
  ++outstanding_;
  return {};
}

void OperationStream::forget(const Operation& operation) {
  const auto entry = entries_.find(operation.id());
  if (entry->second.waits) --waits_;
  entries_.erase(entry);
  if (--outstanding_ == 0) device_->device().blocked_streams().remove();
  changed_.notify_all();
}

Status OperationStream::submit(const std::shared_ptr<Operation>& operation, std::size_t depth,
                               std::chrono::milliseconds timeout) {
  TRY(reserve(depth, timeout));
  const std::lock_guard submitting(submit_mutex_);
  Outstanding entry{last_number_ + 1, false};
  {
    const std::lock_guard lock(mutex_);
    entry.waits = waits_for_values() && waits_ < kMostWaits;
    if (entry.waits) ++waits_;
    entries_.emplace(operation->id(), entry);
    queued_.push_back(operation);
    ++calling_;
    used_ = std::chrono::steady_clock::now();
  }
  bool fills = false;
  ScopeGuard undo([&] {
    {
      const std::lock_guard lock(mutex_);
      std::erase(queued_, operation);
      --calling_;
      forget(*operation);
      if (fills) recorded_ = false;
    }
    // The device may still have to do the fill, into memory that the stream must keep until then.
    if (fills) record();
  });
  // Before anything is queued: a graph would repeat it at each launch.
  Status status = stream_->check_capture();
  fills = status.ok() && entry.waits;
  // A stream waits in the queue of its last work. If that was a copy, copies of other streams would wait behind it, so
  // here is a fill, which goes by a queue for kernels: the bound on blocked streams leaves others enough of those.
  if (fills) status = stream_->fill_zero(counter_.address + sizeof(std::uint32_t), sizeof(std::uint32_t));
  if (status.ok()) status = stream_->call(&OperationStream::on_reached, operation.get());
  if (!status.ok()) return status.with_context("an operation on a stream");
  undo.dismiss();
  ++last_number_;
  if (entry.waits) {
    wait_for(*operation, entry.number);
  } else if (!waits_for_values()) {
    record();
  }
  return {};
}

void OperationStream::wait_for(Operation& operation, std::uint32_t number) {
  {
    const std::lock_guard lock(mutex_);
    recorded_ = false;
  }
  const Status waits = stream_->wait_for_value(counter_.address, number);
  // If the stream does not wait, the operation must not move anything while later work of the stream runs.
  if (!waits.ok() && operation.cancel(waits.with_context("an operation on a stream"))) operation.wait();
  record();
}

void OperationStream::record() {
  // Where calls of the host hold the stream, one event at a time reports a failure as well as many, which would fill
  // the device's queues.
  if (!waits_for_values()) {
    const Result<bool> passed = passed_->query();
    if (passed.ok() && !passed.value()) return;
  }
  if (!stream_->record(*passed_).ok()) return;
  const std::lock_guard lock(mutex_);
  recorded_ = ever_recorded_ = true;
}

// ---- on a driver's thread ----

void OperationStream::on_reached(void* operation) noexcept {
  auto* const reached = static_cast<Operation*>(operation);
  // queued_ has kept it until now, and it keeps the stream.
  reached->stream()->reach(reached);
}

void OperationStream::reach(Operation* reached) {
  std::shared_ptr<Operation> operation;
  bool waits = false;
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(queued_.begin(), queued_.end(),
                                    [&](const std::shared_ptr<Operation>& each) { return each.get() == reached; });
    operation = std::move(*found);
    queued_.erase(found);
    waits = entries_.at(operation->id()).waits;
  }
  if (!operation->reach()) {
    release(*operation);
  } else {
    engine_->start(operation);
    if (!waits) operation->wait();
  }
  // Perhaps the last reference, to the stream as well, which this thread must not destroy: calling_ keeps it.
  operation.reset();
  const std::lock_guard lock(mutex_);
  --calling_;
  changed_.notify_all();
}

void OperationStream::release(const Operation& operation) {
  const std::lock_guard lock(mutex_);
  const std::uint32_t number = entries_.at(operation.id()).number;
  device_->device().blocked_streams().note_progress();
  // Before the stream goes on: what is queued behind may count on it.
  forget(operation);
  if (waits_for_values() && static_cast<std::int32_t>(number - counter().load(std::memory_order_relaxed)) > 0) {
    counter().store(number, std::memory_order_release);
    counter().notify_all();
  }
}

// ---- for the engine ----

std::deque<std::shared_ptr<Operation>> OperationStream::queued() const {
  const std::lock_guard lock(mutex_);
  return queued_;
}

Status OperationStream::failure() {
  {
    const std::lock_guard lock(mutex_);
    if (queued_.empty()) return {};
  }
  const Status health = device_->device().health();
  return health.ok() ? passed_->query().status() : health;
}

bool OperationStream::idle() {
  {
    const std::lock_guard lock(mutex_);
    if (!queued_.empty() || outstanding_ > 0 || calling_ > 0 || !recorded_) return false;
    if (!ever_recorded_) return true;
  }
  // A device that has failed reads nothing any more.
  const Result<bool> passed = passed_->query();
  return !passed.ok() || passed.value();
}

bool OperationStream::closed() const {
  const std::lock_guard lock(mutex_);
  return closed_;
}

bool OperationStream::unused(std::chrono::milliseconds duration) const {
  const std::lock_guard lock(mutex_);
  return std::chrono::steady_clock::now() - used_ >= duration;
}

}  // namespace gpufs
