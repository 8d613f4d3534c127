#include "fuse/inode_table.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
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

std::uint64_t user_key(std::int32_t device, std::uint32_t uid) {
  return std::uint64_t{static_cast<std::uint32_t>(device)} << 32 | uid;
}

Status missing_device(std::int32_t device) { return Status(ENODEV, "gpu" + std::to_string(device) + " is missing"); }

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

Status unknown_inode(std::uint64_t ino) { return Status(ENOENT, "no inode " + std::to_string(ino)); }

}  // namespace

Inode::Inode(const gpufs_attributes& attributes, std::shared_ptr<Buffer> buffer, std::uint64_t references,
             Timestamp birth, Records& records)
    : ino_(attributes.ino),
      device_(attributes.device),
      kind_(attributes.mode & S_IFMT),
      buffer_(std::move(buffer)),
      in_host_memory_(buffer_ && buffer_->device()->info().cpu_addressable),
      birth_(birth),
      records_(records),
      attributes_(attributes),
      references_(references) {}

gpufs_attributes Inode::attributes() const {
  gpufs_attributes copy;
  {
    const std::lock_guard lock(mutex_);
    copy = attributes_;
  }
  if (buffer_) {
    copy.size = buffer()->size();
    copy.blocks = buffer()->bytes_held() / 512;
  }
  return copy;
}

std::shared_ptr<Account> Inode::directory_account() const {
  const std::lock_guard lock(mutex_);
  return directory_account_;
}

void Inode::was_read(AccessTimes policy) {
  if (policy == AccessTimes::kNever) return;
  const Timestamp now = Timestamp::now();
  const std::lock_guard lock(mutex_);
  if (!atime_is_due(policy, attributes_, now)) return;
  set_atime(attributes_, now);
  record_locked();
}

void Inode::was_written(SetIdLoss loss) {
  const Timestamp now = Timestamp::now();
  const std::lock_guard lock(mutex_);
  set_mtime(attributes_, now);
  set_ctime(attributes_, now);
  attributes_.mode = mode_without_set_id(attributes_.mode, loss);
  if (extended_) extended_->drop_capability();
  record_locked();
}

bool Inode::has_writers() const {
  const std::lock_guard lock(mutex_);
  return open_writers_ > 0;
}

SetIdLoss Inode::set_id_bits_to_clear(const Caller& caller) const {
  return has_bare_set_gid_foreign_to(caller) ? SetIdLoss::kAll : SetIdLoss::kExecutable;
}

SetIdLoss Inode::bare_set_gid_to_clear(const Caller& caller) const {
  return has_bare_set_gid_foreign_to(caller) && !caller.keeps_set_id() ? SetIdLoss::kAll : SetIdLoss::kNone;
}

bool Inode::has_bare_set_gid_foreign_to(const Caller& caller) const {
  std::uint32_t mode = 0;
  std::uint32_t gid = 0;
  {
    const std::lock_guard lock(mutex_);
    mode = attributes_.mode;
    gid = attributes_.gid;
  }
  return has_bare_set_gid(mode) && !caller.in_group(gid);
}

void Inode::inherit(Inode& directory, std::uint32_t umask) {
  gpufs_attributes above{};
  ExtendedAttributes::Value list;
  directory.with_extended([&](const gpufs_attributes& theirs, const std::unique_ptr<ExtendedAttributes>& extended) {
    above = theirs;
    const ExtendedAttributes::Value* const found = extended ? extended->find(kDefaultAcl) : nullptr;
    if (found != nullptr) list = *found;
  });
  const bool is_directory = S_ISDIR(kind());
  std::shared_ptr<Account> account = directory.directory_account();
  const std::lock_guard lock(mutex_);
  if (buffer_) buffer_->charge().move(Charge::kDirectory, account);
  directory_account_ = std::move(account);
  std::uint32_t& mode = attributes_.mode;
  if ((above.mode & S_ISGID) != 0) {
    attributes_.gid = above.gid;
    if (is_directory) mode |= S_ISGID;
  }
  if (S_ISLNK(kind())) return;
  if (list.empty()) {
    mode &= ~(umask & kPermissionBits);
    return;
  }
  ExtendedAttributes::Value access = list;
  acl_inherit(access, mode);
  const bool minimal = acl_is_minimal(access);
  if (minimal && !is_directory) return;
  extended_ = std::make_unique<ExtendedAttributes>();
  if (!minimal) static_cast<void>(extended_->set(kAccessAcl, access, 0));
  if (is_directory) static_cast<void>(extended_->set(kDefaultAcl, list, 0));
}

bool Inode::hold() {
  const std::lock_guard lock(mutex_);
  if (forgotten_) return false;
  ++references_;
  record_locked();
  return true;
}

std::uint64_t Inode::metadata_locked(std::uint64_t more) const {
  // The link count of a directory counts its subdirectories, which are charged themselves.
  const std::uint64_t names = S_ISDIR(kind_) ? 1 : std::max(attributes_.nlink, 1U);
  const std::uint64_t target = S_ISLNK(kind_) ? attributes_.size : 0;
  const std::uint64_t attributes = more + (extended_ ? extended_->bytes() : 0);
  const std::uint64_t recorded = more + (extended_ ? extended_->recorded_bytes() : 0);
  constexpr std::uint64_t kUsual = InodeTable::kRecordBytes;
  const std::uint64_t block =
      records_.journal() == nullptr
          ? 0
          : journal::Journal::block_bytes(kUsual + target + recorded) - journal::Journal::block_bytes(kUsual);
  return InodeTable::kInodeBytes + names * InodeTable::kNameBytes + target + attributes + block;
}

Result<std::shared_ptr<Inode>> InodeTable::add(const gpufs_attributes& wanted, Inode* parent, std::uint32_t umask,
                                               std::uint64_t references) {
  gpufs_attributes attributes = wanted;
  if (attributes.device < -1 || attributes.device >= static_cast<std::int32_t>(devices_.size())) {
    return Status(EINVAL, "no device " + std::to_string(attributes.device));
  }
  std::shared_ptr<Buffer> buffer;
  if (is_regular(attributes.mode) && attributes.device >= 0) {
    Result<std::shared_ptr<Buffer>> created =
        Buffer::create(devices_[static_cast<std::size_t>(attributes.device)], /*preallocates=*/true);
    if (!created.ok()) return created.status();
    buffer = created.take();
    buffer->charge().move(Charge::kOwner, quotas_.user(attributes.device, attributes.uid));
  }
  if (attributes.ino == 0) attributes.ino = ino_numbers_.next();
  auto inode = std::make_shared<Inode>(attributes, std::move(buffer), references,
                                       Timestamp{attributes.ctime, attributes.ctime_ns}, records_);
  if (parent != nullptr) inode->inherit(*parent, umask);
  if (Status inserted = insert(inode); !inserted.ok()) return inserted;
  return inode;
}

void InodeTable::watch_contents(const std::shared_ptr<Inode>& inode) {
  if (!inode->buffer_) return;
  inode->buffer_->watch([moved = std::weak_ptr<Inode>(inode)] {
    const std::shared_ptr<Inode> found = moved.lock();
    if (!found) return;
    const std::lock_guard lock(found->mutex_);
    found->record_locked();
  });
}

Status InodeTable::insert(const std::shared_ptr<Inode>& inode) {
  watch_contents(inode);
  const std::lock_guard own(inode->mutex_);
  const std::uint64_t metadata = inode->metadata_locked();
  Metadata::Share* const share = metadata_.share_of(inode->attributes_.uid);
  if (!metadata_.take(share, metadata)) return metadata_full(inode->attributes_.uid);
  inode->charged_ = metadata;
  inode->charged_to_ = share;
  const std::unique_lock lock(inodes_mutex_);
  if (!inodes_.emplace(inode->ino_, inode).second) {
    metadata_.release(share, metadata);
    return Status(EEXIST, "inode " + std::to_string(inode->ino_) + " exists");
  }
  if (inode->buffer_) ++file_counts_[inode->device_];
  inode->record_locked();
  return {};
}

Status InodeTable::metadata_full(std::uint32_t uid) const {
  log_user_warning(uid, "No space left on device: names and attributes of user ", uid,
                   " have reached the limit for metadata, which is ", metadata_limit(),
                   " bytes for all and half of that for a plain user. Remove files, or mount with a larger --metadata");
  return {ENOSPC, "the limit for metadata"};
}

void InodeTable::was_read(Inode& inode) const {
  const bool directory = S_ISDIR(inode.kind());
  inode.was_read((directory ? directory_access_times_ : access_times_).load(std::memory_order_relaxed));
}

void InodeTable::set_access_times(AccessTimes policy, bool not_directories) {
  access_times_.store(policy, std::memory_order_relaxed);
  directory_access_times_.store(not_directories ? AccessTimes::kNever : policy, std::memory_order_relaxed);
}

void InodeTable::remove_if_unused(std::shared_ptr<Inode> inode) {
  bool must_be_freed = false;
  {
    const std::lock_guard lock(inode->mutex_);
    if (inode->forgotten_ || inode->references_ != 0 || inode->attributes_.nlink != 0) return;
    inode->forgotten_ = true;
    records_.remove_inode(inode->ino_);
    metadata_.release(inode->charged_to_, std::exchange(inode->charged_, 0));
    must_be_freed = update_expected_locked(*inode);
  }
  {
    const std::unique_lock lock(inodes_mutex_);
    inodes_.erase(inode->ino_);
    if (inode->buffer_) --file_counts_[inode->device_];
  }
  if (must_be_freed) records_.afterwards([this, inode = std::move(inode)]() mutable { free_later(std::move(inode)); });
}

Status InodeTable::hold(std::uint64_t ino) {
  const std::shared_ptr<Inode> inode = find(ino);
  return inode && inode->hold() ? Status() : unknown_inode(ino);
}

bool InodeTable::forget(std::uint64_t ino, std::uint64_t count) {
  std::shared_ptr<Inode> inode = find(ino);
  if (!inode) return false;
  {
    const std::lock_guard lock(inode->mutex_);
    inode->references_ -= std::min(count, inode->references_);
    inode->record_locked();
  }
  remove_if_unused(std::move(inode));
  return true;
}

std::shared_ptr<Inode> InodeTable::find(std::uint64_t ino) const {
  const std::shared_lock lock(inodes_mutex_);
  const auto found = inodes_.find(ino);
  return found == inodes_.end() ? nullptr : found->second;
}

Status InodeTable::set(Inode& inode, const AttributeChanges& changes, Wait wait) {
  // The size comes first, because it can fail, and without our mutex: the buffer takes that itself if contents move.
  if (changes.size) {
    if (Status status = inode.buffer()->resize(*changes.size, wait); !status.ok()) return status;
  }
  const bool pays = changes.uid && inode.buffer_;
  std::shared_ptr<Account> payer = pays ? quotas_.user(inode.device_, *changes.uid) : nullptr;
  const std::lock_guard lock(inode.mutex_);
  gpufs_attributes& ours = inode.attributes_;
  if (changes.mode) {
    ours.mode = (ours.mode & ~kPermissionBits) | (*changes.mode & kPermissionBits);
    ExtendedAttributes::Value* const acl = inode.extended_ ? inode.extended_->find(kAccessAcl) : nullptr;
    if (acl != nullptr) acl_follow_mode(*acl, ours.mode);
  }
  if (pays) inode.buffer_->charge().move(Charge::kOwner, std::move(payer));
  if (pays && inode.replacement_) inode.replacement_->charge().move_to_accounts_of(inode.buffer_->charge());
  if (changes.uid) {
    Metadata::Share* const share = metadata_.share_of(*changes.uid);
    metadata_.move(std::exchange(inode.charged_to_, share), share, inode.charged_);
  }
  ours.uid = changes.uid.value_or(ours.uid);
  ours.gid = changes.gid.value_or(ours.gid);
  if (changes.atime) set_atime(ours, *changes.atime);
  if (changes.mtime) set_mtime(ours, *changes.mtime);
  set_ctime(ours, Timestamp::now());
  const Records::Change change(records_);
  inode.record_locked();
  records_.done({});
  return {};
}

Status InodeTable::set_links(std::shared_ptr<Inode> inode, std::uint32_t links) {
  const std::uint32_t before = inode->attributes().nlink;
  const std::uint64_t more = S_ISDIR(inode->kind_) || links <= before ? 0 : links - before;
  bool must_be_freed = false;
  const auto change = [&](gpufs_attributes& ours, const auto&) {
    ours.nlink = links;
    set_ctime(ours, Timestamp::now());
    must_be_freed = update_expected_locked(*inode);  // removed at the same time
    return 0;
  };
  if (change_metadata(*inode, more, 0, change) != 0) {
    return {ENOSPC, "the limit for metadata"};
  }
  if (must_be_freed) records_.afterwards([this, inode = std::move(inode)]() mutable { free_later(std::move(inode)); });
  return {};
}

Status InodeTable::limit_user(std::int32_t device, std::uint32_t uid, std::optional<std::uint64_t> bytes) {
  if (device < 0 || device >= static_cast<std::int32_t>(devices_.size()))
    return Status(EINVAL, "no device " + std::to_string(device));
  quotas_.limit_user(device, uid, bytes);
  records_.put_user_limit(user_key(device, uid), bytes);
  return {};
}

void InodeTable::charge_to_user(Buffer& buffer, std::uint32_t uid) {
  buffer.charge().move(Charge::kOwner, quotas_.user(buffer.device()->info().index, uid));
}

void InodeTable::charge_to(Inode& inode, std::shared_ptr<Account> account) {
  const std::lock_guard lock(inode.mutex_);
  if (inode.buffer_) inode.buffer_->charge().move(Charge::kDirectory, account);
  if (inode.replacement_) inode.replacement_->charge().move(Charge::kDirectory, account);
  inode.directory_account_ = std::move(account);
}

Status InodeTable::replace_buffer(std::uint64_t ino, std::shared_ptr<Buffer> buffer, bool again) {
  const std::shared_ptr<Inode> inode = find(ino);
  if (!inode) return unknown_inode(ino);
  if (!inode->buffer_) return Status(EINVAL, "inode " + std::to_string(ino) + " has no buffer");
  const Timestamp now = Timestamp::now();
  const std::lock_guard lock(inode->mutex_);
  const bool is_new = inode->created_open_ && inode->writers_ever_ == 1 && inode->attributes_.nlink <= 1;
  const bool fresh = (is_new || again) && !inode->replaced_ && inode->buffer_->size() == 0;
  if (!fresh) return Status(EBUSY, "the file is not one that its opener has just created, empty and for itself alone");
  buffer->charge().move_to_accounts_of(inode->buffer_->charge());  // whose owner may have changed
  inode->replacement_ = std::move(buffer);
  inode->replaced_.store(true, std::memory_order_release);
  if (again) return {};
  set_mtime(inode->attributes_, now);
  set_ctime(inode->attributes_, now);
  inode->record_locked();
  return {};
}

Result<std::uint64_t> InodeTable::open(const std::shared_ptr<Inode>& inode, int flags) {
  if (!inode->buffer_) {
    return Status(S_ISDIR(inode->kind_) ? EISDIR : EINVAL, "inode " + std::to_string(inode->ino_) + " has no buffer");
  }
  const bool writes = (flags & O_ACCMODE) != O_RDONLY;
  const std::uint64_t fh = files_.add(std::make_shared<OpenFile>(OpenFile{inode, writes}));
  // Last, since nothing that fails may come after it. The handle is not known to anyone yet.
  const std::lock_guard lock(inode->mutex_);
  ++inode->open_files_;
  if (writes) {
    ++inode->open_writers_;
    // The kernel names these flags only when it creates the file.
    constexpr int kCreation = O_CREAT | O_EXCL;
    if (inode->writers_ever_++ == 0) inode->created_open_ = (flags & kCreation) == kCreation;
  }
  const Records::Change change(records_);
  records_.put_file(fh, {inode->ino_, writes});
  inode->record_locked();
  records_.done({inode->ino_, fh});
  static_cast<void>(update_expected_locked(*inode));  // in use now
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
    const std::lock_guard lock(inode->mutex_);
    records_.remove_file(fh);
    --inode->open_files_;
    if (writes) --inode->open_writers_;
    // At each close without a writer: the last try may have found the buffer in use.
    trims = inode->open_writers_ == 0 && inode->attributes_.nlink != 0 && inode->buffer_->may_trim();
    must_be_freed = update_expected_locked(*inode);
  }
  if (must_be_freed) {
    free_later(std::move(inode));
  } else if (trims) {
    trim_later(inode);
  }
  return {};
}

bool InodeTable::update_expected_locked(Inode& inode) {
  if (!inode.buffer_) return false;
  if (inode.open_files_ != 0 || inode.attributes_.nlink != 0) {
    inode.expected_.reset();
    return false;
  }
  if (!inode.expected_) {
    inode.expected_ = std::make_unique<Reclaim::Expected>(
        inode.buffer_->device()->reclaim(), [buffer = inode.buffer_.get()] { return buffer->bytes_held(); });
  }
  if (inode.forgotten_) inode.expected_->confirm();
  return inode.forgotten_;
}

void InodeTable::free_later(std::shared_ptr<Inode> inode) {
  // The caller's reference goes along, so the executor's is the last one and the memory is free when it reports that.
  const std::int32_t device = inode->device_;
  {
    const std::lock_guard lock(forgotten_mutex_);
    ForgottenFiles& files = to_be_freed_[device];
    files.inodes.push_back(std::move(inode));
    if (std::exchange(files.has_job, true)) return;
  }
  try {
    executor_.submit({Executor::Lane::Kind::kReclaim, device, 0}, nullptr, 0,
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
  std::unique_ptr<Reclaim::Expected> expected;
  {
    const std::lock_guard lock(inode->mutex_);
    // Null: it was opened again at the last moment, and comes back when that file is released.
    expected = std::move(inode->expected_);
  }
  if (expected) expected->begin_release();
  inode.reset();  // frees the memory, unless a request or a lease still uses it; `expected` reports that
}

void InodeTable::trim_later(const std::shared_ptr<Inode>& inode) {
  // Weak: once free() has reported an inode, its memory must be free.
  executor_.submit({Executor::Lane::Kind::kReclaim, inode->device_, 0}, nullptr, 0,
                   [closed = std::weak_ptr<Inode>(inode)](int refusal, Cancellation&) {
                     std::shared_ptr<Inode> found = refusal == 0 ? closed.lock() : nullptr;
                     if (!found) return;
                     const std::shared_ptr<DeviceContext> device = found->buffer_->device();
                     (void)found->buffer_->trim(std::chrono::milliseconds(0));
                     found.reset();  // perhaps the last reference
                     device->reclaim().released();
                   });
}

// ---- another process's inodes ----

void Inode::record_locked() const {
  if (records_.journal() == nullptr || forgotten_) return;
  InodeRecord record{.attributes = attributes_,
                     .birth_seconds = birth_.seconds,
                     .birth_nanoseconds = birth_.nanoseconds,
                     .writers_ever = writers_ever_,
                     .references = references_,
                     .created_open = created_open_,
                     .target = names_.target,
                     .extended = {},
                     .contents = std::nullopt};
  if (extended_) {
    extended_->each([&](const std::string& name, const ExtendedAttributes::Value& value) {
      record.extended.emplace_back(name, value);
    });
  }
  if (buffer_) record.contents = buffer_->kept();
  records_.put_inode(record);
}

bool InodeTable::has_device(std::int32_t device) const {
  return device >= 0 && static_cast<std::size_t>(device) < devices_.size();
}

Status InodeTable::restore_slabs(const std::vector<Records::Stored>& stored, Restoring& known) {
  struct Small {
    std::vector<std::uint64_t> inodes;
    std::vector<std::uint64_t> memories;  // the number that the record of each has
    Extents slots;
  };
  std::map<std::int32_t, Small> small;  // by device
  for (const Records::Stored& each : stored) {
    const InodeRecord record = Records::read_inode(each);
    ++known.devices[record.attributes.device];
    if (!record.contents || record.contents->slot.bytes == 0) continue;
    Small& files = small[record.attributes.device];
    files.inodes.push_back(record.attributes.ino);
    files.memories.push_back(record.contents->memory);
    files.slots.push_back(record.contents->slot);
  }
  for (auto& [device, files] : small) {
    if (!has_device(device)) continue;  // see restore_inode()
    std::map<std::uint64_t, std::size_t> counts;
    for (const std::uint64_t memory : files.memories) ++counts[memory];
    const std::uint64_t memory =
        std::ranges::max_element(counts, {}, [](const auto& each) { return each.second; })->first;
    for (std::size_t i = 0; i < files.slots.size(); ++i) {
      if (files.memories[i] != memory) files.slots[i] = {};
    }
    SlabPool* const slabs = devices_[static_cast<std::size_t>(device)]->slabs();
    Status restored = slabs == nullptr ? Status(EPROTO, "the device has no memory for small files")
                                       : slabs->restore(memory, files.slots);
    if (!restored.ok() && !is_bad_record(restored)) return restored;
    for (std::size_t i = 0; i < files.slots.size(); ++i) {
      if (!restored.ok()) {
        known.lost.emplace(files.inodes[i], restored);
      } else if (files.slots[i].bytes == 0) {
        known.lost.emplace(files.inodes[i], Status(EPROTO, "no other small file lies where it should"));
      }
    }
  }
  return {};
}

void InodeTable::charge_restored(const std::shared_ptr<Inode>& inode) {
  inode->restored_ = true;
  watch_contents(inode);
  inode->charged_ = inode->metadata_locked();
  inode->charged_to_ = metadata_.share_of(inode->attributes_.uid);
  metadata_.add(inode->charged_to_, inode->charged_);
}

Result<std::shared_ptr<Inode>> InodeTable::restore_inode(InodeRecord& record, const Restoring& known) {
  gpufs_attributes& attributes = record.attributes;
  if (known.directories.contains(attributes.ino) && !S_ISDIR(attributes.mode)) {
    return Status(EPROTO, "it has names, and is not a directory");
  }
  if (attributes.device < -1) return Status(EPROTO, "it is on no possible device");
  if (attributes.device >= 0 && !has_device(attributes.device)) {
    // A device that has files has a directory, too.
    if (known.devices.at(attributes.device) == 1) return Status(EPROTO, "nothing else is on its device");
    return missing_device(attributes.device);
  }
  std::shared_ptr<Buffer> buffer;
  if (record.contents) {
    if (attributes.device < 0 || !is_regular(attributes.mode)) return Status(EPROTO, "it cannot have contents");
    Result<std::shared_ptr<Buffer>> restored =
        Buffer::restore(devices_[static_cast<std::size_t>(attributes.device)], *record.contents);
    if (!restored.ok()) return restored.status();
    buffer = restored.take();
    buffer->charge().move(Charge::kOwner, quotas_.user(attributes.device, attributes.uid));
  }
  const Timestamp birth{record.birth_seconds, record.birth_nanoseconds};
  auto inode = std::make_shared<Inode>(attributes, std::move(buffer), record.references, birth, records_);
  inode->writers_ever_ = record.writers_ever;
  inode->created_open_ = record.created_open;
  inode->names_.target = std::move(record.target);
  if (!record.extended.empty()) inode->extended_ = std::make_unique<ExtendedAttributes>();
  for (const auto& [name, value] : record.extended) static_cast<void>(inode->extended_->set(name, value, 0));
  charge_restored(inode);
  return inode;
}

Status InodeTable::restore() {
  for (const auto& [user, bytes] : records_.user_limits()) {
    quotas_.limit_user(static_cast<std::int32_t>(user >> 32), static_cast<std::uint32_t>(user), bytes);
  }
  Restoring known;
  records_.each_name([&](std::uint64_t, const NameRecord& name) { known.directories.insert(name.directory); });
  const std::vector<Records::Stored> stored = records_.stored_inodes();
  // First all slots: the slabs must know which are free.
  if (Status slabs = restore_slabs(stored, known); !slabs.ok()) return slabs;
  struct Restored {
    Status status;
    std::shared_ptr<Inode> inode;
    bool moves = false;
  };
  std::vector<Restored> restored(stored.size());
  for_each_index(stored.size(), [&](std::size_t index) {
    if (known.lost.contains(stored[index].first)) return;
    Restored& mine = restored[index];
    try {
      InodeRecord record = Records::read_inode(stored[index]);
      Result<std::shared_ptr<Inode>> made = restore_inode(record, known);
      mine.status = made.status();
      if (!made.ok()) return;
      mine.inode = made.take();
      mine.moves = record.contents && record.contents->shift.step != 0;
    } catch (const std::exception& failure) {
      mine.status = Status(ENOMEM, failure.what());
    }
  });
  std::vector<std::shared_ptr<Inode>> incomplete;
  inodes_.reserve(stored.size());
  for (std::size_t index = 0; index < stored.size(); ++index) {
    auto& [status, inode, moves] = restored[index];
    const std::uint64_t ino = stored[index].first;
    if (!status.ok() && !is_bad_record(status)) return status.with_context("inode " + std::to_string(ino));
    if (!status.ok()) known.lost.emplace(ino, std::move(status));
    if (!inode) continue;
    if (moves) incomplete.push_back(inode);
    if (inode->buffer_) ++file_counts_[inode->device_];
    inodes_.emplace(ino, std::move(inode));
  }
  for (const auto& [ino, reason] : known.lost) {
    log_error("inode ", ino, " is lost: ", reason.message());
    records_.remove_inode(ino);
  }
  restore_directories();
  // From now on a buffer's record is written with each step.
  for (const std::shared_ptr<Inode>& inode : incomplete) {
    if (Status whole = inode->buffer_->complete_shift(); !whole.ok()) {
      log_error("inode ", inode->ino_, ": ", whole.message());
    }
  }
  for (const auto& [fh, file] : records_.files()) {
    if (!is_buffer(fh)) continue;
    const std::shared_ptr<Inode> inode = find(file.inode);
    if (!inode || !inode->buffer_) {
      log_error("an open file is lost with inode ", file.inode);
      records_.remove_file(fh);
      continue;
    }
    files_.restore(fh, std::make_shared<OpenFile>(OpenFile{inode, file.writes}));
    ++inode->open_files_;
    if (file.writes) ++inode->open_writers_;
  }
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
    gpufs_attributes attributes{};
    attributes.ino = ino;
    attributes.mode = S_IFDIR | (ino == kRootInode ? 0555 : 0700);
    attributes.nlink = 2;
    attributes.blksize = kPageBytes;
    attributes.device = ino == kRootInode ? -1 : device;
    const auto inode = std::make_shared<Inode>(attributes, nullptr, 1, Timestamp::now(), records_);
    charge_restored(inode);
    inodes_.emplace(ino, inode);
    const std::lock_guard lock(inode->mutex_);
    inode->record_locked();
  }
}

std::vector<std::uint64_t> InodeTable::doubtful() const {
  const auto expects = [](const std::shared_ptr<DeviceContext>& device) {
    return device->reclaim().expected_files() > 0;
  };
  std::vector<std::uint64_t> found;
  if (std::ranges::none_of(devices_, expects)) return found;
  for (const std::shared_ptr<Inode>& inode : all()) {
    const std::lock_guard lock(inode->mutex_);
    if (inode->restored_ && inode->expected_ && !inode->forgotten_) found.push_back(inode->ino_);
  }
  return found;
}

void InodeTable::restore_links(std::shared_ptr<Inode> inode, std::uint32_t links) {
  {
    const std::lock_guard lock(inode->mutex_);
    inode->attributes_.nlink = links;
    static_cast<void>(update_expected_locked(*inode));
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
    counts.orphans += device->reclaim().expected_files();
    counts.orphan_bytes += device->reclaim().expected_bytes();
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
