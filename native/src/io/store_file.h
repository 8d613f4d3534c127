// The backing file of a store while it runs: allocated before the first byte is written, cut to what was moved, synced.
// Functions block for as long as the file does. Ownership: its Transfer; one thread at a time changes it.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/status.h"
#include "io/backing_file.h"

namespace gpufs {

class StoreFile {
 public:
  // offset: where in the file the store begins.
  StoreFile(BackingFile& file, std::uint64_t offset) : file_(file), offset_(offset) {}

  // Before the first byte is written; size: the file's.
  void set_original_size(std::uint64_t size) { original_size_ = size; }
  [[nodiscard]] bool grows_by(std::uint64_t bytes) const { return offset_ + bytes > original_size_; }
  // For a file in memory: sets the size, so that several threads can write its pages at once (write_pages()).
  void prepare_pages(std::uint64_t bytes);
  // For O_DIRECT: allocates, so that chunks written out of order do not wait for each other at the file's end, and a
  // full disk is reported before the work starts. ECANCELED once `cancelled` is true.
  Status preallocate(std::uint64_t bytes, const std::atomic<bool>& cancelled);

  // Whether write_pages() is possible. Constant while bytes are written.
  [[nodiscard]] bool by_pages() const { return by_pages_; }

  // The file ends where the store ended: neither short of a hole that was left at its end, nor extended by what was
  // preallocated or written beyond a failure. reached: bytes moved without a gap; touched: end of the highest chunk.
  Status finish(std::uint64_t reached, std::uint64_t touched);
  Status sync(bool data_only);

 private:
  BackingFile& file_;
  const std::uint64_t offset_;
  std::uint64_t original_size_ = 0;
  std::uint64_t preallocated_end_ = 0;
  bool by_pages_ = false;
};

}  // namespace gpufs
