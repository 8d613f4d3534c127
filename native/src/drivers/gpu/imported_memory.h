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

  [[nodiscard]] DeviceAddress base() const override { return mapped_.base; }
  [[nodiscard]] std::uint64_t capacity() const override { return mapped_.capacity; }

 private:
  // Addresses, and the pieces that are mapped there.
  struct Mapped {
    std::shared_ptr<GpuDevice> device;
    DeviceAddress base;
    std::uint64_t capacity;
    std::map<std::uint64_t, std::uint64_t> pieces;  // bytes by offset

    void unmap() const;
  };
  // Mappings that could not be unmapped yet, of all devices.
  struct Kept;

  ImportedMemory(std::shared_ptr<GpuDevice> device, DeviceAddress base, std::uint64_t capacity, bool writable)
      : mapped_{std::move(device), base, capacity, {}}, writable_(writable) {}
  Status map(const ExportedMemory& piece) override;

  Mapped mapped_;
  const bool writable_;
};

}  // namespace gpufs::gpu
