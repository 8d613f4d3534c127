#include "fuse/payload_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "base/log.h"
#include "base/math.h"
#include "fuse/protocol.h"

namespace gpufs::fuse {

namespace {

constexpr std::size_t kPage = 65536;  // a multiple of the page size wherever Linux runs
static_assert(kWriteHeaderBytes <= kPage);

}  // namespace

Result<PayloadMemory> PayloadMemory::create(std::size_t payload_bytes, const std::shared_ptr<HostLocks>& locks) {
  const std::size_t bytes = kPage + round_up(payload_bytes, kPage);
  void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (base == MAP_FAILED) return Status::from_errno(errno, "memory for requests");
  // A forked child must not share pages that a device reads: copy-on-write would replace them here.
  static_cast<void>(::madvise(base, bytes, MADV_DONTFORK));
  static_cast<void>(::madvise(base, bytes, MADV_DONTDUMP));  // users' data
  static_cast<void>(::mlock(base, bytes));                   // plain users have a limit; only speed is lost
  PayloadMemory memory(static_cast<std::byte*>(base), bytes);
  if (locks != nullptr) {
    const std::span<std::byte> payload = memory.payload();
    const Status status =
        locks->lock(payload.data(), payload.size(), HostLocks::Access::kBoth, HostLocks::Owner::kMount);
    if (!status.ok() && locks->policy() == LockPolicy::kMandatory) {
      return status.with_context("locking the memory for requests is mandatory");
    }
    if (status.ok()) {
      memory.locks_ = locks;
    } else {
      log_warning("request memory is not locked: ", status.message());
    }
  }
  return memory;
}

PayloadMemory::PayloadMemory(PayloadMemory&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)), bytes_(other.bytes_), locks_(std::move(other.locks_)) {}

PayloadMemory::~PayloadMemory() {
  if (base_ == nullptr) return;
  if (locks_ != nullptr) {
    const Status status = locks_->unlock(payload().data(), payload().size());
    if (!status.ok()) log_warning(status.message());
  }
  ::munmap(base_, bytes_);
}

std::span<std::byte> PayloadMemory::message() const {
  return {base_ + kPage - kWriteHeaderBytes, bytes_ - kPage + kWriteHeaderBytes};
}

std::span<std::byte> PayloadMemory::payload() const { return {base_ + kPage, bytes_ - kPage}; }

}  // namespace gpufs::fuse
