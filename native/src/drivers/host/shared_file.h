// Memory of another program as the host driver maps it: a part of a file in memory (memfd_create(2), shm_open(3)).
// Ownership and threads: as ForeignMapping.
#pragma once

#include <cstdint>
#include <memory>

#include "base/status.h"
#include "base/unique_fd.h"
#include "drivers/driver.h"
#include "drivers/host/fault_guard.h"

namespace gpufs {

class SharedFile : public ForeignMapping {
 public:
  // EINVAL: not such a file, not open as needed, or too small.
  static Result<std::unique_ptr<ForeignMapping>> map(const ForeignMemory& memory);
  ~SharedFile() override;
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;

  [[nodiscard]] DeviceAddress address() const override { return mapped_ + (offset_ - start_); }
  [[nodiscard]] bool intact() override;

 private:
  SharedFile(UniqueFd file, DeviceAddress mapped, std::uint64_t mapped_bytes, std::uint64_t start, std::uint64_t offset,
             std::uint64_t end)
      : file_(std::move(file)),
        mapped_(mapped),
        mapped_bytes_(mapped_bytes),
        start_(start),
        offset_(offset),
        end_(end) {}

  const UniqueFd file_;
  const DeviceAddress mapped_;
  const std::uint64_t mapped_bytes_;
  const std::uint64_t start_;   // of the mapping in the file: a multiple of the page size
  const std::uint64_t offset_;  // [offset_, end_) of the file is the memory
  const std::uint64_t end_;
  std::unique_ptr<FaultGuard> guard_;
};

}  // namespace gpufs
