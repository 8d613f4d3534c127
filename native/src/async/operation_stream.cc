#include "async/operation_stream.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <new>
#include <utility>

#include "async/async_engine.h"
#include "observe/trace.h"

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

// What a submission has taken of its stream. Goes back unless the stream has got the operation.
class OperationStream::Submission {
 public:
  // After room() has counted the operation.
  Submission(OperationStream& stream, Operation& operation) : stream_(stream), operation_(operation) {}
  ~Submission() {
    if (kept_) return;
    if (queued_) stream_.holds_->end();
    const std::lock_guard lock(stream_.mutex_);
    if (operation_.waits_) {
      --stream_.waits_;
      stream_.holds_->give_wait_back();
    }
    if (queued_) {
      std::erase_if(stream_.queued_, [this](const auto& each) { return each.get() == &operation_; });
      --stream_.calling_;
    }
    --stream_.outstanding_;
    stream_.changed_.notify_all();
  }
  Submission(const Submission&) = delete;
  Submission& operator=(const Submission&) = delete;

  void queued() { queued_ = true; }
  void keep() { kept_ = true; }

 private:
  OperationStream& stream_;
  Operation& operation_;
  bool queued_ = false;
  bool kept_ = false;
};

Status OperationStream::submit(const std::shared_ptr<Operation>& operation, std::size_t depth,
                               std::chrono::milliseconds patience) {
  Status status = room(depth, patience);
  if (!status.ok()) return status;
  Submission submission(*this, *operation);
  const std::lock_guard submitting(submit_mutex_);
  operation->sequence_ = last_ + 1;
  {
    const std::lock_guard lock(mutex_);
    queued_.push_back(operation);
    ++calling_;
    used_ = std::chrono::steady_clock::now();
  }
  holds_->begin();
  submission.queued();
  operation->waits_ = take_wait();
  status = stream_->call(&OperationStream::reached, operation.get());
  if (!status.ok()) return status.with_context("an operation on a stream");
  submission.keep();
  ++last_;
  if (operation->waits_) {
    hold(operation);
  } else if (counter_.word == nullptr) {
    record();
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

void OperationStream::hold(const std::shared_ptr<Operation>& operation) noexcept {
  {
    const std::lock_guard lock(mutex_);
    recorded_ = false;
  }
  Status held(ENOMEM, "");
  try {
    held = stream_->wait_for_value(counter_.address, operation->sequence_).with_context("an operation on a stream");
  } catch (const std::bad_alloc&) {  // as if the stream had refused to wait
  }
  if (!held.ok()) {
    // What is queued behind would not wait: it must have stopped before that can be.
    {
      const std::lock_guard lock(operation->mutex_);
      operation->unheld_ = std::move(held);
    }
    if (engine_->cancel(operation)) AsyncEngine::wait(*operation);
  }
  record();
}

void OperationStream::record() noexcept {
  try {
    // Where calls of the host hold the stream, one event at a time reports a failure as well as many, which would fill
    // the device's queues.
    if (counter_.word == nullptr) {
      const Result<bool> passed = passed_->query();
      if (passed.ok() && !passed.value()) return;
    }
    const Status recorded = stream_->record(*passed_);
    const std::lock_guard lock(mutex_);
    if (recorded.ok()) recorded_ = ever_recorded_ = true;
  } catch (const std::bad_alloc&) {  // as if it could not be recorded
  }
}

void OperationStream::reached(void* operation) noexcept {
  auto* const reached_operation = static_cast<Operation*>(operation);
  // queued_ has it until now, and it has the stream.
  reached_operation->stream_->reach(reached_operation);
}

void OperationStream::reach(const Operation* operation) noexcept {
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
    if (self->submitted_at_ != 0) self->reached_at_ = observe::now_ns();
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
