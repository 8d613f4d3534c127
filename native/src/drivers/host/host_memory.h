// A buffer's memory on the host driver: one memfd, whose offsets are the buffer's, shown in ranges of addresses.
// Ownership: the buffer's; the memfd and its charge live until the last range that shows them is gone.
// One thread at a time; any thread may destroy the ranges.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "drivers/driver.h"
#include "drivers/host/host_device.h"
#include "drivers/host/host_file.h"

namespace gpufs {

class HostMemory : public DeviceMemory {
 public:
  static Result<std::unique_ptr<DeviceMemory>> create(std::shared_ptr<Ledger> limit,
                                                      std::shared_ptr<SharedHostFiles> shared,
                                                      std::shared_ptr<MemoryKeeper> keeper);
  // Of the last process: see Device::restore_memory().
  static Result<std::unique_ptr<DeviceMemory>> restore(std::shared_ptr<Ledger> limit,
                                                       std::shared_ptr<SharedHostFiles> shared,
                                                       std::shared_ptr<MemoryKeeper> keeper, std::uint64_t number,
                                                       std::span<const Extent> populated);

  using DeviceMemory::reserve;
  Result<std::shared_ptr<AddressRange>> reserve(std::uint64_t bytes, std::span<const Extent> populated) override;
  using DeviceMemory::populate;
  Status populate(std::span<const Extent> spans, Wait wait) override;
  using DeviceMemory::release;
  void release(std::span<const Extent> spans) override;
  Result<std::vector<ExportedMemory>> export_memory(std::uint64_t from, std::uint64_t end, std::size_t capacity,
                                                    bool writable) override;
  [[nodiscard]] std::uint64_t number() const override { return file_->number(); }

 private:
  class Range;

  explicit HostMemory(std::shared_ptr<HostFile> file) : file_(std::move(file)) {}

  Status populate_one(const Extent& span);
  void release_one(const Extent& span);

  const std::shared_ptr<HostFile> file_;
  std::shared_ptr<Range> range_;  // the current one; null before the first reserve()
};

}  // namespace gpufs
