#include "fuse/inode_table.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <functional>
#include <string>
#include <tuple>
#include <utility>

#include "base/log.h"
#include "fuse/extended_attributes.h"

namespace gpufs::fuse {

namespace {

// Waking another thread takes longer than freeing so much memory that the CPU can address: a slot for a small file.
constexpr std::uint64_t kBrieflyFreedBytes = std::uint64_t{64} << 10;

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
  const Inode::Writer writer(inode);
  gpufs_attributes& ours = writer->record.attributes;
  if (changes.mode) {
    ours.mode = (ours.mode & ~kPermissionBits) | (*changes.mode & kPermissionBits);
    if (writer->extended) writer->extended->follow_mode(ours.mode);
  }
  if (pays) charge_to(*changes.uid, inode.device_, inode.own_buffer());
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

bool InodeTable::has_device(std::int32_t device) const {
  return device >= 0 && static_cast<std::size_t>(device) < devices_.size();
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
