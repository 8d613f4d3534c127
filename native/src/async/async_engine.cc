#include "async/async_engine.h"

#include <algorithm>
#include <cerrno>
#include <exception>
#include <iterator>
#include <limits>
#include <new>
#include <string>
#include <string_view>

#include "base/log.h"
#include "base/math.h"
#include "base/thread.h"
#include "observe/trace.h"

namespace gpufs {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kLargestNumber = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
// Operations that the transfers have at a time, of each kind: enough to keep all threads busy.
constexpr std::size_t kRunning = 64;
// How often streams are looked at: whether their device has failed, and whether they can go.
constexpr std::chrono::milliseconds kLook{50};
// How long a stream that nobody registered is remembered after its last operation.
constexpr std::chrono::milliseconds kMemory{1000};
// How long shutdown() waits for streams that do not come to their operations.
constexpr std::chrono::milliseconds kStreamGrace{1000};

std::string name_of(const DeviceContext& device) {
  return "gpu " + std::to_string(device.info().index) + " (" + device.info().name + ")";
}

// Streams which still refer to their operations when the engine ends: kept for ever, with all that they refer to.
void leave_behind(std::shared_ptr<OperationStream> stream) {
  static auto* const mutex = new std::mutex;
  static auto* const streams = new std::vector<std::shared_ptr<OperationStream>>;
  const std::lock_guard lock(*mutex);
  streams->push_back(std::move(stream));
}

Status check_number(std::uint64_t value, const char* what, bool aligned) {
  if (value > kLargestNumber) return Status(EINVAL, std::string("the ") + what + " is negative or too large");
  if (aligned && value % OperationStream::kAlignment != 0) {
    return Status(EINVAL, std::string("the ") + what + " is no multiple of 4096, as was promised for the stream");
  }
  return {};
}

// What of an operation's numbers is known, put into the request that will be moved. late: those too that are bound when
// the stream comes to it; until then they are 0.
Status apply_numbers(OperationRequest& request, bool aligned, bool late) {
  struct Number {
    const Parameter& from;
    std::uint64_t& to;
    const char* what;
  };
  TransferRequest& transfer = request.transfer;
  for (const Number& number : {Number{request.file_offset, transfer.file_offset, "file offset"},
                               Number{request.target_offset, transfer.target_offset, "buffer offset"}}) {
    number.to = number.from.late() && !late ? 0 : number.from.read();
    Status status = check_number(number.to, number.what, aligned);
    if (!status.ok()) return status;
  }
  transfer.bytes = request.bytes.late() && !late ? request.bytes.value : request.bytes.read();
  if (!request.bytes.late() && transfer.bytes == kToTheEnd) return {};
  if (request.bytes.late() && transfer.bytes > request.bytes.value) {
    return Status(EINVAL, "the size has grown from " + std::to_string(request.bytes.value) + " to " +
                              std::to_string(transfer.bytes) + " since the operation was submitted");
  }
  return check_number(transfer.bytes, "size", aligned);
}

// Writes the outcome to where the program wants it.
void tell_program(const OperationRequest& request, const Completion& completion) {
  const int error = completion.status.error();
  if (request.codes != nullptr) {
    request.codes[0] = error;
    request.codes[1] = completion.status.device_code();
  }
  if (request.count != nullptr) {
    const bool nothing = error != 0 && completion.bytes == 0;
    std::atomic_ref<std::int64_t>(*request.count)
        .store(nothing ? -error : static_cast<std::int64_t>(completion.bytes), std::memory_order_release);
  }
}

// What helps against a standstill, where that is known.
std::string remedy(const DeviceContext& device) {
  const bool cuda = std::string_view(device.driver().name()) == "cuda";
  return std::string("queue them once the operation is over") +
         (cuda ? ", or set CUDA_DEVICE_MAX_COPY_CONNECTIONS=32 before CUDA starts" : "");
}

}  // namespace

AsyncEngine::AsyncEngine(const AsyncOptions& options, std::shared_ptr<TransferEngine> transfers,
                         std::vector<std::shared_ptr<DeviceContext>> devices)
    : options_(options), transfers_(std::move(transfers)) {
  for (std::shared_ptr<DeviceContext>& device : devices) {
    auto state = std::make_unique<DeviceState>();
    state->counters = std::make_shared<StreamCounters>(device);
    state->holds = std::make_shared<StreamHolds>(device);
    state->context = std::move(device);
    devices_.push_back(std::move(state));
  }
}

std::shared_ptr<AsyncEngine> AsyncEngine::create(const AsyncOptions& options, std::shared_ptr<TransferEngine> transfers,
                                                 std::vector<std::shared_ptr<DeviceContext>> devices) {
  for (const std::shared_ptr<DeviceContext>& device : devices) {
    // Now, for it waits for streams that stand, and the program may be about to have one stand.
    const Status prepared = device->prepare_to_stand();
    if (!prepared.ok())
      log_warning(name_of(*device) + ": operations on streams may delay each other: " + prepared.message());
  }
  return std::shared_ptr<AsyncEngine>(new AsyncEngine(options, std::move(transfers), std::move(devices)));
}

std::shared_ptr<CompletionQueue> AsyncEngine::open_queue(std::size_t capacity) {
  auto queue = std::make_shared<CompletionQueue>(shared_from_this(), capacity == 0 ? options_.operations : capacity);
  const std::lock_guard lock(mutex_);
  std::erase_if(queues_, [](const std::weak_ptr<CompletionQueue>& each) { return each.expired(); });
  queues_.push_back(queue);
  return queue;
}

// ---- streams ----

// Tried out, since what a runtime says of itself is not what it does with memory that is merely pinned.
bool AsyncEngine::probe(DeviceState& device) {
  const std::lock_guard lock(device.mutex);
  if (device.probed) return device.waits_for_values;
  device.probed = true;
  Result<StreamCounter> counter = device.counters->take();
  Status status = counter.status();
  if (status.ok()) {
    {
      Result<std::unique_ptr<Stream>> stream = device.context->device().create_stream();
      status = stream.status();
      // The value is satisfied already; destroying the stream waits for it.
      if (status.ok()) status = stream.value()->wait_for_value(counter.value().address, *counter.value().word);
    }
    device.counters->give_back(counter.value());
  }
  device.waits_for_values = status.ok();
  if (!status.ok()) log_info(name_of(*device.context), ": calls of the host hold streams: ", status.message());
  return device.waits_for_values;
}

Result<std::shared_ptr<OperationStream>> AsyncEngine::add_stream(std::size_t device, std::unique_ptr<Stream> stream,
                                                                 const StreamPromises& promises,
                                                                 OperationStream::Origin origin) {
  Status started = start_keeper();
  if (!started.ok()) return started;
  DeviceState& state = *devices_[device];
  Result<std::unique_ptr<Event>> passed = state.context->device().create_event();
  if (!passed.ok()) return passed.status().with_context("an event for a stream");
  StreamCounter counter;
  if (options_.stream_waits != Switch::kOff && probe(state)) {
    Result<StreamCounter> taken = state.counters->take();
    // Without one the stream is held by calls of the host.
    if (taken.ok()) counter = taken.value();
  }
  auto added = std::make_shared<OperationStream>(shared_from_this(), state.context, std::move(stream), passed.take(),
                                                 state.counters, counter, state.holds, promises, origin);
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return Status(ESHUTDOWN, "the engine is being closed");
    streams_.push_back(added);
  }
  changed_.notify_all();
  return added;
}

Result<std::shared_ptr<OperationStream>> AsyncEngine::create_stream(std::size_t device,
                                                                    const StreamPromises& promises) {
  if (device >= devices_.size()) return Status(EINVAL, "no such device");
  Result<std::unique_ptr<Stream>> stream = devices_[device]->context->device().create_stream();
  if (!stream.ok()) return stream.status();
  return add_stream(device, stream.take(), promises, OperationStream::Origin::kOwn);
}

Result<std::pair<std::size_t, std::unique_ptr<Stream>>> AsyncEngine::adopt(NativeStream native, int device) const {
  Status first;
  for (std::size_t index = 0; index < devices_.size(); ++index) {
    if (device >= 0 && index != static_cast<std::size_t>(device)) continue;
    Result<std::unique_ptr<Stream>> stream = devices_[index]->context->device().adopt_stream(native, device >= 0);
    if (stream.ok()) return std::pair(index, stream.take());
    if (first.ok()) first = stream.status();
  }
  if (device >= static_cast<int>(devices_.size())) return Status(EINVAL, "no such device");
  if (first.error() != EXDEV) return first;
  return Status(EINVAL, device < 0 ? "the stream belongs to none of the engine's devices"
                                   : "the stream is not one of " + name_of(*devices_[device]->context));
}

Result<std::shared_ptr<OperationStream>> AsyncEngine::register_stream(NativeStream native, int device,
                                                                      const StreamPromises& promises) {
  Result<std::pair<std::size_t, std::unique_ptr<Stream>>> adopted = adopt(native, device);
  if (!adopted.ok()) return adopted.status();
  return add_stream(adopted.value().first, std::move(adopted.value().second), promises,
                    OperationStream::Origin::kRegistered);
}

Result<std::shared_ptr<OperationStream>> AsyncEngine::imply_stream(NativeStream native, int device) {
  // Asked anew each time: the program may have destroyed the stream, and made another that has its name.
  Result<std::pair<std::size_t, std::unique_ptr<Stream>>> adopted = adopt(native, device);
  if (!adopted.ok()) return adopted.status();
  const std::size_t index = adopted.value().first;
  {
    const std::lock_guard lock(mutex_);
    for (const std::shared_ptr<OperationStream>& stream : streams_) {
      if (stream->origin_ == OperationStream::Origin::kImplied && stream->native() == native &&
          stream->device() == devices_[index]->context) {
        return stream;
      }
    }
  }
  return add_stream(index, std::move(adopted.value().second), {}, OperationStream::Origin::kImplied);
}

// ---- submitting ----

Status AsyncEngine::check(OperationRequest& request, const OperationStream* stream) const {
  TransferRequest& transfer = request.transfer;
  if (!transfer.target.valid()) return Status(EINVAL, "an operation needs a file and memory");
  const DeviceContext& device = *transfer.target.device();
  const StreamPromises promises = stream == nullptr ? StreamPromises{} : stream->promises();
  if (stream != nullptr && stream->device().get() != &device) {
    return Status(EINVAL, "the memory is on " + name_of(device) + ", the stream on " + name_of(*stream->device()));
  }
  const auto fix = [](Parameter& number) { number = Parameter{number.read(), nullptr}; };
  if (promises.fixed_target_offset) fix(request.target_offset);
  if (promises.fixed_file_offset) fix(request.file_offset);
  if (promises.fixed_bytes) fix(request.bytes);
  if (request.bytes.late()) request.bytes.value = request.bytes.read();
  Status status = apply_numbers(request, promises.aligned, /*late=*/false);
  if (status.ok()) status = TransferEngine::check(transfer);
  return status.ok() ? device.device().health() : status;
}

Status AsyncEngine::reserve(std::size_t count) {
  Status started = start_keeper();
  if (!started.ok()) return started;
  std::size_t now = outstanding_.load();
  do {
    if (options_.operations - std::min(options_.operations, now) < count) {
      return Status(EAGAIN, std::to_string(now) + " operations are under way, which is as many as may be");
    }
  } while (!outstanding_.compare_exchange_weak(now, now + count));
  return {};
}

Status AsyncEngine::submit(const std::shared_ptr<Operation>& operation) {
  if (operation->stream_ != nullptr) {
    return operation->stream_->submit(operation, options_.stream_depth, options_.patience);
  }
  bind(operation);
  return {};
}

// ---- moving ----

void AsyncEngine::bind(const std::shared_ptr<Operation>& operation) noexcept {
  Lane& lane = lane_of(*operation);
  Status status;
  bool empty = false;
  try {
    {
      const std::lock_guard lock(operation->mutex_);
      if (operation->phase_ != Operation::Phase::kQueued) return;
      operation->phase_ = Operation::Phase::kReady;
      const bool aligned = operation->stream_ != nullptr && operation->stream_->promises().aligned;
      status = apply_numbers(operation->request_, aligned, /*late=*/true);
      const TransferRequest& transfer = operation->request_.transfer;
      if (status.ok()) status = TransferEngine::check(transfer);
      empty = transfer.bytes == 0 && transfer.sync == SyncMode::kNone;
    }
    if (status.ok() && !empty) {
      const std::lock_guard lock(lane.mutex);
      lane.ready.push_back(operation);
    }
  } catch (const std::exception&) {
    status = Status(ENOMEM, "");
  }
  if (!status.ok() || empty) {
    end_later(operation, std::move(status));
  } else {
    pump(lane);
  }
}

void AsyncEngine::pump(Lane& lane) noexcept {
  for (;;) {
    std::shared_ptr<Operation> operation;
    {
      const std::lock_guard lock(lane.mutex);
      if (lane.ready.empty() || lane.running >= kRunning) return;
      operation = std::move(lane.ready.front());
      lane.ready.pop_front();
      ++lane.running;
    }
    launch(operation);
  }
}

void AsyncEngine::launch(const std::shared_ptr<Operation>& operation) noexcept {
  Lane& lane = lane_of(*operation);
  const auto leave = [&lane] {
    const std::lock_guard lock(lane.mutex);
    --lane.running;
  };
  std::shared_ptr<TransferEngine> transfers;
  {
    const std::lock_guard lock(mutex_);
    transfers = transfers_;
  }
  TransferRequest request;
  {
    const std::lock_guard lock(operation->mutex_);
    if (operation->phase_ == Operation::Phase::kReady) {
      operation->phase_ = Operation::Phase::kRunning;
      request = std::move(operation->request_.transfer);
      if (operation->submitted_at_ != 0) {
        operation->launched_at_ = observe::now_ns();
        operation->transfer_id_ = request.trace_id = observe::trace::next_id();
      }
    }
  }
  if (request.file == nullptr) {  // cancelled meanwhile
    leave();
    return;
  }
  std::shared_ptr<Transfer> transfer;
  Status status;
  try {
    request.done = [self = shared_from_this(), operation](const TransferProgress& progress) {
      self->moved(operation, progress);
    };
    Result<std::shared_ptr<Transfer>> started =
        transfers != nullptr ? transfers->start(request) : Status(ESHUTDOWN, "the engine is being closed");
    if (started.ok()) {
      transfer = started.take();
    } else {
      status = started.status();
    }
  } catch (const std::exception&) {
    status = Status(ENOMEM, "");
  }
  // The operation has its file, its memory and its transfer back: they are not released on a driver's thread.
  bool over = false;
  bool cancelled = false;
  {
    const std::lock_guard lock(operation->mutex_);
    over = operation->phase_ != Operation::Phase::kRunning;
    cancelled = operation->cancelled_;
    request.done = nullptr;
    operation->request_.transfer.file = std::move(request.file);
    operation->request_.transfer.target = std::exchange(request.target, Target{});
    operation->transfer_ = transfer;
    if (over || !cancelled) transfer.reset();
  }
  if (!status.ok()) {
    leave();
    end_later(operation, std::move(status));
    return;
  }
  if (transfer != nullptr) {
    transfer->cancel();
    const std::lock_guard lock(operation->mutex_);
    over = operation->phase_ != Operation::Phase::kRunning;
    operation->transfer_ = std::move(transfer);
  }
  if (over) release_later(operation);
}

void AsyncEngine::moved(const std::shared_ptr<Operation>& operation, const TransferProgress& progress) noexcept {
  Completion completion;
  completion.bytes = progress.prefix;
  try {
    completion.status = progress.status;
  } catch (const std::bad_alloc&) {  // its codes need no memory
    completion.status = Status(progress.status.error(), "", progress.status.device_code());
  }
  completion.fastpath_bytes = progress.path_bytes[static_cast<std::size_t>(Path::kFastpath)];
  completion.fallback_bytes = progress.path_bytes[static_cast<std::size_t>(Path::kFallback)];
  completion.hole_bytes = progress.hole_bytes;
  completion.refusals = progress.refusals;
  (void)end(operation, std::move(completion));
  Lane& lane = lane_of(*operation);
  {
    const std::lock_guard lock(lane.mutex);
    --lane.running;
  }
  pump(lane);
}

void AsyncEngine::append_ending(const std::shared_ptr<Operation>& operation) {
  (last_ending_ == nullptr ? ending_ : last_ending_->next_ending_) = operation;
  last_ending_ = operation.get();
}

void AsyncEngine::end_later(const std::shared_ptr<Operation>& operation, Status status) noexcept {
  {
    const std::lock_guard lock(mutex_);
    operation->outcome_ = std::move(status);
    append_ending(operation);
  }
  changed_.notify_all();
}

void AsyncEngine::release_later(const std::shared_ptr<Operation>& operation) noexcept {
  {
    const std::lock_guard lock(mutex_);
    operation->is_over_ = true;
    append_ending(operation);
  }
  changed_.notify_all();
}

void AsyncEngine::trace_phases(const Operation& operation, std::uint64_t reached_at, const OperationRequest& request,
                               const Completion& completion) {
  observe::TraceRecord record;
  record.id = operation.id();
  record.name = operation.trace_name_;
  record.device = operation.device_->info().index;
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
  write(observe::TraceKind::kOperation, operation.submitted_at_, now, request.trace_cookie, completion.bytes);
  if (operation.stream_ != nullptr) {
    write(observe::TraceKind::kStreamWait, operation.submitted_at_, reached_at != 0 ? reached_at : now,
          request.trace_cookie, 0);
  }
  if (operation.launched_at_ != 0) {
    write(observe::TraceKind::kMove, operation.launched_at_, now, operation.transfer_id_, completion.bytes);
  }
}

bool AsyncEngine::end(const std::shared_ptr<Operation>& operation, Completion completion, bool waiting_only) {
  std::shared_ptr<CompletionQueue> queue;
  OperationRequest request;
  std::shared_ptr<Transfer> transfer;
  std::uint64_t reached_at = 0;
  {
    const std::lock_guard lock(operation->mutex_);
    const Operation::Phase phase = operation->phase_;
    if (phase == Operation::Phase::kEnding || phase == Operation::Phase::kDone) return false;
    if (waiting_only && phase == Operation::Phase::kRunning) return false;
    operation->phase_ = Operation::Phase::kEnding;
    queue = std::move(operation->queue_);
    request = std::exchange(operation->request_, OperationRequest{});
    transfer = std::move(operation->transfer_);
    if (completion.status.error() == ECANCELED && !operation->unheld_.ok()) {
      completion.status = std::move(operation->unheld_);
    }
    reached_at = operation->reached_at_;
  }
  if (operation->submitted_at_ != 0) trace_phases(*operation, reached_at, request, completion);
  tell_program(request, completion);
  completion.cookie = request.cookie;
  completion.id = operation->id();
  // Before the stream goes on, so that what ends on a stream is found in its order.
  queue->deliver(std::move(completion));
  bool reached = false;
  {
    const std::lock_guard lock(operation->mutex_);
    operation->phase_ = Operation::Phase::kDone;
    reached = operation->reached_ && !operation->let_go_;
  }
  operation->changed_.notify_all();
  if (reached) operation->stream_->release(*operation);
  // Not before: giving memory back may wait for all that the device has, and so for this stream.
  request = OperationRequest{};
  transfer.reset();
  --outstanding_;
  return true;
}

bool AsyncEngine::retract(Operation& operation) {
  const std::lock_guard lock(operation.mutex_);
  if (operation.phase_ == Operation::Phase::kEnding || operation.phase_ == Operation::Phase::kDone) return false;
  operation.phase_ = Operation::Phase::kDone;
  return true;
}

bool AsyncEngine::cancel(const std::shared_ptr<Operation>& operation) {
  for (;;) {
    std::shared_ptr<Transfer> transfer;
    bool running = false;
    {
      const std::lock_guard lock(operation->mutex_);
      if (operation->phase_ == Operation::Phase::kEnding || operation->phase_ == Operation::Phase::kDone) return false;
      operation->cancelled_ = true;
      running = operation->phase_ == Operation::Phase::kRunning;
      transfer = operation->transfer_;
    }
    if (running) {
      // Without a transfer it is being started: who starts it sees that it was cancelled.
      if (transfer != nullptr) transfer->cancel();
      return true;
    }
    Completion completion;
    completion.status = Status(ECANCELED, "cancelled");
    if (end(operation, std::move(completion), /*waiting_only=*/true)) return true;
  }
}

void AsyncEngine::wait(Operation& operation) {
  std::unique_lock lock(operation.mutex_);
  operation.changed_.wait(lock, [&] { return operation.phase_ == Operation::Phase::kDone || operation.let_go_; });
}

// ---- the keeper ----

Status AsyncEngine::start_keeper() {
  const std::lock_guard lock(mutex_);
  if (closed_) return Status(ESHUTDOWN, "the engine is being closed");
  if (keeper_.joinable()) return {};
  Result<std::thread> started = start_thread("gpufs-async", [self = shared_from_this()] { self->keeper_main(); });
  if (!started.ok()) return started.status().with_context("a thread for operations");
  keeper_ = started.take();
  return {};
}

void AsyncEngine::keeper_main() {
  Clock::time_point look = Clock::now();
  std::unique_lock lock(mutex_);
  while (!keeper_ending_ || ending_ != nullptr) {
    if (ending_ != nullptr) {
      std::shared_ptr<Operation> operation = std::move(ending_);
      ending_ = std::move(operation->next_ending_);
      if (ending_ == nullptr) last_ending_ = nullptr;
      Completion completion;
      completion.status = std::move(operation->outcome_);
      const bool is_over = operation->is_over_;
      lock.unlock();
      if (!is_over) {
        (void)end(operation, std::move(completion));
      } else {
        TransferRequest request;
        std::shared_ptr<Transfer> transfer;
        const std::lock_guard operation_lock(operation->mutex_);
        std::swap(request, operation->request_.transfer);
        transfer.swap(operation->transfer_);
      }
      operation.reset();
      lock.lock();
      continue;
    }
    if (!streams_.empty() && Clock::now() >= look) {
      lock.unlock();
      try {
        watch_devices();
        keep_streams();
      } catch (const std::bad_alloc&) {  // the next time will do
      }
      lock.lock();
      look = Clock::now() + kLook;
      continue;
    }
    if (streams_.empty()) {
      changed_.wait(lock);
    } else {
      changed_.wait_until(lock, look);
    }
  }
}

void AsyncEngine::keep_streams() {
  std::vector<std::shared_ptr<OperationStream>> streams;
  {
    const std::lock_guard lock(mutex_);
    streams = streams_;
  }
  for (const std::shared_ptr<OperationStream>& stream : streams) {
    const Status failure = stream->failure();
    if (failure.ok()) continue;
    // The device will not come to these. The driver may still hold them, so the stream keeps them.
    for (const std::shared_ptr<Operation>& operation : stream->queued()) {
      Completion completion;
      completion.status = failure;
      (void)end(operation, std::move(completion), /*waiting_only=*/true);
    }
  }
  streams.clear();
  // Those that go are taken out of the list first: nobody can find them any more, and who has one has closed it.
  std::vector<std::shared_ptr<OperationStream>> going;
  {
    const std::lock_guard lock(mutex_);
    const auto stays = [](const std::shared_ptr<OperationStream>& stream) {
      if (stream->origin_ == OperationStream::Origin::kImplied) {
        return stream.use_count() > 1 || !stream->unused(kMemory);
      }
      const std::lock_guard stream_lock(stream->mutex_);
      return !stream->closed_;
    };
    const auto first = std::stable_partition(streams_.begin(), streams_.end(), stays);
    std::move(first, streams_.end(), std::back_inserter(going));
    streams_.erase(first, streams_.end());
  }
  std::erase_if(going, [](const std::shared_ptr<OperationStream>& stream) { return stream->can_go(); });
  if (going.empty()) return;
  const std::lock_guard lock(mutex_);
  std::move(going.begin(), going.end(), std::back_inserter(streams_));
}

std::vector<std::shared_ptr<CompletionQueue>> AsyncEngine::queues() {
  std::vector<std::shared_ptr<CompletionQueue>> found;
  const std::lock_guard lock(mutex_);
  for (const std::weak_ptr<CompletionQueue>& weak : queues_) {
    if (std::shared_ptr<CompletionQueue> queue = weak.lock()) found.push_back(std::move(queue));
  }
  return found;
}

void AsyncEngine::watch_devices() {
  for (const std::unique_ptr<DeviceState>& state : devices_) {
    const DeviceContext& device = *state->context;
    const bool stands = device.streams_stand() && device.stands_still();
    if (!stands || state->told) {
      state->told = stands;
      continue;
    }
    state->told = true;
    std::size_t standing = 0;
    for (const std::shared_ptr<CompletionQueue>& queue : queues()) {
      for (const std::shared_ptr<Operation>& operation : queue->under_way()) {
        const std::lock_guard lock(operation->mutex_);
        if (operation->device_.get() == &device && operation->phase_ != Operation::Phase::kQueued) ++standing;
      }
    }
    log_warning(device.standstill(), ", and ", standing,
                " operations stand: copies of the program's own behind streams that wait for an operation are likely to"
                " keep the device's queues; ",
                remedy(device));
  }
}

bool AsyncEngine::awaited() const {
  return std::any_of(devices_.begin(), devices_.end(), [](const std::unique_ptr<DeviceState>& state) {
    return state->context->awaited() > std::chrono::milliseconds{};
  });
}

void AsyncEngine::let_go(const std::shared_ptr<Operation>& operation) {
  if (operation->stream_ == nullptr || operation->device_->awaited() < DeviceContext::kAlert) return;
  {
    const std::lock_guard lock(operation->mutex_);
    if (operation->phase_ != Operation::Phase::kRunning || !operation->reached_ || operation->let_go_) return;
    operation->let_go_ = true;
    Completion unknown;
    unknown.status = Status(ETIMEDOUT, "");
    tell_program(operation->request_, unknown);
    operation->request_.count = nullptr;
    operation->request_.codes = nullptr;
  }
  operation->changed_.notify_all();
  operation->stream_->release(*operation);
  ++let_go_;
  const std::lock_guard lock(mutex_);
  let_go_on_ = name_of(*operation->device_);
}

std::string AsyncEngine::let_go_on() const {
  const std::lock_guard lock(mutex_);
  return let_go_on_;
}

void AsyncEngine::shutdown() {
  std::shared_ptr<TransferEngine> transfers;
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
    transfers = transfers_;
  }
  std::vector<std::shared_ptr<CompletionQueue>> queues = this->queues();
  constexpr std::chrono::milliseconds kStep{2};
  const auto cancel_until = [&](Clock::time_point end) {
    // Again and again: one may have been on its way into its queue.
    while (outstanding_ > 0 && Clock::now() < end) {
      for (const std::shared_ptr<CompletionQueue>& queue : queues) (void)queue->cancel(0);
      std::this_thread::sleep_for(kStep);
    }
  };
  cancel_until(Clock::now() + transfers->options().shutdown_grace);
  // What a device does not get done may wait for the streams that wait for it. One that goes on may stand again at
  // once.
  const Clock::time_point last = Clock::now() + DeviceContext::kAlert + kStreamGrace;
  while (outstanding_ > 0 && awaited() && Clock::now() < last) {
    for (const std::shared_ptr<CompletionQueue>& queue : queues) {
      for (const std::shared_ptr<Operation>& operation : queue->under_way()) let_go(operation);
    }
    cancel_until(std::min(Clock::now() + kLook, last));
  }
  // What is left hangs in its file, or uses its memory still: the transfers leave it behind, and end it.
  if (outstanding_ > 0) transfers->shutdown();
  queues.clear();

  std::thread keeper;
  {
    const std::lock_guard lock(mutex_);
    keeper_ending_ = true;
    keeper.swap(keeper_);
  }
  changed_.notify_all();
  if (keeper.joinable()) keeper.join();
  std::vector<std::shared_ptr<OperationStream>> streams;
  {
    const std::lock_guard lock(mutex_);
    streams.swap(streams_);
    transfers_.reset();
  }
  const Clock::time_point enough = Clock::now() + kStreamGrace;
  for (const std::shared_ptr<OperationStream>& stream : streams) stream->close();
  for (;;) {
    std::erase_if(streams, [](const std::shared_ptr<OperationStream>& stream) { return stream->can_go(); });
    if (streams.empty() || Clock::now() >= enough) break;
    std::this_thread::sleep_for(kStep);
  }
  if (streams.empty()) return;
  log_warning(streams.size(), " streams have not come to their operations and are left behind");
  for (std::shared_ptr<OperationStream>& stream : streams) leave_behind(std::move(stream));
}

}  // namespace gpufs
