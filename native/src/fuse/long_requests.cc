#include "fuse/long_requests.h"

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
  copy.in = request.arguments<fuse_copy_file_range_in>();
  if (!copy.wide) copy.in.len = std::min(copy.in.len, kCopyLimit32);
  if (copy.in.flags != 0) return Status(EINVAL, "unknown flags of a copy");
  if (!valid_range(copy.in.off_in, copy.in.len) || !valid_range(copy.in.off_out, copy.in.len)) {
    return Status(EINVAL, "impossible ranges of a copy");
  }
  return copy;
}

LongRequests::LongRequests(const std::vector<std::shared_ptr<DeviceContext>>& devices, Executor& executor,
                           observe::EngineCounters& counters, std::chrono::milliseconds timeout)
    : devices_(devices), executor_(executor), counters_(counters), timeout_(timeout) {
  for (const std::shared_ptr<DeviceContext>& device : devices_) {
    listeners_.push_back(
        device->releases().on_release([&executor, index = device->info().index] { executor.resume(index); }));
  }
}

void reply_copied(Responder& responder, bool wide, std::uint64_t bytes) {
  if (wide) return responder.body(bytes);  // COPY_FILE_RANGE_64; the other one answers with 32 bits
  fuse_write_out out{};
  out.size = static_cast<std::uint32_t>(bytes);  // the length was clipped to 32 bits
  responder.body(out);
}

}  // namespace gpufs::fuse
