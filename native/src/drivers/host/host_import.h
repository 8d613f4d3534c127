// Memory of the host driver that another program has exported, mapped into this process.
// Ownership: the caller's. Threads: as ImportedRange.
#pragma once

#include <cstdint>
#include <memory>

#include "drivers/driver.h"

namespace gpufs {

class HostImport final : public ImportedRange {
 public:
  static Result<std::unique_ptr<ImportedRange>> create(std::uint64_t capacity, bool writable);
  ~HostImport() override;
  HostImport(const HostImport&) = delete;
  HostImport& operator=(const HostImport&) = delete;

  [[nodiscard]] DeviceAddress base() const override { return base_; }
  [[nodiscard]] std::uint64_t capacity() const override { return capacity_; }

 private:
  Status map(const ExportedMemory& piece) override;
  HostImport(DeviceAddress base, std::uint64_t capacity, bool writable)
      : base_(base), capacity_(capacity), writable_(writable) {}

  const DeviceAddress base_;
  const std::uint64_t capacity_;
  const bool writable_;
};

}  // namespace gpufs
