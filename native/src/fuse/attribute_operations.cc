#include "fuse/attribute_operations.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <string>
#include <utility>

#include "base/log.h"
#include "base/pages.h"
#include "fuse/extended_attributes.h"
#include "memory/account.h"

namespace gpufs::fuse {

namespace {

// How long STATFS waits for memory of removed files. Freeing 3.5 GiB of host memory takes 0.14 s.
constexpr std::chrono::seconds kReturnTime{1};

void touch_ctime(Inode::State& state) { set_ctime(state.record.attributes, Timestamp::now()); }

ExtendedAttributes& extended_of(Inode::State& state) {
  if (!state.extended) state.extended = std::make_unique<ExtendedAttributes>();
  return *state.extended;
}

// The value of an attribute below kVirtualAttributes; nothing if there is none.
std::optional<std::string> activity_of(const Inode& inode, std::string_view name) {
  using observe::Flow;
  if (!inode.buffer()) return std::nullopt;
  name.remove_prefix(kVirtualAttributes.size());
  const observe::FileActivity& seen = inode.buffer()->activity();
  if (name == "bytes_read") return std::to_string(seen.bytes(Flow::kFromDevice));
  if (name == "bytes_written") return std::to_string(seen.bytes(Flow::kToDevice));
  if (name == "reads") return std::to_string(seen.operations(Flow::kFromDevice));
  if (name == "writes") return std::to_string(seen.operations(Flow::kToDevice));
  if (name == "parked_bytes") return std::to_string(inode.buffer()->bytes_parked());
  if (name == "leases") return std::to_string(inode.buffer()->leases(/*writable=*/false));
  if (name == "writers") return std::to_string(inode.buffer()->leases(/*writable=*/true));
  if (name == "changes") return std::to_string(Inode::Reader(inode)->record.changes);
  if (name != "last_backend") return std::nullopt;
  const std::size_t last = seen.last();
  return last < observe::kBackendCount ? std::string(observe::kBackendNames[last]) : std::string();
}

// A value, or its size if the caller asks for that (no space).
void reply_value(std::uint32_t space, std::span<const std::byte> value, Responder& responder) {
  if (space == 0) {
    fuse_getxattr_out out{};
    out.size = static_cast<std::uint32_t>(value.size());  // some megabytes at most
    return responder.body(out);
  }
  if (value.size() > space) return responder.error(ERANGE);
  responder.data(value);
}

}  // namespace

// ---- attributes ----

void AttributeOperations::reply_attributes(const Inode& inode, Responder& responder) const {
  fuse_attr_out out{};
  out.attr.ino = inode.ino();
  fill_attr(inode.attributes(), out.attr);
  if (may_be_cached(out.attr.mode)) out.attr_valid = kValidSeconds;
  responder.body(out);
}

void AttributeOperations::getattr(const Target& inode, Request& /*request*/, Responder responder) {
  reply_attributes(*inode, responder);
}

void AttributeOperations::statx(const Target& inode, Request& /*request*/, Responder responder) {
  StatxOut out{};
  out.stat = statx_of(inode->attributes(), inode->birth());
  if (may_be_cached(out.stat.stx_mode)) out.attr_valid = kValidSeconds;
  responder.body(out);
}

void AttributeOperations::setattr(const Target& inode, Request& request, Responder responder) {
  const auto in = request.arguments<fuse_setattr_in>();
  if (inode->is_fixed()) return responder.error(EPERM);
  const gpufs_attributes now = inode->attributes();
  const bool owner = (in.valid & (FATTR_UID | FATTR_GID)) != 0;
  const bool size = (in.valid & FATTR_SIZE) != 0;
  AttributeChanges wanted;
  if ((in.valid & FATTR_UID) != 0) wanted.uid = in.uid;
  if ((in.valid & FATTR_GID) != 0) wanted.gid = in.gid;
  if (size) wanted.size = in.size;
  const auto time = [&](std::uint32_t given, std::uint32_t is_now, std::uint64_t seconds, std::uint32_t nanoseconds) {
    if ((in.valid & given) == 0) return std::optional<Timestamp>();
    if ((in.valid & is_now) != 0) return std::optional(Timestamp::now());
    return std::optional(Timestamp{static_cast<std::int64_t>(seconds), nanoseconds});
  };
  wanted.atime = time(FATTR_ATIME, FATTR_ATIME_NOW, in.atime, in.atimensec);
  wanted.mtime = time(FATTR_MTIME, FATTR_MTIME_NOW, in.mtime, in.mtimensec);
  if (size && !wanted.mtime) wanted.mtime = Timestamp::now();  // even where the size stays
  const std::uint32_t mode = (in.valid & FATTR_MODE) != 0 ? in.mode : now.mode;
  // The kernel clears set-id bits by FATTR_MODE, except those that only callers outside the group clear.
  SetIdLoss loss = owner && (in.valid & FATTR_MODE) == 0 ? SetIdLoss::kExecutable : SetIdLoss::kNone;
  if ((owner || size) && has_bare_set_gid(mode) && !Caller::of(request.header).keeps_set_gid_of(now.gid)) {
    loss = SetIdLoss::kAll;
  }
  const std::uint32_t cleared = mode_without_set_id(mode, loss);
  if ((in.valid & FATTR_MODE) != 0 || cleared != now.mode) wanted.mode = cleared;

  if (size && !inode->buffer()) return responder.error(inode->is_directory() ? EISDIR : EINVAL);
  const uid_t user = request.header.uid;
  const auto apply = [this, inode, wanted, user](Responder& reply, Wait wait) {
    const Status status = table_.set(*inode, wanted, wait, reply);
    if (status.error() == EAGAIN) return false;
    if (status.error() == EBUSY) {
      log_user_warning(user, "truncating inode ", inode->ino(), " failed: ", status.message());
    }
    if (status.ok()) {
      reply_attributes(*inode, reply);
    } else {
      reply.error(status.error());
    }
    return true;
  };
  if (!apply(responder, Wait::kForbidden)) {
    long_requests_.run(*inode, std::move(responder),
                       [apply](Cancellation&, Responder& reply) { apply(reply, Wait::kAllowed); });
  }
}

void AttributeOperations::statfs(const Target& inode, Request& request, Responder responder) {
  // The free memory of a GPU is known only when the memory that is being released is back.
  const bool waits =
      std::ranges::any_of(table_.devices(), [](const auto& device) { return !device->info().cpu_addressable; });
  const std::uint32_t uid = request.header.uid;
  // Memory of files that have just been removed is on its way back. As a write that needs it, this waits for it.
  const auto start = std::chrono::steady_clock::now();
  const std::optional<std::int32_t> device = device_expecting_memory(*inode, start);
  if (!waits && !device) return reply_statfs(*inode, uid, responder);
  long_requests_.run({Executor::Lane::Kind::kBuffers, device.value_or(inode->device()), 0}, inode.get(),
                     std::move(responder),
                     [this, inode, uid, start](Cancellation&, Responder& reply) -> std::optional<Executor::TimePoint> {
                       const auto end = start + kReturnTime;
                       if (std::chrono::steady_clock::now() < end && device_expecting_memory(*inode, start)) return end;
                       reply_statfs(*inode, uid, reply);
                       return std::nullopt;
                     });
}

std::optional<std::int32_t> AttributeOperations::device_expecting_memory(const Inode& inode,
                                                                         Releases::TimePoint before) const {
  for (const std::shared_ptr<DeviceContext>& device : table_.devices()) {
    const std::int32_t index = device->info().index;
    if ((inode.device() < 0 || inode.device() == index) && device->releases().expects_since(before)) return index;
  }
  return std::nullopt;
}

void AttributeOperations::reply_statfs(const Inode& inode, std::uint32_t uid, Responder& responder) const {
  std::uint64_t total = 0;
  std::uint64_t free = 0;
  for (const std::shared_ptr<DeviceContext>& device : table_.devices()) {
    if (inode.device() >= 0 && inode.device() != device->info().index) continue;
    const Result<MemoryInfo> memory = device->memory();
    if (!memory.ok()) {
      log_warning("statfs failed: ", memory.status().message());
      return responder.error(memory.error());
    }
    total += memory.value().total_bytes;
    free += std::min(memory.value().free_bytes + table_.evictable(device->info().index), memory.value().total_bytes);
  }
  if (const std::shared_ptr<Account> account = inode.directory_account()) {
    total = std::min(total, account->limit());
    free = std::min(free, account->available());
  }
  fuse_statfs_out out{};
  out.st.bsize = kPageBytes;
  out.st.frsize = kPageBytes;
  out.st.blocks = total / kPageBytes;
  out.st.bfree = free / kPageBytes;
  out.st.bavail = free / kPageBytes;
  // As many more files with one name as the limit for metadata allows the caller.
  const InodeTable::Counts counts = table_.counts();
  const std::uint64_t left = table_.metadata_available(uid);
  out.st.ffree = std::min(left / (InodeTable::kInodeBytes + InodeTable::kNameBytes), std::uint64_t{1} << 30);
  out.st.files = out.st.ffree + counts.inodes;
  out.st.namelen = NAME_MAX;
  responder.body(out);
}

// ---- extended attributes ----

void AttributeOperations::getxattr(const Target& inode, Request& request, Responder responder) {
  const auto in = request.arguments<fuse_getxattr_in>();
  const std::optional<std::string_view> name = request.text(sizeof(in));
  if (!name) return responder.error(EINVAL);
  if (name->starts_with(kVirtualAttributes)) {
    const std::optional<std::string> text = activity_of(*inode, *name);
    if (!text) return responder.error(ENODATA);
    return reply_value(in.size, std::as_bytes(std::span(*text)), responder);
  }
  if (const int error = attribute_name_error(*name); error != 0) return responder.error(error);
  std::optional<ExtendedAttributes::Value> value;
  {
    const Inode::Reader reader(*inode);
    const ExtendedAttributes::Value* const found = reader->extended ? reader->extended->find(*name) : nullptr;
    if (found != nullptr) value = *found;
  }
  if (!value) return responder.error(ENODATA);
  reply_value(in.size, *value, responder);
}

template <typename Change>
int AttributeOperations::change_attribute(Inode& inode, std::size_t most, Responder& request, Change change) {
  const Records::Change together(table_.records());
  const int error = table_.change_metadata(inode, 0, most, change);
  if (error == 0) table_.records().done(request, {});
  return error;
}

void AttributeOperations::setxattr(const Target& inode, Request& request, Responder responder) {
  const auto in = request.arguments<fuse_setxattr_in>();
  const std::optional<std::string_view> given = request.text(sizeof(in));
  if (!given) return responder.error(EINVAL);
  const std::string_view name = *given;
  const std::span<const std::byte> value = request.message.subspan(kBodyOffset + sizeof(in) + name.size() + 1);
  if (value.size() != in.size) return responder.error(EINVAL);
  if (inode->is_fixed() || name.starts_with(kVirtualAttributes)) return responder.error(EPERM);
  if (const int error = attribute_name_error(name); error != 0) return responder.error(error);
  if (is_acl(name)) {
    return responder.answer(
        set_acl(*inode, name, value, (in.setxattr_flags & FUSE_SETXATTR_ACL_KILL_SGID) != 0, responder));
  }
  const std::size_t most = name.size() + 1 + value.size() + ExtendedAttributes::kOverhead;
  const auto change = [&](Inode::State& state) {
    const Status status = extended_of(state).set(name, value, in.flags);
    if (status.ok()) touch_ctime(state);
    return status.error();
  };
  responder.answer(change_attribute(*inode, most, responder, change));
}

int AttributeOperations::set_acl(Inode& inode, std::string_view name, std::span<const std::byte> value,
                                 bool kill_set_gid, Responder& request) {
  const ExtendedAttributes::Value list(value.begin(), value.end());
  if (!acl_is_valid(list)) return EINVAL;
  const bool access = name == kAccessAcl;
  if (!access && !inode.is_directory()) return EACCES;
  const std::size_t most = name.size() + 1 + list.size() + ExtendedAttributes::kOverhead;
  return change_attribute(inode, most, request, [&](Inode::State& state) {
    if (access && acl_is_minimal(list)) {
      if (state.extended) state.extended->remove(name);
    } else if (const Status status = extended_of(state).set(name, list, 0); !status.ok()) {
      return status.error();
    }
    touch_ctime(state);
    if (!access) return 0;
    gpufs_attributes& attributes = state.record.attributes;
    attributes.mode = mode_with_acl(attributes.mode, list);
    if (kill_set_gid) attributes.mode &= ~static_cast<std::uint32_t>(S_ISGID);
    return 0;
  });
}

void AttributeOperations::listxattr(const Target& inode, Request& request, Responder responder) {
  const auto has_trusted = [&] {
    const Inode::Reader reader(*inode);
    return reader->extended && reader->extended->has_trusted();
  };
  const bool trusted = has_trusted() && Caller::of(request.header).administers();
  std::string names;
  {
    const Inode::Reader reader(*inode);
    if (reader->extended) names = reader->extended->names(trusted);
  }
  reply_value(request.arguments<fuse_getxattr_in>().size, std::as_bytes(std::span(names)), responder);
}

void AttributeOperations::removexattr(const Target& inode, Request& request, Responder responder) {
  const std::optional<std::string_view> given = request.text(0);
  if (!given) return responder.error(EINVAL);
  const std::string_view name = *given;
  if (inode->is_fixed() || name.starts_with(kVirtualAttributes)) return responder.error(EPERM);
  if (const int error = attribute_name_error(name); error != 0) return responder.error(error);
  bool kill_set_gid = false;
  if (name == kAccessAcl) {
    const gpufs_attributes now = inode->attributes();
    kill_set_gid = (now.mode & S_ISGID) != 0 && !Caller::of(request.header).keeps_set_gid_of(now.gid);
  }
  const auto change = [&](Inode::State& state) {
    if (kill_set_gid) state.record.attributes.mode &= ~static_cast<std::uint32_t>(S_ISGID);
    const bool removed = state.extended && state.extended->remove(name);
    if (!removed && !is_acl(name)) return ENODATA;  // removing a list that is not there succeeds
    touch_ctime(state);
    return 0;
  };
  responder.answer(change_attribute(*inode, 0, responder, change));
}

}  // namespace gpufs::fuse
