// A keeper of descriptors, for tests of memory whose process dies.
// Owned by the tests that include it.
// One thread.
#pragma once

#include <fcntl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "base/unique_fd.h"
#include "drivers/driver.h"

namespace gpufs::testing {

// Holds the descriptors for a process that can die between any two calls.
class FakeKeeper final : public MemoryKeeper {
 public:
  std::uint64_t new_memory() override { return ++last_memory_; }
  std::uint64_t hold(std::uint64_t memory, std::uint64_t offset, std::uint64_t bytes, int descriptor) override {
    const std::uint64_t key = ++last_key_;
    if (lives()) held_[memory].push_back({{offset, bytes}, key, copy_of(descriptor)});
    return key;
  }
  void drop(std::uint64_t key) override {
    if (!lives()) return;
    for (auto& [memory, pieces] : held_) std::erase_if(pieces, [&](const KeptPiece& each) { return each.key == key; });
  }
  void settle() override { ++settled; }
  std::uint64_t lose(const Status& reason) override {
    lost = reason;
    return ++last_key_;
  }
  std::vector<KeptPiece> take(std::uint64_t memory) override {
    std::vector<KeptPiece> pieces;
    for (const KeptPiece& each : held_[memory]) {
      pieces.push_back({{each.offset, each.bytes}, each.key, copy_of(each.descriptor.get())});
    }
    std::ranges::sort(pieces, {}, &KeptPiece::offset);
    return pieces;
  }

  // The process dies after so many more calls: later ones have no effect.
  void die_after(int calls) { calls_left_ = calls; }
  [[nodiscard]] bool died() const { return calls_left_ < 0; }
  // What the next process has in place of this one, which dies now.
  std::shared_ptr<FakeKeeper> next() {
    auto next = std::make_shared<FakeKeeper>();
    for (const auto& [memory, pieces] : held_) next->held_[memory] = take(memory);
    next->last_key_ = last_key_;
    next->last_memory_ = last_memory_;
    die_after(0);
    return next;
  }
  [[nodiscard]] std::size_t pieces(std::uint64_t memory) const { return held_.at(memory).size(); }
  // Bytes of all that is held.
  [[nodiscard]] std::uint64_t bytes() const {
    std::uint64_t sum = 0;
    for (const auto& [memory, pieces] : held_) {
      for (const KeptPiece& each : pieces) sum += each.bytes;
    }
    return sum;
  }

  int settled = 0;
  Status lost;

 private:
  static UniqueFd copy_of(int descriptor) { return UniqueFd(::fcntl(descriptor, F_DUPFD_CLOEXEC, 3)); }
  bool lives() {
    if (calls_left_ >= 0) --calls_left_;
    return calls_left_ >= 0;
  }

  std::map<std::uint64_t, std::vector<KeptPiece>> held_;  // by memory
  std::uint64_t last_key_ = 0;
  std::uint64_t last_memory_ = 0;
  int calls_left_ = 1 << 30;  // negative: died
};

}  // namespace gpufs::testing
