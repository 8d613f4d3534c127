// The Buffer for its readers and writers: snapshots, pins, copies by the calling thread, and where data is.

#include "memory/extent_buffer.h"

#include <algorithm>
#include <cstring>
#include <ctime>
#include <utility>

#include "base/log.h"
#include "base/math.h"
#include "base/pages.h"
#include "base/thread.h"

namespace gpufs {
// Where the CPU can address the memory, what costs is the memory and not the call.
ExtentBuffer::ExtentBuffer(std::shared_ptr<DeviceContext> device, bool preallocates)
    : context_(std::move(device)),
      preallocates_(preallocates && !context_->info().cpu_addressable && !context_->info().reserve_copies),
      here_(std::make_shared<Residence>(context_, shared_charge())) {
  snapshot_ = std::make_shared<Snapshot>(*this);
}

ExtentBuffer::~ExtentBuffer() {
  snapshot_.reset();
  here_->device->releases().unlist_trimmable(this);
}

Residence::~Residence() {
  range.reset();
  memory.reset();
  charge->settle(0);
  charge->settle_descriptors(0);
  if (held > 0) device->released(held);
}

// ---- snapshots ----

ExtentBuffer::Snapshot::Snapshot(ExtentBuffer& buffer, std::uint64_t first, Extents existing, const Residence* where)
    : owner(buffer),
      device(where != nullptr ? where->device : buffer.context_),
      range(where != nullptr ? where->range : nullptr),
      memory(where != nullptr && where->memory != nullptr ? where->memory->number() : 0),
      base(range ? range->base() : 0),
      extents(std::move(existing)),
      placement(first) {
  const std::lock_guard lock(owner.state_mutex_);
  ++owner.snapshots_;
}

ExtentBuffer::Snapshot::Snapshot(ExtentBuffer& buffer, std::shared_ptr<const SlabPool::Slot> small)
    : Snapshot(buffer, 0, {{0, small->bytes}}) {
  memory = small->memory;
  base = small->address;
  slot = std::move(small);
}

ExtentBuffer::Snapshot::~Snapshot() {
  // First, so that the addresses are really gone when a waiter goes on.
  range.reset();
  slot.reset();
  {
    const std::lock_guard lock(owner.state_mutex_);
    --owner.snapshots_;
  }
  owner.state_changed_.notify_all();
}

ExtentBuffer::SnapshotPointer ExtentBuffer::current() const {
  const std::lock_guard lock(state_mutex_);
  return snapshot_;
}

std::uint64_t ExtentBuffer::highest_locked() const {
  std::uint64_t highest = snapshot_->placement + size_.load(std::memory_order_relaxed);
  for (const WritePin* writer : writers_) highest = std::max(highest, writer->range_.end());
  return highest;
}

// ---- pins ----

ExtentBuffer::WritePin::~WritePin() {
  if (buffer_ == nullptr) return;
  {
    const std::lock_guard lock(buffer_->state_mutex_);
    std::erase(buffer_->writers_, this);
  }
  buffer_->state_changed_.notify_all();
}

ExtentBuffer::Turn::~Turn() {
  if (!listed_) return;
  {
    const std::lock_guard lock(buffer_.state_mutex_);
    std::erase(buffer_.turns_, this);
  }
  buffer_.state_changed_.notify_all();
}

Status ExtentBuffer::Turn::take(Wait wait) {
  std::unique_lock lock(buffer_.state_mutex_);
  std::vector<const Turn*>& turns = buffer_.turns_;
  const auto overlaps = [this](const Turn* other) { return other->offset_ < end_ && offset_ < other->end_; };
  if (wait == Wait::kForbidden && std::any_of(turns.begin(), turns.end(), overlaps)) return would_wait();
  turns.push_back(this);
  listed_ = true;
  buffer_.state_changed_.wait(
      lock, [&] { return std::none_of(turns.begin(), std::find(turns.begin(), turns.end(), this), overlaps); });
  return {};
}

template <typename Work>
Status ExtentBuffer::for_each_piece(const ReadPin& held, Work work) {
  const Snapshot& snapshot = *held.snapshot;
  const std::uint64_t first = snapshot.placement;
  const std::uint64_t end = first + held.end;
  auto extent = first_above(snapshot.extents, first + held.offset);
  for (std::uint64_t position = first + held.offset; position < end;) {
    const bool hole = extent == snapshot.extents.end() || extent->offset > position;
    std::uint64_t stop = end;
    if (extent != snapshot.extents.end()) stop = std::min(stop, hole ? extent->offset : extent->end());
    TRY(work(Piece{Extent::between(position - first, stop - first), hole ? 0 : snapshot.base + position}));
    if (!hole) ++extent;
    position = stop;
  }
  return {};
}

Buffer::Pin ExtentBuffer::pin(ReadPin held) {
  Pin pin;
  (void)for_each_piece(held, [&](const Piece& piece) {
    pin.pieces.push_back(piece);
    return Status();
  });
  struct Kept {
    std::shared_ptr<Buffer> buffer;  // destroyed after the pin
    ReadPin held;
  };
  pin.device = held.snapshot->device.get();
  pin.keep = std::make_shared<Kept>(Kept{shared_from_this(), std::move(held)});
  return pin;
}

// The coarse clock is 4 ms behind at most, and takes a tenth of the time.
void ExtentBuffer::touch() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  const auto since = std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec);
  used_.store(std::chrono::duration_cast<TimePoint::duration>(since).count(), std::memory_order_relaxed);
}

Status ExtentBuffer::acquire_read(std::uint64_t offset, std::uint64_t bytes, ReadPin* held, Wait wait) {
  touch();
  std::unique_lock lock(state_mutex_);
  for (;; state_changed_.wait(lock)) {
    const std::uint64_t size = size_.load(std::memory_order_relaxed);
    const std::uint64_t end = offset >= size ? offset : offset + std::min(bytes, size - offset);
    const Extent range = placed(offset, end);
    if (range.end() <= gate_.offset || gate_.end() <= range.offset) {
      if (shift_.step != 0) return torn();
      *held = {snapshot_, offset, end};
      return {};
    }
    if (wait == Wait::kForbidden) return would_wait();
  }
}

bool ExtentBuffer::try_write_locked(std::uint64_t offset, std::uint64_t end, WritePin* held) {
  const Extent range = placed(offset, end);
  if (range.end() > write_limit_ || shift_.step != 0) return false;
  if (range.end() > gate_.offset && gate_.end() > range.offset) return false;
  if (!covered(snapshot_->extents, range.offset, range.end())) return false;
  writers_.push_back(held);
  held->buffer_ = this;
  held->snapshot_ = snapshot_;
  held->range_ = range;
  return true;
}

Status ExtentBuffer::acquire_write(std::uint64_t offset, std::uint64_t end, WritePin* held, Growth how) {
  touch();
  {
    const std::lock_guard lock(state_mutex_);
    if (at_home() && try_write_locked(offset, end, held)) return {};
  }
  return change_at_home(offset, end, how, [&]() -> Status {
    const Extent range = placed(offset, end);
    TRY(ensure(range.offset, range.end(), how));
    const std::lock_guard lock(state_mutex_);
    // Only the holder of the mutation's mutex can take it away again or close the way.
    if (!try_write_locked(offset, end, held)) return Status(EIO, "memory that was just populated is not there");
    return {};
  });
}

Status ExtentBuffer::check_end(std::uint64_t offset, std::uint64_t bytes, std::uint64_t* end) {
  if (add_overflows(offset, bytes, end) || *end > kMaximumBytes) {
    return Status(EFBIG, "beyond the largest size of a buffer");
  }
  return {};
}

Result<Buffer::Pin> ExtentBuffer::pin_for_read(std::uint64_t offset, std::uint64_t bytes, Wait wait) {
  ReadPin held;
  TRY(acquire_read(offset, bytes, &held, wait));
  return pin(std::move(held));
}

Result<Buffer::Pin> ExtentBuffer::pin_for_write(std::uint64_t offset, std::uint64_t bytes, Wait wait) {
  std::uint64_t end = 0;
  TRY(check_end(offset, bytes, &end));
  struct Kept {
    std::shared_ptr<Buffer> buffer;  // destroyed after the pin
    WritePin held;
  };
  const auto kept = std::make_shared<Kept>();
  kept->buffer = shared_from_this();
  Pin pin{{}, kept, context_.get()};
  if (bytes != 0) {
    TRY(acquire_write(offset, end, &kept->held, {.wait = wait}));
    pin.pieces.push_back({{offset, bytes}, kept->held.address()});
  }
  return pin;
}

std::shared_ptr<const ExtentBuffer::Claim> ExtentBuffer::claim(const Extent& range) {
  std::list<Claim>::iterator made;
  {
    const std::lock_guard lock(state_mutex_);
    made = claims_.insert(claims_.end(), {range, shrinks_});
  }
  return {&*made, [made, buffer = owner().lock()](const Claim*) {
            const std::lock_guard lock(buffer->state_mutex_);
            buffer->claims_.erase(made);
          }};
}

bool ExtentBuffer::publish(std::uint64_t end, const Claim* since) {
  const std::lock_guard lock(state_mutex_);
  if (since != nullptr && since->shrinks != shrinks_) return false;
  const std::uint64_t size = std::min({end, publish_limit_, kMaximumBytes});
  if (size > size_.load(std::memory_order_relaxed)) size_.store(size, std::memory_order_release);
  return true;
}

// ---- copies by the calling thread ----

Result<std::size_t> ExtentBuffer::read(std::uint64_t offset, std::span<std::byte> destination, Wait wait) {
  ReadPin held;
  TRY(acquire_read(offset, destination.size(), &held, wait));
  TRY(for_each_piece(held, [&](const Piece& piece) {
    std::byte* const out = destination.data() + (piece.offset - offset);
    if (piece.address != 0) return held.snapshot->device->device().copy_out(out, piece.address, piece.bytes);
    std::memset(out, 0, piece.bytes);
    return Status();
  }));
  return static_cast<std::size_t>(held.end - held.offset);
}

Result<std::size_t> ExtentBuffer::write(std::uint64_t offset, std::span<const std::byte> source, Wait wait) {
  std::uint64_t end = 0;
  TRY(check_end(offset, source.size(), &end));
  if (source.empty()) return std::size_t{0};
  Turn turn(*this, offset, end);
  TRY(turn.take(wait));
  Status status;
  {
    WritePin held;
    TRY(acquire_write(offset, end, &held, {.speculative = true, .wait = wait, .anywhere = true}));
    status = held.device().copy_in(held.address(), source.data(), source.size());
    if (status.ok()) {
      publish(end);
      return source.size();
    }
  }
  const Status cleared = discard_above_size(offset, source.size());
  if (!cleared.ok()) log_error("clearing what a failed write left: ", cleared.message());
  return status;
}

Result<Buffer::Gathered> ExtentBuffer::gather(std::uint64_t offset, std::uint64_t bytes, Wait wait) {
  if (!context_->info().cpu_addressable) return Status(EOPNOTSUPP, "the CPU cannot address this device's memory");
  ReadPin held;
  TRY(acquire_read(offset, bytes, &held, wait));
  Pin pinned = pin(std::move(held));
  Gathered gathered;
  gathered.pieces.reserve(pinned.pieces.size());
  for (const Piece& piece : pinned.pieces) {
    gathered.bytes += piece.bytes;
    if (piece.address != 0) {
      gathered.pieces.push_back({reinterpret_cast<void*>(piece.address), piece.bytes});
      continue;
    }
    for (std::uint64_t left = piece.bytes; left > 0;) {
      const std::size_t part = std::min<std::uint64_t>(left, zeros().size());
      gathered.pieces.push_back({const_cast<std::byte*>(zeros().data()), part});  // an iovec's address is never const
      left -= part;
    }
  }
  gathered.keep = std::move(pinned.keep);
  return gathered;
}

// ---- where data is ----

// Regardless of the gate: the memory itself is not used.
ExtentBuffer::ReadPin ExtentBuffer::whole() const {
  const std::lock_guard lock(state_mutex_);
  return {snapshot_, 0, size_.load(std::memory_order_relaxed)};
}

Result<std::uint64_t> ExtentBuffer::seek_data(std::uint64_t offset) {
  const ReadPin all = whole();
  const std::uint64_t first = all.snapshot->placement;
  const auto extent = first_above(all.snapshot->extents, first + offset);
  if (offset < all.end && extent != all.snapshot->extents.end()) {
    const std::uint64_t found = std::max(first + offset, extent->offset) - first;
    if (found < all.end) return found;
  }
  return Status(ENXIO, "no data at or above the offset");
}

Result<std::uint64_t> ExtentBuffer::seek_hole(std::uint64_t offset) {
  const ReadPin all = whole();
  if (offset >= all.end) return Status(ENXIO, "the offset is not below the end");
  const std::uint64_t first = all.snapshot->placement;
  const auto extent = first_above(all.snapshot->extents, first + offset);
  if (extent == all.snapshot->extents.end() || extent->offset > first + offset) return offset;
  return std::min(extent->end() - first, all.end);  // the end of a file is a hole
}

}  // namespace gpufs
