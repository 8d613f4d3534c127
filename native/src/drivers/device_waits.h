// Threads that wait for a device, and since when: how it is told that a device has come to a standstill.
// Owned by the driver's device.
// Any thread may call any function.
#pragma once

#include <atomic>
#include <chrono>
#include <mutex>

namespace gpufs {

class DeviceWaits {
 public:
  using Clock = std::chrono::steady_clock;

  DeviceWaits() = default;
  DeviceWaits(const DeviceWaits&) = delete;
  DeviceWaits& operator=(const DeviceWaits&) = delete;

  // While it lives, its thread waits for one piece of work. waits: null where nobody counts.
  class Wait {
   public:
    explicit Wait(DeviceWaits* waits);
    ~Wait();
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;

   private:
    friend class DeviceWaits;
    DeviceWaits* const waits_;
    // Guarded by the owner's mutex_.
    Clock::time_point since_;
    Wait* before_ = nullptr;
    Wait* after_ = nullptr;
  };

  // For how long the one who has waited longest has; 0: nobody waits.
  [[nodiscard]] std::chrono::milliseconds longest() const;

  // A wait of this length tells of a standstill: what the engine gives a device at a time takes milliseconds.
  [[nodiscard]] std::chrono::milliseconds patience() const { return std::chrono::milliseconds(patience_.load()); }
  void set_patience(std::chrono::milliseconds patience) { patience_ = patience.count(); }

 private:
  std::atomic<std::chrono::milliseconds::rep> patience_{10000};
  mutable std::mutex mutex_;  // guards all below; innermost
  Wait* oldest_ = nullptr;
  Wait* youngest_ = nullptr;
};

}  // namespace gpufs
