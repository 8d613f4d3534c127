// Explains why a program ends that writes to memory which it may only read: a line on standard error names the file.
// Such a write is SIGSEGV. The handler prints the text of the range that was written to, restores the handler before it
// and returns: the write is repeated, and everything else happens as without this handler, also under Python's
// faulthandler. A faulthandler that is enabled later comes first, and then there is no line.
// Ownership: the mapping's owner has a WriteNotice, and destroys it before munmap(2).
// Thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "drivers/host/signal_ranges.h"

namespace gpufs {

class WriteNotice {
 public:
  // Longer texts lose their beginning, as the directories of a path.
  struct Line {
    std::size_t length = 0;
    std::array<char, 1000> text{};
  };
  using Ranges = SignalRanges<Line, 4096>;

  // The first call installs the handler. Null without a free slot: the program then ends without a word.
  static std::unique_ptr<WriteNotice> watch(std::uintptr_t start, std::size_t bytes, std::string_view text);
  ~WriteNotice();
  WriteNotice(const WriteNotice&) = delete;
  WriteNotice& operator=(const WriteNotice&) = delete;

 private:
  explicit WriteNotice(Ranges::Slot& slot) : slot_(slot) {}

  Ranges::Slot& slot_;
};

}  // namespace gpufs
