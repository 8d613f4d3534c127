#include "async/operation_stream.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <utility>

#include "async/async_engine.h"

namespace gpufs {

OperationStream::OperationStream(std::shared_ptr<AsyncEngine> engine, std::shared_ptr<DeviceContext> device,
                                 std::unique_ptr<Stream> stream, std::shared_ptr<Event> passed,
                                 std::shared_ptr<StreamCounters> counters, StreamCounter counter,
                                 std::shared_ptr<StreamHolds> holds, StreamPromises promises, Origin origin)
    : engine_(std::move(engine)),
      device_(std::move(device)),
      stream_(std::move(stream)),
      passed_(std::move(passed)),
      counters_(std::move(counters)),
      counter_(counter),
      holds_(std::move(holds)),
      promises_(promises),
      origin_(origin),
      last_(counter.word == nullptr ? 0 : std::atomic_ref<std::uint32_t>(*counter.word).load()),
      used_(std::chrono::steady_clock::now()) {}

OperationStream::~OperationStream() {
  if (counter_.word != nullptr) counters_->give_back(counter_);
}

std::size_t OperationStream::outstanding() const {
  const std::lock_guard lock(mutex_);
  return outstanding_;
}

Status OperationStream::call(HostFunction function, void* argument) {
  const std::lock_guard submitting(submit_mutex_);
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return Status(EBADF, "the stream is closed");
  }
  return stream_->call(function, argument);
}

Status OperationStream::synchronize() { return stream_->synchronize(); }

Status OperationStream::room(std::size_t depth, std::chrono::milliseconds patience) {
  std::unique_lock lock(mutex_);
  if (!changed_.wait_for(lock, patience, [&] { return closed_ || outstanding_ < depth; })) {
    return Status(EAGAIN, std::to_string(outstanding_) + " operations are outstanding on the stream, and it stands");
  }
  if (closed_) return Status(EBADF, "the stream is closed");
  ++outstanding_;
  return {};
}

Status OperationStream::submit(const std::shared_ptr<Operation>& operation, std::size_t depth,
                               std::chrono::milliseconds patience) {
  Status status = room(depth, patience);
  if (!status.ok()) return status;
  const std::lock_guard submitting(submit_mutex_);
  operation->sequence_ = last_ + 1;
  {
    const std::lock_guard lock(mutex_);
    queued_.push_back(operation);
    ++calling_;
    used_ = std::chrono::steady_clock::now();
  }
  operation->waits_ = take_wait();
  holds_->begin();
  status = stream_->call(&OperationStream::reached, operation.get());
  if (!status.ok()) {
    holds_->end();
    const std::lock_guard lock(mutex_);
    if (operation->waits_) {
      --waits_;
      holds_->give_wait_back();
    }
    queued_.erase(std::find(queued_.begin(), queued_.end(), operation));
    --calling_;
    --outstanding_;
    changed_.notify_all();
    return status.with_context("an operation on a stream");
  }
  ++last_;
  if (operation->waits_) {
    hold(operation);
  } else if (counter_.word == nullptr) {
    // One at a time tells of a failure as well as many, which would fill the device's queues.
    const Result<bool> passed = passed_->query();
    if (!passed.ok() || passed.value()) record();
  }
  return {};
}

bool OperationStream::take_wait() {
  if (counter_.word == nullptr || !holds_->take_wait()) return false;
  const std::lock_guard lock(mutex_);
  if (waits_ < StreamHolds::kWaitsOfStream) {
    ++waits_;
    return true;
  }
  holds_->give_wait_back();
  return false;
}

void OperationStream::hold(const std::shared_ptr<Operation>& operation) {
  {
    const std::lock_guard lock(mutex_);
    recorded_ = false;
  }
  const Status held = stream_->wait_for_value(counter_.address, operation->sequence_);
  if (!held.ok()) {
    // What is queued behind would not wait: it must have stopped before that can be.
    {
      const std::lock_guard lock(operation->mutex_);
      operation->unheld_ = held.with_context("an operation on a stream");
    }
    if (engine_->cancel(operation)) AsyncEngine::wait(*operation);
  }
  record();
}

void OperationStream::record() {
  const Status recorded = stream_->record(*passed_);
  const std::lock_guard lock(mutex_);
  if (recorded.ok()) recorded_ = ever_recorded_ = true;
}

void OperationStream::reached(void* operation) {
  auto* const reached_operation = static_cast<Operation*>(operation);
  // queued_ has it until now, and it has the stream.
  reached_operation->stream_->reach(reached_operation);
}

void OperationStream::reach(const Operation* operation) {
  std::shared_ptr<Operation> self;
  {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(queued_.begin(), queued_.end(),
                                    [&](const std::shared_ptr<Operation>& each) { return each.get() == operation; });
    self = std::move(*found);
    queued_.erase(found);
  }
  bool over = false;
  {
    const std::lock_guard lock(self->mutex_);
    self->reached_ = true;
    over = self->phase_ == Operation::Phase::kDone;
  }
  if (over) {
    release(*self);
  } else {
    engine_->bind(self);
    if (!self->waits_) AsyncEngine::wait(*self);
  }
  self.reset();
  // The last that this thread does here: whoever destroys the stream waits for it.
  const std::lock_guard lock(mutex_);
  --calling_;
  changed_.notify_all();
}

void OperationStream::release(const Operation& operation) {
  // Before the stream goes on: whoever finds that it has may count on it.
  holds_->end();
  const std::lock_guard lock(mutex_);
  if (operation.waits_) {
    --waits_;
    holds_->give_wait_back();
  }
  if (counter_.word != nullptr) {
    const std::atomic_ref<std::uint32_t> word(*counter_.word);
    if (static_cast<std::int32_t>(operation.sequence_ - word.load(std::memory_order_relaxed)) > 0) {
      word.store(operation.sequence_, std::memory_order_release);
      word.notify_all();
    }
  }
  --outstanding_;
  changed_.notify_all();
}

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
  bool ask = false;
  {
    const std::lock_guard lock(mutex_);
    if (!queued_.empty() || outstanding_ > 0 || calling_ > 0 || !recorded_) return false;
    ask = ever_recorded_;
  }
  if (!ask) return true;
  // A device that has failed looks at nothing any more.
  const Result<bool> passed = passed_->query();
  return !passed.ok() || passed.value();
}

bool OperationStream::unused(std::chrono::milliseconds duration) const {
  const std::lock_guard lock(mutex_);
  return std::chrono::steady_clock::now() - used_ >= duration;
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
  // What the program queued here itself is waited for, too, before the stream goes.
  const Status recorded = stream_->record(*passed_);
  const std::lock_guard lock(mutex_);
  if (recorded.ok()) ever_recorded_ = true;
}

}  // namespace gpufs
