#include "fuse/inode.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "fuse/inode_table.h"

namespace gpufs::fuse {

Inode::Inode(State state, std::shared_ptr<Buffer> buffer, std::string target, Records& records)
    : ino_(state.record.attributes.ino),
      device_(state.record.attributes.device),
      kind_(state.record.attributes.mode & S_IFMT),
      buffer_(std::move(buffer)),
      in_host_memory_(buffer_ && buffer_->device()->info().cpu_addressable),
      target_(std::move(target)),
      records_(records),
      guarded_(std::move(state)) {}

// ---- changes ----

Inode::Writer::Writer(Inode& inode)
    : inode_(inode),
      state_(inode.guarded_.state),
      lock_(inode.guarded_.mutex),
      together_(inode.records_),
      presence_(state_.presence),
      record_(state_.record),
      extended_changes_(extended_changes()) {}

Inode::Writer::~Writer() {
  if (inode_.buffer_) state_.record.attributes.size = inode_.buffer_->size();
  if (inode_.records_.journal() != nullptr) record();
}

void Inode::Writer::record() const {
  Records& records = inode_.records_;
  const bool was_known = presence_ == Presence::kKnown;
  if (state_.presence != Presence::kKnown) {
    if (was_known) remove_record();
    return;
  }
  static_assert(std::has_unique_object_representations_v<InodeRecord>);
  if (!was_known || std::memcmp(&record_, &state_.record, sizeof record_) != 0) records.put_inode(state_.record);
  if (!was_known && !inode_.target_.empty()) records.put_target(inode_.ino_, inode_.target_);
  const std::uint64_t known_changes = was_known ? extended_changes_ : 0;
  if (extended_changes() != known_changes) records.put_extended(inode_.ino_, state_.extended->image());
  if (inode_.buffer_ && (!was_known || contents_moved_)) records.put_contents(inode_.ino_, inode_.own_buffer().kept());
}

void Inode::Writer::remove_record() const {
  const auto remove = [this](journal::Kind kind) { inode_.records_.remove({kind, inode_.ino_}); };
  remove(journal::kInode);
  if (!inode_.target_.empty()) remove(journal::kTarget);
  if (state_.extended) remove(journal::kExtended);
  if (inode_.buffer_) remove(journal::kContents);
}

void Inode::was_read(AccessTimes policy) {
  if (policy == AccessTimes::kNever) return;
  const Timestamp now = Timestamp::now();
  if (!atime_is_due(policy, Reader(*this)->record.attributes, now)) return;  // as for most reads
  set_atime(Writer(*this)->record.attributes, now);
}

void Inode::was_written(SetIdLoss loss) {
  const Timestamp now = Timestamp::now();
  const Writer writer(*this);
  gpufs_attributes& attributes = writer->record.attributes;
  ++writer->record.changes;
  set_mtime(attributes, now);
  set_ctime(attributes, now);
  attributes.mode = mode_without_set_id(attributes.mode, loss);
  if (writer->extended) writer->extended->drop_capability();
}

bool Inode::hold() {
  const Writer writer(*this);
  if (writer->presence == Presence::kForgotten) return false;
  ++writer->record.references;
  return true;
}

void Inode::inherit(const Inode& directory, std::uint32_t umask) {
  gpufs_attributes above{};
  ExtendedAttributes::Value list;
  std::shared_ptr<Account> account;
  std::uint64_t limited_directory = 0;
  {
    const Reader reader(directory);
    above = reader->record.attributes;
    account = reader->directory_account;
    limited_directory = reader->record.limited_directory;
    const ExtendedAttributes::Value* const found = reader->extended ? reader->extended->find(kDefaultAcl) : nullptr;
    if (found != nullptr) list = *found;
  }
  const Writer writer(*this);
  if (buffer_) buffer_->charge().move(Charge::kDirectory, account);
  writer->directory_account = std::move(account);
  writer->record.limited_directory = limited_directory;
  std::uint32_t& mode = writer->record.attributes.mode;
  if ((above.mode & S_ISGID) != 0) {
    writer->record.attributes.gid = above.gid;
    if (is_directory()) mode |= S_ISGID;
  }
  if (S_ISLNK(kind())) return;
  if (list.empty()) {
    mode &= ~(umask & kPermissionBits);
    return;
  }
  ExtendedAttributes::Value access = list;
  acl_inherit(access, mode);
  const bool minimal = acl_is_minimal(access);
  if (minimal && !is_directory()) return;
  writer->extended = std::make_unique<ExtendedAttributes>();
  if (!minimal) static_cast<void>(writer->extended->set(kAccessAcl, access, 0));
  if (is_directory()) static_cast<void>(writer->extended->set(kDefaultAcl, list, 0));
}

// ---- questions ----

gpufs_attributes Inode::attributes() const {
  gpufs_attributes copy = Reader(*this)->record.attributes;
  if (buffer_) {
    copy.size = buffer()->size();
    copy.blocks = (buffer()->bytes_held() + buffer()->bytes_parked()) / 512;
  }
  return copy;
}

Timestamp Inode::birth() const {
  const Reader reader(*this);
  return {reader->record.birth_seconds, reader->record.birth_nanoseconds};
}

std::shared_ptr<Account> Inode::directory_account() const { return Reader(*this)->directory_account; }

bool Inode::has_writers() const { return Reader(*this)->open_writers > 0; }

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
    const Reader reader(*this);
    mode = reader->record.attributes.mode;
    gid = reader->record.attributes.gid;
  }
  return has_bare_set_gid(mode) && !caller.in_group(gid);
}

std::uint64_t Inode::metadata(const State& state, std::uint64_t more) const {
  const gpufs_attributes& attributes = state.record.attributes;
  // The link count of a directory counts its subdirectories, which are charged themselves.
  const std::uint64_t names = S_ISDIR(kind_) ? 1 : std::max(attributes.nlink, 1U);
  const std::uint64_t extended = more + (state.extended ? state.extended->bytes() : 0);
  const std::uint64_t image = more + (state.extended ? state.extended->image_bytes() : 0);
  std::uint64_t blocks = 0;
  if (records_.journal() != nullptr) {
    for (const std::uint64_t bytes : {target_.size(), image}) {
      if (bytes != 0) blocks += journal::Journal::block_bytes(bytes);
    }
  }
  return InodeTable::kInodeBytes + names * InodeTable::kNameBytes + target_.size() + extended + blocks;
}

}  // namespace gpufs::fuse
