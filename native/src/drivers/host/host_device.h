// The host driver: simulated devices whose memory is the machine's own, in memfds, with a limit for each.
// Ownership: devices are the driver's; the memory charged to the limit shares it.
// Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "drivers/driver.h"
#include "drivers/host/host_memory.h"
#include "drivers/ledger.h"

namespace gpufs {

// The pinned host ranges, for all devices of a driver. Copies here are memcpy, which gains nothing from locked pages,
// and locking would fail for ordinary users (RLIMIT_MEMLOCK). So pinning is bookkeeping only, with the rules and errors
// of a GPU's driver.
class HostPins {
 public:
  Status pin(void* address, std::size_t bytes);
  Status unpin(void* address);
  Result<PinnedHostRange> around(const void* address) const;

 private:
  mutable std::mutex mutex_;  // guards ranges_; innermost
  std::map<std::uintptr_t, std::size_t> ranges_;
};

class HostDevice : public Device {
 public:
  // host_tier: as DeviceInfo has it.
  HostDevice(int index, std::uint64_t memory_bytes, std::shared_ptr<HostPins> pins, bool host_tier = false);

  [[nodiscard]] const DeviceInfo& info() const override { return info_; }
  Result<MemoryInfo> memory(Wait wait) override;
  Status bind_thread() override { return {}; }
  Status health() override { return {}; }
  Result<std::unique_ptr<DeviceMemory>> create_memory() override;
  Result<std::unique_ptr<DeviceMemory>> restore_memory(std::uint64_t number,
                                                       std::span<const Extent> populated) override;
  Result<std::unique_ptr<ForeignMapping>> map_foreign(const ForeignMemory& memory) override;
  Result<std::unique_ptr<ImportedRange>> create_import(std::uint64_t capacity, ImportAccess access) override;
  Result<std::unique_ptr<Stream>> create_stream() override;
  Result<std::unique_ptr<Event>> create_event() override;
  Result<std::unique_ptr<Stream>> adopt_stream(NativeStream native, bool certain) override;
  Status copy_in(DeviceAddress destination, const void* source, std::size_t bytes) override;
  Status copy_out(void* destination, DeviceAddress source, std::size_t bytes) override;
  Status copy_within(DeviceAddress destination, DeviceAddress source, std::size_t bytes) override;
  Status zero(DeviceAddress destination, std::size_t bytes) override;
  Status copy_to_peer(Device& peer, DeviceAddress destination, DeviceAddress source, std::size_t bytes) override;
  Status pin(void* address, std::size_t bytes) override { return pins_->pin(address, bytes); }
  Status unpin(void* address) override { return pins_->unpin(address); }
  Result<DeviceAddress> address_of_pinned(void* address) override { return reinterpret_cast<DeviceAddress>(address); }
  Result<PinnedHostRange> pinned_range(const void* address) override { return pins_->around(address); }

 private:
  DeviceInfo info_;
  std::shared_ptr<Ledger> limit_;  // how much of its memory is in use
  std::shared_ptr<HostPins> pins_;
  std::shared_ptr<SharedHostFiles> shared_files_ = std::make_shared<SharedHostFiles>();
};

// ---- memory of other programs ----

// Memory that the host driver of another program has exported.
Result<std::unique_ptr<ImportedRange>> import_host_memory(std::uint64_t capacity, ImportAccess access);

// A part of a file in memory (memfd_create(2), shm_open(3)). EINVAL: not such a file, not open as needed, or too small.
Result<std::unique_ptr<ForeignMapping>> map_shared_file(const ForeignMemory& memory, std::shared_ptr<Ledger> limit);

// options.devices: 0 means one; options.memory_bytes: required, the limit of each device. EINVAL for bad options,
// ENODEV: the kernel provides no memfd.
Result<std::unique_ptr<Driver>> open_host_driver(const DriverOptions& options);
// See open_device().
Result<std::shared_ptr<Device>> open_host_device(const std::string& pci_address);

}  // namespace gpufs
