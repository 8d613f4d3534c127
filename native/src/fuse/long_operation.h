// What the classes that serve requests share: ranges that a request can mean, copies' replies, and operations that run
// on the executor and can be interrupted.
// Owned by the Session.
// Thread-safe; nothing here blocks.
#pragma once

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <type_traits>
#include <utility>

#include "fuse/cancellation.h"
#include "fuse/executor.h"
#include "fuse/inode_table.h"
#include "fuse/statistics.h"
#include "fuse/transport.h"

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

class LongOperations {
 public:
  // patience: how long an operation that finds the device full waits for memory of removed files to come back.
  LongOperations(InodeTable& table, Executor& executor, Cancellations& cancellations, Statistics& statistics,
                 std::chrono::milliseconds patience)
      : table_(table),
        executor_(executor),
        cancellations_(cancellations),
        statistics_(statistics),
        patience_(patience) {}

  [[nodiscard]] Executor& executor() const { return executor_; }
  [[nodiscard]] Cancellations& cancellations() const { return cancellations_; }

  // Runs body(operation, responder), registered for INTERRUPT. What was interrupted before is EINTR, what finds no
  // thread or no memory ENOMEM. The body returns nothing or as Executor::Job::run().
  template <typename Body>
  void run(const Executor::Lane& lane, const void* subject, Responder responder, Body body) {
    Flying flying(cancellations_, std::move(responder));
    const std::shared_ptr<const Operation> operation = flying.shared();
    const std::uint64_t unique = operation->unique;
    executor_.submit(lane, subject, unique,
                     [flying = std::move(flying),
                      body = std::move(body)](int refusal) mutable -> std::optional<Executor::TimePoint> {
                       Responder& reply = flying.responder();
                       if (refusal == 0 && flying.operation().cancelled) refusal = EINTR;
                       try {
                         if (refusal != 0) {
                           reply.error(refusal);
                         } else if constexpr (std::is_void_v<decltype(body(flying.operation(), reply))>) {
                           body(flying.operation(), reply);
                         } else {
                           return body(flying.operation(), reply);
                         }
                       } catch (const std::bad_alloc&) {
                         reply.error(ENOMEM);
                       }
                       return std::nullopt;
                     });
    // An INTERRUPT that came before it was in the queue has not found it there.
    if (operation->cancelled) static_cast<void>(executor_.discard(unique));
  }

  // An operation of an inode's buffer.
  template <typename Body>
  void run(const Inode& inode, Responder responder, Body body) {
    run({Executor::Lane::Kind::kBuffers, inode.device(), 0}, &inode, std::move(responder), std::move(body));
  }

  // The same for what needs memory. attempt(operation, responder) returns 0 when it has answered, else the errno to
  // answer with. After ENOSPC it is tried again when memory of removed files comes back, for as long as there is any.
  template <typename Attempt>
  void run_with_space(const Executor::Lane& lane, const void* subject, Responder responder, Attempt attempt) {
    run(lane, subject, std::move(responder),
        [this, device = lane.device, attempt = std::move(attempt),
         deadline = std::chrono::steady_clock::now() + patience_,
         waited = false](const Operation& operation, Responder& reply) mutable -> std::optional<Executor::TimePoint> {
          const std::uint64_t noted = table_.reaped();
          const int error = attempt(operation, reply);
          if (error == ENOSPC && !operation.cancelled) {
            if (!std::exchange(waited, true)) statistics_.space_waits.add();
            if (table_.orphan_bytes(device) > 0 || table_.reaped() != noted) return deadline;
          }
          if (error != 0) {
            reply.error(operation.cancelled ? EINTR : error);
          } else if (waited) {
            statistics_.space_waits_won.add();
          }
          return std::nullopt;
        });
  }
  template <typename Attempt>
  void run_with_space(const Inode& inode, Responder responder, Attempt attempt) {
    run_with_space({Executor::Lane::Kind::kBuffers, inode.device(), 0}, &inode, std::move(responder),
                   std::move(attempt));
  }

 private:
  InodeTable& table_;
  Executor& executor_;
  Cancellations& cancellations_;
  Statistics& statistics_;
  const std::chrono::milliseconds patience_;
};

}  // namespace gpufs::fuse
