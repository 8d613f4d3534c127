#include "drivers/gpu/context.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <optional>

#include "base/log.h"

namespace gpufs::gpu {
namespace {

// More than the release of all of a device's memory takes. Who asks how much is free waits no longer for one.
constexpr std::chrono::seconds kReleaseTime{1};

}  // namespace

void Context::give_up_pools() {
  spares_.close();
  // Nothing can be done about failures here, and after a fatal one all of these fail.
  const Current current(*this);
  for (StreamHandle stream : idle_streams_) destroy_stream(stream);
  idle_streams_.clear();
}

void Context::fail(const Status& reason) {
  {
    const std::scoped_lock lock(failure_mutex_);
    if (!failure_.ok()) return;
    failure_ = Status{EIO, "out of service since " + reason.message(), reason.device_code()};
    failed_.store(true, std::memory_order_release);
  }
  log_error(name(), " is out of service: ", reason.message());
}

Status Context::health() {
  if (!failed_.load(std::memory_order_acquire)) return {};
  const std::scoped_lock lock(failure_mutex_);
  return failure_;
}

Status Context::take(std::uint64_t bytes) {
  std::uint64_t taken = taken_.load(std::memory_order_relaxed);
  do {
    if (cap_ != 0 && (taken > cap_ || bytes > cap_ - taken)) {
      return {ENOSPC, "No space left on device (" + name() + ": " + std::to_string(bytes) +
                          " more bytes would exceed the cap of " + std::to_string(cap_) + ")"};
    }
  } while (!taken_.compare_exchange_weak(taken, taken + bytes, std::memory_order_relaxed));
  return {};
}

Status Context::acquire_physical(std::uint64_t bytes, PhysicalHandle* handle) {
  if (Status status = take(bytes); !status.ok()) return status;
  if (const std::optional<PhysicalHandle> spare = spares_.take(bytes)) {
    *handle = *spare;
    return {};
  }
  if (cap_ != 0 && taken_.load(std::memory_order_relaxed) + spares_.bytes() > cap_) static_cast<void>(spares_.drop());
  Status status = create_physical(bytes, handle);
  if (status.error() == ENOSPC && spares_.drop()) status = create_physical(bytes, handle);
  if (!status.ok()) give_back(bytes);
  return status;
}

void Context::return_physical(PhysicalHandle handle, std::uint64_t bytes, bool kept) {
  if (!kept || !health().ok() || !spares_.keep(handle, bytes)) release({&handle, 1});
  give_back(bytes);
}

// Of a device out of service, too: what the vendor still does about it is done.
void Context::release(std::span<const PhysicalHandle> handles) {
  const Current current(*this);
  for (const PhysicalHandle handle : handles) release_physical(handle);
}

Result<MemoryInfo> Context::memory() {
  const Current current(*this);
  if (!current.status().ok()) return current.status();
  MemoryInfo info{info_.total_bytes, 0};
  // Again where memory went from here to the vendor or back meanwhile. What is on its way is in nobody's count.
  constexpr int kAttempts = 100;
  const auto deadline = std::chrono::steady_clock::now() + kReleaseTime;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const std::optional<std::uint64_t> before = spares_.settled(deadline);
    if (Status status = free_memory(&info.free_bytes); !status.ok()) return status;
    info.free_bytes = std::min(info.free_bytes + spares_.bytes(), info.total_bytes);
    if (!before || spares_.changes() == before) break;
  }
  if (cap_ != 0) {
    const std::uint64_t taken = taken_.load(std::memory_order_relaxed);
    info.free_bytes = std::min<std::uint64_t>(info.free_bytes, taken < cap_ ? cap_ - taken : 0);
  }
  return info;
}

Result<StreamHandle> Context::borrow_stream() {
  {
    const std::scoped_lock lock(streams_mutex_);
    if (!idle_streams_.empty()) {
      StreamHandle stream = idle_streams_.back();
      idle_streams_.pop_back();
      return stream;
    }
    idle_streams_.reserve(streams_ + 1);
    ++streams_;
  }
  StreamHandle stream = nullptr;
  if (Status status = create_stream(&stream); !status.ok()) {
    const std::scoped_lock lock(streams_mutex_);
    --streams_;
    return status;
  }
  return stream;
}

void Context::return_stream(StreamHandle stream) {
  const std::scoped_lock lock(streams_mutex_);
  idle_streams_.push_back(stream);
}

Current::Current(Context& context) : context_(context), status_(context.health()) {
  if (!status_.ok()) return;
  Result<bool> changed = context_.make_current(&before_);
  status_ = changed.status();
  changed_ = changed.ok() && changed.value();
}

Current::~Current() {
  if (changed_) context_.restore(before_);
}

SynchronousWork::SynchronousWork(Context& context) : context_(context), current_(context), status_(current_.status()) {
  if (!status_.ok()) return;
  Result<StreamHandle> stream = context_.borrow_stream();
  if (stream.ok()) {
    stream_ = stream.value();
  } else {
    status_ = stream.status();
  }
}

SynchronousWork::~SynchronousWork() {
  if (stream_ == nullptr) return;
  if (!finished_) static_cast<void>(finish());
  context_.return_stream(stream_);
}

Status SynchronousWork::finish() {
  finished_ = true;
  return context_.synchronize_stream(stream_);
}

}  // namespace gpufs::gpu
