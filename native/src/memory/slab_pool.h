// Memory for small files: slots of a few sizes, cut from granules (slabs) that all small files of a device share.
// Removed files leave free slots behind. When the device is full, files move together and so free whole slabs.
// Owned by the device's context; a slot is shared by the readers and writers of the file in it.
// Any thread may call any function.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "base/status.h"
#include "drivers/driver.h"
#include "memory/buffer.h"

namespace gpufs {

class DeviceContext;
class ExtentBuffer;

class SlabPool : public std::enable_shared_from_this<SlabPool> {
 public:
  // Slots have powers of two of bytes, from this one on.
  static constexpr std::uint64_t kSmallestSlot = 512;

  // Memory for one small file, zeroed when it is taken; returned to the pool when destroyed.
  struct Slot {
    DeviceAddress address = 0;
    std::uint64_t bytes = 0;
    std::uint64_t memory = 0;  // the number of the slabs' memory
    std::uint64_t offset = 0;  // in it
  };

  // file_bytes: the largest file that gets a slot, rounded up to a slot's size. The context must outlive the pool and
  // its slots. EINVAL when a granule would not hold two such files, EOPNOTSUPP for a device without virtual memory
  // management, where reserving addresses takes memory.
  static Result<std::shared_ptr<SlabPool>> create(DeviceContext& context, std::uint64_t file_bytes);
  ~SlabPool();

  [[nodiscard]] std::uint64_t largest() const { return largest_; }

  // The smallest slot for `bytes` (1..largest()). owner: moves out of it when compact() asks. ENOSPC when a new slab is
  // needed and the device is full, or none may be added. EAGAIN when it would wait and may not.
  Result<std::shared_ptr<const Slot>> take(std::uint64_t bytes, std::weak_ptr<ExtentBuffer> owner = {},
                                           bool may_add_slab = true, Wait wait = Wait::kAllowed);

  // The slabs of the last process, in the memory with this number, with these slots in use. Before anything else. Each
  // of the slots is then taken once. Those that cannot be are set to {}: no slot lies there, or another has it.
  Status restore(std::uint64_t memory, std::span<Extent> slots);
  std::shared_ptr<const Slot> take_restored(const Extent& slot, std::weak_ptr<ExtentBuffer> owner);

  // Moves files out of slabs with few of them, until no slab can be freed or the deadline has passed. Waits for no file
  // that is in use. The caller holds no lock of a buffer.
  void compact(std::chrono::steady_clock::time_point deadline);

 private:
  // A granule cut into slots of one size.
  struct Slab {
    std::size_t size_class = 0;
    std::size_t fresh = 0;              // the first slot that was never used: it and all after it are free, and zero
    std::vector<std::size_t> returned;  // other free slots, which are zeroed when they are used again
    std::vector<std::weak_ptr<ExtentBuffer>> owners;  // by slot, up to `fresh`
    bool emptying = false;                            // compact() moves its files: no slot is taken here
  };

  SlabPool(DeviceContext& context, std::uint64_t largest);
  [[nodiscard]] std::shared_ptr<const Slot> make_slot(std::uint64_t slab, std::size_t index, std::uint64_t bytes);
  // Addresses for all of the device's memory, so that slots never move.
  [[nodiscard]] std::uint64_t address_bytes() const;
  // Needs mutex_.
  Status add_slab(std::size_t size_class, Wait wait);
  void put_back(std::uint64_t slab, std::size_t index);
  // The rest needs mutex_, too.
  // Without files: its memory goes back to the device.
  void release_slab(std::uint64_t offset);
  [[nodiscard]] std::size_t slots(const Slab& slab) const;
  [[nodiscard]] std::size_t free_slots(const Slab& slab) const;
  // So many slots more, or fewer, are free in slabs that are not being emptied. Reports to the context what compact()
  // can free.
  void count_free(std::size_t size_class, std::ptrdiff_t change);
  // The slabs with free slots: those with the fewest files first.
  [[nodiscard]] std::vector<std::uint64_t> emptiest() const;
  // Whether the others of its class have enough free slots for the slab's files. Then lists their owners, and no slot
  // is taken in the slab until reopen().
  bool close(std::uint64_t offset, std::vector<std::shared_ptr<ExtentBuffer>>* owners);
  void reopen(std::uint64_t offset);

  DeviceContext& context_;
  const std::uint64_t granule_;
  const std::uint64_t largest_;

  std::mutex mutex_;  // guards all below, over calls of the driver; order 6 of docs/design/requests.md#locks
  std::unique_ptr<DeviceMemory> memory_;
  std::shared_ptr<AddressRange> range_;
  std::map<std::uint64_t, Slab> slabs_;              // by offset in the memory
  std::vector<std::set<std::uint64_t>> free_slabs_;  // by size class: slabs with a free slot, filled from the lowest
  std::vector<std::size_t> free_slots_;              // by size class, in these slabs
  // By size class: a slab without files, kept for the next one. A file that grows through the sizes would else take a
  // granule for each. It counts as free memory, and compact() releases it.
  std::vector<std::optional<std::uint64_t>> spares_;

  std::mutex compact_mutex_;  // one compact() at a time; order 2 of docs/design/requests.md#locks
};

}  // namespace gpufs
