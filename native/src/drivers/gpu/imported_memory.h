// Memory of a GPU that another program has exported, mapped into this process's addresses.
// Ownership: the caller's. Threads: as ImportedRange.
#pragma once

#include <cstdint>
#include <map>
#include <memory>

#include "drivers/driver.h"
#include "drivers/gpu/gpu_device.h"

namespace gpufs::gpu {

class ImportedMemory final : public ImportedRange {
 public:
  static Result<std::unique_ptr<ImportedRange>> create(std::shared_ptr<GpuDevice> device, std::uint64_t capacity,
                                                       bool writable);
  ~ImportedMemory() override;
  ImportedMemory(const ImportedMemory&) = delete;
  ImportedMemory& operator=(const ImportedMemory&) = delete;

  [[nodiscard]] DeviceAddress base() const override { return base_; }
  [[nodiscard]] std::uint64_t capacity() const override { return capacity_; }

 private:
  ImportedMemory(std::shared_ptr<GpuDevice> device, DeviceAddress base, std::uint64_t capacity, bool writable)
      : device_(std::move(device)), base_(base), capacity_(capacity), writable_(writable) {}
  Status map(const ExportedMemory& piece) override;

  const std::shared_ptr<GpuDevice> device_;
  const DeviceAddress base_;
  const std::uint64_t capacity_;
  const bool writable_;
  std::map<std::uint64_t, std::uint64_t> pieces_;  // bytes by offset
};

}  // namespace gpufs::gpu
