// Requests on open files below backing/: passed through to the host's file on the executor, in a lane for each file
// system, and copies between them and buffers, which the transfer engine makes.
// Ownership: the Mount's. A thread that hangs in a file is left behind at the end, and its request is answered when the
// process that waits for it is killed.
// The operations run on the transport's threads and never wait for a file; any thread may call the rest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "fuse/backing_table.h"
#include "fuse/caller.h"
#include "fuse/inode_table.h"
#include "fuse/long_requests.h"
#include "fuse/request.h"
#include "io/transfer_engine.h"
#include "observe/counters.h"

namespace gpufs::fuse {

class BackingOperations {
 public:
  using File = std::shared_ptr<OpenBacking>;

  // transfers: null without an engine (tests); copies with buffers are then EXDEV, which makes the kernel copy.
  BackingOperations(InodeTable& table, std::shared_ptr<TransferEngine> transfers, LongRequests& long_requests,
                    observe::EngineCounters& counters)
      : table_(table),
        transfers_(std::move(transfers)),
        long_requests_(long_requests),
        counters_(counters),
        files_(long_requests.executor()) {}

  void read(const File& file, Request& request, Responder responder);
  void write(const File& file, Request& request, Responder responder);
  void lseek(const File& file, Request& request, Responder responder);
  void fallocate(const File& file, Request& request, Responder responder);
  void flush(const File& file, Request& request, Responder responder);
  void fsync(const File& file, Request& request, Responder responder);
  void copy(const File& from, const File& to, const Request& request, const CopyRequest& copy, Responder responder);
  // load: from the file to the buffer.
  void copy_with_buffer(const File& file, const std::shared_ptr<OpenFile>& buffer, bool load, const Request& request,
                        const CopyRequest& copy, Responder responder);

  // The INTERRUPT of a request has come while a thread serves it: answers EINTR once its client is being killed.
  // Other signals end no call on a file whose bytes are under way.
  void interrupted(std::uint64_t unique);

  [[nodiscard]] BackingTable& files() { return files_; }
  // The executor has ended without so many threads, which hang in files: answers their requests.
  void left_behind(std::size_t threads);

 private:
  // The result of a thread's work. It depends on nothing of this object, which may be gone by then.
  struct Answer {
    int error = 0;
    std::vector<std::byte> body{};
    Counter observe::EngineCounters::*counter = &observe::EngineCounters::backing_read_bytes;
    std::uint64_t counted = 0;  // bytes, by the counter
  };
  template <typename T>
  static Answer answer_of(const T& body);

  // A request whose thread may hang. Its job owns it, so it is answered even if it cannot be queued.
  struct Pending {
    std::uint64_t unique = 0;
    Caller client;
    std::mutex mutex;     // guards responder
    Responder responder;  // not pending: answered, perhaps while its thread hangs, whose result is then dropped
  };

  // True if the read was served without waiting, from the page cache.
  bool read_cached(const OpenBacking& open, const fuse_read_in& in, std::span<std::byte> memory, Responder& responder);
  // loss: of the target, if that is a buffer.
  Result<std::uint64_t> transfer(const TransferRequest& wanted, Inode& inode, SetIdLoss loss,
                                 Cancellation& cancellation);
  void drop_set_id_after_copy(const File& to, const Caller& caller);

  // Runs Answer body(const Cancellation&) in the lane of the file and answers the request. The body owns all that it
  // uses.
  template <typename Body>
  void pass_through(const OpenBacking& open, const Request& request, Responder responder, Body body);
  // Answers with the pending request's mutex held.
  void settle(Pending& pending, const Answer& answer);

  InodeTable& table_;
  const std::shared_ptr<TransferEngine> transfers_;
  LongRequests& long_requests_;
  observe::EngineCounters& counters_;
  BackingTable files_;

  std::mutex pending_mutex_;  // guards pending_; after a Pending's
  std::unordered_map<std::uint64_t, std::weak_ptr<Pending>> pending_;
};

}  // namespace gpufs::fuse
