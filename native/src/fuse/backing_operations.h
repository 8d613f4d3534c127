// The native operations on files below backing/: passed through to the host's file on the executor, in a lane for each
// file system, and copies between them and buffers, which the transfer engine makes.
// Owned by the Session. A thread that hangs in a file is left behind at the end, and is not waited for when the process
// that it serves ends.
// serve() is called on the transport's threads and never waits for a file; any thread may call the rest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>

#include "fuse/backing_table.h"
#include "fuse/caller.h"
#include "fuse/cancellation.h"
#include "fuse/inode_table.h"
#include "fuse/long_operation.h"
#include "fuse/statistics.h"
#include "fuse/transport.h"
#include "io/transfer_engine.h"

namespace gpufs::fuse {

class BackingOperations {
 public:
  // transfers: null where there is no engine (tests); copies with buffers are then EXDEV, which makes the kernel copy.
  BackingOperations(InodeTable& table, std::shared_ptr<TransferEngine> transfers, LongOperations& long_operations,
                    Statistics& statistics);
  BackingOperations(const BackingOperations&) = delete;
  BackingOperations& operator=(const BackingOperations&) = delete;

  // Answers requests on handles of backing files and returns true; others are not its affair.
  bool serve(Request& request, Responder& responder);

  // Its INTERRUPT has come: answers a request that a thread serves, or that waits for one, EINTR once its client is
  // being killed. Other signals end no call on a file whose bytes are under way.
  void interrupted(std::uint64_t unique);

  [[nodiscard]] BackingTable& files() { return files_; }
  // The executor has ended without so many threads, which hang in files: answers what they serve.
  void left_behind(std::size_t threads);
  // The members of one JSON object.
  void write_statistics(JsonWriter& json) const;

 private:
  // What a thread has found out. Made without anything of this object, which may be gone by then.
  struct Answer {
    int error = 0;
    std::unique_ptr<std::byte[]> body;
    std::size_t body_bytes = 0;
    std::uint64_t read = 0;  // bytes, for the statistics
    std::uint64_t written = 0;
    std::uint64_t copied = 0;
  };
  static Answer failed(int error);
  template <typename T>
  static Answer answer_of(const T& body);

  // A request that a thread serves, which may hang.
  struct Flight {
    std::shared_ptr<Operation> operation;
    Caller client;
    std::mutex mutex;     // guards responder
    Responder responder;  // not pending: answered, perhaps while its thread hangs, which then drops what it finds out
  };

  bool read(Request& request, Responder& responder);
  bool write(Request& request, Responder& responder);
  bool lseek(Request& request, Responder& responder);
  bool fallocate(Request& request, Responder& responder);
  bool flush(Request& request, Responder& responder);
  bool fsync(Request& request, Responder& responder);
  bool copy_file_range(Request& request, Responder& responder);

  // True if the read was served without waiting, from the page cache.
  bool read_cached(const OpenBacking& open, const fuse_read_in& in, std::span<std::byte> memory, Responder& responder);
  // The count of a copy with the buffer of `inode`, short when `operation` was cancelled after progress.
  Result<std::uint64_t> copy_with_buffer(const TransferRequest& wanted, Inode& inode, const Operation& operation);
  void drop_set_id_after_copy(const std::shared_ptr<OpenBacking>& to, const Caller& caller);
  static Answer copy_files(const OpenBacking& from, const OpenBacking& to, const fuse_copy_file_range_in& in, bool wide,
                           const Operation& operation);

  // Runs Answer body(const Operation&) in the lane of the file, registered for INTERRUPT, and answers the request. The
  // body owns all that it uses.
  template <typename Body>
  void pass_through(const OpenBacking& open, const Request& request, Responder responder, Body body);
  // Looks now and then whether the client is being killed, until the request is answered.
  void watch(std::shared_ptr<Flight> flight);
  void settle(Flight& flight, const Answer& answer);

  InodeTable& table_;
  const std::shared_ptr<TransferEngine> transfers_;
  LongOperations& long_operations_;
  Statistics& statistics_;
  Counter read_bytes_;
  Counter written_bytes_;
  Counter copied_bytes_;
  Counter cached_reads_;
  Counter left_behind_;
  BackingTable files_;

  mutable std::mutex flights_mutex_;  // guards flights_; after a Flight's
  std::map<const Flight*, std::shared_ptr<Flight>> flights_;
};

}  // namespace gpufs::fuse
