// What the data plane counts: requests by opcode, bytes, errors, queues. And the writer of JSON objects.
// Ownership: the Mount's; its parts keep a reference.
// Any thread may count and read; the numbers are independent of each other.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "fuse/protocol.h"
#include "observe/counters.h"

namespace gpufs::fuse {

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
  Counter bytes_read_ahead;  // of mappings, by ReadAhead
  Counter written_bytes;
  Counter copied_bytes;  // by COPY_FILE_RANGE

  Counter lost_replies;      // the kernel no longer knew the request
  Counter rejected_replies;  // refused by the kernel and replaced by EIO
  Counter unanswered;        // requests that their handler left without a reply: answered EIO
  Counter bad_requests;      // malformed messages of the kernel

  Counter interrupts;            // all received
  Counter interrupts_cancelled;  // ended or shortened a native operation
  Counter interrupts_early;      // came before their request, or after it had ended

  Counter spins;  // of a reader, before it sleeps

  Counter space_waits;  // writes that waited for removed files' memory

  Counter relay_overflowed;   // messages that had to queue because the control plane was busy
  Counter relay_bad_replies;  // malformed, too large, or to an unknown request

  Counter notifications;
};

// Composes one JSON object. Keys and texts are the caller's constants.
class JsonWriter {
 public:
  JsonWriter() : text_("{") {}
  void number(std::string_view key, std::uint64_t value);
  void boolean(std::string_view key, bool value);
  void string(std::string_view key, std::string_view value);  // without characters to escape
  void open(std::string_view key);                            // a nested object
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
