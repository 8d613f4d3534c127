#include "async/async_engine.h"

#include <algorithm>
#include <cerrno>
#include <iterator>

#include "base/log.h"
#include "base/scope_guard.h"

namespace gpufs {
namespace {

using Clock = std::chrono::steady_clock;

// Transfers at a time, of each kind: enough to keep all threads busy.
constexpr std::size_t kRunning = 64;
// How often the worker checks streams: whether their device has failed, and whether they can be destroyed.
constexpr std::chrono::milliseconds kCheckInterval{50};
// How long an implied stream is remembered after its last operation.
constexpr std::chrono::milliseconds kMemory{1000};
// How long shutdown() waits at most for streams that do not reach their operations.
constexpr std::chrono::milliseconds kStreamGrace{1000};
constexpr std::chrono::milliseconds kStep{2};

// Keeps a stream that still refers to its operations when the engine ends until the process ends.
void abandon(std::shared_ptr<OperationStream> stream) {
  static auto* const mutex = new std::mutex;
  static auto* const streams = new std::vector<std::shared_ptr<OperationStream>>;
  const std::lock_guard lock(*mutex);
  streams->push_back(std::move(stream));
}

Completion failed(Status status) {
  Completion completion;
  completion.status = std::move(status);
  return completion;
}

}  // namespace

std::string name_of(const DeviceContext& device) {
  return "gpu " + std::to_string(device.info().index) + " (" + device.info().name + ")";
}

AsyncEngine::AsyncEngine(const AsyncOptions& options, std::shared_ptr<TransferEngine> transfers,
                         std::vector<std::shared_ptr<DeviceContext>> devices)
    : options_(options), transfers_(std::move(transfers)) {
  for (std::shared_ptr<DeviceContext>& device : devices) {
    devices_.push_back(std::make_unique<DeviceState>());
    devices_.back()->context = std::move(device);
  }
}

std::chrono::milliseconds AsyncEngine::stall_timeout() const {
  return devices_.front()->context->device().blocked_streams().stall_timeout();
}

std::shared_ptr<CompletionQueue> AsyncEngine::open_queue(std::size_t capacity) {
  auto queue = std::make_shared<CompletionQueue>(capacity == 0 ? options_.operations : capacity);
  const std::lock_guard lock(mutex_);
  std::erase_if(queues_, [](const std::weak_ptr<CompletionQueue>& each) { return each.expired(); });
  queues_.push_back(queue);
  return queue;
}

// ---- streams ----

// Tried out: what a runtime reports of itself need not hold for memory that was pinned later.
bool AsyncEngine::probe(DeviceState& device) {
  const std::lock_guard lock(device.mutex);
  if (device.probed) return device.waits_for_values;
  device.probed = true;
  const Result<PinnedBlock> counter = device.context->pinned().take(sizeof(std::uint32_t));
  Status status = counter.status();
  if (status.ok()) {
    {
      const Result<std::unique_ptr<Stream>> stream = device.context->device().create_stream();
      status = stream.status();
      // The value is there already. Destroying the stream waits for it.
      if (status.ok()) status = stream.value()->wait_for_value(counter.value().address, 0);
    }
    device.context->pinned().release(counter.value());
  }
  device.waits_for_values = status.ok();
  if (!status.ok()) log_info(name_of(*device.context), ": calls of the host hold streams: ", status.message());
  return device.waits_for_values;
}

Result<std::shared_ptr<OperationStream>> AsyncEngine::add_stream(std::size_t device, std::unique_ptr<Stream> stream,
                                                                 const StreamPromises& promises,
                                                                 OperationStream::Origin origin) {
  // First of all: pinning memory, and other things below, can end the capture of any stream of the program.
  TRY(stream->check_capture());
  TRY(worker_.start());
  DeviceState& state = *devices_[device];
  Result<std::unique_ptr<Event>> passed = state.context->device().create_event();
  if (!passed.ok()) return passed.status().with_context("an event for a stream");
  PinnedBlock counter;
  if (options_.stream_waits != Switch::kOff && probe(state)) {
    // The counter, and a word for fills. Without them calls of the host hold the stream.
    const Result<PinnedBlock> taken = state.context->pinned().take(2 * sizeof(std::uint32_t));
    if (taken.ok()) counter = taken.value();
  }
  auto added = std::make_shared<OperationStream>(shared_from_this(), state.context, std::move(stream), passed.take(),
                                                 counter, promises, origin);
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return Status(ESHUTDOWN, "the engine is being closed");
    streams_.push_back(added);
  }
  worker_.wake();
  return added;
}

Result<std::shared_ptr<OperationStream>> AsyncEngine::create_stream(int device, const StreamPromises& promises) {
  if (device < 0 || device >= static_cast<int>(devices_.size())) return Status(EINVAL, "no such device");
  std::unique_ptr<Stream> stream = TRY(devices_[device]->context->device().create_stream());
  return add_stream(device, std::move(stream), promises, OperationStream::Origin::kOwn);
}

Result<std::pair<std::size_t, std::unique_ptr<Stream>>> AsyncEngine::adopt(NativeStream native, int device) const {
  if (device >= static_cast<int>(devices_.size())) return Status(EINVAL, "no such device");
  Status first;
  for (std::size_t index = 0; index < devices_.size(); ++index) {
    if (device >= 0 && index != static_cast<std::size_t>(device)) continue;
    Result<std::unique_ptr<Stream>> stream = devices_[index]->context->device().adopt_stream(native, device >= 0);
    if (stream.ok()) return std::pair(index, stream.take());
    if (first.ok()) first = stream.status();
  }
  if (first.error() != EXDEV) return first;
  return Status(EINVAL, device < 0 ? "the stream belongs to none of the engine's devices"
                                   : "the stream is not one of " + name_of(*devices_[device]->context));
}

Result<std::shared_ptr<OperationStream>> AsyncEngine::register_stream(NativeStream native, int device,
                                                                      const StreamPromises& promises) {
  std::pair<std::size_t, std::unique_ptr<Stream>> adopted = TRY(adopt(native, device));
  return add_stream(adopted.first, std::move(adopted.second), promises, OperationStream::Origin::kRegistered);
}

Result<std::shared_ptr<OperationStream>> AsyncEngine::imply_stream(NativeStream native, int device) {
  // Each time: the program may have destroyed the stream, and created another one with the same handle.
  std::pair<std::size_t, std::unique_ptr<Stream>> adopted = TRY(adopt(native, device));
  const std::size_t index = adopted.first;
  {
    const std::lock_guard lock(mutex_);
    for (const std::shared_ptr<OperationStream>& stream : streams_) {
      if (stream->origin() == OperationStream::Origin::kImplied && stream->native() == native &&
          stream->device() == devices_[index]->context) {
        return stream;
      }
    }
  }
  return add_stream(index, std::move(adopted.second), {}, OperationStream::Origin::kImplied);
}

// ---- submitting ----

Status AsyncEngine::reserve(std::size_t count) {
  TRY(worker_.start());
  std::size_t now = outstanding_.load();
  do {
    if (options_.operations - std::min(options_.operations, now) < count) {
      return Status(EAGAIN, std::to_string(now) + " operations are under way, and the engine allows no more");
    }
  } while (!outstanding_.compare_exchange_weak(now, now + count));
  return {};
}

Status AsyncEngine::submit(const std::shared_ptr<CompletionQueue>& queue, std::vector<Submission> entries,
                           std::vector<std::uint64_t>* ids, std::size_t* bad) {
  for (std::size_t number = 0; number < entries.size(); ++number) {
    *bad = number;
    TRY(Operation::check(entries[number].request, entries[number].stream.get()));
  }
  *bad = 0;
  TRY(reserve(entries.size()));
  ScopeGuard unreserve_all([this, count = entries.size()] { unreserve(count); });
  std::vector<std::shared_ptr<Operation>> operations;
  operations.reserve(entries.size());
  for (Submission& entry : entries) {
    operations.push_back(std::make_shared<Operation>(++last_id_, std::move(entry.request), shared_from_this(),
                                                     std::move(entry.stream), queue));
  }
  TRY(queue->add(operations));
  unreserve_all.dismiss();
  for (const std::shared_ptr<Operation>& operation : operations) {
    if (operation->stream() == nullptr) {
      start(operation);
      continue;
    }
    Status status = operation->stream()->submit(operation, options_.stream_depth, options_.timeout);
    if (status.ok()) continue;
    if (operation == operations.front()) {
      for (const std::shared_ptr<Operation>& each : operations) (void)each->retract();
      return status;
    }
    (void)operation->end(failed(std::move(status)));
  }
  for (const std::shared_ptr<Operation>& operation : operations) ids->push_back(operation->id());
  return {};
}

// ---- moving ----

void AsyncEngine::start(const std::shared_ptr<Operation>& operation) {
  Result<Operation::Bound> bound = operation->bind();
  if (!bound.ok() || bound.value() == Operation::Bound::kNothingToMove) {
    worker_.post([operation, status = bound.status()] { (void)operation->end(failed(status)); });
    return;
  }
  if (bound.value() == Operation::Bound::kOver) return;
  Backlog& backlog = backlog_of(*operation);
  {
    const std::lock_guard lock(backlog.mutex);
    backlog.ready.push_back(operation);
  }
  start_ready(backlog);
}

void AsyncEngine::start_ready(Backlog& backlog) {
  std::shared_ptr<TransferEngine> transfers;
  {
    const std::lock_guard lock(mutex_);
    transfers = transfers_;
  }
  for (;;) {
    std::shared_ptr<Operation> operation;
    {
      const std::lock_guard lock(backlog.mutex);
      if (backlog.ready.empty() || backlog.running >= kRunning) return;
      operation = std::move(backlog.ready.front());
      backlog.ready.pop_front();
      ++backlog.running;
    }
    const auto on_moved = [self = shared_from_this(), operation](const TransferProgress& progress) {
      self->moved(operation, progress);
    };
    std::shared_ptr<void> leftover;
    Result<bool> started = transfers != nullptr ? operation->start(*transfers, on_moved, &leftover)
                                                : Status(ESHUTDOWN, "the engine is being closed");
    if (leftover != nullptr) drop(operation->may_hang(), std::move(leftover));
    if (started.ok() && started.value()) continue;
    {
      const std::lock_guard lock(backlog.mutex);
      --backlog.running;
    }
    if (!started.ok()) worker_.post([operation, status = started.status()] { (void)operation->end(failed(status)); });
  }
}

void AsyncEngine::moved(const std::shared_ptr<Operation>& operation, const TransferProgress& progress) {
  (void)operation->end({progress, 0, 0});
  Backlog& backlog = backlog_of(*operation);
  {
    const std::lock_guard lock(backlog.mutex);
    --backlog.running;
  }
  start_ready(backlog);
}

// ---- the worker ----

// Destroying a stream may wait for blocked streams of the program.
void AsyncEngine::drop_idle(std::vector<std::shared_ptr<OperationStream>>& streams) {
  const auto idle = std::stable_partition(
      streams.begin(), streams.end(), [](const std::shared_ptr<OperationStream>& stream) { return !stream->idle(); });
  if (idle == streams.end()) return;
  reapers_[0].post([going = std::vector(std::make_move_iterator(idle), std::make_move_iterator(streams.end()))] {});
  streams.erase(idle, streams.end());
}

Worker::Clock::time_point AsyncEngine::check_streams() {
  std::vector<std::shared_ptr<OperationStream>> streams;
  {
    const std::lock_guard lock(mutex_);
    streams = streams_;
  }
  for (const std::shared_ptr<OperationStream>& stream : streams) {
    const Status failure = stream->failure();
    if (failure.ok()) continue;
    // The device will not reach these. The driver may still refer to them, so the stream keeps them.
    for (const std::shared_ptr<Operation>& operation : stream->queued()) (void)operation->cancel(failure);
  }
  streams.clear();
  // Streams that may go leave the list first, so that nobody finds them while they are checked.
  std::vector<std::shared_ptr<OperationStream>> going;
  {
    const std::lock_guard lock(mutex_);
    const auto stays = [](const std::shared_ptr<OperationStream>& stream) {
      if (stream->origin() != OperationStream::Origin::kImplied) return !stream->closed();
      return stream.use_count() > 1 || !stream->unused(kMemory);
    };
    const auto first = std::stable_partition(streams_.begin(), streams_.end(), stays);
    std::move(first, streams_.end(), std::back_inserter(going));
    streams_.erase(first, streams_.end());
  }
  drop_idle(going);
  const std::lock_guard lock(mutex_);
  std::move(going.begin(), going.end(), std::back_inserter(streams_));
  return streams_.empty() ? Worker::kNever : Clock::now() + kCheckInterval;
}

// ---- the end ----

std::vector<std::shared_ptr<Operation>> AsyncEngine::all_under_way() {
  std::vector<std::shared_ptr<CompletionQueue>> queues;
  {
    const std::lock_guard lock(mutex_);
    for (const std::weak_ptr<CompletionQueue>& queue : queues_) queues.push_back(queue.lock());
  }
  std::vector<std::shared_ptr<Operation>> all;
  for (const std::shared_ptr<CompletionQueue>& queue : queues) {
    if (queue == nullptr) continue;
    const std::vector<std::shared_ptr<Operation>> some = queue->under_way();
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

void AsyncEngine::cancel_until(Clock::time_point end) {
  // Repeatedly: one may have been on its way into its queue.
  while (outstanding_ > 0 && Clock::now() < end) {
    for (const std::shared_ptr<Operation>& operation : all_under_way()) (void)operation->cancel();
    std::this_thread::sleep_for(kStep);
  }
}

Status AsyncEngine::released_early() const {
  const std::lock_guard lock(mutex_);
  if (released_early_ == 0) return {};
  return Status(ETIMEDOUT, released_on_ + " has not finished " + std::to_string(released_early_) +
                               " operations in time, so their streams went on before they were over");
}

void AsyncEngine::shutdown() {
  std::shared_ptr<TransferEngine> transfers;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
    transfers = transfers_;
  }
  const std::chrono::milliseconds grace = transfers->options().shutdown_grace;
  const std::chrono::milliseconds stream_grace = std::min(kStreamGrace, grace);
  cancel_until(Clock::now() + grace);
  // The device may be waiting for the very streams that wait for it. One that goes on may block again at once.
  const Clock::time_point last = Clock::now() + 2 * stream_grace;
  while (outstanding_ > 0 && Clock::now() < last) {
    for (const std::shared_ptr<Operation>& operation : all_under_way()) {
      if (!operation->release_stream_early()) continue;
      const std::lock_guard lock(mutex_);
      ++released_early_;
      released_on_ = name_of(operation->device());
    }
    cancel_until(std::min(Clock::now() + kCheckInterval, last));
  }
  // What is left hangs in its file, or the device still uses its memory: the transfers abandon it, and end it.
  if (outstanding_ > 0) transfers->shutdown();

  worker_.stop();
  std::vector<std::shared_ptr<OperationStream>> streams;
  {
    const std::lock_guard lock(mutex_);
    streams.swap(streams_);
    transfers_.reset();
  }
  for (const std::shared_ptr<OperationStream>& stream : streams) stream->close();
  const Clock::time_point end = Clock::now() + stream_grace;
  for (drop_idle(streams); !streams.empty() && Clock::now() < end; drop_idle(streams)) {
    std::this_thread::sleep_for(kStep);
  }
  if (!streams.empty()) log_warning(streams.size(), " streams have not reached their operations and are abandoned");
  for (std::shared_ptr<OperationStream>& stream : streams) abandon(std::move(stream));
  for (Worker& reaper : reapers_) {
    if (reaper.stop(stream_grace)) continue;
    log_warning("memory of operations is not free yet: streams of the program or a file do not go on");
  }
}

}  // namespace gpufs
