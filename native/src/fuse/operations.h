// The operations that native threads serve: everything that moves bytes or asks where they are.
// Owned by the Session.
// serve() is called on the transport's threads and waits for nothing; what may take long goes on to the executor.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "fuse/inode_table.h"
#include "fuse/long_operation.h"
#include "fuse/statistics.h"
#include "fuse/transport.h"

namespace gpufs::fuse {

struct OperationOptions {
  double attribute_timeout = 1.0;  // seconds
  // How long a write that finds the device full waits for removed files' memory to come back.
  std::chrono::milliseconds space_patience{3000};
};

class Operations {
 public:
  Operations(InodeTable& table, LongOperations& long_operations, Statistics& statistics);

  // Answers the request and returns true, or leaves it to the control plane. The responder is used only if true.
  bool serve(Request& request, Responder& responder);

 private:
  enum class Source { kNative, kControl, kStale };
  // Whose handle this is. kNative fills in `file`.
  Source classify(std::uint64_t fh, std::shared_ptr<OpenFile>* file) const;
  // The arguments of a request about one open file, whose handle they hold at `fh`, and that file. None where there is
  // nothing more to do here: the request is answered, or it is the control plane's.
  template <typename Arguments>
  std::shared_ptr<OpenFile> begin(const Request& request, Responder& responder, Arguments* in, const std::uint64_t* fh,
                                  bool* answered);

  bool mark_listed(const Request& request);  // access time of a directory; the listing itself is the control plane's
  bool read(Request& request, Responder& responder);
  bool write(Request& request, Responder& responder);
  bool lseek(Request& request, Responder& responder);
  bool fallocate(Request& request, Responder& responder);
  bool copy_file_range(Request& request, Responder& responder);
  void end_copy(Inode& from, Inode& to, SetIdLoss loss, std::uint64_t bytes);
  bool flush_or_fsync(Request& request, Responder& responder);
  bool release(Request& request, Responder& responder);

  // A write that crosses the buffer's largest size is cut short there.
  static Result<std::size_t> write_to_limit(Buffer& buffer, std::uint64_t offset, std::span<const std::byte> data);
  void note_read(Inode& inode, std::uint64_t bytes);
  void finish_write(OpenFile& file, SetIdLoss loss, std::uint64_t bytes, Responder& responder);
  // The same by a thread of the executor: for what would wait.
  void read_later(const std::shared_ptr<OpenFile>& file, const fuse_read_in& in, std::uint64_t bytes,
                  Responder responder);
  void write_later(const std::shared_ptr<OpenFile>& file, std::uint64_t offset, SetIdLoss loss,
                   std::vector<std::byte> data, Responder responder);
  Result<std::size_t> write_what_fits(Buffer& buffer, std::uint64_t granule, std::uint64_t offset,
                                      std::span<const std::byte> data);
  Status allocate(Inode& inode, const fuse_fallocate_in& in, const Operation& operation) const;

  InodeTable& table_;
  LongOperations& long_operations_;
  Statistics& statistics_;
};

}  // namespace gpufs::fuse
