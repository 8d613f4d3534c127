// Parking: the contents of an ExtentBuffer lie in another device's memory, the host's, until somebody needs them here.
//
// A parked buffer has no memory of its device. Reads by the calling thread are served from the host, and so are copies
// to other buffers. What takes memory away is done there, too. Whatever needs memory of the device brings the contents
// back first: pins, writes, leases, fallocate(2); where the device has no space for them, writes and fallocate(2) are
// done where the contents are.
// Both ways the old copy is whole until the record of the new one is written, so a process that dies in between loses
// nothing: the next one finds one of them.
//
// Takes: memory of the host tier, which the owner's account there pays for; while the contents move, memory of both.
// The copy runs at the speed of the bus with mutation_mutex_ held: readers go on, writers wait.

#include <cerrno>
#include <chrono>
#include <memory>
#include <mutex>
#include <utility>

#include "memory/extent_buffer_exclusion.h"
#include "observe/counters.h"

namespace gpufs {
namespace {

// How long the memory waits for readers that still use it; then it goes with the last of them.
constexpr std::chrono::seconds kReaderTimeout{1};

Status host_is_full() { return Status(ENOSPC, "the host's memory for parked files is full"); }

}  // namespace

std::shared_ptr<Buffer> ExtentBuffer::parked() const {
  const std::lock_guard lock(state_mutex_);
  return parked_;
}

Result<bool> ExtentBuffer::park(const std::shared_ptr<DeviceContext>& host, std::shared_ptr<Account> payer) {
  const std::lock_guard mutation(mutation_mutex_);
  if (parked_ != nullptr) return true;
  const std::uint64_t size = this->size();
  if (snapshot_->slot != nullptr || memory_ == nullptr || size < granule_) return false;
  if (shift_.step != 0) return torn();
  (void)release_unused(TimePoint{});
  if (own().empty()) return false;
  // Copying what fits would take long, and writers wait.
  const Result<MemoryInfo> there = host->memory();
  if (there.ok() && there.value().free_bytes < total_bytes(own())) return host_is_full();
  Exclusion exclusion(*this);
  {
    const std::lock_guard lock(state_mutex_);
    TRY(check_leases_locked("parked", 0));
    if (!claims_.empty()) return Status(EBUSY, "the file is being written");
  }
  (void)exclusion.stop_writers(Wait::kAllowed);
  const auto copy = std::make_shared<ExtentBuffer>(host);
  copy->charge().move(Charge::kOwner, std::move(payer));
  TRY(copy->become_copy_of(*this));
  {
    const std::lock_guard lock(state_mutex_);
    if (!claims_.empty() || this->size() != size) return Status(EBUSY, "the file is being written");
    parked_ = copy;
  }
  watch_parked();
  replace(make_empty_snapshot(snapshot_->placement));
  (void)await_readers(TimePoint::clock::now() + kReaderTimeout);
  give_up_memory();
  return true;
}

Status ExtentBuffer::become_copy_of(ExtentBuffer& source) {
  const std::uint64_t size = source.size();
  overwritten_ = true;
  std::uint64_t copied = TRY(copy_from(source, 0, 0, size, nullptr));
  if (copied != size) return host_is_full();
  const std::lock_guard mutation(mutation_mutex_);
  overwritten_ = false;  // what a write to a hole takes later must be zeros
  if (memory_ != nullptr) memory_->leave_undefined(false);
  Status status = zero_existing(0, snapshot_->placement);
  return status.ok() ? zero_existing(snapshot_->placement + size, kNoLimit) : status;
}

void ExtentBuffer::give_up_memory() {
  ahead_.clear();
  range_.reset();
  memory_.reset();
  account();
  context_->releases().unlist_trimmable(this);
}

Status ExtentBuffer::bring_back(Wait wait) {
  return retry_when_full(
      0, size(),
      [&]() -> Status {
        const std::unique_lock mutation = lock_mutation(wait);
        return mutation ? unpark(wait) : would_wait();
      },
      wait);
}

Status ExtentBuffer::unpark(Wait wait) {
  if (parked_ == nullptr) return {};
  if (wait == Wait::kForbidden) return would_wait();
  const TimePoint start = TimePoint::clock::now();
  const std::shared_ptr<ExtentBuffer> source = parked_;
  Result<Pin> pinned = source->pin_for_read(0, size(), wait);
  Status status = pinned.status();
  std::uint64_t end = 0;
  observe::ScopedOperationCount taken(source->device()->counters(), observe::Backend::kDeviceCopy,
                                      observe::Flow::kFromDevice);
  observe::ScopedOperationCount given(context_->counters(), observe::Backend::kDeviceCopy, observe::Flow::kToDevice);
  std::uint64_t moved = 0;
  if (status.ok()) {
    for (const Piece& piece : pinned.value().pieces) end = std::max(end, placed(piece.offset, piece.end()).end());
    for (const Piece& piece : pinned.value().pieces) {
      if (piece.address == 0 || !status.ok()) continue;
      const Extent range = placed(piece.offset, piece.end());
      status = ensure_own(range.offset, range.end(), end, {.wait = wait});
      std::uint64_t copied = 0;
      if (status.ok()) status = copy_pieces(range_->base() + range.offset, *source, {piece}, &copied);
      moved += copied;
    }
  }
  if (!status.ok()) {
    replace(make_empty_snapshot(snapshot_->placement));
    give_up_memory();
    return status;
  }
  taken.done(moved);
  given.done(moved);
  forget_parked();
  touch();
  const TimePoint end_time = TimePoint::clock::now();
  stays_.store((end_time + (end_time - start)).time_since_epoch().count());
  return {};
}

Status ExtentBuffer::change_parked(const std::function<Status(ExtentBuffer&)>& change) {
  Status status = change(*parked_);
  {
    const std::lock_guard lock(state_mutex_);
    const std::uint64_t size = parked_->size();
    if (size < size_.load(std::memory_order_relaxed)) ++shrinks_;
    size_.store(size, std::memory_order_release);
  }
  parked_bytes_.store(parked_->bytes_held(), std::memory_order_release);
  if (parked_->bytes_held() == 0) {
    forget_parked();
    if (size() == 0) replace(make_empty_snapshot());
  }
  return status;
}

void ExtentBuffer::watch_parked() {
  // Transfers, and what frees it, may have it for longer than this buffer exists.
  parked_->watch({.moved = [watched = owner()] {
    if (const std::shared_ptr<ExtentBuffer> buffer = watched.lock()) buffer->watcher_.moved();
  }});
  parked_bytes_.store(parked_->bytes_held(), std::memory_order_release);
}

void ExtentBuffer::forget_parked() {
  std::shared_ptr<ExtentBuffer> gone;
  {
    const std::lock_guard lock(state_mutex_);
    gone = std::exchange(parked_, nullptr);
  }
  parked_bytes_.store(0, std::memory_order_release);
  watcher_.moved();
  watcher_.freed(std::move(gone));
}

void ExtentBuffer::charge_parked_to(std::shared_ptr<Account> payer) {
  if (const std::shared_ptr<Buffer> held = parked()) held->charge().move(Charge::kOwner, std::move(payer));
}

}  // namespace gpufs
