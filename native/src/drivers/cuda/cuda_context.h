// What all objects of one CUDA device share: its primary context, its health, its account of memory taken and its pool
// of streams for synchronous work; and the guard that makes the context current on a thread.
// Owned by shared pointers of the device, its memory, its streams and its events; the primary context is let go with
// the last of them.
// Any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/status.h"
#include "drivers/cuda/cuda_library.h"
#include "drivers/driver.h"

namespace gpufs::cuda {

class Context {
 public:
  // Retains the primary context of the driver's device `index`. cap: the most bytes populated at a time, 0 for no cap.
  static Result<std::shared_ptr<Context>> open(std::shared_ptr<const Library> library, int index, std::uint64_t cap);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  [[nodiscard]] const Library& library() const { return *library_; }
  [[nodiscard]] const DeviceInfo& info() const { return info_; }
  [[nodiscard]] CuDevice device() const { return device_; }
  [[nodiscard]] CuContext handle() const { return context_; }
  [[nodiscard]] bool virtual_memory() const { return virtual_memory_; }
  [[nodiscard]] bool read_only_pinning() const { return read_only_pinning_; }
  [[nodiscard]] const CuAllocationProperties& allocation() const { return allocation_; }

  // Who may reach memory of this device: itself, and the peers that can. Set once, before anything is allocated.
  void set_access(std::vector<CuAccess> access) { access_ = std::move(access); }
  [[nodiscard]] const std::vector<CuAccess>& access() const { return access_; }

  // Turns the result of a call into a Status: "gpu 0: cuMemCreate: CUDA_ERROR_... (2): out of memory". A fatal code
  // puts the device out of service.
  Status check(CuResult code, const char* call, Purpose purpose = Purpose::kMemory);
  Status health();
  // Puts the device out of service; only the first reason is kept.
  void fail(const Status& reason);

  // The account of memory under the cap: ENOSPC when `bytes` more do not fit.
  Status take(std::uint64_t bytes);
  void give_back(std::uint64_t bytes) { taken_.fetch_sub(bytes, std::memory_order_relaxed); }
  Result<MemoryInfo> memory();

  // Streams for synchronous work, each lent to one thread at a time, so that nobody waits for another's copy.
  Result<CuStream> borrow_stream();
  void return_stream(CuStream stream);

 private:
  Context(std::shared_ptr<const Library> library, CuDevice device, std::uint64_t cap)
      : library_(std::move(library)), device_(device), cap_(cap) {}
  Status describe_device();

  const std::shared_ptr<const Library> library_;
  const CuDevice device_;
  const std::uint64_t cap_;
  CuContext context_ = nullptr;
  DeviceInfo info_;
  CuAllocationProperties allocation_{};
  std::vector<CuAccess> access_;
  bool virtual_memory_ = false;
  bool read_only_pinning_ = false;

  std::atomic<std::uint64_t> taken_{0};

  std::atomic<bool> failed_{false};
  std::mutex failure_mutex_;  // guards failure_; a leaf
  Status failure_;

  std::mutex streams_mutex_;  // guards idle_streams_; a leaf
  std::vector<CuStream> idle_streams_;
};

// Makes the context current on this thread while it lives, and then what was current before. Costs two cheap calls, or
// one where the context is current already.
class Current {
 public:
  explicit Current(Context& context);
  ~Current();
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  // The device's health, or why the context could not be made current.
  [[nodiscard]] const Status& status() const { return status_; }

 private:
  Context& context_;
  Status status_;
  bool pushed_ = false;
};

// A stream of the context's pool on a thread where the context is current: queue on get(), then finish(), which waits
// for what was queued (as the destructor does on the way out of a failure).
class SynchronousWork {
 public:
  explicit SynchronousWork(Context& context);
  ~SynchronousWork();
  SynchronousWork(const SynchronousWork&) = delete;
  SynchronousWork& operator=(const SynchronousWork&) = delete;
  [[nodiscard]] const Status& status() const { return status_; }
  [[nodiscard]] CuStream get() const { return stream_; }
  Status finish();

 private:
  Context& context_;
  Current current_;
  Status status_;
  CuStream stream_ = nullptr;
  bool finished_ = false;
};

}  // namespace gpufs::cuda
