#include "fuse/name_operations.h"

#include <sys/stat.h>

#include <cstddef>
#include <memory>

#include "base/status.h"
#include "fuse/control_messages.h"
#include "fuse/open_files.h"
#include "fuse/protocol.h"

namespace gpufs::fuse {

bool NameOperations::open(const Request& request, Responder& responder) {
  fuse_open_in in{};
  if (!read_struct(request.message, sizeof(fuse_in_header), &in)) return false;
  const std::shared_ptr<Inode> inode = table_.find(request.header.nodeid);
  if (!inode || !inode->buffer()) return false;
  const Result<std::uint64_t> fh = table_.open(request.header.nodeid, static_cast<int>(in.flags));
  if (!fh.ok()) return false;
  count(statistics_.of(FUSE_OPEN).native);
  fuse_open_out out{};
  out.fh = fh.value();
  out.open_flags = buffer_open_flags(init_);
  responder.body(out);
  return true;
}

bool NameOperations::opendir(const Request& request, Responder& responder) {
  const std::shared_ptr<Inode> inode = table_.find(request.header.nodeid);
  if (!inode || !S_ISDIR(inode->kind()) || inode->device() < 0) return false;
  count(statistics_.of(FUSE_OPENDIR).native);
  fuse_open_out out{};
  out.fh = directory_handle(inode->ino(), directories_opened_.fetch_add(1, std::memory_order_relaxed));
  responder.body(out);
  return true;
}

}  // namespace gpufs::fuse
