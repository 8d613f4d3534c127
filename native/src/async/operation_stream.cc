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
                                 PinnedBlock counter, StreamPromises promises, Origin origin)
    : engine_(std::move(engine)),
      device_(std::move(device)),
      stream_(std::move(stream)),
      passed_(std::move(passed)),
      counter_(counter),
      promises_(promises),
      origin_(origin),
      used_(std::chrono::steady_clock::now()) {}

OperationStream::~OperationStream() {
  if (counter_.data != nullptr) device_->pinned().release(counter_);
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

Status OperationStream::reserve(std::size_t depth, std::chrono::milliseconds patience) {
  BlockedStreams& blocked = device_->device().blocked_streams();
  const auto end = std::chrono::steady_clock::now() + patience;
  std::unique_lock lock(mutex_);
  if (!changed_.wait_until(lock, end, [&] { return closed_ || outstanding_ < depth; })) {
    return Status(EAGAIN, std::to_string(outstanding_) + " operations are outstanding on the stream, and it is blocked");
  }
  if (outstanding_ == 0) {
    lock.unlock();
    if (!blocked.add(end - std::chrono::steady_clock::now())) {
      return Status(EAGAIN, std::to_string(BlockedStreams::kMost) +
                                " other streams of the device have outstanding operations, which is as many as may:"
                                " wait for some of those first");
    }
    lock.lock();
    if (closed_ || outstanding_ > 0) blocked.remove();
  }
  if (closed_) return Status(EBADF, "the stream is closed");
  ++outstanding_;
  return {};
}

void OperationStream::unreserve() {
  if (--outstanding_ == 0) device_->device().blocked_streams().remove();
  changed_.notify_all();
}

// What a submission has taken of its stream. Goes back unless the stream has got the operation.
class OperationStream::Submission {
 public:
  // After reserve() has counted the operation.
  Submission(OperationStream& stream, Operation& operation) : stream_(stream), operation_(operation) {}
  ~Submission() {
    if (kept_) return;
    const std::lock_guard lock(stream_.mutex_);
    if (operation_.waits_) --stream_.waits_;
    if (queued_) {
      std::erase_if(stream_.queued_, [this](const auto& each) { return each.get() == &operation_; });
      --stream_.calling_;
    }
    stream_.unreserve();
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
  Status status = reserve(depth, patience);
  if (!status.ok()) return status;
  Submission submission(*this, *operation);
  const std::lock_guard submitting(submit_mutex_);
  operation->sequence_ = last_ + 1;
  {
    const std::lock_guard lock(mutex_);
    queued_.push_back(operation);
    ++calling_;
    used_ = std::chrono::steady_clock::now();
    operation->waits_ = counter_.data != nullptr && waits_ < kMostWaits;
    if (operation->waits_) ++waits_;
  }
  submission.queued();
  // A stream whose last work was a copy waits in a queue that other streams copy through. A fill has a queue for
  // kernels instead, of which the others keep enough.
  if (operation->waits_) status = stream_->fill_zero(counter_.address + sizeof(std::uint32_t), sizeof(std::uint32_t));
  if (status.ok()) status = stream_->call(&OperationStream::reached, operation.get());
  if (!status.ok()) return status.with_context("an operation on a stream");
  submission.keep();
  ++last_;
  if (operation->waits_) {
    hold(operation);
  } else if (counter_.data == nullptr) {
    record();
  }
  return {};
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
    if (counter_.data == nullptr) {
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
  const std::lock_guard lock(mutex_);
  if (operation.waits_) --waits_;
  device_->device().blocked_streams().note_progress();
  // Before the stream goes on: what is queued behind may count on it.
  unreserve();
  if (counter_.data != nullptr &&
      static_cast<std::int32_t>(operation.sequence_ - word().load(std::memory_order_relaxed)) > 0) {
    word().store(operation.sequence_, std::memory_order_release);
    word().notify_all();
  }
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
