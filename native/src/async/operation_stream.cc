#include "async/operation_stream.h"

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "async/async_engine.h"

namespace gpufs {

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

Status OperationStream::reserve(std::size_t depth, std::chrono::milliseconds patience) {
  BlockedStreams& blocked = device_->device().blocked_streams();
  const auto end = std::chrono::steady_clock::now() + patience;
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
                               std::chrono::milliseconds patience) {
  Status status = reserve(depth, patience);
  if (!status.ok()) return status;
  const std::lock_guard submitting(submit_mutex_);
  Entry entry{last_number_ + 1, false};
  {
    const std::lock_guard lock(mutex_);
    entry.waits = waits_for_values() && waits_ < kMostWaits;
    if (entry.waits) ++waits_;
    entries_.emplace(operation->id(), entry);
    queued_.push_back(operation);
    ++calling_;
    used_ = std::chrono::steady_clock::now();
  }
  // A stream waits in the queue of its last work. If that was a copy, copies of other streams would wait behind it, so
  // here is a fill, which goes by a queue for kernels: the bound on blocked streams leaves others enough of those.
  if (entry.waits) status = stream_->fill_zero(counter_.address + sizeof(std::uint32_t), sizeof(std::uint32_t));
  if (status.ok()) status = stream_->call(&OperationStream::on_reached, operation.get());
  if (!status.ok()) {
    const std::lock_guard lock(mutex_);
    std::erase(queued_, operation);
    --calling_;
    forget(*operation);
    return status.with_context("an operation on a stream");
  }
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
