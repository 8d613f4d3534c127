// Requests that find, open and forget what the control plane has named: files and directories on devices.
// Ownership: the Mount's.
// Called on the transport's threads, where nothing waits.
#pragma once

#include <atomic>
#include <cstdint>

#include "fuse/attributes.h"
#include "fuse/inode_table.h"
#include "fuse/relay.h"
#include "fuse/request.h"
#include "fuse/statistics.h"

namespace gpufs::fuse {

class NameOperations {
 public:
  // The timeouts: how long the kernel may cache names and attributes, in seconds.
  NameOperations(InodeTable& table, Relay& relay, double entry_timeout, double attribute_timeout,
                 Statistics& statistics)
      : table_(table),
        relay_(relay),
        entry_validity_(Validity::of(entry_timeout)),
        attribute_validity_(Validity::of(attribute_timeout)),
        statistics_(statistics) {}

  // Each returns false, without an answer, if the control plane must answer. The kernel has checked the caller's
  // rights.
  bool lookup(const Request& request, Responder& responder);
  bool open(const Request& request, Responder& responder);
  bool opendir(const Request& request, Responder& responder);
  // FORGET and BATCH_FORGET, which have no reply.
  void forget(const Request& request);

 private:
  InodeTable& table_;
  Relay& relay_;
  const Validity entry_validity_;
  const Validity attribute_validity_;
  Statistics& statistics_;
  std::atomic<std::uint64_t> directories_opened_{0};
};

}  // namespace gpufs::fuse
