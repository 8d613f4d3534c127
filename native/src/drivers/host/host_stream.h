// Streams and events of the host driver. They are really asynchronous, so that tests without a GPU find a missing wait.
// Ownership: a stream ends its thread; adopted streams share its queue. An event and its streams share the count of its
// recordings.
// Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>

#include "base/worker.h"
#include "drivers/driver.h"

namespace gpufs {

class HostEvent : public Event {
 public:
  Result<bool> query() override;

 private:
  friend class HostStream;
  // Recordings are counted; the streams that made them may outlive the event.
  struct Recordings {
    std::mutex mutex;  // guards all below; innermost
    std::uint64_t made = 0;
    std::uint64_t reached = 0;  // the latest that a stream has reached

    void reach(std::uint64_t number);
  };
  const std::shared_ptr<Recordings> recordings_ = std::make_shared<Recordings>();
};

class HostStream final : public Stream {
 public:
  static Result<std::unique_ptr<Stream>> create(int device);
  // Adopts an existing stream by its native().
  static Result<std::unique_ptr<Stream>> adopt(NativeStream native, int device);
  ~HostStream() override;
  HostStream(const HostStream&) = delete;
  HostStream& operator=(const HostStream&) = delete;

  Status copy(CopyDirection direction, std::span<const HostCopy> copies) override;
  Status fill_zero(DeviceAddress destination, std::size_t bytes) override;
  Status record(Event& event) override;
  Status call(HostFunction function, void* argument) override;
  Status wait_for_value(DeviceAddress cell, std::uint32_t value) override;
  [[nodiscard]] NativeStream native() const override { return reinterpret_cast<NativeStream>(queue_.get()); }
  Status synchronize() override;

 private:
  struct Queue {
    const int device;
    Worker worker{"gpufs-str" + std::to_string(device)};
  };
  struct Streams;  // all that exist, by their native handles

  HostStream(std::shared_ptr<Queue> queue, bool adopted) : queue_(std::move(queue)), adopted_(adopted) {}
  bool queue(Worker::Task work) { return queue_->worker.post(std::move(work)); }

  const std::shared_ptr<Queue> queue_;
  const bool adopted_;
};

}  // namespace gpufs
