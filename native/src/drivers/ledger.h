// Bytes in use, up to a limit.
// Thread-safe.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace gpufs {

class Ledger {
 public:
  static constexpr std::uint64_t kNoLimit = ~std::uint64_t{0};

  explicit Ledger(std::uint64_t limit = kNoLimit) : limit_(limit) {}

  [[nodiscard]] std::uint64_t used() const { return used_.load(std::memory_order_relaxed); }
  [[nodiscard]] std::uint64_t limit() const { return limit_.load(std::memory_order_relaxed); }
  // A limit below what is used takes nothing away.
  void set_limit(std::uint64_t bytes) { limit_.store(bytes, std::memory_order_relaxed); }
  // Bytes that may still be taken.
  [[nodiscard]] std::uint64_t available() const {
    const std::uint64_t most = limit();
    return most - std::min(used(), most);
  }

  // False, and nothing is taken, beyond the limit.
  [[nodiscard]] bool take(std::uint64_t bytes) {
    std::uint64_t now = used();
    const std::uint64_t most = limit();
    do {
      if (bytes > most - std::min(now, most)) return false;
    } while (!used_.compare_exchange_weak(now, now + bytes, std::memory_order_relaxed));
    return true;
  }
  // Regardless of the limit.
  void add(std::uint64_t bytes) { used_.fetch_add(bytes, std::memory_order_relaxed); }
  void release(std::uint64_t bytes) { used_.fetch_sub(bytes, std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> limit_;
  std::atomic<std::uint64_t> used_{0};
};

}  // namespace gpufs
