// Requests on the attributes of inodes in the table, extended ones too, and STATFS.
// Ownership: the Mount's.
// Called on the transport's threads, where nothing waits: what may take long goes to the executor.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

#include "fuse/inode_table.h"
#include "fuse/long_requests.h"
#include "fuse/request.h"

namespace gpufs::fuse {

class AttributeOperations {
 public:
  using Target = std::shared_ptr<Inode>;

  AttributeOperations(InodeTable& table, LongRequests& long_requests) : table_(table), long_requests_(long_requests) {}

  void getattr(const Target& inode, Request& request, Responder responder);
  void statx(const Target& inode, Request& request, Responder responder);
  void setattr(const Target& inode, Request& request, Responder responder);
  void statfs(const Target& inode, Request& request, Responder responder);
  void getxattr(const Target& inode, Request& request, Responder responder);
  void setxattr(const Target& inode, Request& request, Responder responder);
  void listxattr(const Target& inode, Request& request, Responder responder);
  void removexattr(const Target& inode, Request& request, Responder responder);

 private:
  // An extended attribute, as InodeTable::change_metadata().
  template <typename Change>
  int change_attribute(Inode& inode, std::size_t most, Responder& request, Change change);
  int set_acl(Inode& inode, std::string_view name, std::span<const std::byte> value, bool kill_set_gid,
              Responder& request);
  // A device below the inode to which much memory of files removed before a time will come back soon.
  [[nodiscard]] std::optional<std::int32_t> device_expecting_memory(const Inode& inode,
                                                                    Releases::TimePoint before) const;
  void reply_statfs(const Inode& inode, std::uint32_t uid, Responder& responder) const;
  void reply_attributes(const Inode& inode, Responder& responder) const;

  InodeTable& table_;
  LongRequests& long_requests_;
};

}  // namespace gpufs::fuse
