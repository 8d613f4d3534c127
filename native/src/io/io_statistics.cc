#include "io/io_statistics.h"

#include <initializer_list>
#include <string_view>
#include <utility>

namespace gpufs {
namespace {

std::uint64_t read(const Counter& counter) { return counter.load(std::memory_order_relaxed); }

void append_numbers(std::string& text, std::initializer_list<std::pair<std::string_view, std::uint64_t>> numbers) {
  bool first = true;
  for (const auto& [name, number] : numbers) {
    if (!first) text += ", ";
    first = false;
    text += '"';
    text += name;
    text += "\": ";
    text += std::to_string(number);
  }
}

void append_direction(std::string& text, const DirectionCounters& counters) {
  text += '{';
  append_numbers(text, {{"transfers", read(counters.transfers)},
                        {"failed", read(counters.failed)},
                        {"cancelled", read(counters.cancelled)},
                        {"abandoned", read(counters.abandoned)}});
  for (const Path path : {Path::kFastpath, Path::kFallback}) {
    const PathCounters& own = counters.paths[static_cast<std::size_t>(path)];
    text += ", \"";
    text += path_name(path);
    text += "\": {";
    append_numbers(text,
                   {{"bytes", read(own.bytes)}, {"operations", read(own.operations)}, {"errors", read(own.errors)}});
    if (path == Path::kFallback) {
      text += ", ";
      append_numbers(text, {{"buffered_bytes", read(counters.buffered_bytes)},
                            {"direct_bytes", read(counters.direct_bytes)},
                            {"pagecache_bytes", read(counters.pagecache_bytes)},
                            {"hole_bytes", read(counters.hole_bytes)}});
    }
    text += '}';
  }
  text += ", \"refusals\": {";
  bool first = true;
  for (std::size_t bit = 0; bit < kRefusalCount; ++bit) {
    const std::uint64_t times = read(counters.refusals[bit]);
    if (times == 0) continue;
    if (!first) text += ", ";
    first = false;
    append_numbers(text, {{kRefusalNames[bit], times}});
  }
  text += "}}";
}

}  // namespace

void IoStatistics::count_refusals(int device, Direction direction, RefusalMask mask) {
  DirectionCounters& counters = of(device, direction);
  for (std::size_t bit = 0; bit < kRefusalCount; ++bit) {
    if ((mask >> bit & 1U) != 0) count(counters.refusals[bit]);
  }
}

std::string IoStatistics::to_json(const BouncePool::Statistics& pool, std::size_t active) const {
  std::string text = "{\"active\": " + std::to_string(active) + ", \"devices\": [";
  for (std::size_t index = 0; index < count_; ++index) {
    if (index > 0) text += ", ";
    text += "{\"load\": ";
    append_direction(text, devices_[index].directions[static_cast<std::size_t>(Direction::kLoad)]);
    text += ", \"store\": ";
    append_direction(text, devices_[index].directions[static_cast<std::size_t>(Direction::kStore)]);
    text += '}';
  }
  text += "], \"bounce_pool\": {";
  append_numbers(text, {{"slot_bytes", pool.slot_bytes},
                        {"capacity_bytes", pool.capacity_bytes},
                        {"pinned_bytes", pool.pinned_bytes},
                        {"used_bytes", pool.used_bytes},
                        {"waits", pool.waits},
                        {"pin_failures", pool.pin_failures}});
  text += "}}";
  return text;
}

}  // namespace gpufs
