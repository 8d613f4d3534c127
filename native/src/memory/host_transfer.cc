#include "memory/host_transfer.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "base/log.h"
#include "device/device_context.h"
#include "memory/host_locks.h"
#include "observe/counters.h"

namespace gpufs {
namespace {

using observe::Backend;
using observe::Flow;

Backend backend_of(const HostLocks::Part& part) { return part.locked ? Backend::kLocked : Backend::kPageable; }

// A lock for the time of one copy.
class ShortLock {
 public:
  ~ShortLock() {
    if (locks_ == nullptr) return;
    if (const Status status = locks_->unlock(memory_.data(), memory_.size()); !status.ok()) {
      log_warning(status.message());
    }
  }
  ShortLock(const ShortLock&) = delete;
  ShortLock& operator=(const ShortLock&) = delete;
  ShortLock() = default;

  Status take(HostLocks& locks, std::span<const std::byte> memory, HostLocks::Access access) {
    Status status = locks.lock(memory.data(), memory.size(), access);
    if (!status.ok()) return status.with_context("locking is mandatory");
    locks_ = &locks;
    memory_ = memory;
    return status;
  }

 private:
  HostLocks* locks_ = nullptr;
  std::span<const std::byte> memory_;
};

// What is locked of the memory, after the policy has been followed.
Result<HostLocks::Use> find_parts(HostLocks& locks, std::span<const std::byte> memory, HostLocks::Access access,
                                  ShortLock* own) {
  Result<HostLocks::Use> use = locks.use(memory.data(), memory.size(), access);
  if (!use.ok() || locks.policy() != LockPolicy::kMandatory || memory.empty()) return use;
  const auto& parts = use.value().parts();
  if (std::all_of(parts.begin(), parts.end(), [](const HostLocks::Part& part) { return part.locked; })) return use;
  if (Status status = own->take(locks, memory, access); !status.ok()) return status;
  return locks.use(memory.data(), memory.size(), access);
}

// The bytes of [offset, offset + out.size()) that exist: holes are zeros.
Status read_part(Device& device, const std::vector<Buffer::Piece>& pieces, std::uint64_t offset,
                 std::span<std::byte> out) {
  const std::uint64_t end = offset + out.size();
  for (const Buffer::Piece& piece : pieces) {
    const std::uint64_t from = std::max(offset, piece.offset);
    const std::uint64_t to = std::min(end, piece.offset + piece.bytes);
    if (from >= to) continue;
    const std::span<std::byte> target = out.subspan(from - offset, to - from);
    if (piece.address == 0) {
      std::memset(target.data(), 0, target.size());
      continue;
    }
    const DeviceAddress address = piece.address + (from - piece.offset);
    if (Status status = device.copy_out(target.data(), address, target.size()); !status.ok()) return status;
  }
  return {};
}

Status write_part(Device& device, const std::vector<Buffer::Piece>& pieces, std::uint64_t offset,
                  std::span<const std::byte> in) {
  const std::uint64_t end = offset + in.size();
  for (const Buffer::Piece& piece : pieces) {
    const std::uint64_t from = std::max(offset, piece.offset);
    const std::uint64_t to = std::min(end, piece.offset + piece.bytes);
    if (from >= to) continue;
    const std::span<const std::byte> source = in.subspan(from - offset, to - from);
    const DeviceAddress address = piece.address + (from - piece.offset);
    if (Status status = device.copy_in(address, source.data(), source.size()); !status.ok()) return status;
  }
  return {};
}

}  // namespace

Result<std::size_t> read_to_host(Buffer& buffer, std::uint64_t offset, std::span<std::byte> destination) {
  DeviceContext& context = *buffer.device();
  HostLocks* const locks = context.host_locks();
  if (locks == nullptr) return buffer.read(offset, destination);
  ShortLock own;
  Result<HostLocks::Use> use = find_parts(*locks, destination, HostLocks::Access::kBoth, &own);
  if (!use.ok()) return use.status();
  const auto& parts = use.value().parts();
  if (parts.size() == 1) {
    observe::Measured measured(context.counters(), backend_of(parts.front()), Flow::kOut);
    Result<std::size_t> got = buffer.read(offset, destination);
    if (got.ok()) {
      measured.done(got.value());
      buffer.activity().note(backend_of(parts.front()), Flow::kOut, got.value());
    }
    return got;
  }
  Result<std::unique_ptr<Buffer::Pinned>> pin = buffer.pin_for_read(offset, destination.size());
  if (!pin.ok()) return pin.status();
  const std::vector<Buffer::Piece>& pieces = pin.value()->pieces();
  const std::size_t there =
      pieces.empty() ? 0 : static_cast<std::size_t>(pieces.back().offset + pieces.back().bytes - offset);
  for (const HostLocks::Part& part : parts) {
    if (part.offset >= there) break;
    const std::size_t bytes = std::min(part.bytes, there - part.offset);
    observe::Measured measured(context.counters(), backend_of(part), Flow::kOut);
    const Status status =
        read_part(context.device(), pieces, offset + part.offset, destination.subspan(part.offset, bytes));
    if (!status.ok()) return status;
    measured.done(bytes);
    buffer.activity().note(backend_of(part), Flow::kOut, bytes);
  }
  return there;
}

Result<std::size_t> write_from_host(Buffer& buffer, std::uint64_t offset, std::span<const std::byte> source) {
  DeviceContext& context = *buffer.device();
  HostLocks* const locks = context.host_locks();
  if (locks == nullptr) return buffer.write(offset, source);
  ShortLock own;
  Result<HostLocks::Use> use = find_parts(*locks, source, HostLocks::Access::kSource, &own);
  if (!use.ok()) return use.status();
  const auto& parts = use.value().parts();
  if (parts.size() == 1) {
    observe::Measured measured(context.counters(), backend_of(parts.front()), Flow::kIn);
    Result<std::size_t> put = buffer.write(offset, source);
    if (put.ok()) {
      measured.done(put.value());
      buffer.activity().note(backend_of(parts.front()), Flow::kIn, put.value());
    }
    return put;
  }
  Status status;
  {
    Result<std::unique_ptr<Buffer::Pinned>> pin = buffer.pin_for_write(offset, source.size());
    if (!pin.ok()) return pin.status();
    for (const HostLocks::Part& part : parts) {
      observe::Measured measured(context.counters(), backend_of(part), Flow::kIn);
      status = write_part(context.device(), pin.value()->pieces(), offset + part.offset,
                          source.subspan(part.offset, part.bytes));
      if (!status.ok()) break;
      measured.done(part.bytes);
      buffer.activity().note(backend_of(part), Flow::kIn, part.bytes);
    }
    if (status.ok()) {
      buffer.publish(offset + source.size());
      return source.size();
    }
  }
  const Status cleared = buffer.discard_above_size(offset, source.size());
  if (!cleared.ok()) log_error("clearing what a failed write left: ", cleared.message());
  return status;
}

}  // namespace gpufs
