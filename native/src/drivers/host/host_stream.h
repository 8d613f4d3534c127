// Streams and events of the host driver: really asynchronous, so that a missing wait shows here as on a GPU.
// A stream owns its thread, which ends with it, and those adopted from it are other names of its queue; a recording is
// shared by its event and by the streams that wait for it.
// Any thread may call any function.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "drivers/driver.h"

namespace gpufs {

// One record() of an event: done once the stream that it was recorded in has come to it.
class HostRecording {
 public:
  void finish(Status outcome);
  Status wait();
  Result<bool> query();

 private:
  std::mutex mutex_;  // guards all below; innermost
  std::condition_variable done_changed_;
  bool done_ = false;
  Status outcome_;
};

class HostEvent : public Event {
 public:
  Result<bool> query() override;
  Status synchronize() override;

  // Null: never recorded.
  [[nodiscard]] std::shared_ptr<HostRecording> recording() const;
  void set_recording(std::shared_ptr<HostRecording> recording);

 private:
  mutable std::mutex mutex_;  // guards recording_; innermost
  std::shared_ptr<HostRecording> recording_;
};

class HostStream : public Stream {
 public:
  static Result<std::unique_ptr<Stream>> create(int device);
  // By native() of one that lives.
  static Result<std::unique_ptr<Stream>> adopt(NativeStream native, int device);
  ~HostStream() override;
  HostStream(const HostStream&) = delete;
  HostStream& operator=(const HostStream&) = delete;

  Status copy_to_device(DeviceAddress destination, const void* source, std::size_t bytes) override;
  Status copy_to_host(void* destination, DeviceAddress source, std::size_t bytes) override;
  Status copy_on_device(DeviceAddress destination, DeviceAddress source, std::size_t bytes) override;
  Status fill_zero(DeviceAddress destination, std::size_t bytes) override;
  Status record(Event& event) override;
  Status wait(Event& event) override;
  Status call(HostFunction function, void* argument) override;
  Status wait_for_value(DeviceAddress cell, std::uint32_t value) override;
  [[nodiscard]] NativeStream native() const override { return reinterpret_cast<NativeStream>(queue_.get()); }
  Status synchronize() override;

 private:
  struct Queue {
    const int device;
    std::mutex mutex;  // guards all below; nothing queued runs under it
    std::condition_variable changed;
    std::condition_variable ended;  // a piece of work has
    std::deque<std::function<void()>> work;
    std::uint64_t queued = 0;  // ever
    std::uint64_t done = 0;    // of these
    bool ending = false;

    explicit Queue(int on) : device(on) {}
    void run();
  };
  struct Streams;  // those that live, by their native names

  explicit HostStream(std::shared_ptr<Queue> queue) : queue_(std::move(queue)) {}
  void queue(std::function<void()> work);

  const std::shared_ptr<Queue> queue_;
  std::thread thread_;  // not in one that was adopted
};

}  // namespace gpufs
