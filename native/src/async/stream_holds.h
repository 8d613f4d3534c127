// How many operations a device's streams hold, and how many of them by a wait in the device's own queues.
// Shared by the device's streams and the AsyncEngine.
// Any thread may call any function, a driver's own threads too.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <utility>

#include "device/device_context.h"

namespace gpufs {

class StreamHolds {
 public:
  // A hardware queue of an H200 takes 55 calls of the host with a wait behind each, and makes whoever queues more wait
  // inside the driver; streams are spread over 8 queues, and the program's own work needs room there, too.
  static constexpr std::size_t kWaitsOfStream = 16;
  static constexpr std::size_t kWaitsOfDevice = 256;

  explicit StreamHolds(std::shared_ptr<DeviceContext> device) : device_(std::move(device)) {}
  StreamHolds(const StreamHolds&) = delete;
  StreamHolds& operator=(const StreamHolds&) = delete;

  // From before it is queued until its stream goes on.
  void begin() { device_->streams_stand(1); }
  void end() { device_->streams_stand(-1); }
  [[nodiscard]] bool any() const { return device_->streams_stand(); }

  // Room for one more wait in the device's queues, if there is.
  bool take_wait() {
    if (waits_.fetch_add(1) < kWaitsOfDevice) return true;
    --waits_;
    return false;
  }
  void give_wait_back() { --waits_; }

 private:
  const std::shared_ptr<DeviceContext> device_;
  std::atomic<std::size_t> waits_{0};
};

}  // namespace gpufs
