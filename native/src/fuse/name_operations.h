// Requests about names: they find, create, rename, remove, list, open and forget inodes of the table.
// Ownership: the Mount's.
// Called on the transport's threads, where nothing waits.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "fuse/attributes.h"
#include "fuse/inode_table.h"
#include "fuse/namespace.h"
#include "fuse/open_files.h"
#include "fuse/read_ahead.h"
#include "fuse/relay.h"
#include "fuse/request.h"
#include "observe/counters.h"

namespace gpufs::fuse {

class NameOperations {
 public:
  NameOperations(InodeTable& table, Namespace& names, Relay& relay, const ReadAhead& read_ahead,
                 observe::EngineCounters& counters)
      : table_(table),
        names_(names),
        relay_(relay),
        read_ahead_(read_ahead),
        counters_(counters),
        directories_(table.records(), journal::NumbersOf::kDirectories) {}

  using InodePointer = std::shared_ptr<Inode>;
  // Where a listing ends: at the names that the directory had when it began, so a program that creates a name for each
  // one that it finds reaches the end.
  struct OpenDirectory {
    InodePointer inode;
    std::atomic<std::uint64_t> end{0};

    [[nodiscard]] FileRecord record() const { return {inode->ino(), 0}; }
  };
  using Directory = std::shared_ptr<OpenDirectory>;

  // Requests on inodes of the table. The kernel has checked the caller's rights.
  void lookup(const InodePointer& inode, Request& request, Responder responder);
  void create(const InodePointer& directory, Request& request, Responder responder);
  void mknod(const InodePointer& directory, Request& request, Responder responder);
  void mkdir(const InodePointer& directory, Request& request, Responder responder);
  void symlink(const InodePointer& directory, Request& request, Responder responder);
  void link(const InodePointer& directory, Request& request, Responder responder);
  // UNLINK and RMDIR.
  void remove(const InodePointer& directory, Request& request, Responder responder);
  void rename(const InodePointer& directory, Request& request, Responder responder);
  void readlink(const InodePointer& inode, Request& request, Responder responder);
  void open(const InodePointer& inode, Request& request, Responder responder);
  void opendir(const InodePointer& inode, Request& request, Responder responder);
  // Requests on open directories.
  void readdirplus(const Directory& directory, Request& request, Responder responder);
  void fsyncdir(const Directory& directory, Request& request, Responder responder);
  void releasedir(const Directory& directory, Request& request, Responder responder);
  // FORGET and BATCH_FORGET.
  void forget(const Request& request);
  // The open directories of the last process, after Namespace::restore().
  void restore_directories();

  // Null if unknown.
  [[nodiscard]] Directory directory(std::uint64_t fh) const { return directories_.find(fh); }
  // The directory that was open; null: none was.
  Directory close_directory(std::uint64_t fh) { return directories_.remove(fh); }

  // Whether one of the two inodes of a request is the host's and the other one is not.
  [[nodiscard]] static bool crosses_to_host(const Request& request);

  void reply_entry(const Inode& inode, Responder& responder) const { responder.body(entry_of(inode)); }
  void reply_open(std::uint64_t fh, std::uint32_t more_flags, Responder& responder) const;
  void reply_created(const Inode& inode, std::uint64_t fh, const Request& request, Responder& responder) const;

 private:
  [[nodiscard]] fuse_entry_out entry_of(const Inode& inode) const;
  void reply_made(const Result<InodePointer>& made, Responder& responder) const;
  [[nodiscard]] fuse_open_out opened(std::uint64_t fh) const;

  InodeTable& table_;
  Namespace& names_;
  Relay& relay_;
  const ReadAhead& read_ahead_;
  observe::EngineCounters& counters_;
  OpenFiles<OpenDirectory, kDirectoryHandle> directories_;
};

}  // namespace gpufs::fuse
