// Moving: the contents of an ExtentBuffer go to another residence, to the host tier (parking) and back home.
//
// Everything works where the contents are, but what programs and devices use in place must be at home: leases, loads
// and copies to the buffer bring the contents back first. Writes and fallocate(2) do so, too; where the device has no
// space, they are done where the contents are. The old copy is whole until the record of the new one is written, so a
// process that dies in between loses nothing: the next one finds one of them. Both are charged until then.
//
// Takes: while the contents move, memory of both devices. The copy runs at the speed of the bus with mutation_mutex_
// held: readers go on, writers wait.

#include <cerrno>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "memory/extent_buffer_exclusion.h"
#include "observe/counters.h"

namespace gpufs {
namespace {

// How long the memory waits for readers that still use it; then it goes with the last of them.
constexpr std::chrono::seconds kReaderTimeout{1};

Status is_being_written() { return Status(EBUSY, "the file is being written"); }

}  // namespace

Result<bool> ExtentBuffer::park(const std::shared_ptr<DeviceContext>& host, std::shared_ptr<Account> payer) {
  const auto charge = std::make_shared<Charge>();
  charge->move(Charge::kOwner, std::move(payer));
  bool stays = false;
  const auto attempt = [&]() -> Status {
    const std::lock_guard mutation(mutation_mutex_);
    if (!at_home()) return {};
    stays = snapshot_->slot != nullptr || here_->memory == nullptr || size() < granule();
    if (stays) return {};
    if (shift_.step == 0) (void)release_unused(TimePoint{});
    stays = contents_bytes() == 0;
    if (stays) return {};
    const std::shared_ptr<Residence> left = TRY(move_to(host, charge));
    (void)await_readers(TimePoint::clock::now() + kReaderTimeout);
    return {};
  };
  TRY(retry_when_full(*host, *charge, 0, 0, attempt));
  return !stays;
}

Status ExtentBuffer::bring_back(Wait wait) {
  return change_at_home(0, size(), {.wait = wait}, [] { return Status(); });
}

Status ExtentBuffer::come_home(Wait wait) {
  if (at_home()) return {};
  if (wait == Wait::kForbidden) return would_wait();
  const TimePoint start = TimePoint::clock::now();
  watcher_.freed(TRY(move_to(context_, shared_charge())));
  touch();
  const TimePoint end = TimePoint::clock::now();
  stays_.store((end + (end - start)).time_since_epoch().count());
  return {};
}

Result<std::shared_ptr<Residence>> ExtentBuffer::move_to(const std::shared_ptr<DeviceContext>& target,
                                                         std::shared_ptr<Charge> payers) {
  if (shift_.step != 0) return torn();
  // Copying what fits would take long, and writers wait.
  const std::uint64_t bytes = contents_bytes();
  const Result<MemoryInfo> there = target->memory();
  if (there.ok() && there.value().free_bytes < bytes) {
    return Status(ENOSPC, "No space left on device for a file of " + std::to_string(bytes) +
                              " bytes: " + std::to_string(there.value().free_bytes) + " are free");
  }
  TRY(payers->grow(bytes));
  payers->settle(0);  // the copy charges it part by part
  Exclusion exclusion(*this);
  {
    const std::lock_guard lock(state_mutex_);
    TRY(check_leases_locked("moved to other memory", 0));
    if (target != context_ && !claims_.empty()) return is_being_written();
  }
  (void)exclusion.stop_writers(Wait::kAllowed);
  const auto copy = std::make_shared<ExtentBuffer>(target);
  copy->here_ = std::make_shared<Residence>(target, std::move(payers));
  TRY(copy->become_copy_of(*this));
  std::shared_ptr<Residence> left =
      enter(copy->here_, std::make_shared<Snapshot>(*this, snapshot_->placement, copy->own(), copy->here_.get()));
  if (left == nullptr) return is_being_written();
  return left;
}

Status ExtentBuffer::become_copy_of(ExtentBuffer& source) {
  const std::uint64_t size = source.size();
  replace(std::make_shared<Snapshot>(*this, source.placement()));
  overwritten_ = true;
  observe::ScopedOperationCount taken(source.here_->device->counters(), observe::Backend::kDeviceCopy,
                                      observe::Flow::kFromDevice);
  observe::ScopedOperationCount given(context_->counters(), observe::Backend::kDeviceCopy, observe::Flow::kToDevice);
  std::uint64_t copied = 0;
  TRY(copy_chunks(source, 0, 0, size, nullptr, Wait::kAllowed, &copied, [&] {
    taken.advance(copied);
    given.advance(copied);
  }));
  if (copied != size) return Status(EIO, "the file became shorter while it was moved");
  taken.done(copied);
  given.done(copied);
  const std::lock_guard mutation(mutation_mutex_);
  overwritten_ = false;  // what a write to a hole takes later must be zeros
  if (here_->memory != nullptr) here_->memory->leave_undefined(false);
  const std::uint64_t first = snapshot_->placement;
  for (const Extent& rest : without(own(), inside(source.own(), first, first + size))) {
    TRY(zero_existing(rest.offset, rest.end()));
  }
  return {};
}

std::shared_ptr<Residence> ExtentBuffer::enter(std::shared_ptr<Residence> other, SnapshotPointer next) {
  {
    const std::lock_guard lock(state_mutex_);
    if (other->device != context_ && !claims_.empty()) return nullptr;
    here_.swap(other);
    snapshot_.swap(next);
  }
  watcher_.moved();
  next.reset();
  other->device->releases().unlist_trimmable(this);
  account();
  return other;
}

std::uint64_t ExtentBuffer::contents_bytes() const { return total_bytes(inside(own(), 0, placed(0, size()).end())); }

void ExtentBuffer::charge_parked_to(std::shared_ptr<Account> payer) {
  const std::lock_guard lock(state_mutex_);
  if (!at_home()) here_->charge->move(Charge::kOwner, std::move(payer));
}

}  // namespace gpufs
