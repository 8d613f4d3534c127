// Requests on open buffers: what moves bytes of device memory or asks where they are.
// Ownership: the Mount's.
// Called on the transport's threads, where nothing waits: what may take long goes to the executor.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "fuse/init_negotiation.h"
#include "fuse/inode_table.h"
#include "fuse/long_requests.h"
#include "fuse/namespace.h"
#include "fuse/read_ahead.h"
#include "fuse/request.h"
#include "observe/counters.h"

namespace gpufs::fuse {

class BufferOperations {
 public:
  using File = std::shared_ptr<OpenFile>;

  BufferOperations(InodeTable& table, const Namespace& names, LongRequests& long_requests, ReadAhead& read_ahead,
                   const InitNegotiation& init, observe::EngineCounters& counters)
      : table_(table),
        names_(names),
        long_requests_(long_requests),
        read_ahead_(read_ahead),
        init_(init),
        counters_(counters) {}

  void read(const File& file, Request& request, Responder responder);
  void write(const File& file, Request& request, Responder responder);
  void lseek(const File& file, Request& request, Responder responder);
  void fallocate(const File& file, Request& request, Responder responder);
  // FLUSH and FSYNC: memory has nothing to write back.
  void flush(const File& file, Request& request, Responder responder);
  void fsync(const File& file, Request& request, Responder responder);
  void copy(const File& from, const File& to, const Request& request, const CopyRequest& copy, Responder responder);

 private:
  // A READ for the page cache: of a mapping, or ahead of one. True if the request has been answered or handed on.
  bool read_pages(const File& file, const Request& request, const fuse_read_in& in, std::uint64_t wanted,
                  Responder& responder);
  // Host memory: the reply is made of pieces of the buffer itself. False if another thread has to serve the request.
  bool reply_from_memory(Inode& inode, const fuse_read_in& in, std::uint64_t bytes, Responder& responder);
  // Device memory, through host memory. An error if nothing was read; EAGAIN: another thread has to serve the request.
  int reply_from_copy(Inode& inode, const fuse_read_in& in, std::span<std::byte> memory, Wait wait,
                      Responder& responder);
  void read_later(const File& file, const fuse_read_in& in, std::uint64_t bytes, Responder responder);
  // Once there is memory for the holes.
  void fill_later(const File& file, const fuse_read_in& in, std::uint64_t bytes, Responder responder);
  void note_read(Inode& inode, const fuse_read_in& in, std::uint64_t bytes);

  void write_later(const File& file, const fuse_write_in& in, SetIdLoss loss, std::vector<std::byte> data,
                   Responder responder);
  // The count; *stopped: why it is less than all.
  std::size_t write_what_fits(Buffer& buffer, std::uint64_t offset, std::span<const std::byte> data, Status* stopped);
  void report_lost_stores(Inode& inode, int error) const;
  void finish_write(OpenFile& file, SetIdLoss loss, std::uint64_t bytes, Responder& responder);
  void finish_copy(Inode& from, Inode& to, SetIdLoss loss, std::uint64_t bytes);
  Status allocate(Inode& inode, const fuse_fallocate_in& in, const Cancellation& cancellation) const;

  InodeTable& table_;
  const Namespace& names_;
  LongRequests& long_requests_;
  ReadAhead& read_ahead_;
  const InitNegotiation& init_;
  observe::EngineCounters& counters_;
};

}  // namespace gpufs::fuse
