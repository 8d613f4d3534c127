#include "fuse/statistics.h"

#include <string>
#include <string_view>
#include <utility>

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
  text_ += value;
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
    if (counts.native + counts.relayed + counts.errors == 0) continue;
    if (opcode < kOpcodeNames && std::string_view(opcode_name(opcode)) == "other") continue;  // no such opcode
    json.open(opcode_name(opcode));
    json.number("native", counts.native);
    json.number("relayed", counts.relayed);
    json.number("errors", counts.errors);
    json.close();
  }
  json.close();

  struct Row {
    const char* group;
    const char* name;
    const Counter* counter;
  };
  const Row rows[] = {
      {"bytes", "read", &statistics.read_bytes},
      {"bytes", "read_ahead", &statistics.bytes_read_ahead},
      {"bytes", "written", &statistics.written_bytes},
      {"bytes", "copied", &statistics.copied_bytes},
      {"replies", "lost", &statistics.lost_replies},
      {"replies", "rejected", &statistics.rejected_replies},
      {"replies", "unanswered", &statistics.unanswered},
      {"replies", "bad_requests", &statistics.bad_requests},
      {"interrupts", "received", &statistics.interrupts},
      {"interrupts", "cancelled", &statistics.interrupts_cancelled},
      {"interrupts", "early", &statistics.interrupts_early},
      {"workers", "space_waits", &statistics.space_waits},
      {"relay", "overflowed", &statistics.relay_overflowed},
      {"relay", "bad_replies", &statistics.relay_bad_replies},
      {"notifications", "sent", &statistics.notifications},
  };
  std::string_view group;
  for (const Row& row : rows) {
    if (row.group != group) {
      if (!group.empty()) json.close();
      json.open(row.group);
      group = row.group;
    }
    json.number(row.name, *row.counter);
  }
  json.close();
}

}  // namespace gpufs::fuse
