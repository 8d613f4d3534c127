#include "io/pipeline.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/caught.h"
#include "base/math.h"
#include "device/device_context.h"
#include "io/file_moves.h"
#include "io/transfer_job.h"

namespace gpufs {
namespace {

constexpr std::uint64_t kPage = 4096;
// A piece counts as cached if this part of it is: reading the rest through the page cache then costs less than reading
// all of it from the disk.
constexpr std::uint64_t kHotNumerator = 3;
constexpr std::uint64_t kHotDenominator = 4;
// Below this, registering pages of the page cache costs more than copying them.
constexpr std::uint64_t kSmallestMapping = std::uint64_t{1} << 20;
// Drivers read small sources with the CPU, which a file truncated at that moment would kill with SIGBUS.
constexpr std::uint64_t kSmallestMappedCopy = std::uint64_t{256} << 10;
// Stores smaller than this are left to the page cache, from which they are likely read again.
constexpr std::uint64_t kSmallestDirectStore = std::uint64_t{1} << 20;
constexpr std::chrono::microseconds kEventLook{20};
// No limit in practice: a thread with nothing to copy through has nothing to do.
constexpr std::chrono::hours kSlotPatience{1};

// A file's pages mapped and registered with the driver, for one copy.
class RegisteredPages {
 public:
  RegisteredPages() = default;
  RegisteredPages(Device& device, void* memory, std::size_t bytes) : device_(&device), memory_(memory), bytes_(bytes) {}
  RegisteredPages(RegisteredPages&& other) noexcept
      : device_(std::exchange(other.device_, nullptr)), memory_(other.memory_), bytes_(other.bytes_) {}
  RegisteredPages& operator=(RegisteredPages&& other) noexcept {
    if (this != &other) {
      reset();
      device_ = std::exchange(other.device_, nullptr);
      memory_ = other.memory_;
      bytes_ = other.bytes_;
    }
    return *this;
  }
  RegisteredPages(const RegisteredPages&) = delete;
  RegisteredPages& operator=(const RegisteredPages&) = delete;
  ~RegisteredPages() { reset(); }

  [[nodiscard]] bool valid() const { return device_ != nullptr; }
  void reset() {
    Device* const device = std::exchange(device_, nullptr);
    if (device == nullptr) return;
    // Pages that the driver keeps for itself must stay mapped.
    if (device->unpin(memory_).ok()) ::munmap(memory_, bytes_);
  }

 private:
  Device* device_ = nullptr;  // null: holds nothing
  void* memory_ = nullptr;
  std::size_t bytes_ = 0;
};

// Bytes of a piece, from its start, that the buffer does not hold.
struct Hole {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

// A slot, or a mapping in its place, with the piece that is in it.
struct Slot {
  BounceLease lease;
  std::shared_ptr<Event> event;
  bool busy = false;  // the device works on it, and the job's target is in use
  Chunk chunk;
  std::uint64_t bytes = 0;      // of the chunk, after chunk.done, that are in the slot
  Status file_status;           // load: how reading the file ended
  std::byte* memory = nullptr;  // store: where the chunk's bytes are
  std::vector<Hole> holes;      // store
  std::shared_ptr<const PinnedRange> window;
  RegisteredPages pages;
  std::uint8_t lane = 0;         // in traces, from 1 on
  std::uint64_t copy_start = 0;  // when the device's work was queued; 0: not traced
  std::uint64_t copy_end = 0;    // when it was seen to be done; 0: not yet
};

class Session {
 public:
  explicit Session(TransferJob& job)
      : job_(job),
        file_(job.file()),
        device_(job.device()),
        load_(job.request().direction == Direction::kLoad),
        // What can hang in the file must not hold the device's memory meanwhile: such files go through a slot.
        straight_(device_->info().cpu_addressable && !file_.facts().may_hang) {}
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  ~Session() { settle(); }

  void run(Turn& turn) {
    do {
      std::optional<Chunk> chunk;
      const Status claimed = caught([&] {
        chunk = job_.claim();
        return Status();
      });
      if (!claimed.ok()) job_.stop(claimed);
      if (!chunk) return;
      process(*chunk);
    } while (!turn.over());
  }

 private:
  // ---- one piece ----

  // Whatever there is no memory for, the piece ends: what is left of it, and all behind it, is not moved then. What
  // uses the target, or lies in a slot, catches that itself; so here nothing of it is under way.
  void process(Chunk chunk) {
    if (!chunk.hole) job_.start_path(chunk);
    const Status status = caught([&] {
      chunk.hole ? skip_hole(chunk) : move(chunk);
      return Status();
    });
    if (!status.ok()) job_.complete(chunk, status);
  }

  void move(Chunk& chunk) {
    observe::Span span(observe::TraceKind::kPiece, device_->info().index, file_offset(chunk), chunk.bytes,
                       job_.trace_id(), job_.trace_name());
    if (load_ && !straight_) job_.take_ahead([this] { settle(); });
    if (chunk.path == Path::kFastpath && !move_fast(chunk)) return;
    if (straight_) {
      move_straight(chunk);
    } else if (load_) {
      load_bounced(chunk);
    } else {
      store_bounced(chunk);
    }
  }

  // Nothing to move, where the file still reaches so far.
  void skip_hole(Chunk& chunk) {
    std::uint64_t size = 0;
    if (file_.operations().size(file_.buffered_fd(), &size) != 0) {
      job_.complete(chunk, Status::from_errno(errno, "the backing file's size"));
      return;
    }
    const std::uint64_t start = file_offset(chunk);
    chunk.done = size <= start ? 0 : std::min(chunk.bytes, size - start);
    job_.count_skipped(chunk, chunk.done);
    count(job_.details().hole_bytes, chunk.done);
    job_.complete(chunk, Status{});
  }

  [[nodiscard]] std::uint64_t file_offset(const Chunk& chunk) const {
    return job_.request().file_offset + chunk.offset + chunk.done;
  }
  [[nodiscard]] std::uint64_t target_offset(const Chunk& chunk) const {
    return job_.request().target_offset + chunk.offset + chunk.done;
  }

  void count_way(bool direct, std::uint64_t bytes) {
    observe::TransferDetails& details = job_.details();
    count(direct ? details.direct_bytes : details.buffered_bytes, bytes);
  }

  // The target's memory for what is left of the piece; in use. An empty range: the source ends here.
  Result<PinnedRange> pin(const Chunk& chunk, std::uint64_t bytes) {
    settle();  // pinning may wait for somebody who waits for the pins of our slots
    if (!load_) return job_.target().pin_for_read(target_offset(chunk), bytes);
    Result<PinnedRange> pinned = job_.pin_for_write(target_offset(chunk), bytes);
    if (pinned.ok()) {
      for (const Buffer::Piece& piece : pinned.value().pieces) {
        if (piece.address == 0) return Status(EIO, "memory that was to be written is not there");
      }
    }
    return pinned;
  }

  // ---- fastpath ----

  // True if (the rest of) the piece is to go by fallback.
  bool move_fast(Chunk& chunk) {
    if (!job_.begin_use()) {
      job_.complete(chunk, Status(ECANCELED, "cancelled"));
      return false;
    }
    bool rest = false;
    Status gave_up;
    const Status status = caught([&] { return move_fast_in_use(chunk, &rest, &gave_up); });
    job_.end_use();
    if (rest) {
      job_.end_path(chunk, !gave_up.ok());
      chunk.path = Path::kFallback;
      job_.start_path(chunk);
      return true;
    }
    job_.complete(chunk, status);
    return false;
  }

  Status move_fast_in_use(Chunk& chunk, bool* rest, Status* gave_up) {
    Status bound = device_->device().bind_thread();
    if (!bound.ok()) return bound;
    Result<PinnedRange> pinned = pin(chunk, chunk.bytes);
    if (!pinned.ok()) return pinned.status();
    for (const Buffer::Piece& piece : pinned.value().pieces) {
      // Holes, and memory that does not lie as the request's beginning let expect, are not for the vendor.
      const bool unaligned = piece.address % file_.facts().memory_align != 0 ||
                             file_offset(chunk) % file_.facts().unit != 0 || piece.bytes % file_.facts().unit != 0;
      if (piece.address != 0 && unaligned && !job_.may_change_path()) {
        return Status(EOPNOTSUPP, "fastpath alone is allowed but refused: memory_unaligned");
      }
      if (piece.address == 0 || unaligned) {
        *rest = true;
        return {};
      }
      const Moved moved = call_vendor(chunk, piece);
      chunk.done += moved.bytes;
      job_.count_moved(Path::kFastpath, moved.bytes);
      if (!moved.status.ok()) {
        if (!rerun_on_fallback(moved.status.error())) return moved.status;
        job_.give_up_fastpath(moved.status, moved.refusals);
        if (!job_.may_change_path()) {
          return Status(EOPNOTSUPP, "fastpath alone is allowed but failed: " + moved.status.message(),
                        moved.status.device_code());
        }
        *gave_up = moved.status;
        *rest = true;
        return {};
      }
      if (moved.bytes < piece.bytes) {
        if (!job_.may_change_path()) return stopped_short(chunk);
        *rest = true;  // the end of the file, which fallback can tell from a short count
        return {};
      }
    }
    return {};
  }

  // Where fallback may not look: the end of a file that has become shorter, or a failure that said nothing.
  Status stopped_short(const Chunk& chunk) {
    std::uint64_t size = 0;
    if (load_ && file_.operations().size(file_.buffered_fd(), &size) == 0 && size <= file_offset(chunk)) return {};
    return Status(EIO, "fastpath stopped before the end, and it alone is allowed");
  }

  Moved call_vendor(const Chunk& chunk, const Buffer::Piece& piece) {
    observe::Span span(observe::TraceKind::kFastpath, device_->info().index, file_offset(chunk), piece.bytes,
                       job_.trace_id());
    Moved moved = load_ ? job_.direct_file()->load(piece.address, piece.bytes, file_offset(chunk))
                        : job_.direct_file()->store(piece.address, piece.bytes, file_offset(chunk));
    span.set_bytes(moved.bytes);
    span.set_error(moved.status.error());
    return moved;
  }

  // ---- fallback where the CPU addresses the device's memory ----

  void move_straight(Chunk& chunk) {
    if (!job_.begin_use()) {
      job_.complete(chunk, Status(ECANCELED, "cancelled"));
      return;
    }
    const Status status = caught([&] { return move_straight_in_use(chunk); });
    job_.end_use();
    job_.complete(chunk, status);
  }

  Status move_straight_in_use(Chunk& chunk) {
    Result<PinnedRange> pinned = pin(chunk, chunk.bytes - chunk.done);
    if (!pinned.ok()) return pinned.status();
    const bool direct = wants_direct(chunk);
    for (const Buffer::Piece& piece : pinned.value().pieces) {
      const Moved moved = load_ ? load_straight(chunk, piece, direct) : store_straight(chunk, piece, direct);
      chunk.done += moved.bytes;
      if (piece.address != 0) job_.count_moved(Path::kFallback, moved.bytes);
      if (!moved.status.ok() || moved.bytes < piece.bytes) return moved.status;
    }
    return {};
  }

  Moved load_straight(const Chunk& chunk, const Buffer::Piece& piece, bool direct) {
    observe::Span span(observe::TraceKind::kFileRead, device_->info().index, file_offset(chunk), piece.bytes,
                       job_.trace_id());
    auto* const memory = reinterpret_cast<std::byte*>(piece.address);
    const std::uint64_t body = direct ? round_down(piece.bytes, file_.facts().unit) : 0;
    Moved moved;
    if (direct_fits(file_, memory, body, file_offset(chunk))) {
      moved = read_direct(file_, memory, body, file_offset(chunk));
      count_way(true, moved.bytes);
      if (!moved.status.ok() && moved.status.error() != EINVAL) return moved;
    }
    const Moved rest =
        read_buffered(file_, memory + moved.bytes, piece.bytes - moved.bytes, file_offset(chunk) + moved.bytes);
    count_way(false, rest.bytes);
    return Moved{moved.bytes + rest.bytes, rest.status};
  }

  Moved store_straight(Chunk& chunk, const Buffer::Piece& piece, bool direct) {
    if (piece.address == 0) return store_hole(chunk, piece.bytes);
    return write_out(reinterpret_cast<const std::byte*>(piece.address), piece.bytes, file_offset(chunk), direct);
  }

  // ---- both ways of fallback ----

  // Whether what is left of a piece should go by O_DIRECT, alignment aside.
  bool wants_direct(const Chunk& chunk) {
    const Switch wish = job_.options().direct;
    if (file_.direct_fd() < 0 || wish == Switch::kOff) return false;
    if (wish == Switch::kOn) return true;
    if (!load_) return job_.total() >= kSmallestDirectStore;
    return !hot(chunk);
  }

  bool hot(const Chunk& chunk) {
    if (file_.facts().always_hot) return true;
    const std::uint64_t bytes = chunk.bytes - chunk.done;
    std::uint64_t cached = 0;
    // Where nobody can tell, reading through the page cache is right for both.
    if (file_.operations().cached_bytes(file_.buffered_fd(), file_offset(chunk), bytes, &cached) != 0) return true;
    return cached >= bytes / kHotDenominator * kHotNumerator;
  }

  Moved write_out(const std::byte* memory, std::uint64_t bytes, std::uint64_t offset, bool direct) {
    observe::Span span(observe::TraceKind::kFileWrite, device_->info().index, offset, bytes, job_.trace_id());
    Moved moved = direct            ? write_split(file_, memory, bytes, offset)
                  : job_.by_pages() ? write_pages(file_, memory, bytes, offset)
                                    : write_buffered(file_, memory, bytes, offset);
    count_way(direct, moved.bytes);
    return moved;
  }

  // From chunk.done on; counts how.
  Moved store_hole(Chunk& chunk, std::uint64_t bytes) {
    std::uint64_t holed = 0;
    Moved moved = write_zeros(file_, bytes, file_offset(chunk), job_.request().sparse, &holed);
    count(job_.details().hole_bytes, moved.bytes);
    job_.count_skipped(chunk, holed);
    job_.count_moved(Path::kFallback, moved.bytes - holed);
    return moved;
  }

  // ---- fallback through slots ----

  // The next slot in turn, empty; null with *failure set when there is none. Finishing what was in it is how this
  // thread waits for the device.
  Slot* next_slot(Status* failure) {
    *failure = open_lane();
    if (!failure->ok()) return nullptr;
    if (static_cast<int>(slots_.size()) < job_.options().slots && device_lags()) {
      BounceLease more = job_.engine().bounce_pool()->try_acquire(device_, job_.threads());
      if (more.valid()) {
        // An event that cannot be had now only means fewer slots.
        Status ignored;
        if (add_slot(std::move(more), &ignored)) turn_ = slots_.size() - 1;
      }
    }
    if (slots_.empty()) {
      observe::Span span(observe::TraceKind::kSlotWait, device_->info().index, 0, 0, job_.trace_id());
      Result<BounceLease> lease = job_.engine().bounce_pool()->acquire(
          device_, std::chrono::duration_cast<std::chrono::milliseconds>(kSlotPatience), &job_.cancelled());
      if (!lease.ok()) {
        *failure = lease.status();
        return nullptr;
      }
      if (!add_slot(lease.take(), failure)) return nullptr;
    }
    Slot& slot = *slots_[turn_];
    turn_ = (turn_ + 1) % slots_.size();
    if (slot.busy) finish_slot(slot);
    return &slot;
  }

  // Whether the device still works on what is in the slot that is next. Where it does not, that slot is better than one
  // more: what all threads copy through stays in the CPUs' cache, and the device reads it from there.
  bool device_lags() {
    if (slots_.empty() || !slots_[turn_]->busy) return false;
    const Result<bool> done = slots_[turn_]->event->query();
    return done.ok() && !done.value();
  }

  Status open_lane() {
    Status bound = device_->device().bind_thread();
    if (!bound.ok() || stream_) return bound;
    Result<std::shared_ptr<Stream>> stream = device_->streams().acquire();
    if (!stream.ok()) return stream.status().with_context("a stream for the transfer");
    stream_ = stream.take();
    return {};
  }

  bool add_slot(BounceLease lease, Status* failure) {
    Result<std::shared_ptr<Event>> event = device_->events().acquire();
    if (!event.ok()) {
      *failure = event.status().with_context("an event for the transfer");
      return false;
    }
    auto slot = std::make_unique<Slot>();
    slot->lease = std::move(lease);
    slot->event = event.take();
    slot->lane = static_cast<std::uint8_t>(slots_.size() + 1);
    slots_.push_back(std::move(slot));
    return true;
  }

  void load_bounced(const Chunk& chunk) {
    Status failure;
    Slot* const slot = next_slot(&failure);
    if (slot == nullptr) {
      job_.complete(chunk, failure);
      return;
    }
    if (load_from_pagecache(*slot, chunk)) return;

    std::byte* memory = nullptr;
    const Moved read = read_piece(*slot, chunk, &memory);
    if (observe::trace::on()) note_ended_copies();
    if (read.bytes == 0) {
      job_.complete(chunk, read.status);
      return;
    }
    if (!begin_use_of_rest(chunk)) return;
    slot->chunk = chunk;
    slot->bytes = read.bytes;
    keep(slot->file_status, read.status);
    std::vector<Buffer::Piece> pieces;
    Status status = pin_slot(*slot, &pieces);
    submit_load(*slot, memory, pieces, std::move(status));
  }

  // Into the slot, from where the piece's bytes start at *memory.
  Moved read_piece(Slot& slot, const Chunk& chunk, std::byte** memory) {
    const std::uint64_t bytes = chunk.bytes - chunk.done;
    const std::uint64_t offset = file_offset(chunk);
    observe::Span span(observe::TraceKind::kFileRead, device_->info().index, offset, bytes, job_.trace_id());
    const std::uint64_t unit = file_.facts().unit;
    const std::uint64_t lead = offset % unit;
    const std::uint64_t covering = round_up(lead + bytes, unit);
    *memory = slot.lease.data();
    Moved direct;
    if (covering <= slot.lease.bytes() && wants_direct(chunk)) {
      direct = read_direct(file_, slot.lease.data(), covering, offset - lead);
      const std::uint64_t got = std::min(direct.bytes > lead ? direct.bytes - lead : 0, bytes);
      direct.bytes = got;
      *memory = slot.lease.data() + lead;
      count_way(true, got);
      // EINVAL: the file system's alignment is not what it had said.
      if (!direct.status.ok() && direct.status.error() != EINVAL) return direct;
      if (got == bytes) return direct;
    }
    const Moved rest = read_buffered(file_, *memory + direct.bytes, bytes - direct.bytes, offset + direct.bytes);
    count_way(false, rest.bytes);
    return Moved{direct.bytes + rest.bytes, rest.status};
  }

  bool begin_use_of_rest(const Chunk& chunk) {
    if (job_.begin_use()) return true;
    job_.complete(chunk, Status(ECANCELED, "cancelled"));
    return false;
  }

  // The device memory of slot.bytes of the slot's piece; the window stays pinned until end_slot().
  Status pin_slot(Slot& slot, std::vector<Buffer::Piece>* pieces) {
    return caught([&] {
      Result<std::shared_ptr<const PinnedRange>> window = job_.pin_window(slot.chunk, slot.bytes, [this] { settle(); });
      if (!window.ok()) return window.status();
      slot.window = window.take();
      *pieces = slot.window->part(target_offset(slot.chunk), slot.bytes);
      return Status();
    });
  }

  // In use; it ends with end_slot().
  void submit_load(Slot& slot, const std::byte* memory, const std::vector<Buffer::Piece>& pieces, Status status) {
    const std::uint64_t start = target_offset(slot.chunk);
    bool queued = false;
    for (const Buffer::Piece& piece : pieces) {
      if (status.ok() && piece.address == 0) status = Status(EIO, "memory that was to be written is not there");
      if (!status.ok()) break;
      status = caught([&] {
        return stream_->copy_to_device(piece.address, memory + (piece.offset - start),
                                       static_cast<std::size_t>(piece.bytes));
      });
      queued = true;
    }
    settle_submission(slot, std::move(status), queued);
  }

  void settle_submission(Slot& slot, Status status, bool queued) {
    if (status.ok()) status = caught([&] { return stream_->record(*slot.event); });
    slot.busy = true;
    slot.copy_start = observe::trace::on() ? observe::now_ns() : 0;
    slot.copy_end = 0;
    if (status.ok()) {
      // Nothing may be in use while this thread hangs in such a file.
      if (file_.facts().may_hang) finish_slot(slot);
      return;
    }
    // Copies that did start must end before the memory goes to others; how they end no longer matters.
    if (queued) settle_stream();
    end_slot(slot, status);
  }

  // Waits for the device's work on the slot and completes its piece.
  void finish_slot(Slot& slot) {
    const Status status = caught([&] { return await(slot); });
    if (!status.ok()) settle_stream();
    end_slot(slot, status);
  }

  void settle_stream() {
    (void)caught([this] { return stream_->synchronize(); });
  }

  // Drivers spin in synchronize(), which ends soonest. While other slots keep the device busy nothing is lost by
  // sleeping instead, and the CPU is left to others.
  Status await(Slot& slot) {
    observe::Span span(observe::TraceKind::kDeviceWait, device_->info().index, 0, 0, job_.trace_id());
    const auto busy = std::count_if(slots_.begin(), slots_.end(), [](const auto& other) { return other->busy; });
    for (; busy > 1; std::this_thread::sleep_for(kEventLook)) {
      const Result<bool> done = slot.event->query();
      if (!done.ok()) return done.status();
      if (done.value()) return {};
    }
    return slot.event->synchronize();
  }

  // When the device was seen to be done with a slot, as well as that can be told without waiting for it.
  void note_ended_copies() {
    for (const std::unique_ptr<Slot>& slot : slots_) {
      if (!slot->busy || slot->copy_end != 0) continue;
      const Result<bool> done = slot->event->query();
      if (done.ok() && done.value()) slot->copy_end = observe::now_ns();
    }
  }

  void trace_copy(const Slot& slot, const Status& outcome) {
    observe::TraceRecord record;
    record.kind = load_ ? observe::TraceKind::kCopyToDevice : observe::TraceKind::kCopyToHost;
    record.start = slot.copy_start;
    record.end = slot.copy_end != 0 ? slot.copy_end : observe::now_ns();
    record.id = job_.trace_id();
    record.offset = target_offset(slot.chunk);
    record.bytes = slot.bytes;
    record.lane = slot.lane;
    record.device = device_->info().index;
    record.error = outcome.error();
    observe::trace::record(record);
  }

  void end_slot(Slot& slot, const Status& device_status) {
    if (slot.copy_start != 0) trace_copy(slot, device_status);
    slot.window.reset();
    const bool mapped = slot.pages.valid();
    slot.pages.reset();
    slot.busy = false;
    if (load_) {
      Status status;
      keep(status, device_status.ok() ? slot.file_status : device_status);
      if (device_status.ok()) {
        const std::uint64_t bytes = mapped ? still_there(slot) : slot.bytes;
        slot.chunk.done += bytes;
        job_.count_moved(Path::kFallback, bytes);
        if (mapped) job_.count_pagecache(bytes);
      }
      job_.end_use();
      job_.complete(slot.chunk, status);
      return;
    }
    job_.end_use();
    if (!device_status.ok()) {
      job_.complete(slot.chunk, device_status);
      return;
    }
    write_slot(slot);
  }

  void store_bounced(const Chunk& chunk) {
    Status failure;
    Slot* const slot = next_slot(&failure);
    if (slot == nullptr) {
      job_.complete(chunk, failure);
      return;
    }
    if (!begin_use_of_rest(chunk)) return;
    slot->chunk = chunk;
    slot->holes.clear();
    // Where the file's offset lies in its page is where it lies in the slot's, so that O_DIRECT can take the middle.
    slot->memory = slot->lease.data() + file_offset(chunk) % file_.facts().unit;
    if (slot->memory + (chunk.bytes - chunk.done) > slot->lease.data() + slot->lease.bytes()) {
      slot->memory = slot->lease.data();
    }
    slot->bytes = chunk.bytes - chunk.done;
    std::vector<Buffer::Piece> pieces;
    Status status = pin_slot(*slot, &pieces);
    const std::uint64_t start = target_offset(chunk);
    // Less than the piece: the buffer has become shorter.
    slot->bytes = pieces.empty() ? 0 : pieces.back().offset + pieces.back().bytes - start;
    bool queued = false;
    for (const Buffer::Piece& piece : pieces) {
      if (!status.ok()) break;
      std::byte* const place = slot->memory + (piece.offset - start);
      status = caught([&] {
        if (piece.address == 0) {
          slot->holes.push_back({piece.offset - start, piece.bytes});
          return Status();
        }
        return stream_->copy_to_host(place, piece.address, static_cast<std::size_t>(piece.bytes));
      });
      queued = true;
    }
    settle_submission(*slot, std::move(status), queued);
  }

  // What the device has copied into the slot goes to the file.
  void write_slot(Slot& slot) {
    Status status;
    const Status lacking = caught([&] {
      write_slot_out(slot, &status);
      return Status();
    });
    job_.complete(slot.chunk, lacking.ok() ? status : lacking);
  }

  void write_slot_out(Slot& slot, Status* outcome) {
    Chunk& chunk = slot.chunk;
    const bool direct = wants_direct(chunk);
    Status& status = *outcome;
    std::uint64_t position = 0;
    const auto advance = [&](std::uint64_t bytes, const Moved& moved, bool hole = false) {
      position += moved.bytes;
      chunk.done += moved.bytes;
      if (!hole) job_.count_moved(Path::kFallback, moved.bytes);
      keep(status, moved.status);
      return status.ok() && moved.bytes == bytes;
    };
    bool going = true;
    for (const Hole& hole : slot.holes) {
      if (!job_.request().sparse) {
        std::memset(slot.memory + hole.offset, 0, hole.bytes);
        count(job_.details().hole_bytes, hole.bytes);
        continue;
      }
      const std::uint64_t data = hole.offset - position;
      going = data == 0 || advance(data, write_out(slot.memory + position, data, file_offset(chunk), direct));
      going = going && advance(hole.bytes, store_hole(chunk, hole.bytes), true);
      if (!going) break;
    }
    const std::uint64_t data = slot.bytes - position;
    if (going && data > 0) advance(data, write_out(slot.memory + position, data, file_offset(chunk), direct));
  }

  // ---- fallback straight from the page cache's pages ----

  // False: take the slot.
  bool load_from_pagecache(Slot& slot, const Chunk& chunk) {
    const std::uint64_t bytes = chunk.bytes - chunk.done;
    if (!job_.pagecache() || bytes < kSmallestMapping || !hot(chunk)) return false;
    // Unregistering the pages waits for blocked streams, and one of them may wait for this transfer.
    if (device_->device().blocked_streams().any()) return false;
    const std::uint64_t offset = file_offset(chunk);
    const std::uint64_t lead = offset % kPage;
    const auto length = static_cast<std::size_t>(round_up(lead + bytes, kPage));
    void* const mapping =
        ::mmap(nullptr, length, PROT_READ, MAP_SHARED, file_.buffered_fd(), static_cast<off_t>(offset - lead));
    if (mapping == MAP_FAILED) {
      job_.give_up_pagecache();
      return false;
    }
    // Registering reads pages that are missing, and fails beyond the end of the file; from then on truncation cannot
    // take them away.
    const Status pinned = device_->device().pin_read_only(mapping, length);
    if (!pinned.ok()) {
      ::munmap(mapping, length);
      job_.give_up_pagecache();
      return false;
    }
    slot.pages = RegisteredPages(device_->device(), mapping, length);
    if (!begin_use_of_rest(chunk)) {
      slot.pages.reset();
      return true;
    }
    slot.chunk = chunk;
    slot.bytes = bytes;
    slot.file_status = Status{};
    std::vector<Buffer::Piece> pieces;
    Status status = pin_slot(slot, &pieces);
    const auto small = [](const Buffer::Piece& piece) { return piece.bytes < kSmallestMappedCopy; };
    if (std::any_of(pieces.begin(), pieces.end(), small)) {
      slot.window.reset();
      slot.pages.reset();
      job_.end_use();
      return false;
    }
    submit_load(slot, static_cast<const std::byte*>(mapping) + lead, pieces, std::move(status));
    return true;
  }

  // A file that was truncated while its pages were copied gave zeros for what is gone.
  std::uint64_t still_there(const Slot& slot) {
    std::uint64_t size = 0;
    if (file_.operations().size(file_.buffered_fd(), &size) != 0) return 0;
    const std::uint64_t offset = file_offset(slot.chunk);
    return size <= offset ? 0 : std::min(slot.bytes, size - offset);
  }

  // Waits for all that the device does for this session, oldest first, and completes it.
  void settle() {
    for (std::size_t count = 0; count < slots_.size(); ++count) {
      Slot& slot = *slots_[(turn_ + count) % slots_.size()];
      if (slot.busy) finish_slot(slot);
    }
  }

  TransferJob& job_;
  BackingFile& file_;
  const std::shared_ptr<DeviceContext> device_;
  const bool load_;
  const bool straight_;
  std::shared_ptr<Stream> stream_;
  std::vector<std::unique_ptr<Slot>> slots_;
  std::size_t turn_ = 0;  // the slot to use next: the one that has been busy longest
};

}  // namespace

void run_session(TransferJob& job, Turn& turn) {
  Session session(job);
  session.run(turn);
}

}  // namespace gpufs
