// What the data plane counts: requests by opcode, bytes, errors, wake-ups, queues.
// Owned by the Session; its parts keep a reference.
// Any thread may count and read; the numbers are independent of each other.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "fuse/protocol.h"

namespace gpufs::fuse {

// A number that many threads add to, on a cache line of its own.
class alignas(64) Counter {
 public:
  void add(std::uint64_t amount = 1) { value_.fetch_add(amount, std::memory_order_relaxed); }
  void subtract(std::uint64_t amount = 1) { value_.fetch_sub(amount, std::memory_order_relaxed); }
  // Raises the number to `value` if it is lower.
  void raise(std::uint64_t value) {
    std::uint64_t seen = value_.load(std::memory_order_relaxed);
    while (seen < value && !value_.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
    }
  }
  [[nodiscard]] std::uint64_t get() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> value_{0};
};

struct Statistics {
  struct PerOpcode {
    Counter native;   // answered by native threads
    Counter relayed;  // handed to the control plane
    Counter errors;   // answered with an error, by either
  };
  // The last one counts all opcodes without a name.
  std::array<PerOpcode, kOpcodeNames + 1> opcodes;
  [[nodiscard]] PerOpcode& of(std::uint32_t opcode) { return opcodes[opcode < kOpcodeNames ? opcode : kOpcodeNames]; }

  Counter read_bytes;
  Counter written_bytes;
  Counter copied_bytes;  // by COPY_FILE_RANGE

  Counter lost_replies;      // the kernel no longer knew the request
  Counter rejected_replies;  // refused by the kernel and replaced by EIO
  Counter unanswered;        // requests whose handler ended without a reply: answered EIO; a fault of ours
  Counter bad_requests;      // messages of the kernel's that made no sense

  Counter interrupts;             // all received
  Counter interrupts_cancelled;   // ended or shortened a native operation
  Counter interrupts_remembered;  // came before their request, or after it
  Counter interrupts_relayed;

  Counter reader_grown;   // a further reader was let in
  Counter reader_shrunk;  // one was sent to sleep
  Counter spins;          // looks for a request by a reader before it sleeps
  Counter spins_won;      // that found one
  Counter watcher_ticks;
  Counter watcher_wakeups;  // out of its deep sleep

  Counter worker_jobs;
  Counter worker_queue_peak;
  Counter space_waits;      // writes that waited for removed files' memory
  Counter space_waits_won;  // and then succeeded

  Counter relay_replies;
  Counter relay_overflowed;     // messages that had to queue since the control plane was busy
  Counter relay_overflow_peak;  // bytes
  Counter relay_truncated;      // replies too large for a message: answered EIO
  Counter relay_bad_replies;    // wrong length or unknown request
  Counter relay_clipped;        // requests shortened to what the relay can carry
  Counter relay_refused;        // requests answered since the control plane is gone

  Counter notifications;
  Counter notification_errors;  // without ENOENT, which says that the kernel had nothing cached
  Counter notifications_dropped;
};

// Composes one JSON object. Keys are the caller's constants; text values are escaped.
class JsonWriter {
 public:
  JsonWriter() : text_("{") {}
  void number(std::string_view key, std::uint64_t value);
  void boolean(std::string_view key, bool value);
  void string(std::string_view key, std::string_view value);
  void open(std::string_view key);  // a nested object
  void close();
  [[nodiscard]] std::string finish();

 private:
  void key(std::string_view key);

  std::string text_;
  bool first_ = true;
};

// The counters as keys of the object that `json` has open.
void write_statistics(const Statistics& statistics, JsonWriter& json);

}  // namespace gpufs::fuse
