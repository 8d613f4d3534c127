#include "io/target_memory.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <iterator>

#include "base/math.h"
#include "memory/account.h"

namespace gpufs {
namespace {

// One call pins the memory of many chunks.
constexpr std::uint64_t kWindowBytes = std::uint64_t{256} << 20;
// A load allocates in steps, each as large as what is there already: the first bytes wait for little, and there are
// few calls that other copies have to wait for.
constexpr std::uint64_t kFirstStep = std::uint64_t{64} << 20;
constexpr std::uint64_t kLargestStep = std::uint64_t{1} << 30;
// What a failed load leaves above the buffer's size may share a piece of memory with what others use.
constexpr std::chrono::milliseconds kTrimPatience{10};

std::uint64_t end_of(const HoleRange& hole) { return hole.offset + hole.bytes; }

// The first hole that ends above `offset`.
auto hole_above(const std::vector<HoleRange>& holes, std::uint64_t offset) {
  return std::partition_point(holes.begin(), holes.end(),
                              [&](const HoleRange& hole) { return end_of(hole) <= offset; });
}

}  // namespace

TargetMemory::Use TargetMemory::use() {
  const std::lock_guard lock(mutex_);
  if (closed_) return {};
  ++uses_;
  return Use(this);
}

void TargetMemory::Use::end() {
  TargetMemory* const memory = std::exchange(memory_, nullptr);
  if (memory == nullptr) return;
  const std::lock_guard lock(memory->mutex_);
  --memory->uses_;
}

void TargetMemory::expect(std::uint64_t bytes) {
  if (!of_buffer_) return;
  noted_shrinks_ = target_.buffer()->shrinks();
  kept_ = target_.buffer()->keep_unpublished();
  target_.buffer()->expect(offset_ + bytes);
}

Status TargetMemory::punch(std::vector<HoleRange> holes, const std::atomic<bool>& cancelled) {
  holes_ = std::move(holes);
  Buffer& buffer = *target_.buffer();
  for (const HoleRange& hole : holes_) {
    if (cancelled) return Status(ECANCELED, "cancelled");
    const std::uint64_t start = offset_ + hole.offset;
    const std::uint64_t end = std::min(offset_ + end_of(hole), buffer.size());
    if (start >= end) continue;
    const Result<std::uint64_t> data = buffer.seek_data(start);
    if (!data.ok() || data.value() >= end) continue;
    Status punched = buffer.punch(start, end - start);
    if (punched.error() == EBUSY) punched = buffer.zero_range(start, end - start, /*keep_size=*/true);  // leased
    if (!punched.ok()) return punched;
  }
  return {};
}

void TargetMemory::set_total(std::uint64_t total) { total_ = total; }

// ---- allocating ahead of a load ----

std::uint64_t TargetMemory::next_step_locked() const {
  return std::min(std::clamp(allocated_end_, kFirstStep, kLargestStep), largest_step_);
}

bool TargetMemory::start_ahead(std::uint64_t position) {
  if (!load_ || !of_buffer_) return false;
  const std::lock_guard lock(mutex_);
  if (closed_ || allocating_ || largest_step_ == 0 || allocated_end_ >= total_) return false;
  // Half a step ahead, so that other threads need not wait while this one allocates.
  if (position + next_step_locked() / 2 <= allocated_end_) return false;
  ++uses_;
  allocating_ = true;
  return true;
}

void TargetMemory::allocate_ahead() {
  std::unique_lock lock(mutex_);
  (void)allocate_step(lock, 0);  // the chunk that needs memory reports why there is none
  --uses_;
}

// Allocates from allocated_end_ on: a step if there is space for it, and up to `needed` at least. Releases the lock
// during calls of the buffer; allocating_ is set.
Status TargetMemory::allocate_step(std::unique_lock<std::mutex>& lock, std::uint64_t needed) {
  const std::uint64_t start = allocated_end_;
  Status status;
  for (;;) {
    const std::uint64_t end = std::min(total_, std::max(start + next_step_locked(), needed));
    lock.unlock();
    status = allocate_data(start, end);
    lock.lock();
    if (status.ok()) allocated_end_ = end;
    if (!lacks_memory(status.error()) && status.error() != EFBIG) break;
    // Smaller steps, so that a full device gets all that fits.
    const std::uint64_t half = (end - start) / 2;
    largest_step_ = half < smallest_step_ ? 0 : half;
    if (needed <= start || end == needed) break;
  }
  allocating_ = false;
  changed_.notify_all();
  return status;
}

// Holes get no memory.
Status TargetMemory::allocate_data(std::uint64_t start, std::uint64_t end) {
  auto hole = hole_above(holes_, start);
  while (start < end) {
    const std::uint64_t run_end = hole == holes_.end() ? end : std::min(end, hole->offset);
    if (start < run_end) {
      Status status = target_.buffer()->populate(offset_ + start, run_end - start);
      if (!status.ok()) return status;
    }
    if (hole == holes_.end()) break;
    start = end_of(*hole);
    ++hole;
  }
  return {};
}

Status TargetMemory::allocate_to(std::unique_lock<std::mutex>& lock, std::uint64_t needed) {
  while (needed > allocated_end_) {
    if (allocating_) {
      changed_.wait(lock);
      continue;
    }
    allocating_ = true;
    Status status = allocate_step(lock, needed);
    if (!status.ok()) return status;
  }
  return {};
}

// ---- pins ----

TargetMemory::Window TargetMemory::window_locked(std::uint64_t offset, std::uint64_t bytes) const {
  Window window = window_.lock();
  if (window == nullptr || offset < window_start_ || offset + bytes > window_end_) return nullptr;
  return window;
}

TargetMemory::Window TargetMemory::window(std::uint64_t offset, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  return window_locked(offset, bytes);
}

Result<TargetMemory::Window> TargetMemory::pin_window(std::uint64_t offset, std::uint64_t bytes) {
  const std::uint64_t end = offset + bytes;
  std::unique_lock lock(mutex_);
  if (load_ && of_buffer_) {
    Status allocated = allocate_to(lock, end);
    if (!allocated.ok()) return allocated;
  }
  changed_.wait(lock, [&] { return !pinning_; });
  // Another thread may have pinned it by now.
  if (Window window = window_locked(offset, bytes)) return window;
  pinning_ = true;
  // Between two holes, and no further than memory is allocated.
  const auto after = hole_above(holes_, offset);
  const std::uint64_t first = after == holes_.begin() ? 0 : end_of(*std::prev(after));
  const std::uint64_t last = after == holes_.end() ? total_ : after->offset;
  const std::uint64_t limit = load_ && of_buffer_ ? std::max(allocated_end_, end) : total_;
  const std::uint64_t aligned = round_down(offset, kWindowBytes);
  std::uint64_t from = std::max(first, aligned);
  std::uint64_t to = std::min({limit, last, std::max(aligned + kWindowBytes, end)});
  lock.unlock();
  Result<Buffer::Pin> pinned = pin(from, to - from);
  if (lacks_memory(pinned.error())) {
    // Memory around the bytes was freed, and there is no space for it any more.
    from = offset;
    to = end;
    pinned = pin(from, to - from);
  }
  lock.lock();
  pinning_ = false;
  changed_.notify_all();
  if (!pinned.ok()) return pinned.status();
  Window window = std::make_shared<const Buffer::Pin>(pinned.take());
  window_ = window;
  window_start_ = from;
  window_end_ = to;
  return window;
}

Result<Buffer::Pin> TargetMemory::pin(std::uint64_t offset, std::uint64_t bytes) {
  if (!load_) return target_.pin_for_read(offset_ + offset, bytes);
  Result<Buffer::Pin> pinned = target_.pin_for_write(offset_ + offset, bytes);
  if (!pinned.ok()) return pinned;
  for (const Buffer::Piece& piece : pinned.value().pieces) {
    if (piece.address == 0) return Status(EIO, "the buffer has no memory where the load writes");
  }
  return pinned;
}

// ---- the end ----

Status TargetMemory::finish_load(std::uint64_t reached, std::uint64_t touched) {
  if (!of_buffer_) return {};
  Buffer& buffer = *target_.buffer();
  {
    const std::lock_guard lock(mutex_);
    touched = std::max(touched, allocated_end_);
  }
  const bool published = reached == 0 || buffer.publish_since(offset_ + reached, noted_shrinks_);
  const std::uint64_t kept = published ? reached : 0;
  kept_.reset();
  (void)buffer.trim(kTrimPatience);
  if (touched <= kept) return {};
  return buffer.discard_above_size(offset_ + kept, touched - kept);
}

bool TargetMemory::close(bool force) {
  const std::lock_guard lock(mutex_);
  if (uses_ > 0 && !force) return false;
  closed_ = true;
  return true;
}

bool TargetMemory::in_use() const {
  const std::lock_guard lock(mutex_);
  return uses_ > 0;
}

void TargetMemory::release() {
  Target dropped;              // destroyed without the lock
  std::shared_ptr<void> kept;  // so is this
  const std::lock_guard lock(mutex_);
  closed_ = true;
  if (uses_ > 0) return;
  dropped = std::exchange(target_, Target{});
  kept = std::move(kept_);
}

void TargetMemory::note(observe::Backend backend, observe::Flow flow, std::uint64_t bytes) const {
  const std::lock_guard lock(mutex_);
  if (target_.buffer() != nullptr) target_.buffer()->activity().note(backend, flow, bytes);
}

}  // namespace gpufs
