// The attributes of every inode of a mount and its open buffers, shared by both planes: Python decides what exists,
// READ and WRITE change times and sizes.
// Owned by the Mount; outlives the Session. Inodes and open files are shared with the operations that use them.
// Any thread may call any function.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <thread>
#include <unordered_map>

#include "base/status.h"
#include "fuse/attributes.h"
#include "fuse/buffer_source.h"
#include "gpufs.h"
#include "memory/buffer.h"

namespace gpufs::fuse {

class Inode {
 public:
  Inode(const gpufs_attributes& attributes, std::shared_ptr<Buffer> buffer);

  [[nodiscard]] std::uint64_t ino() const { return ino_; }
  [[nodiscard]] std::int32_t device() const { return device_; }
  // Null where there is no buffer; the same for the inode's life.
  [[nodiscard]] const std::shared_ptr<Buffer>& buffer() const { return buffer_; }

  // As they are now; size and blocks of a regular file are the buffer's.
  [[nodiscard]] gpufs_attributes attributes() const;
  void was_read();                     // access time by the relatime rule
  void was_written(bool drop_set_id);  // modification and change time, set-id bits

 private:
  friend class InodeTable;

  const std::uint64_t ino_;
  const std::int32_t device_;
  const std::shared_ptr<Buffer> buffer_;

  // Guards the three below. InodeTable::orphan_mutex_ may be taken under it, nothing else.
  mutable std::mutex mutex_;
  gpufs_attributes attributes_;
  std::uint32_t open_files_ = 0;
  bool removed_ = false;  // from the table
};

struct OpenFile {
  std::shared_ptr<Inode> inode;
  int flags = 0;  // as open(2)
};

class InodeTable {
 public:
  // Handles that the table gives have this bit; Python's own must not.
  static constexpr std::uint64_t kHandleBit = std::uint64_t{1} << 62;

  explicit InodeTable(std::shared_ptr<BufferSource> source);
  // No thread may use the table any more. Frees what the reaper has not come to.
  ~InodeTable();
  InodeTable(const InodeTable&) = delete;
  InodeTable& operator=(const InodeTable&) = delete;

  // Starts the reaper; before any other call.
  Status start();

  // A regular file with device >= 0 gets an empty buffer. EEXIST if the inode is known.
  Status add(const gpufs_attributes& attributes);
  // The memory is freed by the reaper once nothing uses it. ENOENT if unknown.
  Status remove(std::uint64_t ino);
  // Null if unknown.
  [[nodiscard]] std::shared_ptr<Inode> find(std::uint64_t ino) const;
  // Sets what `set` (GPUFS_SET_*) names, all or nothing, and fills in the attributes as they are afterwards. No time
  // changes that it does not name.
  Status set(std::uint64_t ino, std::uint32_t set, gpufs_attributes* attributes);

  // EISDIR and EINVAL for what has no buffer. O_TRUNC empties the file.
  Result<std::uint64_t> open(std::uint64_t ino, int flags);
  // EBADF if unknown. Operations under way keep the file until they end.
  Status release(std::uint64_t fh);
  // Null if unknown.
  [[nodiscard]] std::shared_ptr<OpenFile> file(std::uint64_t fh) const;

  [[nodiscard]] BufferSource& source() const { return *source_; }

  // Memory of a device that removed files still hold and will give back soon: nobody can open them again in the
  // ordinary way, only the kernel's FORGET or the reaper is still to come. device < 0: of all devices.
  [[nodiscard]] std::uint64_t orphan_bytes(std::int32_t device) const;
  // Counts the times that the reaper gave memory back: note it before an attempt that may find no space.
  [[nodiscard]] std::uint64_t reaped() const;
  // Waits until memory has been given back since reaped() was `noted`. kNothing: there is none to come for the device.
  enum class Wait { kFreed, kTimeOver, kNothing };
  Wait wait_for_orphans(std::int32_t device, std::uint64_t noted, std::chrono::milliseconds patience);

  struct Counts {
    std::size_t inodes = 0;
    std::size_t files = 0;
    std::size_t orphans = 0;
  };
  [[nodiscard]] Counts counts() const;

 private:
  // After a change of links, open files or presence, with the inode's mutex held.
  // True if the reaper is to free it, by reap().
  [[nodiscard]] bool update_orphan_locked(const std::shared_ptr<Inode>& inode);
  void reap(std::shared_ptr<Inode> inode);
  [[nodiscard]] std::uint64_t orphan_bytes_locked(std::int32_t device) const;
  void reap_loop();

  const std::shared_ptr<BufferSource> source_;

  // Guards the inodes; an inode's mutex is never taken under it.
  mutable std::shared_mutex inodes_mutex_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Inode>> inodes_;

  // Guards the open files; innermost.
  mutable std::shared_mutex files_mutex_;
  std::unordered_map<std::uint64_t, std::shared_ptr<OpenFile>> files_;
  std::uint64_t next_file_ = 1;

  // Guards all below; innermost. Nothing is freed under it.
  mutable std::mutex orphan_mutex_;
  std::condition_variable orphan_changed_;
  std::condition_variable reap_wanted_;
  std::unordered_map<const Inode*, std::shared_ptr<Inode>> orphans_;
  std::deque<std::shared_ptr<Inode>> reap_queue_;
  std::int32_t reaping_device_ = -1;  // what the reaper is freeing just now
  std::uint64_t reaping_bytes_ = 0;
  std::uint64_t reaped_ = 0;
  bool closing_ = false;
  std::thread reaper_;  // constant after start()
};

}  // namespace gpufs::fuse
