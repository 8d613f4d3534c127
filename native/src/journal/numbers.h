// Numbers that are never given twice, not even by another process that continues from the journal: the kernel may
// still use those that this one gave.
// Ownership: a member of the object that gives the numbers. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "journal/journal.h"

namespace gpufs::journal {

class Numbers {
 public:
  // Which numbers they are, for the journal.
  enum Of : std::uint64_t { kInodes = 1, kFiles, kDirectories, kNames, kMemories, kMemoryKeys };

  // From `first` on; where the journal has a record, from the first that no process has given. Null: no other process
  // will continue.
  Numbers(Journal* journal, Of of, std::uint64_t first);

  std::uint64_t next();

 private:
  void reserve(std::uint64_t number);

  Journal* const journal_;
  const Of of_;
  std::atomic<std::uint64_t> next_;
  std::mutex mutex_;                     // held while the journal gets a record
  std::atomic<std::uint64_t> reserved_;  // the journal's record: a new process begins here
};

}  // namespace gpufs::journal
