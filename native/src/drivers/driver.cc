#include "drivers/driver.h"

#include "drivers/hip/hip_library.h"
#include "drivers/host/host_device.h"

namespace gpufs {
namespace {

Status unknown_driver(const std::string& name) {
  return {EINVAL, "unknown driver \"" + name + "\": there are host, cuda and hip"};
}

}  // namespace

Result<std::unique_ptr<Driver>> open_driver(const std::string& name, const DriverOptions& options) {
  if (name == "host") return open_host_driver(options);
  if (name == "cuda") return open_cuda_driver(options);
  if (name == "hip") return open_hip_driver(options, hip::Library::names());
  return unknown_driver(name);
}

Result<std::shared_ptr<Device>> open_device(const std::string& driver, const std::string& pci_address) {
  if (driver == "host") return open_host_device(pci_address);
  if (driver == "cuda") return open_cuda_device(pci_address);
  if (driver == "hip") return open_hip_device(pci_address, hip::Library::names());
  return unknown_driver(driver);
}

Status ImportedRange::clear() {
  Status status = unmap_all();
  if (status.ok()) bytes_ = 0;
  return status;
}

Status ImportedRange::add(const ExportedMemory& piece) {
  if (!piece.descriptor.valid() || piece.bytes == 0 || piece.offset != bytes_) {
    return {EINVAL, "a piece of shared memory at " + std::to_string(piece.offset) + ", where " +
                        std::to_string(bytes_) + " bytes are mapped"};
  }
  if (piece.bytes > capacity() - bytes_) {
    return {EFBIG, "the mapping has addresses for " + std::to_string(capacity()) + " bytes, and " +
                       std::to_string(bytes_ + piece.bytes) + " are needed: map the file again"};
  }
  Status status = map(piece);
  if (status.ok()) bytes_ += piece.bytes;
  return status;
}

}  // namespace gpufs
