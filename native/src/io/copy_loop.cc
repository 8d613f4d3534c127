#include "io/copy_loop.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <thread>
#include <utility>

#include "base/math.h"
#include "base/thread.h"
#include "device/device_context.h"
#include "io/file_moves.h"
#include "io/transfer_engine.h"
#include "observe/trace.h"

namespace gpufs {
namespace {

// A chunk counts as cached if this part of it is: reading the rest through the page cache then costs less than reading
// all of it from the disk.
constexpr std::uint64_t kCachedNumerator = 3;
constexpr std::uint64_t kCachedDenominator = 4;
// Smaller stores go to the page cache, from which they are likely read again.
constexpr std::uint64_t kSmallestDirectStore = std::uint64_t{1} << 20;
constexpr std::chrono::microseconds kEventPoll{20};

Status cancelled_status() { return Status(ECANCELED, "cancelled"); }

}  // namespace

CopyLoop::CopyLoop(Transfer& transfer)
    : transfer_(transfer),
      file_(transfer.file()),
      memory_(transfer.memory_),
      device_(transfer.device_),
      device_index_(device_->info().index),
      trace_id_(transfer.trace_id_),
      load_(transfer.load()),
      // What can hang in the file must not hold the device's memory at that time: such files use a bounce buffer.
      straight_(device_->info().cpu_addressable && !file_.facts().may_hang) {}

void CopyLoop::run() {
  const auto start = std::chrono::steady_clock::now();
  do {
    std::optional<Chunk> chunk = transfer_.next_chunk();
    if (!chunk) return;
    if (chunk->hole) {
      skip_hole(*chunk);
    } else {
      move(*chunk);
    }
  } while (!transfer_.threads_->should_yield(transfer_, start));
}

void CopyLoop::move(Chunk& chunk) {
  transfer_.start_path(chunk);
  observe::Span span(observe::TraceKind::kPiece, device_index_, file_offset(chunk), chunk.bytes, trace_id_,
                     transfer_.trace_name_);
  if (!straight_ && memory_.start_ahead(chunk.offset + chunk.bytes)) {
    drain();
    memory_.allocate_ahead();
  }
  if (chunk.path == Path::kFastpath && !move_fast(chunk)) return;
  if (straight_) {
    move_straight(chunk);
  } else if (load_) {
    load_bounced(chunk);
  } else {
    store_bounced(chunk);
  }
}

std::uint64_t CopyLoop::file_offset(const Chunk& chunk) const {
  return transfer_.request_.file_offset + chunk.offset + chunk.done;
}

std::uint64_t CopyLoop::target_offset(const Chunk& chunk) const {
  return transfer_.request_.target_offset + chunk.offset + chunk.done;
}

// Nothing to move, as far as the file still reaches.
void CopyLoop::skip_hole(Chunk& chunk) {
  std::uint64_t size = 0;
  Status status;
  if (file_.operations().size(file_.buffered_fd(), &size) != 0) {
    status = Status::from_errno(errno, "the backing file's size");
  }
  const std::uint64_t start = file_offset(chunk);
  chunk.done = size <= start ? 0 : std::min(chunk.bytes, size - start);
  transfer_.count_skipped(chunk, chunk.done);
  count(transfer_.details_.hole_bytes, chunk.done);
  transfer_.complete(chunk, status);
}

// ---- fastpath: the vendor's library moves the bytes ----

// True if (the rest of) the chunk is to go by fallback.
bool CopyLoop::move_fast(Chunk& chunk) {
  TargetMemory::Use use = memory_.use();
  const FastOutcome outcome = use ? move_by_vendor(chunk) : FastOutcome{cancelled_status()};
  use.end();
  if (!outcome.fall_back) {
    transfer_.complete(chunk, outcome.status);
    return false;
  }
  transfer_.end_path(chunk, !outcome.status.ok());
  chunk.path = Path::kFallback;
  transfer_.start_path(chunk);
  return true;
}

CopyLoop::FastOutcome CopyLoop::move_by_vendor(Chunk& chunk) {
  Status bound = device_->device().bind_thread();
  if (!bound.ok()) return {bound};
  drain();  // pinning may wait for pins that this thread holds
  Result<TransferTarget::Pin> pinned = memory_.pin(chunk.offset, chunk.bytes);
  if (!pinned.ok()) return {pinned.status()};
  const BackingFacts& facts = file_.facts();
  for (const TransferTarget::Piece& piece : pinned.value().pieces) {
    const bool hole = piece.address == 0;
    // Memory need not lie as the start of the request made expect.
    const bool unaligned = piece.address % facts.memory_align != 0 || file_offset(chunk) % facts.unit != 0 ||
                           piece.bytes % facts.unit != 0;
    if (!hole && unaligned && !transfer_.may_change_path()) {
      return {Status(EOPNOTSUPP, "fastpath alone is allowed but refused: memory_unaligned")};
    }
    if (hole || unaligned) return {Status{}, true};
    const Moved moved = call_vendor(chunk, piece);
    chunk.done += moved.bytes;
    transfer_.count_moved(Path::kFastpath, moved.bytes);
    if (!moved.status.ok()) {
      if (!rerun_on_fallback(moved.status.error())) return {moved.status};
      transfer_.give_up_fastpath(moved.status, moved.refusals);
      if (transfer_.may_change_path()) return {moved.status, true};
      return {Status(EOPNOTSUPP, "fastpath alone is allowed but failed: " + moved.status.message(),
                     moved.status.device_code())};
    }
    if (moved.bytes < piece.bytes) {
      // Fallback finds out whether the file ends here.
      if (transfer_.may_change_path()) return {Status{}, true};
      return {stopped_short(chunk)};
    }
  }
  return {};
}

Moved CopyLoop::call_vendor(const Chunk& chunk, const TransferTarget::Piece& piece) {
  observe::Span span(observe::TraceKind::kFastpath, device_index_, file_offset(chunk), piece.bytes, trace_id_);
  DirectFile& direct = *transfer_.direct_file_;
  Moved moved = load_ ? direct.load(piece.address, piece.bytes, file_offset(chunk))
                      : direct.store(piece.address, piece.bytes, file_offset(chunk));
  span.set_bytes(moved.bytes);
  span.set_error(moved.status.error());
  return moved;
}

// Where fallback is not allowed: the end of a file that was truncated, or a failure without a reason.
Status CopyLoop::stopped_short(const Chunk& chunk) {
  std::uint64_t size = 0;
  if (load_ && file_.operations().size(file_.buffered_fd(), &size) == 0 && size <= file_offset(chunk)) return {};
  return Status(EIO, "fastpath stopped before the end, and it alone is allowed");
}

// ---- fallback without a bounce buffer: the CPU addresses the device's memory ----

void CopyLoop::move_straight(Chunk& chunk) {
  TargetMemory::Use use = memory_.use();
  const Status status = use ? move_straight_in_use(chunk) : cancelled_status();
  use.end();
  transfer_.complete(chunk, status);
}

Status CopyLoop::move_straight_in_use(Chunk& chunk) {
  Result<TransferTarget::Pin> pinned = memory_.pin(chunk.offset + chunk.done, chunk.bytes - chunk.done);
  if (!pinned.ok()) return pinned.status();
  const bool direct = wants_direct(chunk);
  for (const TransferTarget::Piece& piece : pinned.value().pieces) {
    const bool hole = piece.address == 0;
    const Moved moved =
        load_  ? load_straight(chunk, piece, direct)
        : hole ? store_hole(chunk, piece.bytes)
               : write_out(reinterpret_cast<const std::byte*>(piece.address), piece.bytes, file_offset(chunk), direct);
    if (Status intact = memory_.target().check_pinned(); !intact.ok()) return intact;
    chunk.done += moved.bytes;
    if (!hole) transfer_.count_moved(Path::kFallback, moved.bytes);
    if (!moved.status.ok() || moved.bytes < piece.bytes) return moved.status;
  }
  return {};
}

Moved CopyLoop::load_straight(const Chunk& chunk, const TransferTarget::Piece& piece, bool direct) {
  const std::uint64_t offset = file_offset(chunk);
  observe::Span span(observe::TraceKind::kFileRead, device_index_, offset, piece.bytes, trace_id_);
  auto* const memory = reinterpret_cast<std::byte*>(piece.address);
  const std::uint64_t body = direct ? round_down(piece.bytes, file_.facts().unit) : 0;
  Moved moved;
  if (direct_fits(file_, memory, body, offset)) {
    moved = read_direct(file_, memory, body, offset);
    count_file_bytes(true, moved.bytes);
    if (!moved.status.ok() && moved.status.error() != EINVAL) return moved;
  }
  const Moved rest = read_buffered(file_, memory + moved.bytes, piece.bytes - moved.bytes, offset + moved.bytes);
  count_file_bytes(false, rest.bytes);
  return Moved{moved.bytes + rest.bytes, rest.status};
}

// ---- fallback through bounce buffers ----

void CopyLoop::load_bounced(const Chunk& chunk) {
  const Result<InFlight*> free = free_buffer();
  if (!free.ok()) {
    transfer_.complete(chunk, free.status());
    return;
  }
  InFlight& slot = *free.value();
  slot.chunk = chunk;
  const Moved read = read_file(slot);
  if (observe::trace::on()) note_ended_copies();
  slot.bytes = read.bytes;
  slot.file_status = read.status;
  if (read.bytes > 0) slot.use = memory_.use();
  if (!slot.use) {
    transfer_.complete(chunk, read.bytes == 0 ? read.status : cancelled_status());
    return;
  }
  bool queued = false;
  Status status = copy_to_device(slot, &queued);
  submitted(slot, std::move(status), queued);
}

void CopyLoop::store_bounced(const Chunk& chunk) {
  const Result<InFlight*> free = free_buffer();
  if (!free.ok()) {
    transfer_.complete(chunk, free.status());
    return;
  }
  InFlight& slot = *free.value();
  slot.chunk = chunk;
  slot.bytes = chunk.bytes - chunk.done;
  slot.use = memory_.use();
  if (!slot.use) {
    transfer_.complete(chunk, cancelled_status());
    return;
  }
  bool queued = false;
  Status status = copy_to_host(slot, &queued);
  submitted(slot, std::move(status), queued);  // end() writes the file
}

// Reads what O_DIRECT can read in whole units around the chunk, or through the page cache.
Moved CopyLoop::read_file(InFlight& slot) {
  const std::uint64_t bytes = slot.chunk.bytes - slot.chunk.done;
  const std::uint64_t offset = file_offset(slot.chunk);
  observe::Span span(observe::TraceKind::kFileRead, device_index_, offset, bytes, trace_id_);
  const std::uint64_t unit = file_.facts().unit;
  const std::uint64_t lead = offset % unit;
  const std::uint64_t covering = round_up(lead + bytes, unit);
  slot.memory = slot.buffer->data;
  Moved direct;
  if (covering <= slot.buffer->bytes && wants_direct(slot.chunk)) {
    direct = read_direct(file_, slot.memory, covering, offset - lead);
    slot.memory += lead;
    direct.bytes = std::min(direct.bytes > lead ? direct.bytes - lead : 0, bytes);
    count_file_bytes(true, direct.bytes);
    // EINVAL: the file system's alignment is not what it reported.
    if (!direct.status.ok() && direct.status.error() != EINVAL) return direct;
    if (direct.bytes == bytes) return direct;
  }
  const Moved rest = read_buffered(file_, slot.memory + direct.bytes, bytes - direct.bytes, offset + direct.bytes);
  count_file_bytes(false, rest.bytes);
  return Moved{direct.bytes + rest.bytes, rest.status};
}

Status CopyLoop::copy_to_device(InFlight& slot, bool* queued) {
  Status status = pin(slot);
  if (!status.ok()) return status;
  const std::uint64_t start = target_offset(slot.chunk);
  for (const TransferTarget::Piece& piece : slot.pin.pieces) {
    *queued = true;
    const std::byte* const from = slot.memory + (piece.offset - start);
    status = stream_->copy_to_device(piece.address, from, static_cast<std::size_t>(piece.bytes));
    if (!status.ok()) break;
  }
  return status;
}

Status CopyLoop::copy_to_host(InFlight& slot, bool* queued) {
  slot.holes.clear();
  // At the same offset in its page as in the file's, so that O_DIRECT can write the middle.
  slot.memory = slot.buffer->data + file_offset(slot.chunk) % file_.facts().unit;
  if (slot.memory + slot.bytes > slot.buffer->data + slot.buffer->bytes) slot.memory = slot.buffer->data;
  Status status = pin(slot);
  if (!status.ok()) return status;
  const std::uint64_t start = target_offset(slot.chunk);
  const std::vector<TransferTarget::Piece>& pieces = slot.pin.pieces;
  // Fewer bytes than wanted if the buffer was truncated.
  slot.bytes = pieces.empty() ? 0 : pieces.back().offset + pieces.back().bytes - start;
  for (const TransferTarget::Piece& piece : pieces) {
    if (piece.address == 0) {
      slot.holes.push_back({piece.offset - start, piece.bytes});
      continue;
    }
    *queued = true;
    std::byte* const to = slot.memory + (piece.offset - start);
    status = stream_->copy_to_host(to, piece.address, static_cast<std::size_t>(piece.bytes));
    if (!status.ok()) break;
  }
  return status;
}

// The device memory of the slot's bytes; pinned until end().
Status CopyLoop::pin(InFlight& slot) {
  const std::uint64_t offset = slot.chunk.offset + slot.chunk.done;
  Result<TransferTarget::Pin> pinned = [&] {
    const NoWaiting only_now;
    return memory_.pin(offset, slot.bytes);
  }();
  if (!pinned.ok()) {
    drain();  // it may have to wait for pins that this thread holds
    pinned = memory_.pin(offset, slot.bytes);
  }
  if (!pinned.ok()) return pinned.status();
  slot.pin = pinned.take();
  return {};
}

void CopyLoop::submitted(InFlight& slot, Status status, bool queued) {
  if (status.ok()) status = stream_->record(*slot.event);
  slot.busy = true;
  slot.copy_start = observe::trace::on() ? observe::now_ns() : 0;
  slot.copy_end = 0;
  if (!status.ok()) {
    // Copies that did start must end before the memory is freed; their outcome no longer matters.
    if (queued) (void)stream_->synchronize();
    end(slot, status);
  } else if (file_.facts().may_hang) {
    wait_for(slot);  // nothing may be in use while this thread hangs in such a file
  }
}

// ---- bounce buffers and the device's work on them ----

// The next slot in turn. This is where a thread waits for the device.
Result<CopyLoop::InFlight*> CopyLoop::free_buffer() {
  Status bound = device_->device().bind_thread();
  if (!bound.ok()) return bound;
  if (stream_ == nullptr) {
    Result<std::shared_ptr<Stream>> stream = device_->streams().acquire();
    if (!stream.ok()) return stream.status().with_context("a stream for the transfer");
    stream_ = stream.take();
  }
  BouncePool& pool = *transfer_.engine_->bounce_pool();
  if (slots_.empty()) {
    observe::Span span(observe::TraceKind::kSlotWait, device_index_, 0, 0, trace_id_);
    Result<BounceBuffer> first = pool.acquire(device_, transfer_.cancelled_);
    if (!first.ok()) return first.status();
    Status added = add_buffer(first.take());
    if (!added.ok()) return added;
  } else if (static_cast<int>(slots_.size()) < transfer_.options().slots && device_lags()) {
    BounceBuffer more = pool.try_acquire(device_, static_cast<std::size_t>(transfer_.threads_->threads()));
    // Without one, or without an event for it, the thread waits for a slot that it has.
    if (more != nullptr && add_buffer(std::move(more)).ok()) turn_ = slots_.size() - 1;
  }
  InFlight& slot = *slots_[turn_];
  turn_ = (turn_ + 1) % slots_.size();
  if (slot.busy) wait_for(slot);
  return &slot;
}

// Whether the device still works on the slot that is next. If not, that slot is better than an additional one: with few
// slots, what the threads copy through stays in the CPUs' cache, and the device reads it from there.
bool CopyLoop::device_lags() {
  if (!slots_[turn_]->busy) return false;
  const Result<bool> done = slots_[turn_]->event->query();
  return done.ok() && !done.value();
}

Status CopyLoop::add_buffer(BounceBuffer buffer) {
  Result<std::shared_ptr<Event>> event = device_->events().acquire();
  if (!event.ok()) return event.status().with_context("an event for the transfer");
  auto slot = std::make_unique<InFlight>();
  slot->buffer = std::move(buffer);
  slot->event = event.take();
  slot->lane = static_cast<std::uint8_t>(slots_.size() + 1);
  slots_.push_back(std::move(slot));
  return {};
}

// Waits for all that the device does for this thread, oldest first, and completes it.
void CopyLoop::drain() {
  for (std::size_t count = 0; count < slots_.size(); ++count) {
    InFlight& slot = *slots_[(turn_ + count) % slots_.size()];
    if (slot.busy) wait_for(slot);
  }
}

void CopyLoop::wait_for(InFlight& slot) {
  const Status status = wait_for_device(slot);
  if (!status.ok()) (void)stream_->synchronize();
  end(slot, status);
}

// Drivers spin in synchronize(), which returns soonest. While other slots keep the device busy nothing is lost by
// sleeping instead, and the CPU is left to others.
Status CopyLoop::wait_for_device(InFlight& slot) {
  observe::Span span(observe::TraceKind::kDeviceWait, device_index_, 0, 0, trace_id_);
  const auto busy = std::count_if(slots_.begin(), slots_.end(), [](const auto& other) { return other->busy; });
  for (; busy > 1; std::this_thread::sleep_for(kEventPoll)) {
    const Result<bool> done = slot.event->query();
    if (!done.ok()) return done.status();
    if (done.value()) return {};
  }
  return slot.event->synchronize();
}

// The device is done with the slot: completes its chunk, for a store after writing it to the file.
void CopyLoop::end(InFlight& slot, const Status& device_status) {
  if (slot.copy_start != 0) trace_copy(slot, device_status);
  Status status = device_status;
  if (status.ok()) status = memory_.target().check_pinned();
  slot.pin = {};
  slot.busy = false;
  slot.use.end();
  if (status.ok() && load_) {
    slot.chunk.done += slot.bytes;
    transfer_.count_moved(Path::kFallback, slot.bytes);
    status = slot.file_status;
  } else if (status.ok()) {
    status = write_file(slot);
  }
  transfer_.complete(slot.chunk, status);
}

Status CopyLoop::write_file(InFlight& slot) {
  Chunk& chunk = slot.chunk;
  const bool direct = wants_direct(chunk);
  const bool sparse = transfer_.request_.sparse;
  std::uint64_t position = 0;
  Status status;
  // True if all of it was written.
  const auto write_data = [&](std::uint64_t end) {
    if (end == position) return true;
    const std::uint64_t bytes = end - position;
    const Moved moved = write_out(slot.memory + position, bytes, file_offset(chunk), direct);
    position += moved.bytes;
    chunk.done += moved.bytes;
    transfer_.count_moved(Path::kFallback, moved.bytes);
    status = moved.status;
    return status.ok() && moved.bytes == bytes;
  };
  for (const BufferHole& hole : slot.holes) {
    if (!sparse) {
      std::memset(slot.memory + hole.offset, 0, hole.bytes);
      count(transfer_.details_.hole_bytes, hole.bytes);
      continue;
    }
    if (!write_data(hole.offset)) return status;
    const Moved moved = store_hole(chunk, hole.bytes);
    position += moved.bytes;
    chunk.done += moved.bytes;
    if (!moved.status.ok() || moved.bytes < hole.bytes) return moved.status;
  }
  write_data(slot.bytes);
  return status;
}

// ---- the file's side of fallback ----

// Whether what is left of a chunk should go by O_DIRECT, apart from alignment.
bool CopyLoop::wants_direct(const Chunk& chunk) {
  const Switch wish = transfer_.options().direct;
  if (file_.direct_fd() < 0 || wish == Switch::kOff) return false;
  if (wish == Switch::kOn) return true;
  return load_ ? !cached(chunk) : transfer_.total_ >= kSmallestDirectStore;
}

bool CopyLoop::cached(const Chunk& chunk) {
  if (file_.facts().always_hot) return true;
  const std::uint64_t bytes = chunk.bytes - chunk.done;
  std::uint64_t found = 0;
  // If the kernel does not report it, reading through the page cache is right either way.
  if (file_.operations().cached_bytes(file_.buffered_fd(), file_offset(chunk), bytes, &found) != 0) return true;
  return found >= bytes / kCachedDenominator * kCachedNumerator;
}

Moved CopyLoop::write_out(const std::byte* memory, std::uint64_t bytes, std::uint64_t offset, bool direct) {
  observe::Span span(observe::TraceKind::kFileWrite, device_index_, offset, bytes, trace_id_);
  Moved moved = direct                ? write_split(file_, memory, bytes, offset)
                : transfer_.by_pages_ ? write_pages(file_, memory, bytes, offset)
                                      : write_buffered(file_, memory, bytes, offset);
  count_file_bytes(direct, moved.bytes);
  return moved;
}

// From chunk.done on; counts how.
Moved CopyLoop::store_hole(Chunk& chunk, std::uint64_t bytes) {
  std::uint64_t holed = 0;
  Moved moved = write_zeros(file_, bytes, file_offset(chunk), transfer_.request_.sparse, &holed);
  count(transfer_.details_.hole_bytes, moved.bytes);
  transfer_.count_skipped(chunk, holed);
  transfer_.count_moved(Path::kFallback, moved.bytes - holed);
  return moved;
}

void CopyLoop::count_file_bytes(bool direct, std::uint64_t bytes) {
  observe::TransferDetails& details = transfer_.details_;
  count(direct ? details.direct_bytes : details.buffered_bytes, bytes);
}

// ---- traces ----

// Records when the device was seen to be done with a slot, as exactly as possible without waiting for it.
void CopyLoop::note_ended_copies() {
  for (const std::unique_ptr<InFlight>& slot : slots_) {
    if (!slot->busy || slot->copy_end != 0) continue;
    const Result<bool> done = slot->event->query();
    if (done.ok() && done.value()) slot->copy_end = observe::now_ns();
  }
}

void CopyLoop::trace_copy(const InFlight& slot, const Status& outcome) {
  observe::TraceRecord record;
  record.kind = load_ ? observe::TraceKind::kCopyToDevice : observe::TraceKind::kCopyToHost;
  record.start = slot.copy_start;
  record.end = slot.copy_end != 0 ? slot.copy_end : observe::now_ns();
  record.id = trace_id_;
  record.offset = target_offset(slot.chunk);
  record.bytes = slot.bytes;
  record.lane = slot.lane;
  record.device = device_index_;
  record.error = outcome.error();
  observe::trace::record(record);
}

}  // namespace gpufs
