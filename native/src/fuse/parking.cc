// Which files leave a device for the host tier: those of which a user asks it, and with eviction those that nobody uses
// when the device is full.

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>

#include "base/log.h"
#include "base/math.h"
#include "fuse/inode_table.h"

namespace gpufs::fuse {

namespace {

// How long parking waits for memory of the host tier that is being freed.
constexpr std::chrono::seconds kFreeTimeout{3};
// How long a full device waits for files that came back a moment ago, and may not go yet.
constexpr std::chrono::seconds kStayTimeout{10};
// An extended attribute: the file stays on its device, whoever needs space.
constexpr const char* kPinned = "user.gpufs-pinned";

Status no_host_tier() {
  return Status(EOPNOTSUPP, "the mount has no host memory for parked files: mount it with --host-memory SIZE");
}

}  // namespace

std::shared_ptr<DeviceContext> InodeTable::host_tier() const {
  return !devices_.empty() && devices_.back()->info().host_tier ? devices_.back() : nullptr;
}

std::shared_ptr<Account> InodeTable::host_account(std::uint32_t uid) {
  return quotas_.user(static_cast<std::int32_t>(devices_.size()) - 1, uid);
}

void InodeTable::charge_to(std::uint32_t uid, std::int32_t device, ExtentBuffer& buffer) {
  buffer.charge().move(Charge::kOwner, quotas_.user(device, uid));
  if (host_tier() != nullptr) buffer.charge_parked_to(host_account(uid));
}

Result<bool> InodeTable::park(Inode& inode) {
  const std::shared_ptr<DeviceContext> host = host_tier();
  if (host == nullptr) return no_host_tier();
  if (!inode.buffer_ || inode.replaced_) return Status(EINVAL, "the file has no memory of the mount's");
  if (inode.buffer_->device() == host) return Status(EINVAL, "the file is in host memory already");
  const auto attempt = [&] {
    Result<bool> parked = inode.own_buffer().park(host, host_account(inode.attributes().uid));
    // The owner may have changed while the contents were copied.
    const Inode::Writer writer(inode);
    charge_to(writer->record.attributes.uid, inode.device_, inode.own_buffer());
    return parked;
  };
  Result<bool> parked = attempt();
  if (parked.error() != ENOSPC) return parked;
  // What files that are back have left there is free in a moment.
  const std::uint64_t bytes = inode.buffer_->bytes_held();
  host->releases().wait_for_expected(std::chrono::steady_clock::now() + kFreeTimeout, [&] {
    const Result<MemoryInfo> memory = host->memory();
    return !memory.ok() || memory.value().free_bytes >= bytes;
  });
  return attempt();
}

Result<InodeTable::Space> InodeTable::space_for(std::span<const std::uint64_t> inos, bool parks) {
  const std::shared_ptr<DeviceContext> host = host_tier();
  if (parks && host == nullptr) return no_host_tier();
  std::shared_ptr<DeviceContext> target = host;
  Space space;
  for (const std::uint64_t ino : inos) {
    const std::shared_ptr<Inode> inode = find(ino);
    if (!inode || !inode->buffer_ || inode->replaced_) continue;
    const ExtentBuffer& buffer = inode->own_buffer();
    const std::uint64_t granule = buffer.device()->info().granule;
    const std::uint64_t parked = buffer.bytes_parked();
    if (!parks) {
      target = buffer.device();
      space.needed += parked;
    } else if (parked == 0 && buffer.device() != host && buffer.size() >= granule) {
      // Not what is preallocated.
      space.needed += std::min(buffer.bytes_held(), round_up(buffer.placement() + buffer.size(), granule));
    }
  }
  Status status;
  const auto enough = [&] {
    const Result<MemoryInfo> memory = target->memory();
    status = memory.status();
    space.free = memory.ok() ? memory.value().free_bytes + (parks ? 0 : evictable(target->info().index)) : 0;
    return !memory.ok() || space.free >= space.needed;
  };
  if (space.needed != 0 && !enough()) {
    for (const std::weak_ptr<ExtentBuffer>& listed : target->releases().trimmable()) {
      if (const std::shared_ptr<ExtentBuffer> buffer = listed.lock()) (void)buffer->trim(std::chrono::milliseconds(0));
    }
    target->releases().wait_for_expected(std::chrono::steady_clock::now() + kFreeTimeout, enough);
  }
  TRY(status);
  return space;
}

void InodeTable::evict_when_full() {
  if (host_tier() == nullptr) return;
  for (const std::shared_ptr<DeviceContext>& device : devices_) {
    if (device->info().host_tier) continue;
    device->releases().set_evictor(
        [this, index = device->info().index](std::uint64_t needed) { return evict(index, needed); });
  }
  evicts_ = true;
}

InodeTable::~InodeTable() {
  for (const std::shared_ptr<DeviceContext>& device : devices_) device->releases().set_evictor(nullptr);
}

InodeTable::IdleFiles InodeTable::idle_files(std::int32_t device) const {
  IdleFiles idle;
  for (std::shared_ptr<Inode>& inode : all()) {
    if (inode->device_ != device || !inode->buffer_ || inode->replaced_) continue;
    const ExtentBuffer& buffer = inode->own_buffer();
    if (buffer.bytes_held() < buffer.device()->info().granule || buffer.leased()) continue;
    {
      const Inode::Reader reader(*inode);
      const bool is_pinned = reader->extended && reader->extended->find(kPinned) != nullptr;
      if (reader->open_files > 0 || reader->record.attributes.nlink == 0 || is_pinned) continue;
    }
    idle.emplace(buffer.last_used(), std::move(inode));
  }
  return idle;
}

bool InodeTable::evict(std::int32_t device, std::uint64_t needed) {
  const auto deadline = std::chrono::steady_clock::now() + kStayTimeout;
  for (;;) {
    auto soonest = deadline;
    const IdleFiles idle = idle_files(device);
    // Else a call that must fail would first park the files of everybody.
    const Result<MemoryInfo> memory = devices_[static_cast<std::size_t>(device)]->memory();
    if (memory.ok() && memory.value().free_bytes + parkable_bytes(idle) < needed) return false;
    for (const auto& [used, inode] : idle) {
      const auto until = inode->own_buffer().stays_until();
      if (until > std::chrono::steady_clock::now()) {
        soonest = std::min(soonest, until);
        continue;
      }
      const Result<bool> parked = park(*inode);  // EBUSY: a program has attached it meanwhile
      if (!parked.ok() || !parked.value()) continue;
      if (log_permitted(inode->attributes().uid)) {
        log_info("inode ", inode->ino(), " was parked: ", directory_of(device), " is full");
      }
      return true;
    }
    if (soonest >= deadline) return false;
    std::this_thread::sleep_until(soonest);  // files that came back a moment ago may go then
  }
}

std::uint64_t InodeTable::parkable_bytes(const IdleFiles& files) const {
  const std::shared_ptr<DeviceContext> host = host_tier();
  const Result<MemoryInfo> memory = host->memory();
  if (!memory.ok()) return 0;
  std::uint64_t bytes = 0;
  for (const auto& [used, inode] : files) bytes += inode->buffer_->bytes_held();
  return std::min(bytes, memory.value().free_bytes + host->releases().expected_bytes());
}

std::uint64_t InodeTable::evictable(std::int32_t device) {
  if (!evicts_ || !has_device(device) || devices_[static_cast<std::size_t>(device)]->info().host_tier) return 0;
  constexpr int kShare = 20;  // statfs(2) in a loop uses 5 % of a processor
  const Result<MemoryInfo> host = host_tier()->memory();
  const std::lock_guard lock(evictable_mutex_);
  Evictable& known = evictable_[device];
  if (const auto start = std::chrono::steady_clock::now(); start >= known.good_until) {
    known.bytes = 0;
    for (const auto& [used, inode] : idle_files(device)) known.bytes += inode->buffer_->bytes_held();
    const auto end = std::chrono::steady_clock::now();
    known.good_until = end + kShare * (end - start);
  }
  return host.ok() ? std::min(known.bytes, host.value().free_bytes) : 0;
}

}  // namespace gpufs::fuse
