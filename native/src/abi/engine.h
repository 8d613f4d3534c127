// The object of an engine handle: a driver and the contexts of its devices.
// Ownership: shared by the handle table and calls in progress. Buffers and mounts keep their device's context instead.
// Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/status.h"
#include "device/device_context.h"
#include "drivers/driver.h"
#include "gpufs.h"
#include "memory/host_locks.h"

namespace gpufs {

class AsyncEngine;     // async/async_engine.h
struct AsyncOptions;   // async/async_engine.h
struct IoOptions;      // io/io_options.h
class TransferEngine;  // io/transfer_engine.h
namespace fuse {
class Mount;  // fuse/mount.h
}

class Engine {
 public:
  static Result<std::shared_ptr<Engine>> open(const gpufs_engine_options& options);

  [[nodiscard]] const char* driver_name() const { return driver_->name(); }
  [[nodiscard]] std::size_t device_count() const { return devices_.size(); }
  // EINVAL outside 0..device_count()-1.
  [[nodiscard]] Result<std::shared_ptr<DeviceContext>> device(std::int32_t index) const;
  [[nodiscard]] const std::vector<std::shared_ptr<DeviceContext>>& devices() const { return devices_; }

  // The host memory that is locked for these devices.
  [[nodiscard]] const std::shared_ptr<HostLocks>& host_locks() const { return host_locks_; }

  // The counters of all devices.
  [[nodiscard]] observe::Region& counters() const { return *counters_; }
  // Writes the gauges beside the counters, also those of this mount.
  void publish_gauges();
  void publish_of(std::weak_ptr<fuse::Mount> mount);

  // Moves data between files and devices: made by the first call, with these options or the default ones.
  // ESHUTDOWN after close(). EBUSY: it is made already.
  Result<std::shared_ptr<TransferEngine>> transfers();
  Status configure_transfers(const IoOptions& options);
  // The same for operations on streams.
  Result<std::shared_ptr<AsyncEngine>> operations();
  Status configure_operations(const AsyncOptions& options);

  // Ends operations and transfers. The caller then closes the handles that the engine owns. ETIMEDOUT: some operations
  // and transfers were abandoned (gpufs_engine_close()).
  Status close();

 private:
  Engine() = default;
  Result<std::shared_ptr<TransferEngine>> make_transfers_locked(const IoOptions& options);
  Result<std::shared_ptr<AsyncEngine>> make_operations_locked(const AsyncOptions& options);

  std::shared_ptr<Driver> driver_;
  std::shared_ptr<observe::Region> counters_;
  std::shared_ptr<HostLocks> host_locks_;
  std::vector<std::shared_ptr<DeviceContext>> devices_;

  std::mutex mutex_;  // guards all below; held while the two are made
  std::shared_ptr<TransferEngine> transfers_;
  std::shared_ptr<AsyncEngine> operations_;
  std::weak_ptr<fuse::Mount> mount_;
  bool closed_ = false;
};

}  // namespace gpufs
