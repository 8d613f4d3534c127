// What changes names: it holds the lock of all names of a mount, and records each change. What its thread records
// while it lives becomes valid together when it ends, before others see the names.
// Ownership: a local variable of Namespace's functions.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string_view>
#include <utility>

#include "fuse/inode.h"
#include "fuse/inode_table.h"

namespace gpufs::fuse {

class NamesWriter {
 public:
  using InodePointer = std::shared_ptr<Inode>;

  NamesWriter(std::shared_mutex& mutex, InodeTable& table)
      : lock_(mutex), table_(table), records_(table.records()), together_(records_) {}

  // Gives an inode a name, over what had it.
  void attach(Inode& directory, std::string_view name, const InodePointer& inode);
  void detach(Inode& directory, std::string_view name);
  // Swaps what two names lead to.
  void exchange(Inode& from, std::string_view one, Inode& to, std::string_view other);
  // The link count of an inode whose names have changed; the change time becomes now.
  void update_links(const InodePointer& inode);
  // After an inode has lost a name: the same, and it goes with the last one if nothing uses it.
  void settle(InodePointer inode);
  // The directory of an inode that has no name yet.
  static void set_parent(Inode& inode, InodePointer directory) { inode.names_.parent_ = std::move(directory); }

  // ---- another process's names, which have their records ----

  // False if there can be no such name.
  static bool restore(std::uint64_t id, const NameRecord& record, const InodePointer& directory,
                      const InodePointer& inode);
  // Once an inode has all its names: its link count. Without names it is removed unless something uses it.
  void restore_links(InodePointer inode);

  // Forgets the names of an inode, without a record: the mount ends.
  static void drop(Inode& inode) { inode.names_ = {}; }

  // Whether an inode is this directory or anywhere below it. A reader may ask, too.
  [[nodiscard]] static bool is_below(const Inode& directory, const Inode* inode);

 private:
  static void lose_place(Inode& inode, std::list<InodeNames::Name>::iterator place);
  // The times of a directory whose names have changed, and its link count.
  static void changed(Inode& directory, int subdirectories);

  const std::unique_lock<std::shared_mutex> lock_;
  InodeTable& table_;
  Records& records_;
  const Records::Change together_;
};

}  // namespace gpufs::fuse
