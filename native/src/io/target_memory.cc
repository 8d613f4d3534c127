#include "io/target_memory.h"

#include <algorithm>
#include <cerrno>
#include <chrono>

#include "base/thread.h"

namespace gpufs {
namespace {

// A load allocates in steps, each as large as what is there already: the first bytes wait for little, and there are
// few calls that other copies have to wait for.
constexpr std::uint64_t kFirstStep = std::uint64_t{64} << 20;
constexpr std::uint64_t kLargestStep = std::uint64_t{1} << 30;
// What a failed load leaves above the buffer's size may share a piece of memory with what others use.
constexpr std::chrono::milliseconds kTrimPatience{10};

}  // namespace

TargetMemory::AccessGuard TargetMemory::access() {
  const std::lock_guard lock(mutex_);
  if (closed_) return {};
  ++accesses_;
  return AccessGuard(this);
}

void TargetMemory::EndAccess::operator()(TargetMemory* memory) const {
  const std::lock_guard lock(memory->mutex_);
  --memory->accesses_;
}

void TargetMemory::claim(std::uint64_t bytes) {
  total_ = bytes;
  if (growing_ != nullptr) claim_ = growing_->claim({offset_, bytes});
}

Status TargetMemory::punch(Extents holes, const std::atomic<bool>& cancelled) {
  holes_ = std::move(holes);
  ExtentBuffer& buffer = *growing_;
  for (const Extent& hole : holes_) {
    if (cancelled) return Status(ECANCELED, "cancelled");
    const std::uint64_t start = offset_ + hole.offset;
    const std::uint64_t end = std::min(offset_ + hole.end(), buffer.size());
    if (start >= end) continue;
    const Result<std::uint64_t> data = buffer.seek_data(start);
    if (!data.ok() || data.value() >= end) continue;
    Status punched = buffer.punch(start, end - start);
    if (punched.error() == EBUSY) punched = buffer.zero_range(start, end - start, /*keep_size=*/true);  // leased
    if (!punched.ok()) return punched;
  }
  return {};
}

// ---- allocating ahead of a load ----

std::uint64_t TargetMemory::next_step_locked() const {
  return std::min(std::clamp(allocated_end_, kFirstStep, kLargestStep), largest_step_);
}

TargetMemory::AccessGuard TargetMemory::start_ahead(std::uint64_t position) {
  if (!load_ || growing_ == nullptr) return nullptr;
  const std::lock_guard lock(mutex_);
  if (closed_ || allocating_ || largest_step_ == 0 || allocated_end_ >= total_) return nullptr;
  // Half a step ahead, so that other threads need not wait while this one allocates.
  if (position + next_step_locked() / 2 <= allocated_end_) return nullptr;
  ++accesses_;
  allocating_ = true;
  return AccessGuard(this);
}

void TargetMemory::allocate_ahead(AccessGuard /*access*/) {
  std::unique_lock lock(mutex_);
  const std::uint64_t step = std::min(total_ - allocated_end_, next_step_locked());
  const Status status = allocate_on(lock, allocated_end_ + step);
  // Smaller steps next time. The chunk that finds no memory reports why there is none.
  if (!status.ok()) largest_step_ = step / 2 < smallest_step_ ? 0 : step / 2;
}

Status TargetMemory::allocate_to(std::uint64_t end, Wait wait) {
  std::unique_lock lock(mutex_);
  while (allocated_end_ < end) {
    if (!allocating_) {
      allocating_ = true;
      TRY(allocate_on(lock, end));
    } else if (wait == Wait::kAllowed) {
      allocated_.wait(lock);
    } else {
      return Status(EAGAIN, "another thread allocates the load's memory");
    }
  }
  return {};
}

// Allocates from allocated_end_ on. The caller has set allocating_; the lock is released during that.
Status TargetMemory::allocate_on(std::unique_lock<std::mutex>& lock, std::uint64_t end) {
  const std::uint64_t start = allocated_end_;
  lock.unlock();
  Status status = allocate_data(start, end);
  lock.lock();
  if (status.ok()) allocated_end_ = end;
  allocating_ = false;
  allocated_.notify_all();
  return status;
}

// Holes get no memory.
Status TargetMemory::allocate_data(std::uint64_t start, std::uint64_t end) {
  for (const Extent& data : holes(holes_, start, end)) {  // what is between the file's holes
    TRY(target_->pin_for_write(offset_ + data.offset, data.bytes).status());
  }
  return {};
}

Result<TransferTarget::Pin> TargetMemory::pin(std::uint64_t offset, std::uint64_t bytes, Wait wait) {
  if (!load_) return target_->pin_for_read(offset_ + offset, bytes, wait);
  if (growing_ != nullptr) {
    TRY(allocate_to(offset + bytes, wait));
  }
  Result<TransferTarget::Pin> pinned = target_->pin_for_write(offset_ + offset, bytes, wait);
  if (!pinned.ok()) return pinned;
  for (const TransferTarget::Piece& piece : pinned.value().pieces) {
    if (piece.address == 0) return Status(EIO, "the buffer has no memory where the load writes");
  }
  return pinned;
}

// ---- the end ----

Status TargetMemory::finish_load(std::uint64_t reached, std::uint64_t touched) {
  if (growing_ == nullptr) return {};
  ExtentBuffer& buffer = *growing_;
  {
    const std::lock_guard lock(mutex_);
    touched = std::max(touched, allocated_end_);
  }
  const bool published = reached == 0 || buffer.publish(offset_ + reached, claim_.get());
  const std::uint64_t kept = published ? reached : 0;
  claim_.reset();
  (void)buffer.trim(kTrimPatience);
  if (touched <= kept) return {};
  return buffer.discard_above_size(offset_ + kept, touched - kept);
}

bool TargetMemory::close(bool force) {
  const std::lock_guard lock(mutex_);
  if (accesses_ > 0 && !force) return false;
  closed_ = true;
  return true;
}

bool TargetMemory::in_use() const {
  const std::lock_guard lock(mutex_);
  return accesses_ > 0;
}

void TargetMemory::release() {
  std::shared_ptr<TransferTarget> dropped;  // destroyed without the lock, as the next
  std::shared_ptr<const ExtentBuffer::Claim> claim;
  const std::lock_guard lock(mutex_);
  closed_ = true;
  if (accesses_ > 0) return;
  dropped = std::move(target_);
  claim = std::move(claim_);
}

void TargetMemory::note(observe::Backend backend, observe::Flow flow, std::uint64_t bytes) const {
  const std::lock_guard lock(mutex_);
  if (target_ != nullptr) target_->activity().note(backend, flow, bytes);
}

}  // namespace gpufs
