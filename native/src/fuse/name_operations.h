// Requests that open what the control plane has named: files and directories on devices.
// Ownership: the Mount's.
// Called on the transport's threads, where nothing waits.
#pragma once

#include <atomic>
#include <cstdint>

#include "fuse/init_negotiation.h"
#include "fuse/inode_table.h"
#include "fuse/request.h"
#include "fuse/statistics.h"

namespace gpufs::fuse {

class NameOperations {
 public:
  NameOperations(InodeTable& table, const InitNegotiation& init, Statistics& statistics)
      : table_(table), init_(init), statistics_(statistics) {}

  // Each returns false, without an answer, if the control plane must answer. The kernel has checked the caller's
  // rights.
  bool open(const Request& request, Responder& responder);
  bool opendir(const Request& request, Responder& responder);

 private:
  InodeTable& table_;
  const InitNegotiation& init_;
  Statistics& statistics_;
  std::atomic<std::uint64_t> directories_opened_{0};
};

}  // namespace gpufs::fuse
