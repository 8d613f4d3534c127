#include "drivers/host/host_stream.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "base/thread.h"
#include "drivers/host/host_memory.h"

namespace gpufs {

void HostEvent::Recordings::reach(std::uint64_t number) {
  const std::lock_guard lock(mutex);
  reached = std::max(reached, number);
}

Result<bool> HostEvent::query() {
  const std::lock_guard lock(recordings_->mutex);
  return recordings_->reached == recordings_->made;
}

struct HostStream::Streams {
  std::mutex mutex;  // guards the map; innermost
  std::map<NativeStream, std::weak_ptr<Queue>> alive;

  // Never destroyed: streams may outlive main().
  static Streams& instance() {
    static auto* const streams = new Streams;
    return *streams;
  }
};

Result<std::unique_ptr<Stream>> HostStream::create(int device) {
  auto queue = std::make_shared<Queue>(device);
  std::unique_ptr<HostStream> stream(new HostStream(queue));
  Result<std::thread> thread = start_thread("gpufs-str" + std::to_string(device), [queue] { queue->run(); });
  if (!thread.ok()) return thread.status();
  stream->thread_ = thread.take();
  Streams& streams = Streams::instance();
  const std::lock_guard lock(streams.mutex);
  streams.alive.emplace(stream->native(), queue);
  return std::unique_ptr<Stream>(std::move(stream));
}

Result<std::unique_ptr<Stream>> HostStream::adopt(NativeStream native, int device) {
  std::shared_ptr<Queue> queue;
  {
    Streams& streams = Streams::instance();
    const std::lock_guard lock(streams.mutex);
    const auto found = streams.alive.find(native);
    if (found != streams.alive.end()) queue = found->second.lock();
  }
  if (queue == nullptr) return Status(EINVAL, "no stream of the host driver has this handle");
  if (queue->device != device) return Status(EXDEV, "the stream belongs to gpu " + std::to_string(queue->device));
  return std::unique_ptr<Stream>(new HostStream(std::move(queue)));
}

HostStream::~HostStream() {
  if (!thread_.joinable()) return;
  {
    Streams& streams = Streams::instance();
    const std::lock_guard lock(streams.mutex);
    streams.alive.erase(native());
  }
  {
    const std::lock_guard lock(queue_->mutex);
    queue_->ending = true;
  }
  queue_->changed.notify_all();
  thread_.join();
}

void HostStream::Queue::run() {
  std::unique_lock lock(mutex);
  for (;;) {
    changed.wait(lock, [this] { return ending || !work.empty(); });
    if (work.empty()) return;
    std::function<void()> next = std::move(work.front());
    work.pop_front();
    lock.unlock();
    next();
    next = nullptr;  // destroys what it holds without the lock
    lock.lock();
    ++done;
    ended.notify_all();
  }
}

void HostStream::queue(std::function<void()> work) {
  {
    const std::lock_guard lock(queue_->mutex);
    queue_->work.push_back(std::move(work));
    ++queue_->queued;
  }
  queue_->changed.notify_all();
}

Status HostStream::copy(CopyDirection direction, std::span<const HostCopy> copies) {
  for (const HostCopy& copy : copies) {
    queue([direction, copy] {
      auto* const device = reinterpret_cast<void*>(copy.device);
      if (direction == CopyDirection::kToDevice) {
        copy_to_memory(device, copy.host, copy.bytes);
      } else {
        std::memcpy(copy.host, device, copy.bytes);
      }
    });
  }
  return {};
}

Status HostStream::fill_zero(DeviceAddress destination, std::size_t bytes) {
  queue([=] { std::memset(reinterpret_cast<void*>(destination), 0, bytes); });
  return {};
}

Status HostStream::record(Event& event) {
  const auto recordings = static_cast<HostEvent&>(event).recordings_;
  std::uint64_t number = 0;
  {
    const std::lock_guard lock(recordings->mutex);
    number = ++recordings->made;
  }
  queue([=] { recordings->reach(number); });
  return {};
}

Status HostStream::call(HostFunction function, void* argument) {
  queue([=] { function(argument); });
  return {};
}

Status HostStream::wait_for_value(DeviceAddress cell, std::uint32_t value) {
  queue([=] {
    const std::atomic_ref<std::uint32_t> word(*reinterpret_cast<std::uint32_t*>(cell));
    for (;;) {
      const std::uint32_t now = word.load(std::memory_order_acquire);
      if (static_cast<std::int32_t>(now - value) >= 0) return;
      word.wait(now, std::memory_order_acquire);
    }
  });
  return {};
}

Status HostStream::synchronize() {
  std::unique_lock lock(queue_->mutex);
  const std::uint64_t last = queue_->queued;
  queue_->ended.wait(lock, [&] { return queue_->done >= last; });
  return {};
}

}  // namespace gpufs
