#include "fuse/inode_table.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>

#include "base/cpus.h"
#include "base/log.h"
#include "base/pages.h"
#include "base/thread.h"
#include "fuse/extended_attributes.h"
#include "memory/slab_pool.h"

namespace gpufs::fuse {

namespace {

// Whether what a record describes cannot be restored by any process. Everything else may pass, as a lack of memory
// does.
bool is_bad_record(const Status& status) { return status.error() == EPROTO || status.error() == ENOENT; }

// Calls work(index) for each index below `count`, on several threads if there are many. It must not throw.
void for_each_index(std::size_t count, const std::function<void(std::size_t)>& work) {
  constexpr std::size_t kChunk = 1024;
  constexpr std::size_t kMostThreads = 8;
  std::atomic<std::size_t> next{0};
  const auto run = [&] {
    for (std::size_t start = 0; (start = next.fetch_add(kChunk)) < count;) {
      for (std::size_t index = start; index < std::min(start + kChunk, count); ++index) work(index);
    }
  };
  const std::size_t most = std::min({kMostThreads, static_cast<std::size_t>(usable_cpus(-1)), count / kChunk});
  std::vector<std::thread> threads;
  while (threads.size() + 1 < most) {
    Result<std::thread> thread = start_thread("gpufs-restore", run);
    if (!thread.ok()) break;  // fewer do it as well
    threads.push_back(thread.take());
  }
  run();
  for (std::thread& thread : threads) thread.join();
}

// Waking another thread takes longer than freeing so much memory that the CPU can address: a slot for a small file.
constexpr std::uint64_t kBrieflyFreedBytes = std::uint64_t{64} << 10;

// How long parking waits for memory of the host tier that is being freed.
constexpr std::chrono::seconds kFreeTimeout{3};
// How long a full device waits for files that came back a moment ago, and may not go yet.
constexpr std::chrono::seconds kStayTimeout{10};
// An extended attribute: the file stays on its device, whoever needs space.
constexpr const char* kPinned = "user.gpufs-pinned";
constexpr bool kPreallocates = true;  // see trim_later()

Status no_host_tier() {
  return Status(EOPNOTSUPP, "the mount has no host memory for parked files: mount it with --host-memory SIZE");
}

Status unknown_inode(std::uint64_t ino) { return Status(ENOENT, "no inode " + std::to_string(ino)); }

}  // namespace

Result<std::shared_ptr<Inode>> InodeTable::add(const Wanted& wanted) {
  Inode::State state;
  gpufs_attributes& attributes = state.record.attributes;
  attributes = wanted.attributes;
  if (attributes.device < -1 || attributes.device >= static_cast<std::int32_t>(devices_.size())) {
    return Status(EINVAL, "no device " + std::to_string(attributes.device));
  }
  std::shared_ptr<Buffer> buffer;
  if (is_regular(attributes.mode) && attributes.device >= 0) {
    buffer = std::make_shared<ExtentBuffer>(devices_[static_cast<std::size_t>(attributes.device)], kPreallocates);
    buffer->charge().move(Charge::kOwner, quotas_.user(attributes.device, attributes.uid));
  }
  if (attributes.ino == 0) attributes.ino = ino_numbers_.next();
  state.record.birth_seconds = attributes.ctime;
  state.record.birth_nanoseconds = attributes.ctime_ns;
  state.record.references = wanted.references;
  state.record.first_directory = wanted.first_directory;
  auto inode = std::make_shared<Inode>(std::move(state), std::move(buffer), std::string(wanted.target), records_);
  if (wanted.parent != nullptr) inode->inherit(*wanted.parent, wanted.umask);
  TRY(insert(inode));
  return inode;
}

void InodeTable::watch_contents(const std::shared_ptr<Inode>& inode) {
  if (!inode->buffer_) return;
  inode->own_buffer().watch({.moved =
                                 [moved = std::weak_ptr<Inode>(inode)] {
                                   if (const std::shared_ptr<Inode> found = moved.lock()) {
                                     Inode::Writer(*found).contents_moved();
                                   }
                                 },
                             .freed =
                                 [this, watched = std::weak_ptr<Inode>(inode)](std::shared_ptr<Residence> left) {
                                   if (watched.lock()) free_left(std::move(left));
                                 }});
}

void InodeTable::free_left(std::shared_ptr<Residence> left) {
  if (left->held <= kBrieflyFreedBytes) return;
  const auto expected =
      std::make_shared<Releases::Expected>(left->device->releases(), [held = left->held] { return held; });
  expected->confirm();
  const std::int32_t device = left->device->info().index;
  executor_.submit({Executor::Lane::Kind::kRelease, device, 0}, nullptr, 0,
                   [expected, gone = std::move(left)](int, Cancellation&) mutable {
                     expected->begin_release();
                     gone.reset();
                   });
}

Status InodeTable::insert(const std::shared_ptr<Inode>& inode) {
  watch_contents(inode);
  const Inode::Writer writer(*inode);
  const std::uint32_t uid = writer->record.attributes.uid;
  const std::uint64_t metadata = inode->metadata(*writer);
  Metadata::Share* const share = metadata_.share_of(uid);
  if (!metadata_.take(share, metadata)) return metadata_full(uid);
  writer->charged = metadata;
  writer->charged_to = share;
  const std::unique_lock lock(inodes_mutex_);
  if (!inodes_.emplace(inode->ino_, inode).second) {
    metadata_.release(share, metadata);
    return Status(EEXIST, "inode " + std::to_string(inode->ino_) + " exists");
  }
  if (inode->buffer_) ++file_counts_[inode->device_];
  writer->presence = Inode::Presence::kKnown;
  return {};
}

Status InodeTable::metadata_full(std::uint32_t uid) const {
  log_user_warning(uid, "No space left on device: names and attributes of user ", uid,
                   " have reached the limit for metadata, which is ", metadata_limit(),
                   " bytes for all and half of that for a plain user. Remove files, or mount with a larger --metadata");
  return {ENOSPC, "the limit for metadata"};
}

void InodeTable::was_read(Inode& inode) const {
  const bool directory = inode.is_directory();
  inode.was_read((directory ? directory_access_times_ : access_times_).load(std::memory_order_relaxed));
}

void InodeTable::set_access_times(AccessTimes policy, bool not_directories) {
  access_times_.store(policy, std::memory_order_relaxed);
  directory_access_times_.store(not_directories ? AccessTimes::kNever : policy, std::memory_order_relaxed);
}

InodeTable::Departure InodeTable::forget_if_unused(const Inode& inode, Inode::State& state) {
  const InodeRecord& record = state.record;
  if (state.presence != Inode::Presence::kKnown || record.references != 0 || record.attributes.nlink != 0) return {};
  state.presence = Inode::Presence::kForgotten;
  metadata_.release(state.charged_to, std::exchange(state.charged, 0));
  return {true, update_expected(inode, state)};
}

void InodeTable::remove(std::shared_ptr<Inode> inode, Departure departure) {
  if (!departure.is_forgotten) return;
  {
    const std::unique_lock lock(inodes_mutex_);
    inodes_.erase(inode->ino_);
    if (inode->buffer_) --file_counts_[inode->device_];
  }
  if (!departure.must_be_freed) return;
  records_.afterwards([this, inode = std::move(inode)]() mutable { free_later(std::move(inode)); });
}

void InodeTable::remove_if_unused(std::shared_ptr<Inode> inode) {
  const Departure departure = forget_if_unused(*inode, *Inode::Writer(*inode));
  remove(std::move(inode), departure);
}

Status InodeTable::hold(std::uint64_t ino) {
  const std::shared_ptr<Inode> inode = find(ino);
  if (!inode) return unknown_inode(ino);
  const Inode::Writer writer(*inode);
  if (writer->presence == Inode::Presence::kForgotten) return unknown_inode(ino);
  if (writer->unclaimed > 0) {
    --writer->unclaimed;
    return {};
  }
  ++writer->record.references;
  ++writer->record.held;
  return {};
}

bool InodeTable::release_hold(std::uint64_t ino) {
  return drop_references(ino, [](Inode::State& state) {
    if (state.record.held == 0) return;
    --state.record.references;
    if (--state.record.held == 0) state.expected.reset();  // the kernel may need a moment from now on
  });
}

void InodeTable::release_unclaimed() {
  for (const std::uint64_t ino : std::exchange(held_before_, {})) {
    drop_references(ino, [](Inode::State& state) {
      state.record.held -= state.unclaimed;
      state.record.references -= std::exchange(state.unclaimed, 0);
    });
  }
}

bool InodeTable::forget(std::uint64_t ino, std::uint64_t count) {
  return drop_references(ino, [count](Inode::State& state) {
    std::uint64_t& references = state.record.references;
    references -= std::min(count, references - state.record.held);
  });
}

bool InodeTable::drop_references(std::uint64_t ino, const std::function<void(Inode::State&)>& drop) {
  std::shared_ptr<Inode> inode = find(ino);
  if (!inode) return false;
  Departure departure;
  {
    const Inode::Writer writer(*inode);
    drop(*writer);
    departure = forget_if_unused(*inode, *writer);
    if (!departure.is_forgotten) static_cast<void>(update_expected(*inode, *writer));
  }
  remove(std::move(inode), departure);
  return true;
}

std::shared_ptr<Inode> InodeTable::find(std::uint64_t ino) const {
  const std::shared_lock lock(inodes_mutex_);
  const auto found = inodes_.find(ino);
  return found == inodes_.end() ? nullptr : found->second;
}

Status InodeTable::set(Inode& inode, const AttributeChanges& changes, Wait wait, Responder& request) {
  // The size comes first, because it can fail, and without our mutex: the buffer takes that itself if contents move.
  if (changes.size) {
    TRY(inode.buffer()->resize(*changes.size, wait));
  }
  const bool pays = changes.uid && inode.buffer_;
  std::shared_ptr<Account> payer = pays ? quotas_.user(inode.device_, *changes.uid) : nullptr;
  const Inode::Writer writer(inode);
  gpufs_attributes& ours = writer->record.attributes;
  if (changes.mode) {
    ours.mode = (ours.mode & ~kPermissionBits) | (*changes.mode & kPermissionBits);
    if (writer->extended) writer->extended->follow_mode(ours.mode);
  }
  if (pays) inode.buffer_->charge().move(Charge::kOwner, std::move(payer));
  if (pays && inode.buffer_->bytes_parked() > 0) inode.own_buffer().charge_parked_to(host_account(*changes.uid));
  if (pays && inode.replacement_) inode.replacement_->charge().move_to_accounts_of(inode.buffer_->charge());
  if (changes.uid) {
    Metadata::Share* const share = metadata_.share_of(*changes.uid);
    metadata_.move(std::exchange(writer->charged_to, share), share, writer->charged);
  }
  ours.uid = changes.uid.value_or(ours.uid);
  ours.gid = changes.gid.value_or(ours.gid);
  if (changes.atime) set_atime(ours, *changes.atime);
  if (changes.mtime) set_mtime(ours, *changes.mtime);
  if (changes.size) ++writer->record.changes;
  set_ctime(ours, Timestamp::now());
  records_.done(request, {});
  return {};
}

Status InodeTable::set_links(std::shared_ptr<Inode> inode, std::uint32_t links) {
  const std::uint32_t before = inode->attributes().nlink;
  const std::uint64_t more = inode->is_directory() || links <= before ? 0 : links - before;
  bool must_be_freed = false;
  const auto change = [&](Inode::State& state) {
    state.record.attributes.nlink = links;
    set_ctime(state.record.attributes, Timestamp::now());
    must_be_freed = update_expected(*inode, state);  // removed at the same time
    return 0;
  };
  if (change_metadata(*inode, more, 0, change) != 0) {
    return {ENOSPC, "the limit for metadata"};
  }
  if (must_be_freed) records_.afterwards([this, inode = std::move(inode)]() mutable { free_later(std::move(inode)); });
  return {};
}

Status InodeTable::limit_user(std::int32_t device, std::uint32_t uid, std::optional<std::uint64_t> bytes) {
  if (!has_device(device)) return Status(EINVAL, "no device " + std::to_string(device));
  quotas_.limit_user(device, uid, bytes);
  return {};
}

std::string InodeTable::directory_of(std::int32_t device) const {
  const auto index = static_cast<std::size_t>(device);
  return index < devices_.size() && devices_[index]->info().host_tier ? "host0" : "gpu" + std::to_string(device);
}

std::shared_ptr<DeviceContext> InodeTable::host_tier() const {
  return !devices_.empty() && devices_.back()->info().host_tier ? devices_.back() : nullptr;
}

std::shared_ptr<Account> InodeTable::host_account(std::uint32_t uid) {
  return quotas_.user(static_cast<std::int32_t>(devices_.size()) - 1, uid);
}

Result<bool> InodeTable::park(Inode& inode) {
  const std::shared_ptr<DeviceContext> host = host_tier();
  if (host == nullptr) return no_host_tier();
  if (!inode.buffer_ || inode.replaced_) return Status(EINVAL, "the file has no memory of the mount's");
  if (inode.buffer_->device() == host) return Status(EINVAL, "the file is in host memory already");
  Result<bool> parked = park_for_owner(inode, host);
  if (parked.error() != ENOSPC) return parked;
  // What files that are back have left there is free in a moment.
  const std::uint64_t bytes = inode.buffer_->bytes_held();
  host->releases().wait_for_expected(std::chrono::steady_clock::now() + kFreeTimeout, [&] {
    const Result<MemoryInfo> memory = host->memory();
    return !memory.ok() || memory.value().free_bytes >= bytes;
  });
  return park_for_owner(inode, host);
}

Result<bool> InodeTable::park_for_owner(Inode& inode, const std::shared_ptr<DeviceContext>& host) {
  Result<bool> parked = inode.own_buffer().park(host, host_account(inode.attributes().uid));
  // The owner may have changed while the contents were copied.
  const Inode::Writer writer(inode);
  inode.own_buffer().charge_parked_to(host_account(writer->record.attributes.uid));
  return parked;
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

std::vector<std::shared_ptr<Inode>> InodeTable::idle_files(std::int32_t device) const {
  std::vector<std::pair<std::chrono::steady_clock::time_point, std::shared_ptr<Inode>>> idle;
  for (std::shared_ptr<Inode>& inode : all()) {
    if (inode->device_ != device || !inode->buffer_ || inode->replaced_) continue;
    const ExtentBuffer& buffer = inode->own_buffer();
    if (buffer.bytes_held() < buffer.device()->info().granule || buffer.leased()) continue;
    {
      const Inode::Reader reader(*inode);
      const bool is_pinned = reader->extended && reader->extended->find(kPinned) != nullptr;
      if (reader->open_files > 0 || reader->record.attributes.nlink == 0 || is_pinned) continue;
    }
    idle.emplace_back(buffer.last_used(), std::move(inode));
  }
  std::ranges::sort(idle, {}, [](const auto& each) { return each.first; });
  std::vector<std::shared_ptr<Inode>> found;
  found.reserve(idle.size());
  for (auto& [used, inode] : idle) found.push_back(std::move(inode));
  return found;
}

bool InodeTable::evict(std::int32_t device, std::uint64_t needed) {
  const auto deadline = std::chrono::steady_clock::now() + kStayTimeout;
  for (;;) {
    auto soonest = deadline;
    const std::vector<std::shared_ptr<Inode>> idle = idle_files(device);
    // Else a call that must fail would first park the files of everybody.
    const Result<MemoryInfo> memory = devices_[static_cast<std::size_t>(device)]->memory();
    if (memory.ok() && memory.value().free_bytes + parkable_bytes(idle) < needed) return false;
    for (const std::shared_ptr<Inode>& inode : idle) {
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

std::uint64_t InodeTable::parkable_bytes(const std::vector<std::shared_ptr<Inode>>& files) const {
  const std::shared_ptr<DeviceContext> host = host_tier();
  const Result<MemoryInfo> memory = host->memory();
  if (!memory.ok()) return 0;
  std::uint64_t bytes = 0;
  for (const std::shared_ptr<Inode>& inode : files) bytes += inode->buffer_->bytes_held();
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
    for (const std::shared_ptr<Inode>& inode : idle_files(device)) known.bytes += inode->buffer_->bytes_held();
    const auto end = std::chrono::steady_clock::now();
    known.good_until = end + kShare * (end - start);
  }
  return host.ok() ? std::min(known.bytes, host.value().free_bytes) : 0;
}

void InodeTable::charge_to_user(Buffer& buffer, std::uint32_t uid) {
  buffer.charge().move(Charge::kOwner, quotas_.user(buffer.device()->info().index, uid));
}

void InodeTable::charge_to(Inode& inode, std::uint64_t directory, std::shared_ptr<Account> account) {
  const Inode::Writer writer(inode);
  writer->record.limited_directory = account ? directory : 0;
  if (inode.buffer_) inode.buffer_->charge().move(Charge::kDirectory, account);
  if (inode.replacement_) inode.replacement_->charge().move(Charge::kDirectory, account);
  writer->directory_account = std::move(account);
}

Status InodeTable::replace_buffer(std::uint64_t ino, std::shared_ptr<Buffer> buffer, bool again) {
  const std::shared_ptr<Inode> inode = find(ino);
  if (!inode) return unknown_inode(ino);
  if (!inode->buffer_) return Status(EINVAL, "inode " + std::to_string(ino) + " has no buffer");
  const Timestamp now = Timestamp::now();
  const Inode::Writer writer(*inode);
  InodeRecord& record = writer->record;
  const bool is_new = record.created_open != 0 && record.writers_ever == 1 && record.attributes.nlink <= 1;
  const bool fresh = (is_new || again) && !inode->replaced_ && inode->buffer_->size() == 0;
  if (!fresh) return Status(EBUSY, "the file is not one that its opener has just created, empty and for itself alone");
  buffer->charge().move_to_accounts_of(inode->buffer_->charge());  // the file's owner may have changed
  inode->replacement_ = std::move(buffer);
  inode->replaced_.store(true, std::memory_order_release);
  if (again) return {};
  set_mtime(record.attributes, now);
  set_ctime(record.attributes, now);
  return {};
}

Result<std::uint64_t> InodeTable::open(const std::shared_ptr<Inode>& inode, int flags, Responder& request) {
  if (!inode->buffer_) {
    return Status(inode->is_directory() ? EISDIR : EINVAL, "inode " + std::to_string(inode->ino_) + " has no buffer");
  }
  const bool writes = (flags & O_ACCMODE) != O_RDONLY;
  const Inode::Writer writer(*inode);
  const std::uint64_t fh = files_.add(std::make_shared<OpenFile>(OpenFile{inode, writes}));
  // Nothing that fails may come after it. The handle is not known to anyone yet.
  ++writer->open_files;
  if (writes) {
    ++writer->open_writers;
    // The kernel names these flags only when it creates the file.
    constexpr int kCreation = O_CREAT | O_EXCL;
    if (writer->record.writers_ever++ == 0) writer->record.created_open = (flags & kCreation) == kCreation ? 1 : 0;
  }
  records_.done(request, {inode->ino_, fh});
  static_cast<void>(update_expected(*inode, *writer));  // in use now
  return fh;
}

Status InodeTable::release(std::uint64_t fh) {
  std::shared_ptr<OpenFile> file = files_.remove(fh);
  if (!file) return Status(EBADF, "unknown handle");
  std::shared_ptr<Inode> inode = file->inode;
  const bool writes = file->writes;
  file.reset();
  bool must_be_freed = false;
  bool trims = false;
  {
    const Inode::Writer writer(*inode);
    --writer->open_files;
    if (writes) --writer->open_writers;
    // At each close without a writer: the last try may have found the buffer in use.
    trims = writer->open_writers == 0 && writer->record.attributes.nlink != 0 && inode->own_buffer().may_trim();
    must_be_freed = update_expected(*inode, *writer);
  }
  if (must_be_freed) {
    free_later(std::move(inode));
  } else if (trims) {
    trim_later(inode);
  }
  return {};
}

bool InodeTable::update_expected(const Inode& inode, Inode::State& state) {
  if (!inode.buffer_) return false;
  // Also while it is held: a program that has ended, or detached it, is noticed a moment later.
  if (state.open_files != 0 || state.record.attributes.nlink != 0) {
    state.expected.reset();
    return false;
  }
  if (!state.expected) {
    state.expected = std::make_unique<Releases::Expected>(
        inode.buffer_->device()->releases(), [buffer = inode.buffer_.get()] { return buffer->bytes_held(); });
  }
  const bool is_forgotten = state.presence == Inode::Presence::kForgotten;
  if (is_forgotten) state.expected->confirm();
  return is_forgotten;
}

void InodeTable::free_later(std::shared_ptr<Inode> inode) {
  const Buffer& buffer = *inode->buffer_;
  const std::uint64_t most = buffer.device()->info().cpu_addressable ? kBrieflyFreedBytes : 0;
  if (buffer.bytes_held() + buffer.bytes_parked() <= most) return free(std::move(inode));
  // The caller's reference goes along, so the executor's is the last one and the memory is free when it reports that.
  const std::int32_t device = inode->device_;
  {
    const std::lock_guard lock(forgotten_mutex_);
    ForgottenFiles& files = to_be_freed_[device];
    files.inodes.push_back(std::move(inode));
    if (std::exchange(files.has_job, true)) return;
  }
  try {
    executor_.submit({Executor::Lane::Kind::kRelease, device, 0}, nullptr, 0,
                     [this, device](int, Cancellation&) { free_forgotten_files(device); });
  } catch (const std::exception&) {
    const std::lock_guard lock(forgotten_mutex_);
    to_be_freed_[device].has_job = false;  // the next one frees these as well
    throw;
  }
}

void InodeTable::free_forgotten_files(std::int32_t device) {
  for (;;) {
    std::vector<std::shared_ptr<Inode>> inodes;
    {
      const std::lock_guard lock(forgotten_mutex_);
      ForgottenFiles& files = to_be_freed_[device];
      inodes.swap(files.inodes);
      files.has_job = !inodes.empty();
    }
    if (inodes.empty()) return;
    for (std::shared_ptr<Inode>& inode : inodes) free(std::move(inode));
  }
}

void InodeTable::free(std::shared_ptr<Inode> inode) {
  std::unique_ptr<Releases::Expected> expected;
  {
    const Inode::Writer writer(*inode);
    // Null: it was opened again at the last moment, and comes back when that file is released.
    expected = std::move(writer->expected);
  }
  if (expected) expected->begin_release();
  inode.reset();  // frees the memory, unless a request or a lease still uses it; `expected` reports that
}

void InodeTable::trim_later(const std::shared_ptr<Inode>& inode) {
  // Weak: once free() has reported an inode, its memory must be free.
  executor_.submit({Executor::Lane::Kind::kRelease, inode->device_, 0}, nullptr, 0,
                   [closed = std::weak_ptr<Inode>(inode)](int refusal, Cancellation&) {
                     const std::shared_ptr<Inode> found = refusal == 0 ? closed.lock() : nullptr;
                     if (found) (void)found->own_buffer().trim(std::chrono::milliseconds(0));
                   });
}

// ---- another process's inodes ----

bool InodeTable::has_device(std::int32_t device) const {
  return device >= 0 && static_cast<std::size_t>(device) < devices_.size();
}

InodeTable::Restored InodeTable::read(const Records::StoredInode& stored) {
  Restored found;
  found.record = Records::read_inode(stored);
  found.contents = Records::read_contents(stored, found.record);
  found.target = {reinterpret_cast<const char*>(stored.target.data()), stored.target.size()};
  if (stored.record.empty()) found.status = Status(EPROTO, "its attributes are missing");
  if (stored.extended.empty()) return found;
  found.extended = std::make_unique<ExtendedAttributes>();
  if (!found.extended->restore(stored.extended)) log_error("extended attributes of inode ", stored.ino, " are lost");
  return found;
}

Status InodeTable::restore_slabs(std::vector<Restored>& found) {
  struct Small {
    std::vector<Restored*> files;
    std::map<std::uint64_t, std::size_t> memories;  // how many records have each number
  };
  std::map<std::int32_t, Small> by_device;
  for (Restored& each : found) {
    if (!each.status.ok() || !each.contents || each.contents->slot.bytes == 0) continue;
    Small& small = by_device[each.record.attributes.device];
    small.files.push_back(&each);
    ++small.memories[each.contents->memory];
  }
  for (auto& [device, small] : by_device) {
    if (!has_device(device)) continue;  // see restore_inode()
    const std::uint64_t memory =
        std::ranges::max_element(small.memories, {}, [](const auto& each) { return each.second; })->first;
    Extents slots;
    for (const Restored* const each : small.files) {
      slots.push_back(each->contents->memory == memory ? each->contents->slot : Extent{});
    }
    SlabPool* const slabs = devices_[static_cast<std::size_t>(device)]->slabs();
    Status restored =
        slabs == nullptr ? Status(EPROTO, "the device has no memory for small files") : slabs->restore(memory, slots);
    if (!restored.ok() && !is_bad_record(restored)) return restored;
    for (std::size_t i = 0; i < slots.size(); ++i) {
      Status& status = small.files[i]->status;
      if (!restored.ok()) {
        status = restored;
      } else if (slots[i].bytes == 0) {
        status = Status(EPROTO, "no other small file lies where it should");
      }
    }
  }
  return {};
}

void InodeTable::charge_restored(const std::shared_ptr<Inode>& inode) {
  watch_contents(inode);
  const Inode::Writer writer(*inode);
  writer->restored = true;
  writer->record.held =
      static_cast<std::uint32_t>(std::min<std::uint64_t>(writer->record.held, writer->record.references));
  writer->unclaimed = writer->record.held;
  writer->charged = inode->metadata(*writer);
  writer->charged_to = metadata_.share_of(writer->record.attributes.uid);
  metadata_.add(writer->charged_to, writer->charged);
}

Result<std::shared_ptr<Inode>> InodeTable::restore_inode(Restored& found, const Known& known) {
  const gpufs_attributes& attributes = found.record.attributes;
  if (known.directories.contains(attributes.ino) && !S_ISDIR(attributes.mode)) {
    return Status(EPROTO, "it has names, and is not a directory");
  }
  if (attributes.device < -1) return Status(EPROTO, "it is on no possible device");
  if (attributes.device >= 0 && !has_device(attributes.device)) {
    // A device that has files has a directory, too.
    if (known.devices.at(attributes.device) == 1) return Status(EPROTO, "nothing else is on its device");
    return Status(ENODEV, directory_of(attributes.device) + " is missing");
  }
  const bool has_contents = attributes.device >= 0 && is_regular(attributes.mode);
  if (found.contents.has_value() != has_contents) {
    return Status(EPROTO, has_contents ? "its contents are missing" : "it cannot have contents");
  }
  std::shared_ptr<ExtentBuffer> buffer;
  if (has_contents) {
    const std::shared_ptr<DeviceContext>& device = devices_[static_cast<std::size_t>(attributes.device)];
    const std::shared_ptr<DeviceContext> where = found.contents->device == attributes.device ? device : host_tier();
    if (where == nullptr || where->info().index != found.contents->device) {
      return Status(EPROTO, "its contents are on no possible device");
    }
    buffer = std::make_shared<ExtentBuffer>(device, kPreallocates);
    TRY(buffer->restore(*found.contents, where));
    if (where != device) buffer->charge_parked_to(host_account(attributes.uid));
    buffer->charge().move(Charge::kOwner, quotas_.user(attributes.device, attributes.uid));
  }
  Inode::State state;
  state.presence = Inode::Presence::kKnown;
  state.record = found.record;
  state.extended = std::move(found.extended);
  auto inode = std::make_shared<Inode>(std::move(state), std::move(buffer), std::string(found.target), records_);
  charge_restored(inode);
  return inode;
}

Status InodeTable::restore() {
  quotas_.restore_users();
  const std::vector<Records::StoredInode> stored = records_.stored_inodes();
  std::vector<Restored> found(stored.size());
  // Nothing may be recorded until this is done.
  for_each_index(stored.size(), [&](std::size_t index) {
    try {
      found[index] = read(stored[index]);
    } catch (const std::exception& failure) {
      found[index].status = Status(ENOMEM, failure.what());
    }
  });
  Known known;
  records_.each_name([&](std::uint64_t, const NameRecord& name) { known.directories.insert(name.directory); });
  for (const Restored& each : found) ++known.devices[each.record.attributes.device];
  // Before the buffers: the slabs must know which slots are free.
  TRY(restore_slabs(found));
  for_each_index(found.size(), [&](std::size_t index) {
    Restored& mine = found[index];
    if (!mine.status.ok()) return;
    try {
      Result<std::shared_ptr<Inode>> made = restore_inode(mine, known);
      mine.status = made.status();
      if (made.ok()) mine.inode = made.take();
    } catch (const std::exception& failure) {
      mine.status = Status(ENOMEM, failure.what());
    }
  });
  std::vector<std::shared_ptr<Inode>> incomplete;
  inodes_.reserve(found.size());
  for (std::size_t index = 0; index < found.size(); ++index) {
    const std::uint64_t ino = stored[index].ino;
    auto& [record, contents, extended, target, status, inode] = found[index];
    if (!status.ok() && !is_bad_record(status)) return status.with_context("inode " + std::to_string(ino));
    if (!inode) {
      log_error("inode ", ino, " is lost: ", status.message());
      for (const journal::Kind kind : {journal::kInode, journal::kTarget, journal::kExtended, journal::kContents}) {
        records_.remove({kind, ino});
      }
      continue;
    }
    if (contents && contents->shift.step != 0) incomplete.push_back(inode);
    if (record.held != 0) held_before_.push_back(ino);
    if (inode->buffer_) ++file_counts_[inode->device_];
    inodes_.emplace(ino, std::move(inode));
  }
  restore_directories();
  // From now on a buffer's record is written with each step.
  for (const std::shared_ptr<Inode>& inode : incomplete) {
    if (Status whole = inode->own_buffer().complete_shift(); !whole.ok()) {
      log_error("inode ", inode->ino_, ": ", whole.message());
    }
  }
  files_.restore([this](const FileRecord& record) -> std::shared_ptr<OpenFile> {
    const std::shared_ptr<Inode> inode = find(record.inode);
    if (!inode || !inode->buffer_) return nullptr;
    const bool writes = record.writes != 0;
    const Inode::Writer writer(*inode);
    ++writer->open_files;
    if (writes) ++writer->open_writers;
    return std::make_shared<OpenFile>(OpenFile{inode, writes});
  });
  return {};
}

// Without its record a directory would be lost with all that is in it.
void InodeTable::restore_directories() {
  std::map<std::uint64_t, std::int32_t> missing;  // and their devices, which are those of what they have
  records_.each_name([&](std::uint64_t, const NameRecord& name) {
    const std::shared_ptr<Inode> inode = find(name.inode);
    if (inode && !inodes_.contains(name.directory)) missing.emplace(name.directory, inode->device_);
  });
  for (const auto& [ino, device] : missing) {
    log_error("directory ", ino, " has no record any more: it is root's now, with what is in it");
    Inode::State state;
    gpufs_attributes& attributes = state.record.attributes;
    attributes.ino = ino;
    attributes.mode = S_IFDIR | (ino == kRootInode ? 0555 : 0700);
    attributes.nlink = 2;
    attributes.blksize = kPageBytes;
    attributes.device = ino == kRootInode ? -1 : device;
    state.record.references = 1;
    state.record.birth_seconds = Timestamp::now().seconds;
    const auto inode = std::make_shared<Inode>(std::move(state), nullptr, std::string(), records_);
    charge_restored(inode);
    inodes_.emplace(ino, inode);
    Inode::Writer(*inode)->presence = Inode::Presence::kKnown;
  }
}

std::vector<std::uint64_t> InodeTable::doubtful() const {
  const auto expects = [](const std::shared_ptr<DeviceContext>& device) {
    return device->releases().expected_files() > 0;
  };
  std::vector<std::uint64_t> found;
  if (std::ranges::none_of(devices_, expects)) return found;
  for (const std::shared_ptr<Inode>& inode : all()) {
    const Inode::Reader reader(*inode);
    const bool is_known = reader->presence == Inode::Presence::kKnown;
    const bool has_others = reader->record.references > reader->record.held;
    if (reader->restored && reader->expected && is_known && has_others) found.push_back(inode->ino_);
  }
  return found;
}

void InodeTable::restore_links(std::shared_ptr<Inode> inode, std::uint32_t links) {
  {
    const Inode::Writer writer(*inode);
    writer->record.attributes.nlink = links;
    static_cast<void>(update_expected(*inode, *writer));
  }
  if (links == 0) remove_if_unused(std::move(inode));
}

InodeTable::Counts InodeTable::counts() const {
  Counts counts;
  {
    const std::shared_lock lock(inodes_mutex_);
    counts.inodes = inodes_.size();
  }
  counts.files = files_.size();
  for (const std::shared_ptr<DeviceContext>& device : devices_) {
    counts.orphans += device->releases().expected_files();
    counts.orphan_bytes += device->releases().expected_bytes();
  }
  counts.metadata_bytes = metadata_.used();
  return counts;
}

std::size_t InodeTable::file_count(std::int32_t device) const {
  const std::shared_lock lock(inodes_mutex_);
  const auto found = file_counts_.find(device);
  return found == file_counts_.end() ? 0 : found->second;
}

std::vector<std::shared_ptr<Inode>> InodeTable::all() const {
  std::vector<std::shared_ptr<Inode>> inodes;
  const std::shared_lock lock(inodes_mutex_);
  inodes.reserve(inodes_.size());
  for (const auto& [ino, inode] : inodes_) inodes.push_back(inode);
  return inodes;
}

std::vector<std::shared_ptr<Inode>> InodeTable::busiest(std::size_t most) const {
  struct Moved {
    std::uint64_t recently;
    std::uint64_t ever;
    const std::shared_ptr<Inode>* inode;
  };
  const auto more = [](const Moved& a, const Moved& b) {
    return std::tie(a.recently, a.ever) > std::tie(b.recently, b.ever);
  };
  std::vector<Moved> moved;
  std::vector<std::shared_ptr<Inode>> found;
  const std::shared_lock lock(inodes_mutex_);
  for (const auto& [ino, inode] : inodes_) {
    if (inode->buffer() == nullptr) continue;
    observe::FileActivity& activity = inode->buffer()->activity();
    const std::uint64_t ever = activity.bytes(observe::Flow::kToDevice) + activity.bytes(observe::Flow::kFromDevice);
    if (ever > 0) moved.push_back({activity.take_recent(), ever, &inode});
  }
  const auto middle = moved.begin() + static_cast<std::ptrdiff_t>(std::min(most, moved.size()));
  std::partial_sort(moved.begin(), middle, moved.end(), more);
  for (auto busy = moved.begin(); busy != middle; ++busy) found.push_back(*busy->inode);
  return found;
}

}  // namespace gpufs::fuse
