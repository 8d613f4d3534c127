// A load on one thread, in the order of this file. Threads of one transfer work side by side.
//
//  1. run() takes the next chunk of the plan, and skips it if it is a hole of the file.
//  2. move() allocates device memory ahead, if no other thread does, and chooses the way of the chunk:
//  3. by the fastpath move_fast() has the vendor's library move it; the rest of what that refuses goes on with 4;
//  4. where the CPU addresses the device's memory move_in_place() reads the file into that, and the chunk is complete;
//  5. otherwise load() takes a bounce buffer from next_slot(), which waits for the device if all of them are busy.
//  6. read_file() reads the file into it, by O_DIRECT or through the page cache.
//  7. pin() keeps the chunk's device memory in place.
//  8. submit() adds the copies to the transfer's next batch, and the thread goes back to 1 while the device works.
//  9. wait_for() polls the batch when the buffer's turn comes again, or in drain() at the end.
// 10. finish() unpins, and complete() reports the bytes to the Transfer, which publishes the size after its last chunk.

#include "io/pipeline.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <thread>
#include <utility>

#include "base/math.h"
#include "io/file_io.h"
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
constexpr std::chrono::microseconds kBusyPoll{20};
constexpr std::chrono::milliseconds kSpin{1};

}  // namespace

Pipeline::Pipeline(Transfer& transfer)
    : transfer_(transfer),
      facts_(transfer.facts()),
      file_(facts_.file()),
      memory_(transfer.memory()),
      device_(*facts_.device),
      device_index_(device_.info().index),
      // What can hang in the file must not hold the device's memory at that time: such files use a bounce buffer.
      without_bounce_buffer_(device_.info().cpu_addressable && !file_.facts().may_hang) {}

// ---- a load, from here to finish() ----

void Pipeline::run(const Scheduler::Turn& turn) {
  do {
    const std::optional<Chunk> chunk = transfer_.next_chunk();
    if (!chunk) return;
    if (chunk->hole) {
      skip_hole(*chunk);
    } else {
      move(*chunk);
    }
  } while (!turn.over());
}

void Pipeline::move(const Chunk& chunk) {
  const observe::Span span(observe::TraceKind::kPiece, device_index_, facts_.request.file_offset + chunk.offset,
                           chunk.bytes, facts_.trace_id, facts_.trace_name);
  Work work;
  work.chunk = chunk;
  begin_path(work, chunk.path);
  if (!without_bounce_buffer_) {
    if (TargetMemory::AccessGuard access = memory_.start_ahead(chunk.end())) {
      drain();
      memory_.allocate_ahead(std::move(access));
    }
  }
  if (chunk.path == Path::kFastpath && !move_fast(work)) return;
  if (without_bounce_buffer_) {
    move_without_bounce_buffer(work);
  } else if (facts_.load()) {
    load(work);
  } else {
    store(work);
  }
}

// File -> pinned memory -> device.
void Pipeline::load(const Work& work) {
  const Result<Slot*> free = next_slot();
  if (!free.ok()) return complete(work, free.status());
  Slot& slot = *free.value();
  slot.work = work;
  const Moved read = read_file(slot);
  if (observe::trace::on()) note_ended_copies();
  slot.bytes = read.bytes;
  slot.file_status = read.status;
  if (read.bytes == 0) return complete(work, read.status);
  slot.access = memory_.access();
  if (!slot.access) return complete(work, cancelled_status());
  if (Status pinned = pin(slot); !pinned.ok()) return finish(slot, pinned);
  const std::uint64_t start = target_offset(work);
  std::vector<HostCopy> copies;
  for (const TransferTarget::Piece& piece : slot.pin.pieces) {
    copies.push_back({piece.address, slot.memory + (piece.offset - start), piece.bytes});
  }
  submit(slot, copies);  // finish() completes the chunk
}

// Reads what O_DIRECT can read in whole units around the chunk, or through the page cache.
Moved Pipeline::read_file(Slot& slot) {
  const std::uint64_t bytes = slot.work.rest();
  const std::uint64_t offset = file_offset(slot.work);
  const observe::Span span(observe::TraceKind::kFileRead, device_index_, offset, bytes, facts_.trace_id);
  const std::uint64_t unit = file_.facts().unit;
  const std::uint64_t lead = offset % unit;
  const std::uint64_t covering = round_up(lead + bytes, unit);
  slot.memory = slot.buffer->data;
  Moved direct;
  if (covering <= slot.buffer->bytes && wants_direct(slot.work)) {
    direct = read_range(file_, IoMode::kDirect, slot.memory, covering, offset - lead);
    slot.memory += lead;
    direct.bytes = std::min(direct.bytes > lead ? direct.bytes - lead : 0, bytes);
  }
  return read_rest(direct, slot.memory, bytes, offset);
}

// The device memory of the slot's bytes; pinned until finish().
Status Pipeline::pin(Slot& slot) {
  const std::uint64_t offset = slot.work.chunk.offset + slot.work.done;
  Result<TransferTarget::Pin> pinned = memory_.pin(offset, slot.bytes, Wait::kForbidden);
  if (!pinned.ok()) {
    drain();  // pinning may have to wait for pins that this thread holds
    pinned = memory_.pin(offset, slot.bytes);
  }
  if (pinned.ok()) slot.pin = pinned.take();
  return pinned.status();
}

// Hands the slot's copies to the device.
void Pipeline::submit(Slot& slot, std::span<const HostCopy> copies) {
  // An address that a program passes as device memory may be something else, or freed.
  Device& device = device_.device();
  const bool known = memory_.target().address() == 0 || std::ranges::all_of(copies, [&](const HostCopy& copy) {
                       return device.holds(copy.device) && device.holds(copy.device + copy.bytes - 1);
                     });
  slot.batch = copies.empty() ? nullptr : batches_->add(copies, known);
  slot.busy = true;
  slot.copy_start = observe::trace::on() ? observe::now_ns() : 0;
  slot.copy_end = 0;
  if (file_.facts().may_hang) wait_for(slot);  // nothing may be in use while this thread hangs in such a file
}

// The device is done with the slot: completes its chunk, for a store after writing it to the file.
void Pipeline::finish(Slot& slot, const Status& device_status) {
  if (slot.copy_start != 0) trace_copy(slot, device_status);
  slot.copy_start = 0;
  Status status = device_status;
  if (status.ok()) status = memory_.target().check_pinned();
  slot.pin = {};
  slot.batch = nullptr;
  slot.busy = false;
  slot.access.reset();
  if (status.ok() && facts_.load()) {
    slot.work.done += slot.bytes;
    slot.work.count(Path::kFallback, slot.bytes);
    status = slot.file_status;
  } else if (status.ok()) {
    status = write_file(slot);
  }
  complete(slot.work, status);
}

// ---- a store, whose copies also end in finish() ----

// Device -> pinned memory -> file.
void Pipeline::store(const Work& work) {
  const Result<Slot*> free = next_slot();
  if (!free.ok()) return complete(work, free.status());
  Slot& slot = *free.value();
  slot.work = work;
  slot.bytes = work.rest();
  slot.holes.clear();
  slot.access = memory_.access();
  if (!slot.access) return complete(work, cancelled_status());
  // At the same offset in its page as in the file's, so that O_DIRECT can write the middle.
  slot.memory = slot.buffer->data + file_offset(work) % file_.facts().unit;
  if (slot.memory + slot.bytes > slot.buffer->data + slot.buffer->bytes) slot.memory = slot.buffer->data;
  if (Status pinned = pin(slot); !pinned.ok()) return finish(slot, pinned);
  const std::uint64_t start = target_offset(work);
  const std::vector<TransferTarget::Piece>& pieces = slot.pin.pieces;
  // Fewer bytes than wanted if the buffer was truncated.
  slot.bytes = pieces.empty() ? 0 : pieces.back().end() - start;
  std::vector<HostCopy> copies;
  for (const TransferTarget::Piece& piece : pieces) {
    if (piece.address == 0) {
      slot.holes.push_back({piece.offset - start, piece.bytes});
    } else {
      copies.push_back({piece.address, slot.memory + (piece.offset - start), piece.bytes});
    }
  }
  if (slot.pin.device != &device_) {  // in the host tier: the batches' streams are not of that device
    for (const HostCopy& copy : copies) {
      Status copied = slot.pin.device->device().copy_out(copy.host, copy.device, copy.bytes);
      if (!copied.ok()) return finish(slot, copied);
    }
    copies.clear();
  }
  submit(slot, copies);  // finish() calls write_file()
}

Status Pipeline::write_file(Slot& slot) {
  Work& work = slot.work;
  const bool direct = wants_direct(work);
  const bool sparse = facts_.request.sparse;
  std::uint64_t position = 0;
  Status status;
  // True if all of it was written.
  const auto write_data = [&](std::uint64_t end) {
    if (end == position) return true;
    const std::uint64_t bytes = end - position;
    const Moved moved = write_out(slot.memory + position, bytes, file_offset(work), direct);
    position += moved.bytes;
    work.done += moved.bytes;
    work.count(Path::kFallback, moved.bytes);
    status = moved.status;
    return status.ok() && moved.bytes == bytes;
  };
  for (const Extent& hole : slot.holes) {
    if (!sparse) {
      std::memset(slot.memory + hole.offset, 0, hole.bytes);
      count(facts_.details.hole_bytes, hole.bytes);
      continue;
    }
    if (!write_data(hole.offset)) return status;
    const Moved moved = store_hole(work, hole.bytes);
    position += moved.bytes;
    work.done += moved.bytes;
    if (!moved.status.ok() || moved.bytes < hole.bytes) return moved.status;
  }
  write_data(slot.bytes);
  return status;
}

// ---- how chunks end ----

// The path starts on a chunk or on the rest of one.
void Pipeline::begin_path(Work& work, Path path) const {
  work.chunk.path = path;
  work.path_start = observe::now_ns();
  work.done_before = work.done;
  work.skipped_before = work.skipped;
  facts_.counters.begin(backend_of(path), facts_.flow);
}

void Pipeline::end_path(const Work& work, bool failed) const {
  const observe::Backend backend = backend_of(work.chunk.path);
  const std::uint64_t moved = work.done - work.done_before - (work.skipped - work.skipped_before);
  facts_.counters.end(backend, facts_.flow, moved, failed, observe::now_ns() - work.path_start);
  memory_.note(backend, facts_.flow, moved);
}

void Pipeline::complete(const Work& work, const Status& status) {
  end_path(work, !status.ok() && status.error() != ECANCELED);
  transfer_.complete(work, status);
}

// Nothing to move, as far as the file still reaches.
void Pipeline::skip_hole(const Chunk& chunk) {
  ChunkProgress progress;
  progress.chunk = chunk;
  const Result<std::uint64_t> size = size_of(file_);
  const std::uint64_t start = facts_.request.file_offset + chunk.offset;
  if (size.ok() && size.value() > start) progress.done = progress.skipped = std::min(chunk.bytes, size.value() - start);
  count(facts_.details.hole_bytes, progress.done);
  transfer_.complete(progress, size.status());
}

// ---- fastpath: the vendor's library moves the bytes ----

// True if (the rest of) the chunk is to go by fallback.
bool Pipeline::move_fast(Work& work) {
  TargetMemory::AccessGuard access = memory_.access();
  const FastOutcome outcome = access ? move_by_vendor(work) : FastOutcome{cancelled_status()};
  access.reset();
  if (!outcome.fall_back) {
    complete(work, outcome.status);
    return false;
  }
  end_path(work, !outcome.status.ok());
  begin_path(work, Path::kFallback);
  return true;
}

Pipeline::FastOutcome Pipeline::move_by_vendor(Work& work) {
  Status bound = device_.device().bind_thread();
  if (!bound.ok()) return {bound};
  drain();  // pinning may wait for pins that this thread holds
  const Result<TransferTarget::Pin> pinned = memory_.pin(work.chunk.offset, work.chunk.bytes);
  if (!pinned.ok()) return {pinned.status()};
  if (pinned.value().device != &device_) {  // the contents have left the device since the start
    transfer_.give_up_fastpath(Status(EOPNOTSUPP, "the file is in the host's memory"), mask_of(Refusal::kMemoryKind));
    if (transfer_.may_change_path()) return {Status{}, true};
    return {Status(EOPNOTSUPP, "fastpath is required but refused: memory_kind")};
  }
  const BackingFacts& known = file_.facts();
  for (const TransferTarget::Piece& piece : pinned.value().pieces) {
    if (piece.address == 0) {
      const Moved hole = store_hole(work, piece.bytes);
      work.done += hole.bytes;
      if (!hole.status.ok() || hole.bytes < piece.bytes) return {hole.status};
      continue;
    }
    // Memory need not lie as the start of the request made expect.
    if (piece.address % known.memory_align != 0 || file_offset(work) % known.unit != 0 ||
        piece.bytes % known.unit != 0) {
      transfer_.refuse_fastpath(mask_of(Refusal::kMemoryUnaligned));
      if (transfer_.may_change_path()) return {Status{}, true};
      return {Status(EOPNOTSUPP, "fastpath is required but refused: memory_unaligned")};
    }
    const Moved moved = call_vendor(work, piece);
    work.done += moved.bytes;
    work.count(Path::kFastpath, moved.bytes);
    if (!moved.status.ok()) {
      if (!rerun_on_fallback(moved.status.error())) return {moved.status};
      transfer_.give_up_fastpath(moved.status, moved.refusals);
      if (transfer_.may_change_path()) return {moved.status, true};
      return {
          Status(EOPNOTSUPP, "fastpath is required but failed: " + moved.status.message(), moved.status.device_code())};
    }
    if (moved.bytes < piece.bytes) {
      // Not a refusal: fallback finds out whether the file ends here.
      if (transfer_.may_change_path()) return {Status{}, true};
      return {stopped_short(work)};
    }
  }
  return {};
}

Moved Pipeline::call_vendor(const Work& work, const TransferTarget::Piece& piece) {
  observe::Span span(observe::TraceKind::kFastpath, device_index_, file_offset(work), piece.bytes, facts_.trace_id);
  Moved moved = facts_.fastpath_file->move(facts_.request.direction, piece.address, piece.bytes, file_offset(work));
  span.set_bytes(moved.bytes);
  span.set_error(moved.status.error());
  return moved;
}

// Where fallback is not allowed: the end of a file that was truncated, or a failure without a reason.
Status Pipeline::stopped_short(const Work& work) {
  const Result<std::uint64_t> size = size_of(file_);
  if (facts_.load() && size.ok() && size.value() <= file_offset(work)) return {};
  return Status(EIO, "fastpath stopped before the end, and it is required");
}

// ---- fallback without a bounce buffer: the CPU addresses the device's memory ----

void Pipeline::move_without_bounce_buffer(Work& work) {
  TargetMemory::AccessGuard access = memory_.access();
  const Status status = access ? move_in_place(work) : cancelled_status();
  access.reset();
  complete(work, status);
}

Status Pipeline::move_in_place(Work& work) {
  const TransferTarget::Pin pinned = TRY(memory_.pin(work.chunk.offset + work.done, work.rest()));
  const bool direct = wants_direct(work);
  for (const TransferTarget::Piece& piece : pinned.pieces) {
    const bool hole = piece.address == 0;
    const auto* const memory = reinterpret_cast<const std::byte*>(piece.address);
    const Moved moved = facts_.load() ? read_in_place(work, piece, direct)
                        : hole        ? store_hole(work, piece.bytes)
                                      : write_out(memory, piece.bytes, file_offset(work), direct);
    TRY(memory_.target().check_pinned());
    work.done += moved.bytes;
    if (!hole) work.count(Path::kFallback, moved.bytes);
    if (!moved.status.ok() || moved.bytes < piece.bytes) return moved.status;
  }
  return {};
}

Moved Pipeline::read_in_place(const Work& work, const TransferTarget::Piece& piece, bool direct) {
  const std::uint64_t offset = file_offset(work);
  const observe::Span span(observe::TraceKind::kFileRead, device_index_, offset, piece.bytes, facts_.trace_id);
  auto* const memory = reinterpret_cast<std::byte*>(piece.address);
  const std::uint64_t body = direct ? round_down(piece.bytes, file_.facts().unit) : 0;
  Moved moved;
  if (direct_fits(file_, memory, body, offset)) moved = read_range(file_, IoMode::kDirect, memory, body, offset);
  return read_rest(moved, memory, piece.bytes, offset);
}

// ---- the file ----

// Reads what O_DIRECT has left of a range, unless it failed.
Moved Pipeline::read_rest(const Moved& direct, std::byte* memory, std::uint64_t bytes, std::uint64_t offset) {
  count_file_bytes(true, direct.bytes);
  // EINVAL: the file system's alignment is not what it reported.
  if (!direct.status.ok() && direct.status.error() != EINVAL) return direct;
  const std::uint64_t done = direct.bytes;
  const Moved rest = read_range(file_, IoMode::kBuffered, memory + done, bytes - done, offset + done);
  count_file_bytes(false, rest.bytes);
  return Moved{done + rest.bytes, rest.status};
}

// Whether what is left of a chunk should go by O_DIRECT, apart from alignment.
bool Pipeline::wants_direct(const Work& work) {
  const Switch wish = transfer_.engine().options().direct;
  if (file_.direct_fd() < 0 || wish == Switch::kOff) return false;
  if (wish == Switch::kOn) return true;
  return facts_.load() ? !cached(work) : facts_.total >= kSmallestDirectStore;
}

bool Pipeline::cached(const Work& work) {
  if (file_.facts().always_hot) return true;
  std::uint64_t found = 0;
  // If the kernel does not report it, reading through the page cache is right either way.
  if (file_.operations().cached_bytes(file_.buffered_fd(), file_offset(work), work.rest(), &found) != 0) return true;
  return found >= work.rest() / kCachedDenominator * kCachedNumerator;
}

Moved Pipeline::write_out(const std::byte* memory, std::uint64_t bytes, std::uint64_t offset, bool direct) {
  const observe::Span span(observe::TraceKind::kFileWrite, device_index_, offset, bytes, facts_.trace_id);
  Moved moved = direct                              ? write_split(file_, memory, bytes, offset)
                : transfer_.store_file().by_pages() ? write_pages(file_, memory, bytes, offset)
                                                    : write_range(file_, IoMode::kBuffered, memory, bytes, offset);
  count_file_bytes(direct, moved.bytes);
  return moved;
}

// From work.done on; counts how.
Moved Pipeline::store_hole(Work& work, std::uint64_t bytes) {
  std::uint64_t holed = 0;
  Moved moved = write_zeros(file_, bytes, file_offset(work), facts_.request.sparse, &holed);
  count(facts_.details.hole_bytes, moved.bytes);
  work.skipped += holed;
  work.count(Path::kFallback, moved.bytes - holed);
  return moved;
}

void Pipeline::count_file_bytes(bool direct, std::uint64_t bytes) {
  count(direct ? facts_.details.direct_bytes : facts_.details.buffered_bytes, bytes);
}

// ---- slots, and the device's work on them ----

// The next slot in turn. This is where a thread waits for the device.
Result<Pipeline::Slot*> Pipeline::next_slot() {
  TRY(device_.device().bind_thread());
  if (batches_ == nullptr) {
    batches_ = TRY(transfer_.copy_batches());
  }
  TransferEngine& engine = transfer_.engine();
  if (slots_.empty()) {
    const observe::Span span(observe::TraceKind::kSlotWait, device_index_, 0, 0, facts_.trace_id);
    BounceBuffer first = TRY(engine.bounce_pool()->acquire(facts_.device, transfer_.cancelled()));
    add_slot(std::move(first));
  } else if (static_cast<int>(slots_.size()) < engine.options().slots && !done(*slots_[turn_])) {
    // While the device works on the slot that is next. Otherwise that slot is better than an additional one: with few
    // slots, what the threads copy through stays in the CPUs' cache, and the device reads it from there.
    const auto reserve = static_cast<std::size_t>(transfer_.scheduler().threads());
    if (BounceBuffer more = engine.bounce_pool()->try_acquire(facts_.device, reserve)) {
      add_slot(std::move(more));
      turn_ = slots_.size() - 1;
    }
  }
  Slot& slot = *slots_[turn_];
  turn_ = (turn_ + 1) % slots_.size();
  if (slot.busy) wait_for(slot);
  return &slot;
}

void Pipeline::add_slot(BounceBuffer buffer) {
  auto slot = std::make_unique<Slot>();
  slot->buffer = std::move(buffer);
  slot->lane = static_cast<std::uint8_t>(slots_.size() + 1);
  slots_.push_back(std::move(slot));
}

// Whether the device is done with a slot.
bool Pipeline::done(const Slot& slot) {
  if (slot.batch == nullptr || slot.batch->done()) return true;
  batches_->advance();
  return slot.batch->done();
}

// Waits for all that the device does for this thread, oldest first, and completes it.
void Pipeline::drain() {
  for (std::size_t count = 0; count < slots_.size(); ++count) {
    Slot& slot = *slots_[(turn_ + count) % slots_.size()];
    if (slot.busy) wait_for(slot);
  }
}

// A thread that spins sees the end soonest. While other slots keep the device busy, or the device makes no progress,
// nothing is lost by sleeping instead, and the CPU is left to others.
void Pipeline::wait_for(Slot& slot) {
  {
    const observe::Span span(observe::TraceKind::kDeviceWait, device_index_, 0, 0, facts_.trace_id);
    const auto busy = std::count_if(slots_.begin(), slots_.end(), [](const auto& other) { return other->busy; });
    const auto spins_until = std::chrono::steady_clock::now() + kSpin;
    while (!done(slot)) {
      if (busy > 1 || std::chrono::steady_clock::now() > spins_until) {
        std::this_thread::sleep_for(kBusyPoll);
      } else {
        std::this_thread::yield();
      }
    }
  }
  finish(slot, slot.batch == nullptr ? Status{} : slot.batch->status());
}

// ---- traces ----

// Records when the device was seen to be done with a slot, as exactly as possible without waiting for it.
void Pipeline::note_ended_copies() {
  for (const std::unique_ptr<Slot>& slot : slots_) {
    if (slot->busy && slot->copy_end == 0 && done(*slot)) slot->copy_end = observe::now_ns();
  }
}

void Pipeline::trace_copy(const Slot& slot, const Status& outcome) {
  observe::TraceRecord record;
  record.kind = facts_.load() ? observe::TraceKind::kCopyToDevice : observe::TraceKind::kCopyToHost;
  record.start = slot.copy_start;
  record.end = slot.copy_end != 0 ? slot.copy_end : observe::now_ns();
  record.id = facts_.trace_id;
  record.offset = target_offset(slot.work);
  record.bytes = slot.bytes;
  record.lane = slot.lane;
  record.device = device_index_;
  record.error = outcome.error();
  observe::trace::record(record);
}

}  // namespace gpufs
