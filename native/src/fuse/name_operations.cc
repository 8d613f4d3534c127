#include "fuse/name_operations.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "fuse/control_messages.h"
#include "fuse/open_files.h"
#include "fuse/protocol.h"

namespace gpufs::fuse {

namespace {

constexpr std::size_t kBody = sizeof(fuse_in_header);
constexpr std::size_t kLongestName = 255;

// The name that a LOOKUP is about; empty if the message is not as it should be.
std::string_view name_of(const Request& request) {
  const std::span<const std::byte> body = request.message.subspan(kBody);
  if (body.empty() || body.back() != std::byte{0}) return {};
  const std::string_view text(reinterpret_cast<const char*>(body.data()), body.size() - 1);
  return text.find('\0') == std::string_view::npos ? text : std::string_view();
}

}  // namespace

std::shared_ptr<Inode> NameOperations::find_directory(const Request& request) const {
  if (request.header.nodeid >= kFirstHostInode) return nullptr;
  std::shared_ptr<Inode> inode = table_.find(request.header.nodeid);
  return inode && S_ISDIR(inode->kind()) ? inode : nullptr;
}

bool NameOperations::lookup(const Request& request, Responder& responder) {
  const std::shared_ptr<Inode> directory = find_directory(request);
  if (!directory) return false;
  const std::string_view name = name_of(request);
  if (name.empty() || name.size() > kLongestName || name == "." || name == "..") return false;
  count(statistics_.of(FUSE_LOOKUP).native);
  fuse_entry_out out{};  // without an inode: the kernel may remember that there is no such name
  out.entry_valid = entry_validity_.seconds;
  out.entry_valid_nsec = entry_validity_.nanoseconds;
  if (const std::shared_ptr<Inode> inode = table_.look_up(*directory, name)) {
    out.nodeid = inode->ino();
    out.attr.ino = inode->ino();
    fill_attr(inode->attributes(), out.attr);
    if (may_be_cached(out.attr.mode)) {
      out.attr_valid = attribute_validity_.seconds;
      out.attr_valid_nsec = attribute_validity_.nanoseconds;
    }
  }
  responder.body(out);
  return true;
}

bool NameOperations::open(const Request& request, Responder& responder) {
  fuse_open_in in{};
  if (!read_struct(request.message, kBody, &in)) return false;
  const std::shared_ptr<Inode> inode = table_.find(request.header.nodeid);
  if (!inode || !inode->buffer()) return false;
  const Result<std::uint64_t> fh = table_.open(request.header.nodeid, static_cast<int>(in.flags));
  if (!fh.ok()) return false;
  count(statistics_.of(FUSE_OPEN).native);
  fuse_open_out out{};
  out.fh = fh.value();
  out.open_flags = buffer_open_flags(relay_.init());
  if (read_ahead_.is_own(request.header.pid)) out.open_flags |= kOpenKeepCache;
  responder.body(out);
  return true;
}

bool NameOperations::opendir(const Request& request, Responder& responder) {
  const std::shared_ptr<Inode> inode = find_directory(request);
  if (!inode) return false;
  count(statistics_.of(FUSE_OPENDIR).native);
  fuse_open_out out{};
  out.fh = directory_handle(inode->ino(), directories_opened_.fetch_add(1, std::memory_order_relaxed));
  responder.body(out);
  return true;
}

bool NameOperations::fsyncdir(const Request& request, Responder& responder) {
  if (!is_directory_handle(request.arguments<std::uint64_t>())) return false;
  count(statistics_.of(FUSE_FSYNCDIR).native);
  responder.ok();
  return true;
}

bool NameOperations::releasedir(const Request& request, Responder& responder) {
  const auto fh = request.arguments<std::uint64_t>();
  if (!is_directory_handle(fh)) return false;
  {
    const std::lock_guard lock(listed_mutex_);
    if (listed_.erase(fh) != 0) return false;
  }
  count(statistics_.of(FUSE_RELEASEDIR).native);
  responder.ok();
  return true;
}

void NameOperations::note_listing(const Request& request) {
  const auto in = request.arguments<fuse_read_in>();
  if (is_directory_handle(in.fh)) {
    const std::lock_guard lock(listed_mutex_);
    listed_.insert(in.fh);
  }
  // The control plane's library does not report O_NOATIME.
  if (in.offset != 0 || (in.flags & O_NOATIME) != 0) return;
  if (const std::shared_ptr<Inode> inode = table_.find(request.header.nodeid)) table_.was_read(*inode);
}

void NameOperations::forget(const Request& request) {
  std::vector<fuse_forget_one> all;
  if (request.header.opcode == FUSE_FORGET) {
    fuse_forget_in in{};
    if (read_struct(request.message, kBody, &in)) all.push_back({request.header.nodeid, in.nlookup});
  } else {
    fuse_batch_forget_in in{};
    constexpr std::size_t kFirst = kBody + sizeof(in);
    if (read_struct(request.message, kBody, &in) &&
        (request.message.size() - kFirst) / sizeof(fuse_forget_one) >= in.count) {
      all.resize(in.count);
      if (in.count != 0) std::memcpy(all.data(), request.message.data() + kFirst, in.count * sizeof(fuse_forget_one));
    }
  }
  if (all.empty()) return count(statistics_.bad_requests);
  count(statistics_.of(request.header.opcode).native);
  std::erase_if(all, [this](const fuse_forget_one& one) { return table_.forget(one.nodeid, one.nlookup); });
  relay_.forget(all);
}

}  // namespace gpufs::fuse
