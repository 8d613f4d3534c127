// The Buffer: published snapshots of a range and its extents, and one change of them at a time. A file that is small
// enough lives in a slot of its device's slabs until it grows. Large contents that nobody needs on their device may lie
// in the host tier (extent_buffer_park.cc). All functions work where the contents are, except those that name the home.
// Ownership and threads: as Buffer.
//
// How readers and writers avoid waiting for each other:
//  - What exists is an immutable Snapshot. A pin copies the pointer to the current one under state_mutex_ (a few
//    instructions) and so keeps its addresses valid, whatever happens to the buffer.
//  - Growth first makes memory exist and then publishes a snapshot with it.
//  - Whatever takes memory away publishes a snapshot without it, waits until every older one is gone, and only then
//    releases the memory. New pins are pins of the new snapshot, so the wait ends.
//  - Pins for writing are also listed: a shrink must know how far above the size they reach, and moving a small file
//    must wait until nobody writes to the old place. write_limit_ keeps new ones out for that time: they take the slow
//    path, which waits for mutation_mutex_.
//  - Where the driver must unmap a piece to release a part of it, readers and writers of that piece wait at a gate.
//
// Offsets are those of the file; positions are those of its memory, which begins at a granule. A position is the offset
// plus the placement, 0 for most files. Public functions take offsets, and so do pins and sizes; what a snapshot, a
// list or a limit says is in positions, as all that the driver is asked for. The placement is the snapshot's: it
// changes only under both mutexes, while nobody uses the memory (extent_buffer_placement.cc).
//
// One list, Residence::ahead, has the memory that was taken before the contents needed it. Growth adds to it, and
// fallocate(2) removes from it what it asked for. trim() releases all of it that no contents, no pin for writing and no
// claim have reached.
//
// Invariant: where no write is in progress, the bytes above size() in memory that exists are zeros.
#pragma once

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/extents.h"
#include "device/device_context.h"
#include "memory/buffer.h"
#include "memory/slab_pool.h"

namespace gpufs {

// Contents on their way to another placement, in steps of a few MiB: see extent_buffer_placement.cc.
struct Shift {
  std::uint64_t to = 0;
  std::uint64_t step = 0;  // its bytes are in the scratch, those before it have moved; the first is 1, 0: no shift
};

// Memory that a MemoryKeeper keeps, as it is in the journal.
struct KeptMemoryPart {
  std::int64_t device = 0;   // the buffer's own, or the host tier
  std::uint64_t memory = 0;  // its number; 0: none
  Extent slot;               // of a small file, in that memory; no bytes for others
  std::uint64_t placement = 0;
  Shift shift;
};

// What another process needs to have the same contents.
struct KeptContents : KeptMemoryPart {
  std::uint64_t size = 0;
  Extents extents;  // whole granules; none of a small file
};

// The memory that a buffer has on one device, and who pays for it there. Changed only by that buffer, under its
// mutation_mutex_. Destroyed, its memory is free and charged no more.
struct Residence {
  Residence(std::shared_ptr<DeviceContext> where, std::shared_ptr<Charge> payers)
      : device(std::move(where)), charge(std::move(payers)) {}
  ~Residence();
  Residence(const Residence&) = delete;
  Residence& operator=(const Residence&) = delete;

  const std::shared_ptr<DeviceContext> device;
  const std::shared_ptr<Charge> charge;
  std::unique_ptr<DeviceMemory> memory;  // null until the file needs memory of its own
  std::shared_ptr<AddressRange> range;   // the current one of `memory`
  // Memory taken ahead of the contents: what is above the size, unless allocate() asked for it, and at any offset what
  // was preallocated and is in no snapshot. The next growth removes what the contents have reached. While a file is in
  // a slot: its first granule, unless allocate() asked for that.
  Extents ahead;
  std::uint64_t held = 0;  // bytes of `memory`, as counted in the device's context
};

class ExtentBuffer : public Buffer {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  // preallocates: write() takes more memory than it needs when the buffer grows, where that saves time. Only for owners
  // that call trim() when the last writer is done.
  explicit ExtentBuffer(std::shared_ptr<DeviceContext> device, bool preallocates = false);
  ~ExtentBuffer() override;

  [[nodiscard]] const std::shared_ptr<DeviceContext>& device() const override { return context_; }
  [[nodiscard]] std::uint64_t size() const override { return size_.load(std::memory_order_acquire); }
  [[nodiscard]] std::uint64_t bytes_held() const override { return held_.load(std::memory_order_acquire); }
  [[nodiscard]] std::uint64_t limit() const override { return kMaximumBytes; }
  [[nodiscard]] std::uint64_t placement() const override { return current()->placement; }
  [[nodiscard]] std::shared_ptr<DeviceContext> residence() const override { return current()->device; }
  [[nodiscard]] ExtentBuffer* growing() override { return this; }

  Result<Pin> pin_for_read(std::uint64_t offset, std::uint64_t bytes, Wait wait = Wait::kAllowed) override;
  Result<Pin> pin_for_write(std::uint64_t offset, std::uint64_t bytes, Wait wait = Wait::kAllowed) override;
  Result<std::size_t> read(std::uint64_t offset, std::span<std::byte> destination, Wait wait = Wait::kAllowed) override;
  Result<std::size_t> write(std::uint64_t offset, std::span<const std::byte> source,
                            Wait wait = Wait::kAllowed) override;
  Result<Gathered> gather(std::uint64_t offset, std::uint64_t bytes, Wait wait = Wait::kAllowed) override;
  Status resize(std::uint64_t size, Wait wait = Wait::kAllowed) override;
  Status allocate(std::uint64_t offset, std::uint64_t bytes, bool keep_size) override;
  Status punch(std::uint64_t offset, std::uint64_t bytes) override;
  Status zero_range(std::uint64_t offset, std::uint64_t bytes, bool keep_size) override;
  Result<std::uint64_t> seek_data(std::uint64_t offset) override;
  Result<std::uint64_t> seek_hole(std::uint64_t offset) override;
  Result<std::shared_ptr<Lease>> lease(bool writable, bool exports, std::string label,
                                       std::optional<std::uint64_t> placement = std::nullopt,
                                       std::uint64_t most = kMaximumBytes) override;
  [[nodiscard]] std::size_t leases(bool writable) const override;
  [[nodiscard]] std::uint64_t bytes_parked() const override { return parked_bytes_.load(std::memory_order_acquire); }

  // ---- growth ----

  // Some memory is taken ahead of the contents: by a growing buffer that preallocates, and by pins for writing that end
  // without publish(). trim() releases it, except where a pin for writing or a claim is. So do resize() to the same or
  // a smaller size, punch(), and every call that finds the device full. Memory above the size that allocate() or
  // zero_range() took is not among it: only resize() and punch() release that.
  //
  // False: nothing was released, since somebody used memory that shares a piece with it, or changed the buffer, for
  // longer than `timeout`.
  bool trim(std::chrono::milliseconds timeout);
  // False: trim() has nothing to do.
  [[nodiscard]] bool may_trim() const;

  // The range that a load or a copy is about to write. While the claim lives, memory there stays, and a buffer that
  // needs addresses gets enough of them for the whole range, so that it never moves on the way. A claim keeps the
  // buffer, too.
  struct Claim {
    Extent range;
    std::uint64_t shrinks = 0;  // how often the buffer had been made smaller before
  };
  [[nodiscard]] std::shared_ptr<const Claim> claim(const Extent& range);
  // size = max(size, end). since: a claim, for callers that cannot hold their pins until then. If the buffer has been
  // made smaller since that claim, this changes nothing and returns false, as if the shrink had come last.
  bool publish(std::uint64_t end, const Claim* since = nullptr);
  // Zeroes what a failed write left there. Call this once the pin is gone. What other pins for writing cover is left to
  // their holders.
  Status discard_above_size(std::uint64_t offset, std::uint64_t bytes);
  // Whether a copy to here takes less time than handing it to another thread would.
  [[nodiscard]] bool copies_briefly(const Buffer& source, std::uint64_t source_offset, std::uint64_t bytes) const;

  // ---- for the process that takes over ----

  [[nodiscard]] KeptContents kept() const;
  // Gives a new buffer the contents of one of the last process, before anybody else has it. Those in slots: after
  // SlabPool::restore(). where: the device that has their memory.
  Status restore(const KeptContents& contents, const std::shared_ptr<DeviceContext>& where);
  // After restore() and watch(): completes a shift that the last process had begun.
  Status complete_shift();

  struct Watcher {
    // Called whenever the contents have moved, and before memory where they were is used for anything else.
    std::function<void()> moved = [] {};
    // Gets the memory of the host tier that the contents have left, to free it: that takes as long as an eighth of the
    // copy.
    std::function<void(std::shared_ptr<Residence>)> freed = [](const std::shared_ptr<Residence>&) {};
  };
  // Once, before the buffer is shared.
  void watch(Watcher watcher) { watcher_ = std::move(watcher); }

  // ---- parking: see extent_buffer_park.cc ----

  // Moves the contents to the host tier, where `payer` is charged for them; the device's memory is free on return, or
  // with the last reader.
  // False: they stay, being too small for memory of their own. EBUSY: somebody has a lease on them, or writes. ENOSPC,
  // EDQUOT: the host tier is full, or a limit is reached.
  Result<bool> park(const std::shared_ptr<DeviceContext>& host, std::shared_ptr<Account> payer);
  // Moves them back, as every call does that needs them on the device. ENOSPC, EDQUOT: the device is full.
  Status bring_back(Wait wait);
  // Another user pays for what is in the host tier.
  void charge_parked_to(std::shared_ptr<Account> payer);
  // Whether somebody has a lease on the memory.
  [[nodiscard]] bool leased() const;
  // When somebody used the memory last; and until when it should not be parked again: for as long as it took to bring
  // it back.
  [[nodiscard]] TimePoint last_used() const { return TimePoint(TimePoint::duration(used_.load())); }
  [[nodiscard]] TimePoint stays_until() const { return TimePoint(TimePoint::duration(stays_.load())); }

  // Moves a small file that lives at these addresses to a free slot elsewhere. False: there is none, or somebody writes
  // to the file or changes it.
  bool leave_slab(SlabPool& slabs, DeviceAddress start, std::uint64_t bytes);

 private:
  static constexpr std::uint64_t kNoLimit = ~std::uint64_t{0};

  // What exists, at which addresses. Immutable. The buffer counts its snapshots, to know when the old ones are gone.
  struct Snapshot {
    // where: has the memory; null without any.
    explicit Snapshot(ExtentBuffer& buffer, std::uint64_t first = 0, Extents existing = {},
                      const Residence* where = nullptr);
    Snapshot(ExtentBuffer& buffer, std::shared_ptr<const SlabPool::Slot> small);
    ~Snapshot();
    Snapshot(const Snapshot&) = delete;
    Snapshot& operator=(const Snapshot&) = delete;

    ExtentBuffer& owner;
    const std::shared_ptr<DeviceContext> device;
    std::shared_ptr<AddressRange> range;         // of the buffer's own memory; null without any
    std::shared_ptr<const SlabPool::Slot> slot;  // of a small file
    std::uint64_t memory;                        // its number, or that of the slabs
    DeviceAddress base;                          // of position 0
    const Extents extents;
    const std::uint64_t placement;  // the position of offset 0
  };
  using SnapshotPointer = std::shared_ptr<const Snapshot>;

  // [offset, end) of the file in one snapshot, held for reading. Destroyed before its buffer.
  struct ReadPin {
    SnapshotPointer snapshot;
    std::uint64_t offset = 0;
    std::uint64_t end = 0;
  };
  // The same for writing, listed in writers_ from acquire_write() until it is destroyed.
  class WritePin {
   public:
    WritePin() = default;
    ~WritePin();
    WritePin(const WritePin&) = delete;
    WritePin& operator=(const WritePin&) = delete;
    [[nodiscard]] DeviceAddress address() const { return snapshot_->base + range_.offset; }  // of the first byte
    [[nodiscard]] Device& device() const { return snapshot_->device->device(); }

   private:
    friend class ExtentBuffer;
    ExtentBuffer* buffer_ = nullptr;  // null: not listed
    SnapshotPointer snapshot_;
    Extent range_;  // positions
  };
  // Keeps calls of write() that overlap apart, in the order in which they came. Others that write do not take turns: a
  // load holds its range for long.
  class Turn {
   public:
    Turn(ExtentBuffer& buffer, std::uint64_t offset, std::uint64_t end) : buffer_(buffer), offset_(offset), end_(end) {}
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    // Returns once no earlier call overlaps this one.
    Status take(Wait wait);

   private:
    ExtentBuffer& buffer_;
    const std::uint64_t offset_;
    const std::uint64_t end_;
    bool listed_ = false;
  };
  class SharedLease;
  class Exclusion;

  static Status would_wait() { return Status(EAGAIN, "the buffer is in use"); }
  static Status torn() { return Status(EIO, "the device failed while it moved the file within its memory"); }
  // Somebody uses the memory now.
  void touch();
  static Status check_end(std::uint64_t offset, std::uint64_t bytes, std::uint64_t* end);

  // mutation_mutex_; without it where that would have to be waited for and must not be.
  [[nodiscard]] std::unique_lock<std::mutex> lock_mutation(Wait wait) {
    return wait == Wait::kAllowed ? std::unique_lock(mutation_mutex_)
                                  : std::unique_lock(mutation_mutex_, std::try_to_lock);
  }

  // ---- extent_buffer.cc: pins, copies by the caller. Functions named _locked need state_mutex_. ----
  // Positions of a part of the file. Needs one of the mutexes.
  [[nodiscard]] Extent placed(std::uint64_t offset, std::uint64_t end) const {
    return Extent::between(snapshot_->placement + offset, snapshot_->placement + end);
  }
  // Calls work(piece) for what `held` covers, in order, until one fails.
  template <typename Work>
  Status for_each_piece(const ReadPin& held, Work work);
  Pin pin(ReadPin held);
  Status acquire_read(std::uint64_t offset, std::uint64_t bytes, ReadPin* held, Wait wait);
  // How memory is taken for a call.
  struct Growth {
    bool speculative = false;  // the file is likely to go on growing, so memory may be preallocated
    Wait wait = Wait::kAllowed;
    bool anywhere = false;  // not only at home, if that lacks memory
  };
  Status acquire_write(std::uint64_t offset, std::uint64_t end, WritePin* held, Growth how);
  [[nodiscard]] bool try_write_locked(std::uint64_t offset, std::uint64_t end, WritePin* held);
  ReadPin whole() const;
  // Nothing lies above this position, neither published nor being written.
  [[nodiscard]] std::uint64_t highest_locked() const;
  [[nodiscard]] SnapshotPointer current() const;

  // ---- extent_buffer_memory.cc: what takes memory. All need mutation_mutex_, except the first four. ----
  // Calls attempt(), which takes mutation_mutex_ itself, and again whenever it fails with ENOSPC or EDQUOT and others
  // have released memory of the device since. payers: whose it needs. [offset, end) is what needs the memory: files are
  // parked only if that can be enough. The caller holds no lock and no pin.
  Status retry_when_full(DeviceContext& device, const Charge& payers, std::uint64_t offset, std::uint64_t end,
                         const std::function<Status()>& attempt, Wait wait = Wait::kAllowed);
  // The same for a change at home: change() runs with mutation_mutex_ held, once the contents are there. Or where they
  // are, with how.anywhere, if the home lacks memory.
  Status change_at_home(std::uint64_t offset, std::uint64_t end, Growth how, const std::function<Status()>& change);
  // How much memory of the home a part of the file lacks; all of the file, if it is elsewhere.
  [[nodiscard]] std::uint64_t missing_bytes(std::uint64_t offset, std::uint64_t end) const;
  // payers: only from buffers that charge an account of theirs; null: from all.
  static bool reclaim(DeviceContext& device, std::uint64_t releases_before, const Charge* payers);
  [[nodiscard]] std::weak_ptr<ExtentBuffer> owner() {
    return std::static_pointer_cast<ExtentBuffer>(shared_from_this());
  }
  // EPROTO: nothing can be restored from this.
  [[nodiscard]] Status check_kept(const KeptContents& contents) const;
  [[nodiscard]] SnapshotPointer make_snapshot(Extents extents);
  void replace(SnapshotPointer next);
  // What the snapshot shows of the buffer's own memory: nothing of a slot.
  [[nodiscard]] Extents own() const;
  // The part of Residence::ahead that no snapshot shows: the file has holes there.
  [[nodiscard]] Extents hidden() const;
  // The part of Residence::ahead that the contents have not reached: what is hidden, and what is above the size.
  [[nodiscard]] Extents unreached() const;
  void account();  // after each change of the snapshot or of Residence::ahead
  // Takes memory of the device and charges it. replaced: bytes that are released in exchange.
  Status take(const Extents& missing, Wait wait, std::uint64_t replaced = 0);
  Status ensure(std::uint64_t offset, std::uint64_t end, Growth how);
  // Moves there what is in another slot, if there is one.
  Status enter_slot(std::shared_ptr<const SlabPool::Slot> slot, Wait wait);
  // Memory of the buffer's own over the granules of [offset, end), which may be empty, and over what is in a slot, in
  // a range of at least reserve_end bytes.
  Status ensure_own(std::uint64_t offset, std::uint64_t end, std::uint64_t reserve_end, Growth how);
  Status reserve_own(std::uint64_t end, Wait wait);
  // DeviceMemory::reserve(), charged while the range exists.
  Result<std::shared_ptr<AddressRange>> reserve_addresses(std::uint64_t bytes, const Extents& populated);
  Status grow_own(const Extents& missing, Growth how);
  [[nodiscard]] std::uint64_t bytes_to_preallocate(std::uint64_t end, std::uint64_t existing, Wait wait);
  Status leave_slot(const Extents& missing, Wait wait);
  // Without extents, the buffer gives up its DeviceMemory too, unless it is leased.
  void drop_empty_memory();
  // allocate(), and zero_range() if it zeroes.
  Status allocate_range(std::uint64_t offset, std::uint64_t bytes, bool keep_size, bool zeroes);
  Status zero_existing(std::uint64_t offset, std::uint64_t end);

  // What releases memory. All need mutation_mutex_.
  // end: the position behind what stays.
  Status shrink(std::uint64_t end, std::uint64_t highest, Exclusion* exclusion);
  // The part of Residence::ahead that trim() may release. Needs state_mutex_, too.
  [[nodiscard]] Extents unused_locked() const;
  // What trim() does. False if somebody still uses memory that would move when the deadline is reached.
  bool release_unused(TimePoint deadline);
  // Waits until nobody has an older snapshot than the current one. False at the deadline.
  bool await_readers(TimePoint deadline);
  // Publishes a snapshot of `kept` only, and waits until nobody uses `removed`, nor what the driver moves when it
  // releases that. False at the deadline: everything is as before.
  bool detach(const Extents& kept, const Extents& removed, Exclusion* exclusion, TimePoint deadline);
  void release(const Extents& removed);

  // ---- extent_buffer_copy.cc ----
  Status clip_copy(std::uint64_t offset, std::uint64_t* bytes) const override;
  Status copy_chunks(Buffer& source, std::uint64_t source_offset, std::uint64_t offset, std::uint64_t bytes,
                     const std::atomic<bool>* cancelled, Wait wait, std::uint64_t* done,
                     const std::function<void()>& advanced) override;
  std::uint64_t hole_of_both(Buffer& source, std::uint64_t source_offset, std::uint64_t offset,
                             std::uint64_t bytes) const;
  Status take_ahead(Buffer& source, std::uint64_t source_offset, std::uint64_t offset, std::uint64_t bytes);
  Status copy_chunk(Buffer& source, std::uint64_t source_offset, std::uint64_t offset, std::uint64_t bytes, Wait wait,
                    std::uint64_t* done);
  Status copy_data(Buffer& source, std::uint64_t source_offset, std::uint64_t offset, std::uint64_t bytes, Wait wait,
                   std::uint64_t* done);
  Status copy_hole(std::uint64_t offset, std::uint64_t end, Wait wait);

  // ---- extent_buffer_lease.cc: leases. Those named _locked need state_mutex_. ----
  // Makes the memory of [0, *bytes) exist where it will stay, or all of it if there is less. Needs mutation_mutex_.
  Status fix_for_lease(bool writable, bool exports, std::optional<std::uint64_t> placement, std::uint64_t* bytes);
  // Lets the driver move memory again, if no lease forbids that. Needs mutation_mutex_.
  void unfix_unless_leased();
  // EBUSY if a lease covers memory at or above `offset`.
  [[nodiscard]] Status check_leases_locked(const char* what, std::uint64_t offset) const;

  // ---- extent_buffer_placement.cc. All need mutation_mutex_. ----
  // Moves the contents, all of which exist. EBUSY: they are in use. ENOSPC, EDQUOT: no memory for a scratch.
  Status shift_to(std::uint64_t placement);
  // Whether the last process can have begun to move contents like these.
  [[nodiscard]] static bool has_scratch(const KeptContents& contents);
  // Takes the steps of shift_ that are left. Nobody uses the buffer.
  Status run_shift();
  // An empty buffer that is about to become a copy begins where its source does.
  void take_placement(const Buffer& source);

  // ---- extent_buffer_park.cc. All need mutation_mutex_. ----
  // The only way in which contents come to another device: writers are stopped, the contents copied, the copy published
  // and recorded. Returns the memory that they have left. A failure leaves them where they are. EBUSY: a lease is on
  // them, or a load or a copy to here is in progress, which needs them at home.
  Result<std::shared_ptr<Residence>> move_to(const std::shared_ptr<DeviceContext>& target,
                                             std::shared_ptr<Charge> payers);
  // The contents are at home when this returns OK.
  Status come_home(Wait wait);
  // Of a new buffer that nobody else has; it takes the mutex itself.
  Status become_copy_of(ExtentBuffer& source);
  // Shows `next`, which lies in the other residence, and returns the former one. Null: it is refused, see move_to().
  std::shared_ptr<Residence> enter(std::shared_ptr<Residence> other, SnapshotPointer next);
  // The memory that move_to() copies: not what is above the size.
  [[nodiscard]] std::uint64_t contents_bytes() const;
  // Needs one of the mutexes.
  [[nodiscard]] bool at_home() const { return here_->device == context_; }

  [[nodiscard]] std::uint64_t granule() const { return here_->device->info().granule; }

  const std::shared_ptr<DeviceContext> context_;  // the home
  const bool preallocates_;
  Watcher watcher_;  // constant once the buffer is shared

  // One change of the memory at a time, over calls of the driver. Order 3 of docs/design/requests.md#locks
  std::mutex mutation_mutex_;
  // Guarded by mutation_mutex_: what is taken is about to be overwritten, and nobody else sees it.
  bool overwritten_ = false;

  // Nothing that waits is called, and no snapshot destroyed, under it. Order 9 of docs/design/requests.md#locks
  mutable std::mutex state_mutex_;
  std::condition_variable state_changed_;  // a writer, a turn or a snapshot is gone, or the gate has opened
  // Guarded by state_mutex_. A buffer's extents are those of snapshot_, which only the holder of mutation_mutex_
  // replaces, as it does here_.
  std::shared_ptr<Residence> here_;  // never null, as the next
  SnapshotPointer snapshot_;
  std::uint64_t snapshots_ = 0;             // that exist, with those which only pins still hold
  std::vector<WritePin*> writers_;          // all pins for writing
  std::vector<const Turn*> turns_;          // of calls of write(), the oldest first
  std::vector<const SharedLease*> leases_;  // added by holders of mutation_mutex_
  std::uint64_t write_limit_ = kNoLimit;    // writes that end above it take the slow path
  std::uint64_t publish_limit_ = kNoLimit;  // a shrink is in progress: no size above it
  std::uint64_t shrinks_ = 0;               // begun so far
  Extent gate_;                             // the driver moves it, nobody may use it
  Shift shift_;                             // in progress, or ended by a failure: the contents cannot be used
  std::list<Claim> claims_;                 // that live
  // Atomics: read without a lock.
  std::atomic<std::uint64_t> size_{0};          // written under state_mutex_
  std::atomic<std::uint64_t> held_{0};          // written under mutation_mutex_
  std::atomic<std::uint64_t> parked_bytes_{0};  // the same
  std::atomic<TimePoint::rep> used_{TimePoint::clock::now().time_since_epoch().count()};
  std::atomic<TimePoint::rep> stays_{0};
};

}  // namespace gpufs
