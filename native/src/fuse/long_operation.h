// What the classes that serve requests share: ranges that a request can mean, operations that run on a pool and can be
// interrupted, and copies' replies.
// Functions; nobody owns them.
// Any thread may call them; wait_for_space() blocks.
#pragma once

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <memory>
#include <new>
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

// An operation that INTERRUPT finds, with the duty to answer its request; ends both, in this order, for the kernel uses
// the number for another request once it has the reply.
class Flying {
 public:
  Flying(Cancellations& cancellations, Responder responder)
      : cancellations_(&cancellations),
        operation_(cancellations.begin(responder.unique())),
        responder_(std::move(responder)) {}
  Flying(Flying&& other) noexcept
      : cancellations_(other.cancellations_),
        operation_(std::move(other.operation_)),
        responder_(std::move(other.responder_)) {}
  Flying& operator=(Flying&&) = delete;
  ~Flying() {
    if (!operation_) return;
    { const Responder last = std::move(responder_); }
    cancellations_->end(operation_->unique);
  }

  [[nodiscard]] const Operation& operation() const { return *operation_; }
  [[nodiscard]] std::shared_ptr<const Operation> shared() const { return operation_; }
  [[nodiscard]] Responder& responder() { return responder_; }

 private:
  Cancellations* cancellations_;
  std::shared_ptr<Operation> operation_;
  Responder responder_;
};

// Runs body(operation, responder) on the pool, registered for INTERRUPT; what was interrupted before is EINTR,
// what finds no thread or no memory ENOMEM.
template <typename Body>
void submit_operation(WorkerPool& workers, Cancellations& cancellations, Responder responder, Body body) {
  Flying flying(cancellations, std::move(responder));
  const std::shared_ptr<const Operation> operation = flying.shared();
  const std::uint64_t unique = operation->unique;
  workers.submit(unique, [flying = std::move(flying), body = std::move(body)](int refusal) mutable {
    if (refusal != 0 || flying.operation().cancelled) return flying.responder().error(refusal != 0 ? refusal : EINTR);
    try {
      body(flying.operation(), flying.responder());
    } catch (const std::bad_alloc&) {
      flying.responder().error(ENOMEM);
    }
  });
  // An INTERRUPT that came before it was in the queue has not found it there.
  if (operation->cancelled) static_cast<void>(workers.discard(unique));
}

}  // namespace gpufs::fuse
