// The interface of a buffer, the contents of one file: ExtentBuffer owns memory of a device, RegisteredBuffer shows
// memory of another program.
// Owned by shared pointers (inode table, open files, transfers); its memory is freed with the last one.
// Any thread may call any function, except a driver's own threads. Readers wait only while the driver moves a piece of
// memory that they want. Writers wait for growth, and for calls that take memory away, which wait until nobody uses
// that memory any more. With Wait::kForbidden read(), write(), gather(), copy_from(), resize() and pins change nothing
// and return EAGAIN where they would have to wait for others who use the buffer. They do not reclaim memory from other
// buffers either, so ENOSPC may be premature. EDQUOT: an account to which the memory is charged is at its limit. What
// is said of ENOSPC below holds for it, too.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/extents.h"
#include "base/status.h"
#include "drivers/driver.h"
#include "memory/account.h"
#include "memory/transfer_target.h"

namespace gpufs {

// A file's first byte may lie anywhere below this in its memory, so that what programs use in place is aligned however
// long the file's header is.
inline constexpr std::uint64_t kPlacementEnd = 256;

// Contents on their way to another placement, in steps of a few MiB: see extent_buffer_placement.cc.
struct Shift {
  std::uint64_t to = 0;
  std::uint64_t step = 0;  // its bytes are in the scratch, those before it have moved; the first is 1, 0: no shift
};

// What another process needs to have the same contents: memory that a MemoryKeeper keeps.
struct KeptContents {
  std::uint64_t size = 0;
  std::uint64_t memory = 0;  // its number; 0: none
  Extent slot;               // of a small file, in that memory; no bytes for others
  Extents extents;           // of others: whole granules
  std::uint64_t placement = 0;
  Shift shift;
  // Whether all of this is said of the host tier's memory, to which the contents are parked; and the placement that
  // they have on their device when they are back.
  bool parked = false;
  std::uint64_t own_placement = 0;
};

// How much a copy moves between two checks whether it is cancelled.
inline constexpr std::uint64_t kCopyChunk = std::uint64_t{64} << 20;

class Buffer : public TransferTarget, public std::enable_shared_from_this<Buffer> {
 public:
  // The largest size of a buffer in bytes (sparse), a multiple of the page size; resize() beyond it is EFBIG.
  static constexpr std::uint64_t kMaximumBytes = std::uint64_t{1} << 46;

  // preallocates: write() takes more memory than it needs when the buffer grows, where that saves time. Only for owners
  // that call trim() when the last writer is done.
  static Result<std::shared_ptr<Buffer>> create(std::shared_ptr<DeviceContext> device, bool preallocates = false);
  // With the contents of a buffer of the last process; it preallocates. Those in slots: after SlabPool::restore().
  // host: the host tier, null without one.
  static Result<std::shared_ptr<Buffer>> restore(std::shared_ptr<DeviceContext> device, const KeptContents& contents,
                                                 const std::shared_ptr<DeviceContext>& host = nullptr);

  // All device memory of the buffer, with what is preallocated: st_blocks.
  [[nodiscard]] virtual std::uint64_t bytes_held() const = 0;

  // Some memory is taken ahead of the contents: by a growing buffer that preallocates, and by pins for writing that end
  // without publish(). trim() releases it, except where a pin for writing or a claim is. So do resize() to the same or
  // a smaller size, punch(), and every call that finds the device full. Memory above the size that allocate() or
  // zero_range() took is not among it: only resize() and punch() release that.
  //
  // False: nothing was released, since somebody used memory that shares a piece with it, or changed the buffer, for
  // longer than `timeout`.
  virtual bool trim(std::chrono::milliseconds /*timeout*/) { return true; }
  // False: trim() has nothing to do.
  [[nodiscard]] virtual bool may_trim() const { return false; }

  // The range that a load or a copy is about to write. While the claim lives, memory there stays, and a buffer that
  // needs addresses gets enough of them for the whole range, so that it never moves on the way. A claim keeps the
  // buffer, too.
  struct Claim {
    Extent range;
    std::uint64_t shrinks = 0;  // how often the buffer had been made smaller before
  };
  [[nodiscard]] virtual std::shared_ptr<const Claim> claim(const Extent& /*range*/) { return nullptr; }

  // The next two do nothing where the memory and the size are fixed.
  // size = max(size, end). since: a claim, for callers that cannot hold their pins until then. If the buffer has been
  // made smaller since that claim, this changes nothing and returns false, as if the shrink had come last.
  virtual bool publish(std::uint64_t /*end*/, const Claim* /*since*/ = nullptr) { return true; }
  // Zeroes what a failed write left there. Call this once the pin is gone. What other pins for writing cover is left to
  // their holders.
  virtual Status discard_above_size(std::uint64_t /*offset*/, std::uint64_t /*bytes*/) { return {}; }

  // Synchronous copies by the calling thread. read: the count, short only at the end of the file; holes are zeros.
  // write: all or an error; with ENOSPC nothing is written and the size is unchanged.
  virtual Result<std::size_t> read(std::uint64_t offset, std::span<std::byte> destination,
                                   Wait wait = Wait::kAllowed) = 0;
  virtual Result<std::size_t> write(std::uint64_t offset, std::span<const std::byte> source,
                                    Wait wait = Wait::kAllowed) = 0;

  // Where the device is cpu_addressable: the file's bytes as iovecs (holes point at a page of zeros), valid while
  // `keep` lives. EOPNOTSUPP on other devices and for memory of other programs, which is copied.
  struct Gathered {
    std::vector<iovec> pieces;
    std::size_t bytes = 0;
    std::shared_ptr<void> keep;
  };
  virtual Result<Gathered> gather(std::uint64_t offset, std::uint64_t bytes, Wait wait = Wait::kAllowed);

  // The next four change size or memory. Where both are fixed: EPERM, or ESTALE once the memory is withdrawn.
  // Shrinking zeroes the rest of the last granule's bytes above the size and releases whole granules, also those that
  // were allocated beyond the size; growing makes a hole. EFBIG beyond the maximum.
  virtual Status resize(std::uint64_t size, Wait wait = Wait::kAllowed) = 0;
  // fallocate(2): mode 0 / KEEP_SIZE; a partial failure (ENOSPC) leaves everything as it was.
  virtual Status allocate(std::uint64_t offset, std::uint64_t bytes, bool keep_size);
  // Zeroes partial granules and releases whole ones.
  virtual Status punch(std::uint64_t offset, std::uint64_t bytes);
  // Zeroes what exists and allocates what does not, as fallocate(2) has it: later writes there find memory.
  virtual Status zero_range(std::uint64_t offset, std::uint64_t bytes, bool keep_size);

  // lseek(2) SEEK_DATA, as seek_hole(): ENXIO if no data follows. Granular: a populated granule is data.
  virtual Result<std::uint64_t> seek_data(std::uint64_t offset) = 0;
  // Copies between buffers, overlap within one allowed only where copy_file_range(2) allows it (else EINVAL).
  // Holes in the source become zeros. Clipped at the source's end; returns the count, which is short when `cancelled`
  // (may be null; checked between chunks) became true or an error came after progress. ECANCELED if nothing was copied.
  Result<std::uint64_t> copy_from(Buffer& source, std::uint64_t source_offset, std::uint64_t offset,
                                  std::uint64_t bytes, const std::atomic<bool>* cancelled, Wait wait = Wait::kAllowed);
  // Whether that takes less time than handing it to another thread would.
  [[nodiscard]] virtual bool copies_briefly(const Buffer& /*source*/, std::uint64_t /*source_offset*/,
                                            std::uint64_t /*bytes*/) const {
    return false;
  }

  // Keeps the memory of [0, bytes()) in place, for somebody who maps it or uses its address, and keeps the buffer.
  // While a lease lives, resize() to less than bytes() and punch() there are EBUSY. Growth is allowed.
  class Lease {
   public:
    virtual ~Lease() = default;
    // The buffer's size when the lease began, or was last extended.
    [[nodiscard]] virtual std::uint64_t bytes() const = 0;
    // Extends the lease to the buffer's size now. Fails as Buffer::lease(); the lease is then as before.
    virtual Status refresh() = 0;
    // Where in the memory of the pieces the first byte lies.
    [[nodiscard]] virtual std::uint64_t placement() const = 0;
    // See DeviceMemory::export_memory(). The pieces are whole: the last one may reach beyond bytes().
    virtual Result<std::vector<ExportedMemory>> pieces(std::uint64_t from, std::size_t capacity) = 0;
    // The device address of offset 0 in this process, valid while this object lives; refresh() may change it. 0 if the
    // lease is empty.
    [[nodiscard]] virtual DeviceAddress address() const = 0;
  };
  // writable: holes get memory first (ENOSPC), and descriptors give access for writing where the driver makes a
  // difference. Otherwise a hole is ENODATA. exports: pieces() will be called; EOPNOTSUPP if the device cannot share
  // memory. Where ranges move by copying (DeviceInfo::reserve_copies) a buffer with a lease cannot outgrow its range:
  // EFBIG. label: what messages call the holder. EPERM for memory of another program, which alone can pass it on.
  // placement: where the first byte should lie; the contents move there. They stay where they are while another lease
  // or a load uses the memory, and where the device is full: Lease::placement() has the outcome.
  virtual Result<std::shared_ptr<Lease>> lease(bool writable, bool exports, std::string label,
                                               std::optional<std::uint64_t> placement = std::nullopt);
  // A lease of the last process, on the first `bytes` alone: the buffer may have grown since, by holes perhaps.
  virtual Result<std::shared_ptr<Lease>> lease_again(bool writable, std::uint64_t bytes, std::string label);

  [[nodiscard]] virtual KeptContents kept() const { return {}; }
  // After restore() and watch(): completes a shift that the last process had begun.
  virtual Status complete_shift() { return {}; }
  struct Watcher {
    // Called whenever the contents have moved, and before memory where they were is used for anything else.
    std::function<void()> moved = [] {};
    // Gets what the host tier held of contents that are back, to free it: that takes as long as an eighth of the copy.
    std::function<void(std::shared_ptr<Buffer>)> freed = [](const std::shared_ptr<Buffer>&) {};
  };
  // Once, before the buffer is shared.
  // NOLINTNEXTLINE(performance-unnecessary-value-param): the implementations keep it
  virtual void watch(Watcher /*watcher*/) {}

  // Moves the contents to the host tier, where `payer` is charged for them; the device's memory is free on return.
  // False: they stay, being too small for memory of their own. EBUSY: somebody has a lease on them, or writes. ENOSPC,
  // EDQUOT: the host tier is full, or a limit is reached.
  // NOLINTNEXTLINE(performance-unnecessary-value-param): the implementation keeps it
  virtual Result<bool> park(const std::shared_ptr<DeviceContext>& /*host*/, std::shared_ptr<Account> /*payer*/) {
    return refuse_change();
  }
  // Moves them back, as every call does that needs them on the device. ENOSPC, EDQUOT: the device is full.
  virtual Status bring_back(Wait /*wait*/) { return {}; }
  // The contents in the host's memory; null: they are not parked.
  [[nodiscard]] virtual std::shared_ptr<Buffer> parked() const { return nullptr; }
  // Of the host tier: what parked contents take there.
  [[nodiscard]] virtual std::uint64_t bytes_parked() const { return 0; }
  // Whether somebody has a lease on the memory.
  [[nodiscard]] virtual bool is_leased() const { return false; }
  // NOLINTNEXTLINE(performance-unnecessary-value-param): the implementation keeps it
  virtual void charge_parked_to(std::shared_ptr<Account> /*payer*/) {}
  // When somebody used the memory last, by std::chrono::steady_clock; and until when it should not be parked again: for
  // as long as it took to bring it back.
  [[nodiscard]] virtual std::chrono::steady_clock::time_point last_used() const { return {}; }
  [[nodiscard]] virtual std::chrono::steady_clock::time_point stays_until() const { return {}; }

  // Who pays for bytes_held().
  [[nodiscard]] Charge& charge() { return charge_; }

 protected:
  static Status fixed_size();  // EPERM
  Status refuse_change();      // fixed_size(), or ESTALE
  // Copies pieces of the source, or zeros for holes, one after the other to `destination` on this buffer's device.
  // Synchronous, by the shortest way that the devices have. *copied: the bytes, also after a failure. The caller holds
  // both memories.
  Status copy_pieces(DeviceAddress destination, const Buffer& source, const std::vector<Piece>& pieces,
                     std::uint64_t* copied) const;

 private:
  // Whether a copy may write there; *bytes: as many as may be.
  virtual Status clip_copy(std::uint64_t offset, std::uint64_t* bytes) const = 0;
  // What copy_from() does once its arguments are checked. *done: the bytes copied, also after a failure. Calls
  // advanced() after each chunk.
  virtual Status copy_chunks(Buffer& source, std::uint64_t source_offset, std::uint64_t offset, std::uint64_t bytes,
                             const std::atomic<bool>* cancelled, Wait wait, std::uint64_t* done,
                             const std::function<void()>& advanced) = 0;

  Charge charge_;
};

}  // namespace gpufs
