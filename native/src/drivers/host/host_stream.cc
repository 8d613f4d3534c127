#include "drivers/host/host_stream.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <latch>
#include <map>

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
  std::shared_ptr<Queue> queue(new Queue{device});
  TRY(queue->worker.start());
  std::unique_ptr<HostStream> stream(new HostStream(queue, /*adopted=*/false));
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
  return std::unique_ptr<Stream>(new HostStream(std::move(queue), /*adopted=*/true));
}

HostStream::~HostStream() {
  if (adopted_) return;
  {
    Streams& streams = Streams::instance();
    const std::lock_guard lock(streams.mutex);
    streams.alive.erase(native());
  }
  queue_->worker.stop();
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
  const auto reached = std::make_shared<std::latch>(1);
  if (queue([reached] { reached->count_down(); })) reached->wait();
  return {};
}

}  // namespace gpufs
