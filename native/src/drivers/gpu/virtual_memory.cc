#include "drivers/gpu/virtual_memory.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <string>

#include "base/log.h"
#include "base/math.h"

namespace gpufs::gpu {
namespace {

// Smaller pieces could be so many that their descriptors reach the process's limit.
constexpr std::uint64_t kSmallestCached = std::uint64_t{64} << 20;

// How often restoring a mapping is tried.
constexpr int kRestoreAttempts = 5;

std::uint64_t end_of(std::uint64_t offset, const PhysicalMemory& physical) { return offset + physical.bytes(); }

}  // namespace

Result<std::shared_ptr<PhysicalMemory>> PhysicalMemory::create(std::shared_ptr<GpuDevice> device, std::uint64_t bytes,
                                                               DeviceAddress address, Wait wait, bool wants_zeros) {
  const AcquiredMemory piece = TRY(device->acquire_physical(bytes, address, wants_zeros, wait));
  std::shared_ptr<PhysicalMemory> created(new PhysicalMemory(std::move(device), bytes, piece.handle, /*own=*/true));
  created->zeroed_ = piece.zeroed;
  created->left_mapped_ = piece.mapped ? address : 0;
  return created;
}

Result<std::shared_ptr<PhysicalMemory>> PhysicalMemory::import(std::shared_ptr<GpuDevice> device, int descriptor,
                                                               std::uint64_t bytes) {
  PhysicalHandle handle = 0;
  TRY(device->import_physical(descriptor, &handle));
  return std::shared_ptr<PhysicalMemory>(new PhysicalMemory(std::move(device), bytes, handle, /*own=*/false));
}

Result<std::shared_ptr<PhysicalMemory>> PhysicalMemory::adopt(std::shared_ptr<GpuDevice> device,
                                                              MemoryKeeper::KeptPiece piece) {
  PhysicalHandle handle = 0;
  TRY(device->adopt_physical(piece.descriptor.get(), piece.bytes, &handle));
  std::shared_ptr<PhysicalMemory> adopted(new PhysicalMemory(std::move(device), piece.bytes, handle, /*own=*/true));
  // Perhaps. And it may be impossible to export it again, for the keeper, if it served another memory.
  adopted->exported_ = true;
  adopted->descriptor_ = std::move(piece.descriptor);
  adopted->key_ = piece.key;
  return adopted;
}

PhysicalMemory::~PhysicalMemory() {
  drop();
  descriptor_.reset();
  device_->return_physical(handle_, own_ ? bytes_ : 0, !exported_, left_mapped_);
}

bool PhysicalMemory::leave_mapped(DeviceAddress address) {
  if (exported_ || device_->pool_of(bytes_) == nullptr || !device_->health().ok()) return false;
  left_mapped_ = address;
  return true;
}

void PhysicalMemory::keep(std::uint64_t memory, std::uint64_t offset) {
  if (device_->keeper() == nullptr) return;
  Result<UniqueFd> descriptor = export_new();
  if (!descriptor.ok()) {
    key_ = device_->keeper()->lose(descriptor.status());
    return;
  }
  descriptor_ = descriptor.take();
  key_ = device_->keeper()->hold(memory, offset, bytes_, descriptor_.get());
}

void PhysicalMemory::drop() {
  if (key_ != 0) device_->keeper()->drop(std::exchange(key_, 0));
}

Result<UniqueFd> PhysicalMemory::export_new() {
  int fd = -1;
  TRY(device_->call(device_->functions().memory_export, &fd, handle_, api::kHandleDescriptor, 0));
  UniqueFd descriptor(fd);
  // The driver opens it inheritable.
  if (::fcntl(descriptor.get(), F_SETFD, FD_CLOEXEC) != 0) return Status::from_errno(errno, "fcntl(F_SETFD)");
  return descriptor;
}

Result<UniqueFd> PhysicalMemory::export_descriptor() {
  exported_ = true;
  if (!descriptor_.valid()) {
    Result<UniqueFd> descriptor = export_new();
    if (!descriptor.ok() || bytes_ < kSmallestCached) return descriptor;
    descriptor_ = descriptor.take();
  }
  UniqueFd copy(::fcntl(descriptor_.get(), F_DUPFD_CLOEXEC, 3));
  if (!copy.valid()) return Status::from_errno(errno, "duplicating the descriptor of a piece of memory");
  return copy;
}

Result<std::shared_ptr<MappedRange>> MappedRange::reserve(std::shared_ptr<GpuDevice> device, std::uint64_t bytes,
                                                          bool reuses) {
  if (reuses && device->pool() != nullptr) {
    if (const std::optional<Extent> left = device->pool()->take_range(bytes)) {
      return std::shared_ptr<MappedRange>(new MappedRange(std::move(device), left->offset, left->bytes));
    }
  }
  DeviceAddress base = 0;
  TRY(device->call_for_others(device->functions().address_reserve, &base, bytes, 0, 0, 0));
  return std::shared_ptr<MappedRange>(new MappedRange(std::move(device), base, bytes));
}

MappedRange::~MappedRange() {
  const Current current(*device_);
  if (!unmapping_failed_) {
    std::erase_if(shown_, [this](const auto& piece) {
      return piece.second.use_count() == 1 && piece.second->leave_mapped(base() + piece.first);
    });
  }
  // A range with a piece in it cannot be freed: the driver keeps both, and nothing else is lost.
  if (!hide_all().ok()) return;
  if (HostTierPool* const pool = device_->pool()) {
    pool->give_range({base(), bytes()});
  } else {
    device_->functions().address_free(base(), bytes());
  }
}

Status MappedRange::hide_all() {
  Status failure;
  // One call for each contiguous run of pieces, where the vendor allows that.
  for (auto first = shown_.begin(); first != shown_.end();) {
    auto next = first;
    std::uint64_t end = first->first;
    do {
      end = end_of(end, *next->second);
      ++next;
    } while (device_->spans_pieces() && next != shown_.end() && next->first == end);
    if (unmap(first->first, end - first->first).ok()) {
      first = shown_.erase(first, next);
      continue;
    }
    // Piece by piece, so that one that cannot be unmapped does not keep the others.
    while (first != next) {
      const auto piece = first++;
      if (Status status = hide(piece->first); !status.ok()) failure = status;
    }
  }
  return failure;
}

Status MappedRange::unmap(std::uint64_t offset, std::uint64_t bytes) {
  Status status = device_->call(device_->functions().memory_unmap, base() + offset, bytes);
  unmapping_failed_ = unmapping_failed_ || !status.ok();
  return status;
}

Status MappedRange::show(std::uint64_t offset, std::shared_ptr<PhysicalMemory> physical, bool* accessible) {
  if (shown_.contains(offset)) return {EEXIST, "the range shows something there already"};
  const bool there = physical->take_mapping(base() + offset);
  if (accessible != nullptr) *accessible = there;
  Status status;
  if (!there && device_->pool() != nullptr) status = device_->pool()->clear({base() + offset, physical->bytes()});
  if (!there && status.ok()) status = device_->map(base() + offset, physical->bytes(), physical->handle());
  if (status.ok()) shown_.emplace(offset, std::move(physical));
  return status;
}

Status MappedRange::hide(std::uint64_t offset) {
  const auto piece = shown_.find(offset);
  if (piece == shown_.end()) return {};
  Status status = unmap(offset, piece->second->bytes());
  if (status.ok()) shown_.erase(piece);
  return status;
}

bool MappedRange::shows(std::uint64_t offset, const PhysicalMemory& physical) const {
  const auto piece = shown_.find(offset);
  return piece != shown_.end() && piece->second.get() == &physical;
}

Status MappedRange::allow(std::uint64_t offset, std::uint64_t bytes) {
  if (device_->spans_pieces()) return device_->allow(base() + offset, bytes);
  const std::uint64_t end = offset + bytes;
  for (auto piece = shown_.find(offset); piece != shown_.end() && piece->first < end; ++piece) {
    TRY(device_->allow(base() + piece->first, piece->second->bytes()));
  }
  return {};
}

VirtualMemory::VirtualMemory(std::shared_ptr<GpuDevice> device, std::uint64_t number)
    : device_(std::move(device)), granule_(device_->info().granule), number_(number) {}

// The pieces go with the range, which may leave them mapped.
VirtualMemory::~VirtualMemory() { pieces_.clear(); }

std::unique_ptr<DeviceMemory> VirtualMemory::create(std::shared_ptr<GpuDevice> device) {
  const std::uint64_t number = device->keeper() != nullptr ? device->keeper()->new_memory() : 0;
  return std::make_unique<VirtualMemory>(std::move(device), number);
}

Result<std::unique_ptr<DeviceMemory>> VirtualMemory::restore(const std::shared_ptr<GpuDevice>& device,
                                                             std::uint64_t number, std::span<const Extent> populated) {
  const Current current(*device);
  TRY(current.status());
  auto memory = std::make_unique<VirtualMemory>(device, number);
  std::vector<MemoryKeeper::KeptPiece> kept = device->keeper()->take(number);
  // Where a piece was being split, its successors hold the same, but perhaps not all of them were kept.
  std::ranges::sort(kept, {}, &MemoryKeeper::KeptPiece::key);
  for (MemoryKeeper::KeptPiece& piece : kept) {
    const std::uint64_t offset = piece.offset;
    const std::uint64_t key = piece.key;
    const auto next = memory->first_touching(offset);
    const bool possible = piece.bytes != 0 && (offset | piece.bytes) % memory->granule_ == 0;
    if (!possible || (next != memory->pieces_.end() && next->first < offset + piece.bytes)) {
      device->keeper()->drop(key);
      continue;
    }
    const std::size_t granules = static_cast<std::size_t>(piece.bytes / memory->granule_);
    std::shared_ptr<PhysicalMemory> physical = TRY(PhysicalMemory::adopt(device, std::move(piece)));
    memory->pieces_.emplace(offset, MappedPiece{std::move(physical), std::vector<bool>(granules), 0});
  }
  std::uint64_t live = 0;
  for (const Extent& span : populated) {
    memory->mark(span, true);
    live += span.bytes / memory->granule_;
  }
  std::erase_if(memory->pieces_, [&](const auto& piece) {
    live -= piece.second.live_granules;
    return piece.second.live_granules == 0;
  });
  if (live != 0) return Status(ENOENT, "memory " + std::to_string(number) + " was not kept");
  for (const auto& piece : memory->pieces_) {
    const Extents whole{{piece.first, piece.second.physical->bytes()}};
    memory->surplus_ = joined(memory->surplus_, without(whole, memory->live_runs(piece)));
  }
  for (const Extent& span : memory->surplus_) memory->mark(span, true);
  return std::unique_ptr<DeviceMemory>(std::move(memory));
}

VirtualMemory::Pieces::iterator VirtualMemory::first_touching(std::uint64_t offset) {
  auto piece = pieces_.upper_bound(offset);
  if (piece != pieces_.begin()) {
    const auto before = std::prev(piece);
    if (end_of(before->first, *before->second.physical) > offset) return before;
  }
  return piece;
}

Extents VirtualMemory::live_runs(const Pieces::value_type& piece) const {
  Extents runs;
  const std::vector<bool>& live = piece.second.live;
  for (std::size_t i = 0; i < live.size(); ++i) {
    if (!live[i]) continue;
    if (i == 0 || !live[i - 1]) runs.push_back({piece.first + i * granule_, 0});
    runs.back().bytes += granule_;
  }
  return runs;
}

void VirtualMemory::mark(const Extent& span, bool live) {
  const std::uint64_t offset = span.offset;
  const std::uint64_t end = span.end();
  for (auto piece = first_touching(offset); piece != pieces_.end() && piece->first < end; ++piece) {
    MappedPiece& marked = piece->second;
    const std::uint64_t from = offset > piece->first ? (offset - piece->first) / granule_ : 0;
    const std::uint64_t to = std::min<std::uint64_t>(marked.live.size(), (end - piece->first) / granule_);
    std::fill(marked.live.begin() + static_cast<std::ptrdiff_t>(from),
              marked.live.begin() + static_cast<std::ptrdiff_t>(to), live);
    marked.live_granules = static_cast<std::uint64_t>(std::count(marked.live.begin(), marked.live.end(), true));
  }
}

Result<std::shared_ptr<AddressRange>> VirtualMemory::reserve(std::uint64_t bytes,
                                                             std::span<const Extent> /*populated*/) {
  bytes = round_up(bytes, granule_);
  const Current current(*device_);
  TRY(current.status());
  const std::shared_ptr<MappedRange> range = TRY(MappedRange::reserve(device_, bytes, /*reuses=*/pieces_.empty()));
  for (auto piece = pieces_.begin(); piece != pieces_.end();) {
    const std::uint64_t start = piece->first;
    std::uint64_t end = start;
    while (piece != pieces_.end() && piece->first == end) {
      TRY(range->show(end, piece->second.physical));
      end = end_of(end, *piece->second.physical);
      ++piece;
    }
    TRY(range->allow(start, end - start));
  }
  current_ = range;
  return std::shared_ptr<AddressRange>(range);
}

Status VirtualMemory::add_pieces(std::uint64_t offset, std::uint64_t bytes, Pieces& pieces, Wait wait) {
  const std::uint64_t end = offset + bytes;
  Extents mapped;
  for (std::uint64_t at = offset; at < end;) {
    const std::uint64_t part = std::min(device_->largest_piece(), end - at);
    std::shared_ptr<PhysicalMemory> physical =
        TRY(PhysicalMemory::create(device_, part, current_->base() + at, wait, zeroes_));
    const MappedPiece& piece =
        pieces.emplace(at, MappedPiece{std::move(physical), std::vector<bool>(part / granule_), 0}).first->second;
    piece.physical->keep(number_, at);
    bool accessible = false;
    TRY(current_->show(at, piece.physical, &accessible));
    if (!accessible) mapped = joined(mapped, {{at, part}});
    at += part;
  }
  for (const Extent& run : mapped) {
    TRY(current_->allow(run.offset, run.bytes));
  }
  return {};
}

void VirtualMemory::take_back(Pieces& fresh) {
  std::erase_if(fresh, [this](const auto& piece) {
    return !current_->shows(piece.first, *piece.second.physical) || current_->hide(piece.first).ok();
  });
  pieces_.merge(fresh);
}

Status VirtualMemory::back(const Extent& span, Pieces& fresh, Wait wait) {
  const std::uint64_t end = span.end();
  std::uint64_t at = span.offset;
  for (auto piece = first_touching(at); at < end;) {
    const bool more = piece != pieces_.end() && piece->first < end;
    const std::uint64_t gap_end = more ? piece->first : end;
    if (gap_end > at) {
      TRY(add_pieces(at, gap_end - at, fresh, wait));
    }
    if (!more) break;
    at = end_of(piece->first, *piece->second.physical);
    if (piece->second.live_granules == 0) {
      // The piece may have been kept because it could be mapped, but neither made accessible nor unmapped.
      TRY(current_->allow(piece->first, at - piece->first));
    }
    ++piece;
  }
  return {};
}

std::uint64_t VirtualMemory::descriptors_for(std::span<const Extent> spans) {
  std::uint64_t fresh = 0;
  for (const auto& [offset, bytes] : spans) {
    const std::uint64_t end = offset + bytes;
    std::uint64_t at = offset;
    for (auto piece = first_touching(at); at < end;) {
      const bool more = piece != pieces_.end() && piece->first < end;
      const std::uint64_t gap_end = more ? std::max(piece->first, at) : end;
      fresh += (gap_end - at + device_->largest_piece() - 1) / device_->largest_piece();
      at = more ? end_of(piece->first, *piece->second.physical) : end;
      if (more) ++piece;
    }
  }
  return number_ == 0 ? 0 : fresh;
}

Status VirtualMemory::populate_all(std::span<const Extent> spans, Wait wait) {
  const Current current(*device_);
  TRY(current.status());
  Pieces fresh;
  Status status;
  for (const Extent& span : spans) {
    if (status.ok()) status = back(span, fresh, wait);
  }
  if (status.ok() && zeroes_) {
    Extents zeros;
    for (const auto& [offset, piece] : fresh) {
      if (piece.physical->zeroed()) zeros = joined(zeros, {{offset, piece.physical->bytes()}});
    }
    status = device_->zero_spans(current_->base(), without(Extents(spans.begin(), spans.end()), zeros));
  }
  if (!status.ok()) {
    take_back(fresh);
    return status;
  }
  pieces_.merge(fresh);
  for (const Extent& span : spans) mark(span, true);
  return {};
}

Extent VirtualMemory::release_span(std::uint64_t offset, std::uint64_t bytes) {
  const std::uint64_t end = offset + bytes;
  std::uint64_t from = offset;
  std::uint64_t to = end;
  if (fixed_) return {offset, bytes};
  for (auto piece = first_touching(offset); piece != pieces_.end() && piece->first < end; ++piece) {
    for (const Extent& run : live_runs(*piece)) {
      from = std::min(from, run.offset);
      to = std::max(to, run.end());
    }
  }
  return {from, to - from};
}

void VirtualMemory::release_all(std::span<const Extent> spans) {
  for (const Extent& span : spans) mark(span, false);
  const Current current(*device_);
  if (!current.status().ok()) return;
  const auto each_piece = [&](auto work) {
    for (const Extent& span : spans) {
      for (auto piece = first_touching(span.offset); piece != pieces_.end() && piece->first < span.end();) {
        const auto next = std::next(piece);
        work(piece);
        piece = next;
      }
    }
  };
  each_piece([this](Pieces::iterator piece) {
    if (piece->second.live_granules != 0 || !current_->hide(piece->first).ok()) return;
    piece->second.physical->drop();  // readers may still have the memory itself
    pieces_.erase(piece);
  });
  if (fixed_) return;
  each_piece([this](Pieces::iterator piece) {
    const MappedPiece& mapped = piece->second;
    if (mapped.live_granules == 0 || mapped.live_granules == mapped.live.size()) return;
    if (const Status status = split(piece); !status.ok())
      log_debug("a part of a piece of memory stays in use: ", status.message());
  });
}

Result<VirtualMemory::Pieces> VirtualMemory::copy_live(const Pieces::value_type& piece) {
  const std::shared_ptr<MappedRange> range = TRY(MappedRange::reserve(device_, piece.second.physical->bytes()));
  Pieces fresh;
  SynchronousWork work(*device_);
  TRY(work.status());
  for (const Extent& run : live_runs(piece)) {
    std::shared_ptr<PhysicalMemory> physical =
        TRY(PhysicalMemory::create(device_, run.bytes, /*address=*/0, Wait::kAllowed, false));
    const std::uint64_t within = run.offset - piece.first;
    Status status = range->show(within, physical);
    if (status.ok()) status = range->allow(within, run.bytes);
    if (status.ok()) {
      status = device_->call(device_->functions().copy_on_device, range->base() + within, current_->base() + run.offset,
                             run.bytes, work.get());
    }
    if (!status.ok()) return status;
    const std::uint64_t granules = run.bytes / granule_;
    fresh.emplace(run.offset, MappedPiece{std::move(physical), std::vector<bool>(granules, true), granules});
  }
  TRY(work.finish());
  return fresh;
}

Status VirtualMemory::swap(const Pieces& from, const Pieces& to) {
  for (const auto& piece : from) {
    if (!current_->shows(piece.first, *piece.second.physical)) continue;
    TRY(current_->hide(piece.first));
  }
  for (const auto& piece : to) {
    Status status;
    if (!current_->shows(piece.first, *piece.second.physical)) {
      status = current_->show(piece.first, piece.second.physical);
    }
    if (status.ok()) status = current_->allow(piece.first, piece.second.physical->bytes());
    if (!status.ok()) return status;
  }
  return {};
}

Status VirtualMemory::split(Pieces::iterator piece) {
  Pieces fresh = TRY(copy_live(*piece));
  Pieces old;
  old.emplace(piece->first, piece->second);
  Status failure = swap(old, fresh);
  if (failure.ok()) {
    for (const auto& [offset, successor] : fresh) successor.physical->keep(number_, offset);
    piece->second.physical->drop();
    pieces_.erase(piece);
    pieces_.merge(fresh);
    return {};
  }
  // Either copy will do, as both hold the same. But the addresses must be mapped: an access to unmapped memory would
  // destroy the device's context, and with it all files.
  Status restored;
  for (int attempt = 0; attempt < kRestoreAttempts; ++attempt) {
    restored = swap(fresh, old);
    if (restored.ok()) return failure;
  }
  device_->fail(restored.with_context("a mapping could not be restored"));
  return failure;
}

Result<std::vector<ExportedMemory>> VirtualMemory::export_memory(std::uint64_t from, std::uint64_t end,
                                                                 std::size_t capacity, bool /*writable*/) {
  TRY(device_->check_sharing());
  const Current current(*device_);
  TRY(current.status());
  std::vector<ExportedMemory> exported;
  for (auto piece = pieces_.lower_bound(from); piece != pieces_.end() && piece->first < end; ++piece) {
    if (exported.size() == capacity) break;
    UniqueFd descriptor = TRY(piece->second.physical->export_descriptor());
    exported.push_back({{piece->first, piece->second.physical->bytes()}, std::move(descriptor)});
  }
  return exported;
}

}  // namespace gpufs::gpu
