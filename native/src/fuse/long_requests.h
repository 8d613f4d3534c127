// Requests that may take long: they run on the executor and can be interrupted. With the parts that requests on buffers
// and on backing files share.
// Ownership: the Mount's. Thread-safe; nothing here blocks.
#pragma once

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "device/device_context.h"
#include "fuse/executor.h"
#include "fuse/inode_table.h"
#include "fuse/request.h"
#include "memory/account.h"
#include "observe/counters.h"

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

  // devices: those of the mount, which outlive this. timeout: how long a request that finds the device full waits for
  // memory of removed files to come back.
  LongRequests(const std::vector<std::shared_ptr<DeviceContext>>& devices, Executor& executor,
               observe::EngineCounters& counters, std::chrono::milliseconds timeout);

  [[nodiscard]] Executor& executor() const { return executor_; }

  // Runs body(cancellation, responder), which an INTERRUPT of the request cancels; reads, writes and changes of
  // attributes only if its client is being killed. The body returns nothing or as Executor's jobs do.
  template <typename Body>
  void run(const Executor::Lane& lane, const void* subject, Responder responder, Body body) {
    const std::uint64_t unique = responder.unique();
    // tmpfs lets no signal end these: programs expect no EINTR, and a fault that fails is a SIGBUS.
    const std::uint32_t opcode = responder.opcode();
    const bool to_the_end = opcode == FUSE_READ || opcode == FUSE_WRITE || opcode == FUSE_SETATTR;
    const std::uint32_t client = to_the_end ? responder.client() : 0;
    executor_.submit(lane, subject, {unique, client, responder.user()},
                     [reply = std::move(responder), body = std::move(body)](
                         int refusal, Cancellation& cancellation) mutable -> std::optional<Executor::TimePoint> {
                       if (refusal == 0 && cancellation.requested()) refusal = EINTR;
                       try {
                         if (refusal != 0) {
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
  // answer with. After ENOSPC and EDQUOT it is tried again whenever the device releases memory, as long as memory of
  // removed files is coming back, and a last time at the end of the timeout. failed(errno): before the request is
  // answered with it.
  template <typename Attempt, typename Failed = Ignore>
  void retry_until_memory(const Executor::Lane& lane, const void* subject, Responder responder, Attempt attempt,
                          Failed failed = {}) {
    run(lane, subject, std::move(responder),
        [this, &releases = devices_[static_cast<std::size_t>(lane.device)]->releases(), attempt = std::move(attempt),
         failed = std::move(failed), deadline = std::chrono::steady_clock::now() + timeout_,
         waited = false](Cancellation& cancellation, Responder& reply) mutable -> std::optional<Executor::TimePoint> {
          const std::optional<Releases::TimePoint> before = releases.expected_until();
          const int error = attempt(cancellation, reply);
          if (lacks_memory(error) && !cancellation.requested() && std::chrono::steady_clock::now() < deadline) {
            // Memory that is released during the attempt counts.
            if (const auto until = std::max(before, releases.expected_until())) {
              if (!std::exchange(waited, true)) count(counters_.memory_waits);
              return std::min(deadline, *until);
            }
          }
          if (error != 0) {
            failed(error);
            reply.error(cancellation.requested() ? EINTR : error);
          }
          return std::nullopt;
        });
  }
  template <typename Attempt, typename Failed = Ignore>
  void retry_until_memory(const Inode& inode, Responder responder, Attempt attempt, Failed failed = {}) {
    retry_until_memory({Executor::Lane::Kind::kBuffers, inode.device(), 0}, &inode, std::move(responder),
                       std::move(attempt), std::move(failed));
  }

 private:
  const std::vector<std::shared_ptr<DeviceContext>>& devices_;
  Executor& executor_;
  observe::EngineCounters& counters_;
  const std::chrono::milliseconds timeout_;
  std::vector<std::shared_ptr<void>> listeners_;  // of the devices: they wake waiting requests
};

}  // namespace gpufs::fuse
