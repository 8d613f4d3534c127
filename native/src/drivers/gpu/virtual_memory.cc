#include "drivers/gpu/virtual_memory.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "base/caught.h"

namespace gpufs::gpu {
namespace {

std::uint64_t end_of(std::uint64_t offset, const PhysicalMemory& physical) { return offset + physical.bytes(); }

}  // namespace

Result<std::shared_ptr<PhysicalMemory>> PhysicalMemory::create(std::shared_ptr<Context> context, std::uint64_t bytes) {
  // Made first: what the device gives has an owner at once, which needs no memory any more.
  std::shared_ptr<PhysicalMemory> made(new PhysicalMemory(std::move(context), bytes));
  if (Status status = made->context_->acquire_physical(bytes, &made->handle_); !status.ok()) return status;
  made->taken_ = true;
  return made;
}

PhysicalMemory::~PhysicalMemory() {
  if (taken_) context_->return_physical(handle_, bytes_, !exported_);
}

Result<UniqueFd> PhysicalMemory::export_descriptor() {
  exported_ = true;
  int fd = -1;
  Status status = context_->export_physical(handle_, &fd);
  if (!status.ok()) return status;
  UniqueFd descriptor(fd);
  // The driver opens it; whether children inherit it is not its concern.
  if (::fcntl(descriptor.get(), F_SETFD, FD_CLOEXEC) != 0) return Status::from_errno(errno, "fcntl(F_SETFD)");
  return descriptor;
}

Result<std::shared_ptr<MappedRange>> MappedRange::reserve(std::shared_ptr<Context> context, std::uint64_t bytes) {
  std::shared_ptr<MappedRange> made(new MappedRange(std::move(context), bytes));
  DeviceAddress base = 0;
  if (Status status = made->context_->reserve_range(bytes, &base); !status.ok()) return status;
  made->base_ = base;
  return made;
}

MappedRange::~MappedRange() {
  if (base_ == 0) return;
  const Current current(*context_);
  // One call for each contiguous run of pieces, where the vendor allows that.
  for (auto piece = shown_.begin(); piece != shown_.end();) {
    const std::uint64_t start = piece->first;
    std::uint64_t end = start;
    do {
      end = end_of(end, *piece->second);
      ++piece;
    } while (context_->spans_pieces() && piece != shown_.end() && piece->first == end);
    // A range that is given back with a piece still in it cannot be: the vendor keeps both, and nothing else is lost.
    static_cast<void>(context_->unmap(base_ + start, end - start));
  }
  context_->free_range(base_, bytes_);
}

Status MappedRange::show(std::uint64_t offset, std::shared_ptr<PhysicalMemory> physical) {
  // Listed first: what is mapped is always known.
  const auto [place, fresh] = shown_.emplace(offset, std::move(physical));
  if (!fresh) return {EEXIST, "the range shows something there already"};
  const PhysicalMemory& shown = *place->second;
  Status status = caught([&] { return context_->map(base_ + offset, shown.bytes(), shown.handle()); });
  if (!status.ok()) shown_.erase(place);
  return status;
}

Status MappedRange::hide(std::uint64_t offset) {
  const auto piece = shown_.find(offset);
  if (piece == shown_.end()) return {};
  Status status = context_->unmap(base_ + offset, piece->second->bytes());
  if (status.ok()) shown_.erase(piece);
  return status;
}

bool MappedRange::shows(std::uint64_t offset, const PhysicalMemory& physical) const {
  const auto piece = shown_.find(offset);
  return piece != shown_.end() && piece->second.get() == &physical;
}

Status MappedRange::allow(std::uint64_t offset, std::uint64_t bytes) {
  if (context_->spans_pieces()) return context_->allow(base_ + offset, bytes);
  const std::uint64_t end = offset + bytes;
  for (auto piece = shown_.find(offset); piece != shown_.end() && piece->first < end; ++piece) {
    Status status = context_->allow(base_ + piece->first, piece->second->bytes());
    if (!status.ok()) return status;
  }
  return {};
}

VirtualMemory::VirtualMemory(std::shared_ptr<Context> context)
    : context_(std::move(context)), granule_(context_->info().granule) {}

bool VirtualMemory::whole_granules(std::uint64_t offset, std::uint64_t bytes) const {
  return bytes != 0 && offset % granule_ == 0 && bytes % granule_ == 0 && offset + bytes > offset;
}

VirtualMemory::Pieces::iterator VirtualMemory::first_touching(std::uint64_t offset) {
  auto piece = pieces_.upper_bound(offset);
  if (piece != pieces_.begin()) {
    const auto before = std::prev(piece);
    if (end_of(before->first, *before->second.physical) > offset) return before;
  }
  return piece;
}

std::vector<MemorySpan> VirtualMemory::live_runs(const Pieces::value_type& piece) const {
  std::vector<MemorySpan> runs;
  const std::vector<bool>& live = piece.second.live;
  for (std::size_t i = 0; i < live.size(); ++i) {
    if (!live[i]) continue;
    if (i == 0 || !live[i - 1]) runs.push_back({piece.first + i * granule_, 0});
    runs.back().bytes += granule_;
  }
  return runs;
}

std::uint64_t VirtualMemory::populated_within(std::uint64_t offset, std::uint64_t bytes) {
  std::uint64_t granules = 0;
  const std::uint64_t end = offset + bytes;
  for (auto piece = first_touching(offset); piece != pieces_.end() && piece->first < end; ++piece) {
    const std::vector<bool>& live = piece->second.live;
    const std::uint64_t from = offset > piece->first ? (offset - piece->first) / granule_ : 0;
    const std::uint64_t to = std::min<std::uint64_t>(live.size(), (end - piece->first) / granule_);
    granules += static_cast<std::uint64_t>(std::count(live.begin() + static_cast<std::ptrdiff_t>(from),
                                                      live.begin() + static_cast<std::ptrdiff_t>(to), true));
  }
  return granules * granule_;
}

void VirtualMemory::mark(std::uint64_t offset, std::uint64_t bytes, bool live) {
  const std::uint64_t end = offset + bytes;
  for (auto piece = first_touching(offset); piece != pieces_.end() && piece->first < end; ++piece) {
    Piece& marked = piece->second;
    const std::uint64_t from = offset > piece->first ? (offset - piece->first) / granule_ : 0;
    const std::uint64_t to = std::min<std::uint64_t>(marked.live.size(), (end - piece->first) / granule_);
    std::fill(marked.live.begin() + static_cast<std::ptrdiff_t>(from),
              marked.live.begin() + static_cast<std::ptrdiff_t>(to), live);
    marked.live_granules = static_cast<std::uint64_t>(std::count(marked.live.begin(), marked.live.end(), true));
  }
}

std::vector<std::shared_ptr<MappedRange>> VirtualMemory::ranges_showing(const Pieces::value_type& piece) {
  std::vector<std::shared_ptr<MappedRange>> showing;
  std::erase_if(ranges_, [](const std::weak_ptr<MappedRange>& range) { return range.expired(); });
  for (const std::weak_ptr<MappedRange>& weak : ranges_) {
    std::shared_ptr<MappedRange> range = weak.lock();
    if (range != nullptr && range->shows(piece.first, *piece.second.physical)) showing.push_back(std::move(range));
  }
  return showing;
}

Result<std::shared_ptr<AddressRange>> VirtualMemory::reserve(std::uint64_t bytes) {
  if (bytes == 0 || bytes > UINT64_MAX - granule_) return Status{EINVAL, "a range of no size, or of too much"};
  bytes = (bytes + granule_ - 1) / granule_ * granule_;
  if (!pieces_.empty()) {
    const auto last = std::prev(pieces_.end());
    if (end_of(last->first, *last->second.physical) > bytes) {
      return Status{EINVAL, "the new range is smaller than the memory it has to show"};
    }
  }
  const Current current(*context_);
  if (!current.status().ok()) return current.status();
  Result<std::shared_ptr<MappedRange>> reserved = MappedRange::reserve(context_, bytes);
  if (!reserved.ok()) return reserved.status();
  const std::shared_ptr<MappedRange> range = reserved.take();
  for (auto piece = pieces_.begin(); piece != pieces_.end();) {
    const std::uint64_t start = piece->first;
    std::uint64_t end = start;
    while (piece != pieces_.end() && piece->first == end) {
      if (Status status = range->show(end, piece->second.physical); !status.ok()) return status;
      end = end_of(end, *piece->second.physical);
      ++piece;
    }
    if (Status status = range->allow(start, end - start); !status.ok()) return status;
  }
  std::erase_if(ranges_, [](const std::weak_ptr<MappedRange>& earlier) { return earlier.expired(); });
  ranges_.push_back(range);
  current_ = range;
  return std::shared_ptr<AddressRange>(range);
}

Status VirtualMemory::add_pieces(std::uint64_t offset, std::uint64_t bytes, Pieces& pieces) {
  const std::uint64_t end = offset + bytes;
  for (std::uint64_t at = offset; at < end;) {
    const std::uint64_t part = std::min(kLargestPiece, end - at);
    Result<std::shared_ptr<PhysicalMemory>> physical = PhysicalMemory::create(context_, part);
    if (!physical.ok()) return physical.status();
    const Piece& piece =
        pieces.emplace(at, Piece{physical.take(), std::vector<bool>(part / granule_), 0}).first->second;
    if (Status status = current_->show(at, piece.physical); !status.ok()) return status;
    at += part;
  }
  return current_->allow(offset, bytes);
}

Status VirtualMemory::zero(std::uint64_t offset, std::uint64_t bytes) {
  SynchronousWork work(*context_);
  if (!work.status().ok()) return work.status();
  Status status = context_->fill_zero(current_->base() + offset, bytes, work.get());
  return status.ok() ? work.finish() : status;
}

Status VirtualMemory::populate(std::uint64_t offset, std::uint64_t bytes) {
  if (!whole_granules(offset, bytes) || current_ == nullptr || offset + bytes > current_->bytes()) {
    return {EINVAL, "not whole granules of the reserved range"};
  }
  if (populated_within(offset, bytes) != 0) return {EINVAL, "a part of this memory is populated already"};
  const Current current(*context_);
  if (!current.status().ok()) return current.status();

  // Where released granules are still held by their piece, they are used again.
  Pieces fresh;
  Status status;
  const std::uint64_t end = offset + bytes;
  std::uint64_t at = offset;
  for (auto piece = first_touching(offset); at < end && status.ok();) {
    const bool more = piece != pieces_.end() && piece->first < end;
    const std::uint64_t gap_end = more ? piece->first : end;
    if (gap_end > at) status = caught([&] { return add_pieces(at, gap_end - at, fresh); });
    if (!more) break;
    at = end_of(piece->first, *piece->second.physical);
    ++piece;
  }
  if (status.ok()) status = caught([&] { return zero(offset, bytes); });
  if (!status.ok()) {
    for (const auto& piece : fresh) static_cast<void>(current_->hide(piece.first));
    return status;
  }
  pieces_.merge(fresh);
  mark(offset, bytes, true);
  return {};
}

MemorySpan VirtualMemory::release_span(std::uint64_t offset, std::uint64_t bytes) {
  const std::uint64_t end = offset + bytes;
  std::uint64_t from = offset;
  std::uint64_t to = end;
  if (fixed_) return {offset, bytes};
  for (auto piece = first_touching(offset); piece != pieces_.end() && piece->first < end; ++piece) {
    for (const MemorySpan& run : live_runs(*piece)) {
      from = std::min(from, run.offset);
      to = std::max(to, run.offset + run.bytes);
    }
  }
  return {from, to - from};
}

Status VirtualMemory::release(std::uint64_t offset, std::uint64_t bytes) {
  if (!whole_granules(offset, bytes) || populated_within(offset, bytes) != bytes) {
    return {EINVAL, "not whole granules that are populated"};
  }
  const Current current(*context_);
  if (!current.status().ok()) return current.status();
  mark(offset, bytes, false);
  Status first_failure;
  const std::uint64_t end = offset + bytes;
  for (auto piece = first_touching(offset); piece != pieces_.end() && piece->first < end;) {
    const auto next = std::next(piece);
    if (piece->second.live_granules == 0) {
      for (const auto& range : ranges_showing(*piece)) {
        Status status = range->hide(piece->first);
        if (first_failure.ok()) first_failure = status;
      }
      pieces_.erase(piece);
    }
    piece = next;
  }
  if (fixed_) return first_failure;
  for (auto piece = first_touching(offset); piece != pieces_.end() && piece->first < end;) {
    const auto next = std::next(piece);
    Status status = split(piece);
    // With no room for the copy, the released part stays with its piece until all of it has been released.
    if (first_failure.ok() && status.error() != ENOSPC) first_failure = status;
    piece = next;
  }
  return first_failure;
}

Result<VirtualMemory::Pieces> VirtualMemory::copy_live(const Pieces::value_type& piece) {
  Result<std::shared_ptr<MappedRange>> reserved = MappedRange::reserve(context_, piece.second.physical->bytes());
  if (!reserved.ok()) return reserved.status();
  const std::shared_ptr<MappedRange> range = reserved.take();
  Pieces fresh;
  SynchronousWork work(*context_);
  if (!work.status().ok()) return work.status();
  for (const MemorySpan& run : live_runs(piece)) {
    Result<std::shared_ptr<PhysicalMemory>> physical = PhysicalMemory::create(context_, run.bytes);
    if (!physical.ok()) return physical.status();
    const std::uint64_t within = run.offset - piece.first;
    Status status = range->show(within, physical.value());
    if (status.ok()) status = range->allow(within, run.bytes);
    if (status.ok()) {
      status = context_->copy_within(range->base() + within, current_->base() + run.offset, run.bytes, work.get());
    }
    if (!status.ok()) return status;
    const std::uint64_t granules = run.bytes / granule_;
    fresh.emplace(run.offset, Piece{physical.take(), std::vector<bool>(granules, true), granules});
  }
  if (Status status = work.finish(); !status.ok()) return status;
  return fresh;
}

Status VirtualMemory::swap(MappedRange& range, const Pieces& from, const Pieces& to) {
  for (const auto& piece : from) {
    if (!range.shows(piece.first, *piece.second.physical)) continue;
    if (Status status = range.hide(piece.first); !status.ok()) return status;
  }
  for (const auto& piece : to) {
    if (range.shows(piece.first, *piece.second.physical)) continue;
    Status status = range.show(piece.first, piece.second.physical);
    if (status.ok()) status = range.allow(piece.first, piece.second.physical->bytes());
    if (!status.ok()) return status;
  }
  return {};
}

Status VirtualMemory::split(Pieces::iterator piece) {
  Result<Pieces> copied = copy_live(*piece);
  if (!copied.ok()) return copied.status();
  Pieces fresh = copied.take();
  Pieces old;
  old.emplace(piece->first, piece->second);

  const std::vector<std::shared_ptr<MappedRange>> ranges = ranges_showing(*piece);
  for (const auto& range : ranges) {
    Status status = swap(*range, old, fresh);
    if (status.ok()) continue;
    // Both copies hold the same, so every range can go back to the old one. If even that fails there are addresses
    // with nothing behind them, and the first access would take the device's context down.
    for (const auto& changed : ranges) {
      const Status restored = swap(*changed, fresh, old);
      if (!restored.ok()) context_->fail(restored.with_context("a mapping could not be restored"));
    }
    return status;
  }
  pieces_.erase(piece);
  pieces_.merge(fresh);
  return {};
}

Result<std::vector<ExportedMemory>> VirtualMemory::export_memory() {
  if (!context_->exports_descriptors()) {
    return Status{EOPNOTSUPP, "this device cannot export memory as file descriptors"};
  }
  const Current current(*context_);
  if (!current.status().ok()) return current.status();
  std::vector<ExportedMemory> exported;
  for (const auto& piece : pieces_) {
    Result<UniqueFd> descriptor = piece.second.physical->export_descriptor();
    if (!descriptor.ok()) return descriptor.status();
    exported.push_back({piece.first, piece.second.physical->bytes(), descriptor.take()});
  }
  fixed_ = true;
  return exported;
}

}  // namespace gpufs::gpu
