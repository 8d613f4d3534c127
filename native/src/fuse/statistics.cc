#include "fuse/statistics.h"

#include <cstdio>

namespace gpufs::fuse {

void JsonWriter::key(std::string_view key) {
  if (!first_) text_ += ", ";
  first_ = false;
  text_ += '"';
  text_ += key;
  text_ += "\": ";
}

void JsonWriter::number(std::string_view name, std::uint64_t value) {
  key(name);
  text_ += std::to_string(value);
}

void JsonWriter::boolean(std::string_view name, bool value) {
  key(name);
  text_ += value ? "true" : "false";
}

void JsonWriter::string(std::string_view name, std::string_view value) {
  key(name);
  text_ += '"';
  for (const char c : value) {
    if (c == '"' || c == '\\') {
      text_ += '\\';
      text_ += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof(escaped), "\\u%04x", static_cast<unsigned>(c));
      text_ += escaped;
    } else {
      text_ += c;
    }
  }
  text_ += '"';
}

void JsonWriter::open(std::string_view name) {
  key(name);
  text_ += '{';
  first_ = true;
}

void JsonWriter::close() {
  text_ += '}';
  first_ = false;
}

std::string JsonWriter::finish() {
  text_ += '}';
  return std::move(text_);
}

void write_statistics(const Statistics& statistics, JsonWriter& json) {
  json.open("operations");
  for (std::uint32_t opcode = 0; opcode <= kOpcodeNames; ++opcode) {
    const Statistics::PerOpcode& counts = statistics.opcodes[opcode];
    if (counts.native.get() + counts.relayed.get() + counts.errors.get() == 0) continue;
    if (opcode < kOpcodeNames && std::string_view(opcode_name(opcode)) == "other") continue;  // no such opcode
    json.open(opcode_name(opcode));
    json.number("native", counts.native.get());
    json.number("relayed", counts.relayed.get());
    json.number("errors", counts.errors.get());
    json.close();
  }
  json.close();

  json.open("bytes");
  json.number("read", statistics.read_bytes.get());
  json.number("written", statistics.written_bytes.get());
  json.number("copied", statistics.copied_bytes.get());
  json.close();

  json.open("replies");
  json.number("lost", statistics.lost_replies.get());
  json.number("rejected", statistics.rejected_replies.get());
  json.number("unanswered", statistics.unanswered.get());
  json.number("bad_requests", statistics.bad_requests.get());
  json.close();

  json.open("interrupts");
  json.number("received", statistics.interrupts.get());
  json.number("cancelled", statistics.interrupts_cancelled.get());
  json.number("remembered", statistics.interrupts_remembered.get());
  json.number("relayed", statistics.interrupts_relayed.get());
  json.close();

  json.open("workers");
  json.number("space_waits", statistics.space_waits.get());
  json.number("space_waits_won", statistics.space_waits_won.get());
  json.close();

  json.open("relay");
  json.number("replies", statistics.relay_replies.get());
  json.number("overflowed", statistics.relay_overflowed.get());
  json.number("bad_replies", statistics.relay_bad_replies.get());
  json.number("clipped", statistics.relay_clipped.get());
  json.number("refused", statistics.relay_refused.get());
  json.close();

  json.open("notifications");
  json.number("sent", statistics.notifications.get());
  json.number("errors", statistics.notification_errors.get());
  json.number("dropped", statistics.notifications_dropped.get());
  json.close();
}

}  // namespace gpufs::fuse
