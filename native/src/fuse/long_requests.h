// Requests that may take long: they run on the executor and can be interrupted. With the parts that requests on buffers
// and on backing files share.
// Ownership: the Mount's. Thread-safe; nothing here blocks.
#pragma once

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <exception>
#include <optional>
#include <type_traits>
#include <utility>

#include "fuse/executor.h"
#include "fuse/inode_table.h"
#include "fuse/request.h"
#include "fuse/statistics.h"
#include "memory/account.h"

namespace gpufs::fuse {

// The largest offset that the kernel knows.
inline constexpr std::uint64_t kMaximumOffset = INT64_MAX;

// Whether offset + bytes is a range that the kernel could mean.
bool valid_range(std::uint64_t offset, std::uint64_t bytes);

// A COPY_FILE_RANGE or COPY_FILE_RANGE_64. The first can report 32 bits only, so its length is clipped to the largest
// multiple of a page that fits. EINVAL: unknown flags or impossible ranges.
struct CopyRequest {
  fuse_copy_file_range_in in{};
  bool wide = false;
};
Result<CopyRequest> read_copy_request(const Request& request);
void reply_copied(Responder& responder, bool wide, std::uint64_t bytes);

class LongRequests {
 public:
  struct Ignore {
    void operator()(int /*error*/) const {}
  };

  // patience: how long a request that finds the device full waits for memory of removed files to come back.
  LongRequests(InodeTable& table, Executor& executor, Statistics& statistics, std::chrono::milliseconds patience)
      : table_(table), executor_(executor), statistics_(statistics), patience_(patience) {}

  [[nodiscard]] Executor& executor() const { return executor_; }

  // Runs body(cancellation, responder), which an INTERRUPT of the request cancels. The body returns nothing or as
  // Executor's jobs do.
  template <typename Body>
  void run(const Executor::Lane& lane, const void* subject, Responder responder, Body body) {
    const std::uint64_t unique = responder.unique();
    executor_.submit(lane, subject, unique,
                     [reply = std::move(responder), body = std::move(body)](
                         int refusal, Cancellation& cancellation) mutable -> std::optional<Executor::TimePoint> {
                       if (refusal == 0 && cancellation.requested()) refusal = EINTR;
                       try {
                         if (refusal != 0 && refusal != ENOSPC) {  // that comes at the deadline of a parked job
                           reply.error(refusal);
                         } else if constexpr (std::is_void_v<decltype(body(cancellation, reply))>) {
                           body(cancellation, reply);
                         } else {
                           return body(cancellation, reply);
                         }
                       } catch (const std::exception&) {
                         reply.error(ENOMEM);
                       }
                       return std::nullopt;
                     });
  }

  // A request about an inode's buffer.
  template <typename Body>
  void run(const Inode& inode, Responder responder, Body body) {
    run({Executor::Lane::Kind::kBuffers, inode.device(), 0}, &inode, std::move(responder), std::move(body));
  }

  // The same for what needs memory. attempt(cancellation, responder) returns 0 when it has answered, else the errno to
  // answer with. After ENOSPC and EDQUOT it is tried again when memory of removed files comes back, as long as there is
  // any, and a last time at the end of the patience. failed(errno): before the request is answered with it.
  template <typename Attempt, typename Failed = Ignore>
  void run_with_space(const Executor::Lane& lane, const void* subject, Responder responder, Attempt attempt,
                      Failed failed = {}) {
    run(lane, subject, std::move(responder),
        [this, device = lane.device, attempt = std::move(attempt), failed = std::move(failed),
         deadline = std::chrono::steady_clock::now() + patience_,
         waited = false](Cancellation& cancellation, Responder& reply) mutable -> std::optional<Executor::TimePoint> {
          const std::uint64_t noted = executor_.freed_count();
          const int error = attempt(cancellation, reply);
          if (lacks_memory(error) && !cancellation.requested() && std::chrono::steady_clock::now() < deadline) {
            if (!std::exchange(waited, true)) count(statistics_.space_waits);
            if (table_.orphan_bytes(device) > 0 || executor_.freed_count() != noted) return deadline;
          }
          if (error != 0) {
            failed(error);
            reply.error(cancellation.requested() ? EINTR : error);
          }
          return std::nullopt;
        });
  }
  template <typename Attempt, typename Failed = Ignore>
  void run_with_space(const Inode& inode, Responder responder, Attempt attempt, Failed failed = {}) {
    run_with_space({Executor::Lane::Kind::kBuffers, inode.device(), 0}, &inode, std::move(responder),
                   std::move(attempt), std::move(failed));
  }

 private:
  InodeTable& table_;
  Executor& executor_;
  Statistics& statistics_;
  const std::chrono::milliseconds patience_;
};

}  // namespace gpufs::fuse
