// What the classes that serve requests share: ranges that a request can mean, operations that run on a pool and can be
// interrupted, and copies' replies.
// Functions; nobody owns them.
// Any thread may call them; wait_for_space() blocks.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>

#include "fuse/cancellation.h"
#include "fuse/inode_table.h"
#include "fuse/transport.h"
#include "fuse/worker_pool.h"

namespace gpufs::fuse {

// Offsets beyond are no offsets to the kernel.
inline constexpr std::uint64_t kMaximumOffset = INT64_MAX;

// offset + bytes as a range that the kernel could mean.
bool valid_range(std::uint64_t offset, std::uint64_t bytes);

// Reads a COPY_FILE_RANGE or COPY_FILE_RANGE_64 of a sound message. The first can be answered with 32 bits only, so
// its length is clipped to the largest multiple of a page that fits. EINVAL: unknown flags, or ranges that cannot be.
struct CopyRequest {
  fuse_copy_file_range_in in{};
  bool wide = false;
};
Result<CopyRequest> read_copy_request(const Request& request);
void reply_copied(Responder& responder, bool wide, std::uint64_t bytes);

// True if memory has been given back since InodeTable::reaped() was noted, before the failed attempt; false when
// waiting is over.
bool wait_for_space(InodeTable& table, std::int32_t device, std::uint64_t noted, const Operation& operation,
                    std::chrono::steady_clock::time_point deadline);

// Runs body(operation, responder) on the pool, registered for INTERRUPT; what was interrupted before is EINTR,
// what finds no thread ENOMEM.
template <typename Body>
void submit_operation(WorkerPool& workers, Cancellations& cancellations, Responder responder, Body body) {
  std::shared_ptr<Operation> operation = cancellations.begin(responder.unique());
  const std::uint64_t unique = operation->unique;
  workers.submit(unique, [&cancellations, operation = std::move(operation), responder = std::move(responder),
                          body = std::move(body)](int refusal) mutable {
    if (refusal != 0 || operation->cancelled) {
      responder.error(refusal != 0 ? refusal : EINTR);
    } else {
      body(*operation, responder);
    }
    // After the reply: the kernel does not use the number for another request.
    cancellations.end(operation->unique);
  });
}

}  // namespace gpufs::fuse
