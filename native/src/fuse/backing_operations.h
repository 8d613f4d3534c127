// The native operations on files below backing/: passed through to the host's file on pools of their own, and copies
// between them and buffers, which the transfer engine makes.
// Owned by the Session. A thread that hangs in a file is left behind at the end.
// serve() is called on the transport's threads and never waits for a file; any thread may call the rest.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>

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
  struct Options {
    std::size_t threads = 8;        // for the files of a lane; they wait for disks rather than work
    std::size_t copy_threads = 32;  // the same for copies with buffers, which wait for the transfer engine
    // How long a copy that finds the device full waits for removed files' memory to come back.
    std::chrono::milliseconds space_patience{3000};
    // How long stop() waits for threads in files that may hang.
    std::chrono::milliseconds stop_patience{200};
  };

  // transfers: null where there is no engine (tests); copies with buffers are then EXDEV, which makes the kernel copy.
  BackingOperations(InodeTable& table, std::shared_ptr<TransferEngine> transfers, Cancellations& cancellations,
                    Statistics& statistics, const Options& options);
  ~BackingOperations() { stop(); }
  BackingOperations(const BackingOperations&) = delete;
  BackingOperations& operator=(const BackingOperations&) = delete;

  // Answers requests on handles of backing files and returns true; others are not its affair.
  bool serve(Request& request, Responder& responder);

  [[nodiscard]] BackingTable& files() { return files_; }
  // As WorkerPool's.
  bool discard(std::uint64_t unique);
  // Ends all pools; after Cancellations::cancel_all(). What hangs in a file is answered and left behind. May be called
  // twice.
  void stop();
  // The members of one JSON object.
  void write_statistics(JsonWriter& json) const;

 private:
  // The pools for the files of one server that may hang, or for all others: who hangs holds up nobody else.
  struct Lane {
    Lane(const Options& options, Statistics& statistics)
        : files(options.threads, statistics), copies(options.copy_threads, statistics) {}
    WorkerPool files;
    WorkerPool copies;
  };

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
    std::mutex mutex;     // guards responder
    Responder responder;  // not pending: answered, or left behind
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
  // The count of a copy with a buffer, short when `operation` was cancelled after progress.
  Result<std::uint64_t> copy_with_buffer(Direction direction, const OpenBacking& backing, Inode& inode,
                                         std::uint64_t file_offset, std::uint64_t buffer_offset, std::uint64_t bytes,
                                         std::uint64_t client, const Operation& operation);
  static Answer copy_files(const OpenBacking& from, const OpenBacking& to, const fuse_copy_file_range_in& in, bool wide,
                           const Operation& operation);

  // Runs Answer body(const Operation&) on a pool of `lane`, registered for INTERRUPT, and answers the request. The body
  // owns all that it uses.
  template <typename Body>
  void pass_through(Lane& lane, Responder responder, Body body);
  void settle(Flight& flight, const Answer& answer);
  Lane& lane_of(const OpenBacking& open);

  InodeTable& table_;
  const std::shared_ptr<TransferEngine> transfers_;
  Cancellations& cancellations_;
  Statistics& statistics_;
  const Options options_;
  Counter read_bytes_;
  Counter written_bytes_;
  Counter copied_bytes_;
  Counter cached_reads_;
  Counter left_behind_;
  BackingTable files_;

  mutable std::mutex flights_mutex_;  // guards flights_; after a Flight's
  std::map<const Flight*, std::shared_ptr<Flight>> flights_;

  mutable std::mutex lanes_mutex_;                        // guards the two below; nothing is called under it
  std::map<std::uint64_t, std::unique_ptr<Lane>> lanes_;  // by device; 0: files that do not hang
  bool stopped_ = false;
};

}  // namespace gpufs::fuse
