// Requests that find, open and forget what the control plane has named: its directories, and files on devices.
// Ownership: the Mount's.
// Called on the transport's threads, where nothing waits.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_set>

#include "fuse/attributes.h"
#include "fuse/inode_table.h"
#include "fuse/read_ahead.h"
#include "fuse/relay.h"
#include "fuse/request.h"
#include "fuse/statistics.h"

namespace gpufs::fuse {

class NameOperations {
 public:
  // The timeouts: how long the kernel may cache names and attributes, in seconds.
  NameOperations(InodeTable& table, Relay& relay, const ReadAhead& read_ahead, double entry_timeout,
                 double attribute_timeout, Statistics& statistics)
      : table_(table),
        relay_(relay),
        read_ahead_(read_ahead),
        entry_validity_(Validity::of(entry_timeout)),
        attribute_validity_(Validity::of(attribute_timeout)),
        statistics_(statistics) {}

  // Each returns false, without an answer, if the control plane must answer. The kernel has checked the caller's
  // rights.
  bool lookup(const Request& request, Responder& responder);
  bool open(const Request& request, Responder& responder);
  bool opendir(const Request& request, Responder& responder);
  bool fsyncdir(const Request& request, Responder& responder);
  // The control plane closes what it has listed.
  bool releasedir(const Request& request, Responder& responder);
  // READDIR and READDIRPLUS, which the control plane answers: before they are relayed.
  void note_listing(const Request& request);
  // FORGET and BATCH_FORGET, which have no reply.
  void forget(const Request& request);

 private:
  // The directory that a request is about; null if the control plane alone knows its names.
  [[nodiscard]] std::shared_ptr<Inode> find_directory(const Request& request) const;

  InodeTable& table_;
  Relay& relay_;
  const ReadAhead& read_ahead_;
  const Validity entry_validity_;
  const Validity attribute_validity_;
  Statistics& statistics_;
  std::atomic<std::uint64_t> directories_opened_{0};
  std::mutex listed_mutex_;                   // guards what is below
  std::unordered_set<std::uint64_t> listed_;  // handles of directories that the control plane has listed
};

}  // namespace gpufs::fuse
