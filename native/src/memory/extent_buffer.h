// The Buffer: published snapshots of a range and its extents, and the one mutation at a time that changes them.
// Owned as Buffer says. A file that is small enough lives in a slot of its device's slabs until it grows.
// Any thread may call any function, as Buffer says.
//
// How readers and writers get by without waiting for each other:
//  - What exists is an immutable Snapshot. A pin copies the pointer to the current one under state_mutex_ (a few
//    instructions) and so keeps its addresses valid, whatever happens to the buffer meanwhile.
//  - Growth makes memory exist first and then publishes a snapshot that has it.
//  - Whoever takes memory away publishes a snapshot without it, waits until every older one is gone, and only then
//    gives the memory back. New pins are pins of the new snapshot, so the wait ends.
//  - Pins for writing are listed besides: a shrink must know how far above the size they reach, and moving a small file
//    to another place must wait until nobody writes to the old one. write_limit_ keeps new ones out for so long: they
//    take the slow path, which waits for mutation_mutex_.
// What always holds: where no write is under way, the bytes above size() in memory that exists are zeros.
#pragma once

#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "base/thread.h"
#include "base/timed_mutex.h"
#include "device/device_context.h"
#include "memory/buffer.h"
#include "memory/extents.h"
#include "memory/slab_pool.h"

namespace gpufs {

class ExtentBuffer : public Buffer, private AheadHolder {
 public:
  explicit ExtentBuffer(std::shared_ptr<DeviceContext> device);
  ~ExtentBuffer() override;
  ExtentBuffer(const ExtentBuffer&) = delete;
  ExtentBuffer& operator=(const ExtentBuffer&) = delete;

  [[nodiscard]] const std::shared_ptr<DeviceContext>& device() const override { return context_; }
  [[nodiscard]] std::uint64_t size() const override { return size_.load(std::memory_order_acquire); }
  [[nodiscard]] std::uint64_t bytes_held() const override { return held_.load(std::memory_order_acquire); }
  [[nodiscard]] std::uint64_t limit() const override;
  [[nodiscard]] std::uint64_t bytes_ahead() const override { return ahead_bytes_.load(std::memory_order_acquire); }
  void take_ahead() override;
  void trim() override;
  void expect(std::uint64_t end) override;

  Result<std::unique_ptr<Pinned>> pin_for_read(std::uint64_t offset, std::uint64_t bytes) override;
  std::unique_ptr<Pinned> try_pin_for_read(std::uint64_t offset, std::uint64_t bytes) override;
  using Buffer::pin_for_write;
  Result<std::unique_ptr<Pinned>> pin_for_write(std::uint64_t offset, std::uint64_t bytes, Made* made) override;
  Status populate(std::uint64_t offset, std::uint64_t bytes, Made* made) override;
  void release_unused(const Made& made) override;
  void publish(std::uint64_t end) override;
  bool publish_since(std::uint64_t end, std::uint64_t noted) override;
  [[nodiscard]] std::uint64_t shrinks() const override;
  Status discard_above_size(std::uint64_t offset, std::uint64_t bytes) override;
  Result<std::size_t> read(std::uint64_t offset, std::span<std::byte> destination) override;
  Result<std::size_t> write(std::uint64_t offset, std::span<const std::byte> source) override;
  Result<Gathered> gather(std::uint64_t offset, std::uint64_t bytes) override;
  Status resize(std::uint64_t size) override;
  Status allocate(std::uint64_t offset, std::uint64_t bytes, bool keep_size) override;
  Status punch(std::uint64_t offset, std::uint64_t bytes) override;
  Status zero_range(std::uint64_t offset, std::uint64_t bytes, bool keep_size) override;
  Result<std::uint64_t> seek_data(std::uint64_t offset) override;
  Result<std::uint64_t> seek_hole(std::uint64_t offset) override;
  Result<std::uint64_t> copy_from(Buffer& source, std::uint64_t source_offset, std::uint64_t offset,
                                  std::uint64_t bytes, const std::atomic<bool>* cancelled) override;
  [[nodiscard]] bool copies_briefly(const Buffer& source, std::uint64_t source_offset,
                                    std::uint64_t bytes) const override;
  Result<DeviceAddress> pin_address(std::uint64_t maximum_bytes) override;
  Result<std::vector<ExportedMemory>> export_memory() override;

 private:
  using TimePoint = TimedMutex::TimePoint;
  static constexpr std::uint64_t kNoLimit = ~std::uint64_t{0};

  // What growth is for.
  struct Growth {
    bool ahead = false;    // more of it is likely to follow: memory may be taken ahead
    Made* made = nullptr;  // told what was not there before
  };

  // How many snapshots of a buffer there are; shared by them, because a pin may be the buffer's last owner.
  struct Census {
    std::mutex mutex;  // guards snapshots; innermost
    std::condition_variable changed;
    std::uint64_t snapshots = 0;
  };

  // What exists, at which addresses. Immutable.
  struct Snapshot {
    Snapshot(std::shared_ptr<Census> counted_in, std::shared_ptr<AddressRange> own, Extents existing);
    Snapshot(std::shared_ptr<Census> counted_in, std::shared_ptr<SlabPool::Slot> small);
    ~Snapshot();
    Snapshot(const Snapshot&) = delete;
    Snapshot& operator=(const Snapshot&) = delete;

    const std::shared_ptr<Census> census;
    std::shared_ptr<AddressRange> range;   // of memory of the buffer's own; null before there is any
    std::shared_ptr<SlabPool::Slot> slot;  // or of a small file
    const DeviceAddress base;              // of offset 0
    const Extents extents;
  };
  using SnapshotPointer = std::shared_ptr<const Snapshot>;

  // [offset, end) of one snapshot, held for reading.
  struct ReadLease {
    SnapshotPointer snapshot;
    std::uint64_t offset = 0;
    std::uint64_t end = 0;
  };
  // The same for writing, listed in the buffer from acquire_write() until it is destroyed, before its buffer.
  class WriteLease {
   public:
    WriteLease() = default;
    ~WriteLease() { drop(); }
    WriteLease(const WriteLease&) = delete;
    WriteLease& operator=(const WriteLease&) = delete;
    void drop();
    [[nodiscard]] DeviceAddress address() const { return snapshot_->base + offset_; }  // of the first byte

   private:
    friend class ExtentBuffer;
    ExtentBuffer* buffer_ = nullptr;  // null: not listed
    SnapshotPointer snapshot_;
    std::uint64_t offset_ = 0;
    std::uint64_t end_ = 0;
    WriteLease* previous_ = nullptr;  // guarded by the buffer's state_mutex_, as is next_
    WriteLease* next_ = nullptr;
  };
  class ReadPin;
  class WritePin;
  class Exclusion;
  class CopyQueue;

  // ---- extent_buffer.cc: pins, copies by the caller ----
  static void cut(const Snapshot& snapshot, std::uint64_t offset, std::uint64_t end, std::vector<Piece>* pieces);
  // False: it would have to wait, on a thread that must not.
  bool acquire_read(std::uint64_t offset, std::uint64_t bytes, ReadLease* lease);
  [[nodiscard]] bool try_read_locked(std::uint64_t offset, std::uint64_t bytes, ReadLease* lease) const;
  Status acquire_write(std::uint64_t offset, std::uint64_t end, WriteLease* lease) {
    return acquire_write(offset, end, lease, {});
  }
  Status acquire_write(std::uint64_t offset, std::uint64_t end, WriteLease* lease, const Growth& growth);
  // Does it, and again where there was no room before others gave back what they hold ahead. Without the lock.
  template <typename Attempt>
  Status with_reclaiming(Attempt attempt) {
    // Others that go on growing may be faster to what came back, and take ahead anew.
    constexpr int kMostAttempts = 4;
    Status status;
    for (int number = 0; number < kMostAttempts; ++number) {
      const std::uint64_t before = context_->ahead_returns();
      status = attempt();
      if (status.error() != ENOSPC || !this_thread_may_wait() || !context_->reclaim_ahead(before)) break;
    }
    return status;
  }
  [[nodiscard]] ReadLease whole() const;
  [[nodiscard]] bool try_list_locked(std::uint64_t offset, std::uint64_t end, WriteLease* lease);
  void publish_locked(std::uint64_t end);
  Status check_end(std::uint64_t offset, std::uint64_t bytes, std::uint64_t* end) const;
  [[nodiscard]] SnapshotPointer current() const;
  // Locks mutation_mutex_. Not locked: somebody holds it, and this thread must not wait.
  [[nodiscard]] std::unique_lock<TimedMutex> lock_mutation();
  static Status would_wait() { return Status(EAGAIN, "the buffer is in use"); }

  // ---- extent_buffer_memory.cc: what changes the memory; all with mutation_mutex_ held ----
  [[nodiscard]] SnapshotPointer make_snapshot(Extents extents) const;
  void replace(SnapshotPointer next);
  // Waits until every snapshot but the current one is gone. The caller holds none but so many that were never
  // published.
  void wait_for_old_snapshots(std::uint64_t unpublished = 0);
  bool wait_for_old_snapshots_until(TimePoint deadline);  // false: some are left
  Status ensure(std::uint64_t offset, std::uint64_t end, const Growth& growth);
  // What was made before the buffer became smaller is not there any more.
  void forget_shrunk(Made* made) const;
  static Extents made_with(const Growth& growth, const Extents& extents);
  // Beyond the size, somebody was told that he has this: it is not given back with what was made in vain.
  void reserve_for_others(std::uint64_t offset, std::uint64_t end);
  Status ensure_slot(SlabPool& slabs, std::uint64_t end);
  // Memory of the buffer's own over the granules of [offset, end), which may be empty, and over what is in a slot, in
  // a range of at least reserve_end bytes.
  Status ensure_own(std::uint64_t offset, std::uint64_t end, std::uint64_t reserve_end, bool promise,
                    const Growth& growth);
  Status reserve_own(std::uint64_t end, bool promise);
  Status grow_own(const Extents& existing, const Extents& missing, const Growth& growth);
  // How much to take beyond `end`, which nothing reaches yet.
  [[nodiscard]] std::uint64_t wanted_ahead(std::uint64_t end, std::uint64_t existing);
  void set_ahead(Extents ahead);
  void count_ahead(const Extents& ahead);
  // Gives back what was taken ahead. False if somebody uses memory that would move with it until the deadline, and all
  // is as it was.
  bool release_ahead(TimePoint deadline = TimePoint::max());
  void give_back_ahead(TimePoint deadline) override;
  Status leave_slot(const Extents& populated);
  void drop_unused_memory();
  Status shrink(std::uint64_t size, std::uint64_t highest);
  // Publishes a snapshot of `kept`, waits for the users of `removed` and gives it back.
  void take_away(const Extents& kept, const Extents& removed);
  // All of that but the last: nobody uses `removed`, nor what the driver moves with it, until the gate is destroyed.
  // False if somebody still does at the deadline.
  bool set_apart(const Extents& kept, const Extents& removed, Exclusion* gate, TimePoint deadline);
  // Sets the gate around what the driver moves when it releases `removed`.
  void close_gate_locked(const Extents& removed);
  Status zero_existing(std::uint64_t offset, std::uint64_t end);
  // pin_address().
  Status promise_address(std::uint64_t maximum_bytes, DeviceAddress* address);
  void account_own(std::uint64_t bytes);
  [[nodiscard]] std::uint64_t highest_locked() const;

  // ---- extent_buffer_copy.cc ----
  Status copy_chunks(Buffer& source, std::uint64_t source_offset, std::uint64_t offset, std::uint64_t bytes,
                     const std::atomic<bool>* cancelled, std::uint64_t* done);
  Status copy_chunk(Buffer& source, std::uint64_t source_offset, std::uint64_t offset, std::uint64_t bytes,
                    std::uint64_t* done);
  Status copy_data(Buffer& source, std::uint64_t source_offset, std::uint64_t offset, std::uint64_t bytes,
                   std::uint64_t* done);
  Status copy_hole(std::uint64_t offset, std::uint64_t end);

  const std::shared_ptr<DeviceContext> context_;
  const std::uint64_t granule_;
  const std::shared_ptr<Census> census_;

  // One mutation at a time; before state_mutex_. Held over driver calls by intent: only those wait for it who need
  // memory to exist or to go. Guards all up to promised_.
  TimedMutex mutation_mutex_;
  std::unique_ptr<DeviceMemory> memory_;  // null until the file needs memory of its own
  std::shared_ptr<AddressRange> range_;   // memory_'s current one
  std::uint64_t own_held_ = 0;            // bytes of memory_
  bool exported_ = false;                 // others use the memory: it is emptied, but never replaced
  Extents ahead_;                         // exists in range_, as zeros, and is in no snapshot
  Extents reserved_;                      // of memory_: see reserve_for_others()
  bool takes_ahead_ = false;
  // The most that the buffer may grow to: pin_address(). Written under both mutexes, read under either.
  std::uint64_t promised_ = kNoLimit;

  // Guards all below; nothing is called and nothing destroyed under it. The two counters are written under it and read
  // without.
  mutable std::mutex state_mutex_;
  std::condition_variable state_changed_;   // a writer has ended, or the gate has opened
  SnapshotPointer snapshot_;                // never null
  WriteLease* writers_ = nullptr;           // all leases for writing
  std::uint64_t write_limit_ = kNoLimit;    // writes that end above it take the slow path
  std::uint64_t publish_limit_ = kNoLimit;  // a shrink is under way: no size above it
  std::uint64_t shrinks_ = 0;               // begun so far
  std::uint64_t gate_offset_ = 0;           // [gate_offset_, gate_end_): being moved by the driver, nobody may use it
  std::uint64_t gate_end_ = 0;
  std::atomic<std::uint64_t> size_{0};
  std::atomic<std::uint64_t> held_{0};
  std::atomic<std::uint64_t> ahead_bytes_{0};   // of ahead_; written under mutation_mutex_
  std::atomic<bool> ahead_in_use_{false};       // it could not be given back, when that was last tried
  std::atomic<std::uint64_t> expected_end_{0};  // expect(), whose callers need not wait for a mutation
};

}  // namespace gpufs
