// The native operations on files below backing/: passed through to the host's file on a pool of their own, and copies
// between them and buffers, which the transfer engine makes.
// Owned by the Session.
// serve() is called on the transport's threads and never waits for a file; any thread may call the rest.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "fuse/backing_table.h"
#include "fuse/cancellation.h"
#include "fuse/inode_table.h"
#include "fuse/statistics.h"
#include "fuse/transport.h"
#include "fuse/worker_pool.h"
#include "io/transfer.h"

namespace gpufs::fuse {

class BackingOperations {
 public:
  // transfers: null where there is no engine (tests); copies with buffers are then EXDEV, which makes the kernel copy.
  BackingOperations(InodeTable& table, std::shared_ptr<TransferEngine> transfers, Cancellations& cancellations,
                    Statistics& statistics, std::size_t threads);
  BackingOperations(const BackingOperations&) = delete;
  BackingOperations& operator=(const BackingOperations&) = delete;

  // Answers requests on handles of backing files and returns true; others are not its affair.
  bool serve(Request& request, Responder& responder);

  [[nodiscard]] BackingTable& files() { return files_; }
  [[nodiscard]] const WorkerPool& workers() const { return workers_; }
  // As WorkerPool's.
  bool discard(std::uint64_t unique) { return workers_.discard(unique); }
  void stop() { workers_.stop(); }

 private:
  bool read(Request& request, Responder& responder);
  bool write(Request& request, Responder& responder);
  bool lseek(Request& request, Responder& responder);
  bool fallocate(Request& request, Responder& responder);
  bool flush(Request& request, Responder& responder);
  bool fsync(Request& request, Responder& responder);
  bool copy_file_range(Request& request, Responder& responder);

  // The counts of copies from `from` to `to`, short when `operation` was cancelled after progress.
  Result<std::uint64_t> copy_with_buffer(Direction direction, const OpenBacking& backing, Inode& inode,
                                         std::uint64_t file_offset, std::uint64_t buffer_offset, std::uint64_t bytes,
                                         std::uint64_t client, const Operation& operation);
  static Result<std::uint64_t> copy_files(const OpenBacking& from, const OpenBacking& to, std::uint64_t from_offset,
                                          std::uint64_t to_offset, std::uint64_t bytes, const Operation& operation);

  // Runs body(operation, responder) on the pool, registered for INTERRUPT.
  template <typename Body>
  void submit(Responder responder, Body body);

  InodeTable& table_;
  const std::shared_ptr<TransferEngine> transfers_;
  Cancellations& cancellations_;
  Statistics& statistics_;
  BackingTable files_;
  WorkerPool workers_;  // uses all of the above, so it goes first
};

}  // namespace gpufs::fuse
