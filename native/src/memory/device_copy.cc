#include "memory/device_copy.h"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <memory>

namespace gpufs {
namespace {

constexpr std::uint64_t kStagingBytes = std::uint64_t{4} << 20;  // between devices without peer access

Status copy_staged(Device& to, DeviceAddress destination, Device& from, DeviceAddress source, std::uint64_t bytes) {
  const std::uint64_t step = std::min(bytes, kStagingBytes);
  const auto staging = std::make_unique_for_overwrite<std::byte[]>(step);
  for (std::uint64_t done = 0; done < bytes;) {
    const std::uint64_t part = std::min(step, bytes - done);
    Status status = from.copy_out(staging.get(), source + done, part);
    if (status.ok()) status = to.copy_in(destination + done, staging.get(), part);
    if (!status.ok()) return status;
    done += part;
  }
  return {};
}

Status copy_between(const DeviceContext& to, DeviceAddress destination, const DeviceContext& from, DeviceAddress source,
                    std::uint64_t bytes) {
  if (&to.device() == &from.device()) return to.device().copy_within(destination, source, bytes);
  if (&to.driver() == &from.driver()) {
    Status status = from.device().copy_to_peer(to.device(), destination, source, bytes);
    if (status.error() != EOPNOTSUPP) return status;
  }
  return copy_staged(to.device(), destination, from.device(), source, bytes);
}

}  // namespace

Status copy_pieces(const DeviceContext& to, DeviceAddress destination, const DeviceContext& from,
                   const std::vector<Buffer::Piece>& pieces, std::uint64_t* copied) {
  for (const Buffer::Piece& piece : pieces) {
    Status status = piece.address == 0 ? to.device().zero(destination + *copied, piece.bytes)
                                       : copy_between(to, destination + *copied, from, piece.address, piece.bytes);
    if (!status.ok()) return status;
    *copied += piece.bytes;
  }
  return {};
}

}  // namespace gpufs
