#include "fuse/long_operation.h"

#include <algorithm>
#include <cerrno>

#include "base/math.h"
#include "fuse/protocol.h"

namespace gpufs::fuse {

namespace {

constexpr std::uint64_t kCopyLimit32 = UINT32_MAX & ~std::uint64_t{0xfff};

}  // namespace

bool valid_range(std::uint64_t offset, std::uint64_t bytes) {
  std::uint64_t end = 0;
  return !add_overflows(offset, bytes, &end) && end <= kMaximumOffset;
}

Result<CopyRequest> read_copy_request(const Request& request) {
  CopyRequest copy;
  copy.wide = request.header.opcode == kOpcodeCopyFileRange64;
  if (!read_struct(request.message, sizeof(fuse_in_header), &copy.in)) return Status(EINVAL, "a copy without a body");
  if (!copy.wide) copy.in.len = std::min(copy.in.len, kCopyLimit32);
  if (copy.in.flags != 0) return Status(EINVAL, "flags of a copy that nobody knows");
  if (!valid_range(copy.in.off_in, copy.in.len) || !valid_range(copy.in.off_out, copy.in.len)) {
    return Status(EINVAL, "ranges of a copy that cannot be");
  }
  return copy;
}

void reply_copied(Responder& responder, bool wide, std::uint64_t bytes) {
  if (wide) return responder.body(CopyFileRangeOut{bytes});
  fuse_write_out out{};
  out.size = static_cast<std::uint32_t>(bytes);  // of a length that was clipped to 32 bits
  responder.body(out);
}

}  // namespace gpufs::fuse
