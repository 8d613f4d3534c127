// Where in its memory an ExtentBuffer's first byte lies, so that what programs use in place is aligned.
//
// A shift moves the contents to another placement, over the memory that they have. They go in steps: a step's bytes are
// copied into a scratch above the end, the step is noted in the record that the next process finds, and then they are
// copied from there to their new place. The scratch has two halves in turn, so that the half of the noted step is whole
// until the next step is noted. A process that dies in between leaves a record from which the next one goes on.
// Contents that move up begin with the last bytes, others with the first: a step writes only where earlier steps have
// read.
//
// Takes: the scratch, memory of the file's device and owner until the shift ends; and up to one granule more where the
// contents then reach beyond their last one. A full device gives one granule. Readers and writers wait meanwhile: 2 ms
// for each GiB on a GPU.

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>

#include "base/log.h"
#include "base/math.h"
#include "memory/extent_buffer_exclusion.h"

namespace gpufs {
namespace {

// Large, since each copy of a GPU costs 10 us beside its bytes; what CPUs copy should stay in their caches.
constexpr std::uint64_t kGpuScratch = std::uint64_t{64} << 20;
constexpr std::uint64_t kHostScratch = std::uint64_t{1} << 20;
constexpr std::uint64_t kSmallestScratch = std::uint64_t{64} << 10;
// How long a lease waits for those who use the memory. Others wait behind it.
constexpr std::chrono::seconds kBusyTimeout{1};

}  // namespace

Status ExtentBuffer::shift_to(std::uint64_t placement) {
  if (context_->info().reserve_copies) return Status(EBUSY, "memory of this device does not move within a file");
  const std::uint64_t contents_end = std::max(snapshot_->placement, placement) + size();
  const auto take_scratch = [&](std::uint64_t bytes) {
    const std::uint64_t end = round_up(contents_end, kPlacementEnd) + bytes;
    return ensure_own(0, end, end, {});
  };
  Status status = take_scratch(context_->info().cpu_addressable ? kHostScratch : kGpuScratch);
  if (lacks_memory(status.error())) status = take_scratch(kSmallestScratch);
  if (!status.ok()) return status;
  {
    Exclusion exclusion(*this);
    if (exclusion.stop_everybody(std::chrono::steady_clock::now() + kBusyTimeout)) {
      const std::lock_guard lock(state_mutex_);
      shift_ = {.to = placement, .step = 0};
    } else {
      status = Status(EBUSY, "the file's memory is in use");
    }
    if (status.ok()) status = run_shift();
  }
  if (shift_.step == 0) (void)release_unused(TimePoint::max());
  return status;
}

Status ExtentBuffer::run_shift() {
  Device& device = context_->device();
  const Extents extents = snapshot_->extents;
  const DeviceAddress base = snapshot_->base;
  const std::uint64_t from = snapshot_->placement;
  const std::uint64_t to = shift_.to;
  const std::uint64_t size = this->size();
  // The same for the process that goes on with it.
  const std::uint64_t scratch = round_up(std::max(from, to) + size, kPlacementEnd);
  const std::uint64_t most = context_->info().cpu_addressable ? kHostScratch : kGpuScratch;
  const std::uint64_t half = round_down(std::min(extents.front().end() - scratch, most) / 2, kPlacementEnd);
  const std::uint64_t steps = (size + half - 1) / half;
  for (std::uint64_t step = std::max<std::uint64_t>(shift_.step, 1); step <= steps; ++step) {
    const std::uint64_t offset = (to > from ? steps - step : step - 1) * half;
    const std::uint64_t bytes = std::min(half, size - offset);
    const DeviceAddress kept = base + scratch + step % 2 * half;
    if (step != shift_.step) {
      TRY(device.copy_within(kept, base + from + offset, bytes));
      {
        const std::lock_guard lock(state_mutex_);
        shift_.step = step;
      }
      watcher_.moved();
    }
    TRY(device.copy_within(base + to + offset, kept, bytes));
  }
  auto next = std::make_shared<const Snapshot>(*this, to, extents, here_.get());
  {
    const std::lock_guard lock(state_mutex_);
    snapshot_.swap(next);
    shift_ = {};
  }
  watcher_.moved();
  // Programs that map the memory see what is beside the contents, too.
  Status status = zero_existing(0, to);
  return status.ok() ? zero_existing(to + size, extents.front().end()) : status;
}

bool ExtentBuffer::has_scratch(const KeptContents& contents) {
  const std::uint64_t end = std::max(contents.placement, contents.shift.to) + contents.size;
  return covered(contents.extents, 0, round_up(end, kPlacementEnd) + kSmallestScratch);
}

Status ExtentBuffer::complete_shift() {
  const std::lock_guard mutation(mutation_mutex_);
  if (shift_.step == 0) return {};
  log_info("continuing to move a file of ", size(), " bytes within its memory, at step ", shift_.step);
  TRY(run_shift());
  // The scratch, which the last process had allocated.
  here_->ahead =
      joined(hidden(), inside(snapshot_->extents, round_up(snapshot_->placement + size(), granule()), kNoLimit));
  (void)release_unused(TimePoint::max());
  return {};
}

void ExtentBuffer::take_placement(const Buffer& source) {
  const std::uint64_t placement = source.placement();
  if (context_->info().reserve_copies) return;
  const SlabPool* const slabs = context_->slabs();
  if (slabs != nullptr && source.size() <= slabs->largest()) return;  // the file will be in a slot
  const std::unique_lock mutation = lock_mutation(Wait::kForbidden);
  if (!mutation || size() != 0 || here_->memory != nullptr || snapshot_->slot != nullptr) return;
  if (placement != snapshot_->placement) replace(std::make_shared<Snapshot>(*this, placement));
}

}  // namespace gpufs
