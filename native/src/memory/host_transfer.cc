// Copies between a program's own memory and a buffer, part by part as the memory is locked.

#include "memory/host_transfer.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/log.h"
#include "device/device_context.h"
#include "memory/extent_buffer.h"
#include "memory/host_locks.h"
#include "observe/counters.h"

namespace gpufs {
namespace {

using observe::Backend;
using observe::Flow;

Backend backend_of(const HostLocks::Part& part) { return part.locked ? Backend::kLocked : Backend::kPageable; }

// A lock for the time of one copy, as LockPolicy::kMandatory wants it.
class ShortLock {
 public:
  ShortLock() = default;
  ~ShortLock() {
    if (locks_ == nullptr) return;
    if (const Status status = locks_->unlock(memory_.data(), memory_.size()); !status.ok()) {
      log_warning(status.message());
    }
  }
  ShortLock(const ShortLock&) = delete;
  ShortLock& operator=(const ShortLock&) = delete;

  // What is locked of the memory, after the policy has been followed.
  Result<HostLocks::LockUse> use(HostLocks& locks, std::span<const std::byte> memory, HostLocks::Access access) {
    Result<HostLocks::LockUse> found = locks.use(memory.data(), memory.size(), access);
    if (!found.ok() || locks.policy() != LockPolicy::kMandatory || memory.empty()) return found;
    const auto& parts = found.value().parts();
    if (std::all_of(parts.begin(), parts.end(), [](const HostLocks::Part& part) { return part.locked; })) return found;
    Status status = locks.lock(memory.data(), memory.size(), access);
    if (!status.ok()) return status.with_context("locking is mandatory");
    locks_ = &locks;
    memory_ = memory;
    return locks.use(memory.data(), memory.size(), access);
  }

 private:
  HostLocks* locks_ = nullptr;
  std::span<const std::byte> memory_;
};

// Calls copy(piece address, offset within the part, bytes) for what the pieces have of [offset, offset + part's bytes),
// and counts it. Address 0: a hole.
template <typename Copy>
Status copy_part(Buffer& buffer, const std::vector<Buffer::Piece>& pieces, std::uint64_t offset,
                 const HostLocks::Part& part, Flow flow, Copy copy) {
  observe::ScopedOperationCount measured(buffer.device()->counters(), backend_of(part), flow);
  const std::uint64_t start = offset + part.offset;
  std::uint64_t copied = 0;
  for (const Buffer::Piece& piece : pieces) {
    const std::uint64_t from = std::max(start, piece.offset);
    const std::uint64_t to = std::min(start + part.bytes, piece.end());
    if (from >= to) continue;
    const DeviceAddress address = piece.address == 0 ? 0 : piece.address + (from - piece.offset);
    TRY(copy(address, from - offset, to - from));
    copied += to - from;
  }
  measured.done(copied);
  buffer.activity().note(backend_of(part), flow, copied);
  return {};
}

}  // namespace

Result<std::size_t> read_to_host(Buffer& buffer, std::uint64_t offset, std::span<std::byte> destination) {
  DeviceContext& context = *buffer.device();
  HostLocks* const locks = context.host_locks();
  if (locks == nullptr) return buffer.read(offset, destination);
  ShortLock own;
  HostLocks::LockUse use = TRY(own.use(*locks, destination, HostLocks::Access::kBoth));
  Buffer::Pin pin = TRY(buffer.pin_for_read(offset, destination.size()));
  const std::vector<Buffer::Piece>& pieces = pin.pieces;
  const std::size_t there = pieces.empty() ? 0 : static_cast<std::size_t>(pieces.back().end() - offset);
  for (const HostLocks::Part& part : use.parts()) {
    if (part.offset > 0 && part.offset >= there) break;
    Status status = copy_part(buffer, pieces, offset, part, Flow::kFromDevice,
                              [&](DeviceAddress address, std::uint64_t at, std::uint64_t bytes) -> Status {
                                std::byte* const out = destination.data() + at;
                                if (address != 0) return pin.device->device().copy_out(out, address, bytes);
                                std::memset(out, 0, bytes);
                                return {};
                              });
    if (!status.ok()) return status;
  }
  return there;
}

Result<std::size_t> write_from_host(Buffer& buffer, std::uint64_t offset, std::span<const std::byte> source) {
  DeviceContext& context = *buffer.device();
  HostLocks* const locks = context.host_locks();
  if (locks == nullptr) return buffer.write(offset, source);
  ShortLock own;
  HostLocks::LockUse use = TRY(own.use(*locks, source, HostLocks::Access::kSource));
  ExtentBuffer* const growing = buffer.growing();
  Status status;
  {
    Buffer::Pin pin = TRY(buffer.pin_for_write(offset, source.size()));
    for (const HostLocks::Part& part : use.parts()) {
      status = copy_part(buffer, pin.pieces, offset, part, Flow::kToDevice,
                         [&](DeviceAddress address, std::uint64_t at, std::uint64_t bytes) {
                           return context.device().copy_in(address, source.data() + at, bytes);
                         });
      if (!status.ok()) break;
    }
    if (status.ok()) {
      if (growing != nullptr && !source.empty()) growing->publish(offset + source.size());
      return source.size();
    }
  }
  const Status cleared = growing != nullptr ? growing->discard_above_size(offset, source.size()) : Status();
  if (!cleared.ok()) log_error("clearing what a failed write left: ", cleared.message());
  return status;
}

}  // namespace gpufs
