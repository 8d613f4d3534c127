// Counts what has been read and written of one file, by any path, and notes which path was the last.
// Ownership: the Buffer of the file.
// Thread-safe.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "observe/counters.h"

namespace gpufs::observe {

class FileActivity {
 public:
  static constexpr std::uint8_t kNoBackend = 255;

  // Counts an operation that has ended, unless it moved nothing.
  void note(Backend backend, Flow flow, std::uint64_t bytes) {
    if (bytes == 0) return;
    Side& side = sides_[static_cast<std::size_t>(flow)];
    count(side.bytes, bytes);
    count(side.operations);
    last_.store(static_cast<std::uint8_t>(backend), std::memory_order_relaxed);
  }
  [[nodiscard]] std::uint64_t bytes(Flow flow) const { return read(&Side::bytes, flow); }
  [[nodiscard]] std::uint64_t operations(Flow flow) const { return read(&Side::operations, flow); }
  // Bytes moved since the last call.
  [[nodiscard]] std::uint64_t take_recent() {
    const std::uint64_t now = bytes(Flow::kIn) + bytes(Flow::kOut);
    return now - taken_.exchange(now, std::memory_order_relaxed);
  }
  // A Backend's number, or kNoBackend.
  [[nodiscard]] std::uint8_t last() const { return last_.load(std::memory_order_relaxed); }

 private:
  struct Side {
    Counter bytes{0};
    Counter operations{0};
  };
  [[nodiscard]] std::uint64_t read(Counter Side::*member, Flow flow) const {
    return (sides_[static_cast<std::size_t>(flow)].*member).load(std::memory_order_relaxed);
  }

  std::array<Side, kFlowCount> sides_;
  Counter taken_{0};  // by take_recent()
  std::atomic<std::uint8_t> last_{kNoBackend};
};

}  // namespace gpufs::observe
