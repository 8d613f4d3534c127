// Mapping what another process shares, piece by piece: what is checked for every driver.
#include <cerrno>
#include <string>

#include "drivers/driver.h"

namespace gpufs {

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
