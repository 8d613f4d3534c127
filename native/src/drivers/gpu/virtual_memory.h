// A buffer's memory by virtual memory management: pieces of physical memory, mapped into reserved ranges of addresses.
//
// One call of populate() takes memory in pieces of at most kLargestPiece. A piece takes some 35 us to create and 25 us
// to release, almost independent of its size: 16 GiB take 280 ms and 200 ms in pieces of the 2 MiB granule, nearly as
// long as filling them over the bus, but 3 ms and 5 ms in pieces of 256 MiB (one H200). Programs that share memory pay
// for each piece again: exporting and mapping 64 GiB takes 38 and 22 ms in pieces of 256 MiB, 9 and 7 ms in pieces of
// 1 GiB. The driver maps and unmaps whole pieces only. So releasing a part of a piece costs a copy: the rest is copied
// to fresh pieces (at some 2 TB/s), which take over the old one's addresses. Whole pieces are released first, which
// leaves space for that.
//
// Invariant, whichever call of the driver fails: every piece is mapped in the current range, with access if any of its
// granules is live. Released granules that cannot be freed (because of fix_in_place() or a failure) stay dead in their
// piece. They are reused when populated again, and are released with the rest of the piece.
//
// With a keeper, which outlives this process, a descriptor of each piece is handed to it when the piece is taken (0.1
// ms). A piece that is split is kept until its successors are: for a moment both are, with equal contents.
//
// Ownership: the Buffer's. One thread at a time; any thread may release the ranges at any time.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "drivers/driver.h"
#include "drivers/gpu/gpu_device.h"

namespace gpufs::gpu {

// Physical memory of a device, with undefined contents; released when the last piece and the last range that show it
// are gone.
class PhysicalMemory {
 public:
  // address: where the caller is about to map it.
  static Result<std::shared_ptr<PhysicalMemory>> create(std::shared_ptr<GpuDevice> device, std::uint64_t bytes,
                                                        DeviceAddress address, Wait wait, bool wants_zeros);
  // Memory of another program, which a descriptor stands for. It counts towards no limit.
  static Result<std::shared_ptr<PhysicalMemory>> import(std::shared_ptr<GpuDevice> device, int descriptor,
                                                        std::uint64_t bytes);
  // Memory of a descriptor which the last process has kept under this key.
  static Result<std::shared_ptr<PhysicalMemory>> adopt(std::shared_ptr<GpuDevice> device,
                                                       MemoryKeeper::KeptPiece piece);
  ~PhysicalMemory();
  [[nodiscard]] std::uint64_t bytes() const { return bytes_; }
  [[nodiscard]] PhysicalHandle handle() const { return handle_; }
  // Whether it was zeros when it was created; create() tries that if the caller wants it.
  [[nodiscard]] bool zeroed() const { return zeroed_; }
  // Whether the pool has left it mapped there. From then on the caller unmaps it.
  [[nodiscard]] bool take_mapping(DeviceAddress address) { return std::exchange(left_mapped_, 0) == address; }
  // Leaves it mapped there for its next user. False if it cannot have one.
  bool leave_mapped(DeviceAddress address);
  // Has the device's keeper, if there is one, keep it as the part at `offset` of a memory; or keep it no longer.
  void keep(std::uint64_t memory, std::uint64_t offset);
  void drop();
  // Asks the driver, which takes 0.1 ms, unless the piece is kept, or is large and was exported before.
  Result<UniqueFd> export_descriptor();

 private:
  PhysicalMemory(std::shared_ptr<GpuDevice> device, std::uint64_t bytes, PhysicalHandle handle, bool own)
      : device_(std::move(device)), bytes_(bytes), handle_(handle), own_(own), exported_(!own) {}
  Result<UniqueFd> export_new();

  const std::shared_ptr<GpuDevice> device_;
  const std::uint64_t bytes_;
  const PhysicalHandle handle_;
  const bool own_;  // counted as taken from the device
  bool exported_;   // other processes may have mapped it
  bool zeroed_ = false;
  DeviceAddress left_mapped_ = 0;  // where the pool has it mapped, which no range shows; 0: nowhere
  UniqueFd descriptor_;            // of a piece that is kept, or that is large and was exported
  std::uint64_t key_ = 0;          // under which the keeper has a copy of it; 0: not kept
};

// A reserved range of addresses and what it shows.
class MappedRange final : public AddressRange {
 public:
  // reuses: it may be a range that the device's pool has left pieces in.
  static Result<std::shared_ptr<MappedRange>> reserve(std::shared_ptr<GpuDevice> device, std::uint64_t bytes,
                                                      bool reuses = false);
  ~MappedRange() override;

  // Maps a piece at `offset`. *accessible: whether it can be used before allow(), since the pool has left it there.
  Status show(std::uint64_t offset, std::shared_ptr<PhysicalMemory> physical, bool* accessible = nullptr);
  Status hide(std::uint64_t offset);
  // After a failure some of them may still be mapped.
  Status hide_all();
  [[nodiscard]] bool shows(std::uint64_t offset, const PhysicalMemory& physical) const;
  // Gives the device and its peers access to [offset, offset+bytes), all of which is mapped.
  Status allow(std::uint64_t offset, std::uint64_t bytes);

 private:
  MappedRange(std::shared_ptr<GpuDevice> device, DeviceAddress base, std::uint64_t bytes)
      : AddressRange(base, bytes), device_(std::move(device)) {}
  Status unmap(std::uint64_t offset, std::uint64_t bytes);

  const std::shared_ptr<GpuDevice> device_;
  std::map<std::uint64_t, std::shared_ptr<PhysicalMemory>> shown_;  // by offset
  bool unmapping_failed_ = false;                                   // so a piece may be mapped without access
};

class VirtualMemory final : public DeviceMemory {
 public:
  static constexpr std::uint64_t kLargestPiece = std::uint64_t{1} << 30;

  static std::unique_ptr<DeviceMemory> create(std::shared_ptr<GpuDevice> device);
  // number: by which a MemoryKeeper knows it; 0: it is not kept.
  VirtualMemory(std::shared_ptr<GpuDevice> device, std::uint64_t number);
  ~VirtualMemory() override;
  VirtualMemory(const VirtualMemory&) = delete;
  VirtualMemory& operator=(const VirtualMemory&) = delete;
  // See Device::restore_memory(). Pieces move, as in new memory, unless fix_in_place() says that they are in use.
  static Result<std::unique_ptr<DeviceMemory>> restore(const std::shared_ptr<GpuDevice>& device, std::uint64_t number,
                                                       std::span<const Extent> populated);

  Result<std::shared_ptr<AddressRange>> reserve(std::uint64_t bytes, std::span<const Extent> populated) override;
  Status populate_all(std::span<const Extent> spans, Wait wait) override;
  void release_all(std::span<const Extent> spans) override;
  [[nodiscard]] Extent release_span(std::uint64_t offset, std::uint64_t bytes) override;
  void fix_in_place() override { fixed_ = true; }
  void allow_moves() override { fixed_ = false; }
  void leave_undefined(bool undefined) override { zeroes_ = !undefined; }
  [[nodiscard]] Extents surplus() const override { return surplus_; }
  // Descriptors that the keeper has as well.
  [[nodiscard]] std::uint64_t descriptors() const override { return number_ == 0 ? 0 : pieces_.size(); }
  [[nodiscard]] std::uint64_t descriptors_for(std::span<const Extent> spans) override;
  [[nodiscard]] std::uint64_t number() const override { return number_; }
  Result<std::vector<ExportedMemory>> export_memory(std::uint64_t from, std::uint64_t end, std::size_t capacity,
                                                    bool writable) override;

 private:
  struct MappedPiece {
    std::shared_ptr<PhysicalMemory> physical;
    std::vector<bool> live;  // by granule: populated; the others are dead
    std::uint64_t live_granules = 0;
  };
  using Pieces = std::map<std::uint64_t, MappedPiece>;  // by offset

  [[nodiscard]] Pieces::iterator first_touching(std::uint64_t offset);
  [[nodiscard]] Extents live_runs(const Pieces::value_type& piece) const;
  // Marks granules of all pieces.
  void mark(const Extent& span, bool live);
  // Makes the dead granules of the span accessible, and adds fresh pieces where there are none.
  Status back(const Extent& span, Pieces& fresh, Wait wait);
  // Takes fresh memory for [offset, offset+bytes), maps it into the current range and adds it to `pieces`.
  Status add_pieces(std::uint64_t offset, std::uint64_t bytes, Pieces& pieces, Wait wait);
  // Undoes add_pieces(). Pieces that cannot be unmapped are kept, dead.
  void take_back(Pieces& fresh);
  // Moves the live parts of a piece to fresh pieces at the same addresses, which frees the rest. After a failure the
  // piece stays as it is.
  Status split(Pieces::iterator piece);
  Result<Pieces> copy_live(const Pieces::value_type& piece);
  // Shows `to` in the current range instead of `from`, which covers the same granules or more. After a failure any of
  // them may be shown; another call, in either direction, continues from there.
  Status swap(const Pieces& from, const Pieces& to);

  const std::shared_ptr<GpuDevice> device_;
  const std::uint64_t granule_;
  Pieces pieces_;
  std::shared_ptr<MappedRange> current_;
  const std::uint64_t number_;
  Extents surplus_;  // constant once it is restored
  bool fixed_ = false;
  bool zeroes_ = true;
};

}  // namespace gpufs::gpu
