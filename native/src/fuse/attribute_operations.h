// The operations on attributes that native threads serve: those of the inode table, extended ones, and the room left.
// Owned by the Session.
// serve() is called on the transport's threads and waits for nothing; what may take long goes on to the executor.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string_view>

#include "fuse/inode_table.h"
#include "fuse/long_operation.h"
#include "fuse/operations.h"
#include "fuse/statistics.h"
#include "fuse/transport.h"

namespace gpufs::fuse {

class AttributeOperations {
 public:
  AttributeOperations(InodeTable& table, LongOperations& long_operations, const OperationOptions& options);

  // What INIT has agreed on: whether the kernel enforces access control lists, and the form of SETXATTR.
  void negotiated(bool acls, bool long_setxattr);

  // Answers the request and returns true, or leaves it to the control plane: what is about inodes that are not in the
  // table. The responder is used only if true.
  bool serve(Request& request, Responder& responder);

 private:
  bool getattr(Request& request, Responder& responder);
  bool statx(Request& request, Responder& responder);
  bool setattr(Request& request, Responder& responder);
  bool statfs(Request& request, Responder& responder);
  bool getxattr(Request& request, Responder& responder);
  bool setxattr(Request& request, Responder& responder);
  bool listxattr(Request& request, Responder& responder);
  bool removexattr(Request& request, Responder& responder);

  int set_acl(Inode& inode, std::string_view name, std::span<const std::byte> value, bool kill_set_gid);
  void reply_attributes(const Inode& inode, Responder& responder) const;
  template <typename T>
  void fill_validity(std::uint32_t mode, T& out) const;

  InodeTable& table_;
  LongOperations& long_operations_;
  const OperationOptions options_;
  std::atomic<bool> acls_{false};
  std::atomic<bool> long_setxattr_{false};
};

}  // namespace gpufs::fuse
