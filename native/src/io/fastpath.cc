#include "io/fastpath.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/math.h"
#include "drivers/gpu/vendor_library.h"
#include "drivers/hip/hip_library.h"
#include "io/backing_file.h"
#include "io/cufile.h"
#include "io/file_io.h"

namespace gpufs {
namespace {

// Device memory that the CPU addresses: the disk writes to it by DMA.
class HostFastpathFile final : public FastpathFile {
 public:
  explicit HostFastpathFile(BackingFile& file) : file_(file) {}

  Moved move(Direction direction, DeviceAddress memory, std::uint64_t bytes, std::uint64_t file_offset) override {
    auto* const data = reinterpret_cast<std::byte*>(memory);
    return direction == Direction::kLoad ? read_range(file_, IoMode::kDirect, data, bytes, file_offset)
                                         : write_range(file_, IoMode::kDirect, data, bytes, file_offset);
  }

 private:
  BackingFile& file_;  // owns this
};

// A path without a vendor's library.
class PlainFastpath final : public Fastpath {
 public:
  explicit PlainFastpath(RefusalMask refusals) : refusals_(refusals) {}
  [[nodiscard]] RefusalMask refusals() const override { return refusals_; }
  Result<std::unique_ptr<FastpathFile>> attach(BackingFile& file) override {
    if (refusals_ != 0) return Status(EOPNOTSUPP, "this driver moves no files");
    return std::unique_ptr<FastpathFile>(std::make_unique<HostFastpathFile>(file));
  }

 private:
  const RefusalMask refusals_;
};

}  // namespace

std::string describe_refusals(RefusalMask mask) {
  std::string text;
  for (std::size_t bit = 0; bit < kRefusalCount; ++bit) {
    if ((mask >> bit & 1U) == 0) continue;
    if (!text.empty()) text += ", ";
    text += kRefusalNames[bit];
  }
  return text.empty() ? "none" : text;
}

std::shared_ptr<Fastpath> make_fastpath(const std::string& driver_name, const FileSystems& file_systems) {
  if (driver_name == "host") return std::make_shared<PlainFastpath>(0);
  if (driver_name == "cuda") return open_cufile_path(file_systems);
  if (driver_name == "hip") {
    return open_hip_file_path(hip::Library::names(), ::access(hip::kKernelDriver, R_OK | W_OK) == 0);
  }
  return std::make_shared<PlainFastpath>(mask_of(Refusal::kNoVendorCall));
}

Moved move_in_parts(std::uint64_t bytes, std::uint64_t unit,
                    const std::function<Moved(std::uint64_t done, std::uint64_t part)>& call) {
  Moved moved;
  while (moved.bytes < bytes) {
    if (gpu::process_is_ending()) {
      moved.status = Status(ECANCELED, "the process is ending");
      return moved;
    }
    const Moved part = call(moved.bytes, std::min(bytes - moved.bytes, round_down(kKernelLimit, unit)));
    moved.bytes += part.bytes;
    const bool interrupted = part.status.error() == EINTR;
    if (!part.status.ok() && !interrupted) {
      moved.status = part.status;
      moved.refusals = part.refusals;
      return moved;
    }
    // The end of the file, or an offset at which nothing can be continued.
    if (part.bytes % unit != 0 || (part.bytes == 0 && !interrupted)) return moved;
  }
  return moved;
}

bool rerun_on_fallback(int error) {
  return error == ENODEV || error == EREMOTEIO || error == ENOTTY || error == EOPNOTSUPP;
}

}  // namespace gpufs
