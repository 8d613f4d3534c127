#include "drivers/host/host_stream.h"

#include <cstring>
#include <string>
#include <utility>

#include "base/thread.h"
#include "drivers/host/streaming_copy.h"

namespace gpufs {

void HostRecording::finish(Status outcome) {
  {
    const std::lock_guard lock(mutex_);
    done_ = true;
    outcome_ = std::move(outcome);
  }
  done_changed_.notify_all();
}

Status HostRecording::wait() {
  std::unique_lock lock(mutex_);
  done_changed_.wait(lock, [this] { return done_; });
  return outcome_;
}

Result<bool> HostRecording::query() {
  const std::lock_guard lock(mutex_);
  if (done_ && !outcome_.ok()) return outcome_;
  return done_;
}

Result<bool> HostEvent::query() {
  const std::shared_ptr<HostRecording> recording = this->recording();
  if (recording == nullptr) return true;
  return recording->query();
}

Status HostEvent::synchronize() {
  const std::shared_ptr<HostRecording> recording = this->recording();
  if (recording == nullptr) return {};
  return recording->wait();
}

std::shared_ptr<HostRecording> HostEvent::recording() const {
  const std::lock_guard lock(mutex_);
  return recording_;
}

void HostEvent::set_recording(std::shared_ptr<HostRecording> recording) {
  const std::lock_guard lock(mutex_);
  recording_.swap(recording);
}

Result<std::unique_ptr<Stream>> HostStream::create(int device) {
  std::unique_ptr<HostStream> stream(new HostStream);
  Result<std::thread> thread =
      start_thread("gpufs-str" + std::to_string(device), [raw = stream.get()] { raw->work_loop(); });
  if (!thread.ok()) return thread.status();
  stream->thread_ = thread.take();
  return std::unique_ptr<Stream>(std::move(stream));
}

HostStream::~HostStream() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void HostStream::work_loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return ending_ || !work_.empty(); });
    if (work_.empty()) return;
    std::function<void()> work = std::move(work_.front());
    work_.pop_front();
    lock.unlock();
    work();
    work = nullptr;  // what it holds goes before the lock is taken
    lock.lock();
  }
}

void HostStream::queue(std::function<void()> work) {
  {
    const std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
  }
  changed_.notify_all();
}

Status HostStream::copy_to_device(DeviceAddress destination, const void* source, std::size_t bytes) {
  queue([=] { copy_to_memory(reinterpret_cast<void*>(destination), source, bytes); });
  return {};
}

Status HostStream::copy_to_host(void* destination, DeviceAddress source, std::size_t bytes) {
  queue([=] { std::memcpy(destination, reinterpret_cast<const void*>(source), bytes); });
  return {};
}

Status HostStream::copy_on_device(DeviceAddress destination, DeviceAddress source, std::size_t bytes) {
  queue([=] { std::memmove(reinterpret_cast<void*>(destination), reinterpret_cast<const void*>(source), bytes); });
  return {};
}

Status HostStream::fill_zero(DeviceAddress destination, std::size_t bytes) {
  queue([=] { std::memset(reinterpret_cast<void*>(destination), 0, bytes); });
  return {};
}

Status HostStream::record(Event& event) {
  auto recording = std::make_shared<HostRecording>();
  static_cast<HostEvent&>(event).set_recording(recording);
  queue([recording] { recording->finish(Status()); });
  return {};
}

Status HostStream::wait(Event& event) {
  std::shared_ptr<HostRecording> recording = static_cast<HostEvent&>(event).recording();
  if (recording != nullptr) queue([recording] { (void)recording->wait(); });
  return {};
}

Status HostStream::synchronize() {
  // Shared: the stream's thread may still be inside finish() when this has seen the end.
  const auto reached = std::make_shared<HostRecording>();
  queue([reached] { reached->finish(Status()); });
  return reached->wait();
}

}  // namespace gpufs
