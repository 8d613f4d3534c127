// A buffer's memory on the host driver: one memfd, whose offsets are the buffer's, shown in ranges of addresses.
// Owned by the buffer; the memfd and its charge live until the last range that shows them has gone.
// One caller at a time for HostMemory, as the interface says; ranges may be destroyed on any thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "drivers/driver.h"
#include "drivers/host/host_device.h"

namespace gpufs {

class HostMemory : public DeviceMemory {
 public:
  static Result<std::unique_ptr<DeviceMemory>> create(std::shared_ptr<HostLimit> limit);

  Result<std::shared_ptr<AddressRange>> reserve(std::uint64_t bytes) override;
  using DeviceMemory::populate;
  Status populate(std::span<const MemorySpan> spans) override;
  using DeviceMemory::release;
  void release(std::span<const MemorySpan> spans) override;
  Result<std::vector<ExportedMemory>> export_memory() override;

 private:
  struct File;  // the memfd and its charge
  class Range;

  explicit HostMemory(std::shared_ptr<File> file) : file_(std::move(file)) {}

  Status populate_one(std::uint64_t offset, std::uint64_t bytes);
  void release_one(std::uint64_t offset, std::uint64_t bytes);
  [[nodiscard]] bool all_populated(std::uint64_t offset, std::uint64_t bytes) const;
  [[nodiscard]] bool none_populated(std::uint64_t offset, std::uint64_t bytes) const;

  std::shared_ptr<File> file_;
  std::shared_ptr<Range> range_;                      // the current one; null before the first reserve()
  std::map<std::uint64_t, std::uint64_t> populated_;  // offset -> bytes; neighbours are joined
};

}  // namespace gpufs
