#include "io/direct_path.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/math.h"
#include "drivers/gpu/vendor_library.h"
#include "drivers/hip/hip_library.h"
#include "io/backing_file.h"
#include "io/cufile.h"
#include "io/file_moves.h"

namespace gpufs {
namespace {

// Device memory that the CPU addresses: the disk writes to it by DMA.
class HostDirectFile final : public DirectFile {
 public:
  explicit HostDirectFile(BackingFile& file) : file_(file) {}

  Moved load(DeviceAddress destination, std::uint64_t bytes, std::uint64_t file_offset) override {
    return read_range(file_, IoMode::kDirect, reinterpret_cast<std::byte*>(destination), bytes, file_offset);
  }
  Moved store(DeviceAddress source, std::uint64_t bytes, std::uint64_t file_offset) override {
    return write_range(file_, IoMode::kDirect, reinterpret_cast<const std::byte*>(source), bytes, file_offset);
  }

 private:
  BackingFile& file_;  // owns this
};

class HostDirectPath final : public DirectPath {
 public:
  [[nodiscard]] RefusalMask refusals() const override { return 0; }
  Result<std::unique_ptr<DirectFile>> attach(BackingFile& file) override {
    return std::unique_ptr<DirectFile>(std::make_unique<HostDirectFile>(file));
  }
};

class NoDirectPath final : public DirectPath {
 public:
  [[nodiscard]] RefusalMask refusals() const override { return mask_of(Refusal::kNoVendorCall); }
  Result<std::unique_ptr<DirectFile>> attach(BackingFile&) override {
    return Status(EOPNOTSUPP, "this driver moves no files");
  }
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

std::shared_ptr<DirectPath> make_direct_path(const std::string& driver_name, const FileSystems& file_systems) {
  if (driver_name == "host") return std::make_shared<HostDirectPath>();
  if (driver_name == "cuda") return open_cufile_path(file_systems);
  if (driver_name == "hip") {
    return open_hip_file_path(hip::Library::names(), ::access(hip::kKernelDriver, R_OK | W_OK) == 0);
  }
  return std::make_shared<NoDirectPath>();
}

Moved move_in_parts(std::uint64_t bytes, std::uint64_t unit,
                    const std::function<Moved(std::uint64_t done, std::uint64_t part)>& call) {
  constexpr std::uint64_t kKernelLimit = 0x7ffff000;
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
