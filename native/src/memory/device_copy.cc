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

}  // namespace

Status copy_between(const DeviceContext& to, DeviceAddress destination, const DeviceContext& from, DeviceAddress source,
                    std::uint64_t bytes) {
  if (&to.device() == &from.device()) return to.device().copy_within(destination, source, bytes);
  if (&to.driver() == &from.driver()) {
    Status status = from.device().copy_to_peer(to.device(), destination, source, bytes);
    if (status.error() != EOPNOTSUPP) return status;
  }
  return copy_staged(to.device(), destination, from.device(), source, bytes);
}

}  // namespace gpufs
