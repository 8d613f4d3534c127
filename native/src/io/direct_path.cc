#include "io/direct_path.h"

#include <cerrno>

#include "io/backing_file.h"
#include "io/cufile.h"
#include "io/file_moves.h"
#include "io/hip_file.h"

namespace gpufs {
namespace {

// Device memory that the CPU addresses: the disk writes to it by DMA.
class HostDirectFile final : public DirectFile {
 public:
  explicit HostDirectFile(BackingFile& file) : file_(file) {}

  Moved load(DeviceAddress destination, std::uint64_t bytes, std::uint64_t file_offset) override {
    return read_direct(file_, reinterpret_cast<std::byte*>(destination), bytes, file_offset);
  }
  Moved store(DeviceAddress source, std::uint64_t bytes, std::uint64_t file_offset) override {
    return write_direct(file_, reinterpret_cast<const std::byte*>(source), bytes, file_offset);
  }

 private:
  BackingFile& file_;  // owns this
};

class HostDirectPath final : public DirectPath {
 public:
  [[nodiscard]] const char* name() const override { return "O_DIRECT"; }
  [[nodiscard]] RefusalMask refusals() const override { return 0; }
  Result<std::unique_ptr<DirectFile>> attach(BackingFile& file) override {
    return std::unique_ptr<DirectFile>(std::make_unique<HostDirectFile>(file));
  }
};

class NoDirectPath final : public DirectPath {
 public:
  [[nodiscard]] const char* name() const override { return "none"; }
  [[nodiscard]] RefusalMask refusals() const override { return mask_of(Refusal::kNoVendorCall); }
  Result<std::unique_ptr<DirectFile>> attach(BackingFile&) override {
    return Status(EOPNOTSUPP, "this driver moves no files");
  }
};

}  // namespace

std::shared_ptr<DirectPath> make_direct_path(const std::string& driver_name, const FileSystems& file_systems) {
  if (driver_name == "host") return std::make_shared<HostDirectPath>();
  if (driver_name == "cuda") return open_cufile_path(file_systems);
  if (driver_name == "hip") return open_hip_file_path();
  return std::make_shared<NoDirectPath>();
}

bool rerun_on_fallback(int error) {
  return error == ENODEV || error == EREMOTEIO || error == ENOTTY || error == EOPNOTSUPP;
}

}  // namespace gpufs
