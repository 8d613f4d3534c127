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

void append_direction(std::string& text, const observe::DeviceCounters& counters, Direction direction) {
  using observe::Backend;
  using observe::Block;
  observe::Region& region = *counters.region();
  const std::size_t device = counters.device();
  const observe::Flow flow = flow_of(direction);
  const observe::TransferDetails& details = region.details(device, flow);
  text += '{';
  append_numbers(text, {{"transfers", region.sum(device, Backend::kTransfer, flow, &Block::started)},
                        {"failed", read(details.failed)},
                        {"cancelled", read(details.cancelled)},
                        {"abandoned", read(details.abandoned)}});
  for (const Path path : {Path::kFastpath, Path::kFallback}) {
    const Backend backend = backend_of(path);
    text += ", \"";
    text += path_name(path);
    text += "\": {";
    append_numbers(text, {{"bytes", region.sum(device, backend, flow, &Block::bytes)},
                          {"operations", region.sum(device, backend, flow, &Block::ended)},
                          {"errors", region.sum(device, backend, flow, &Block::errors)}});
    if (path == Path::kFallback) {
      text += ", ";
      append_numbers(text, {{"buffered_bytes", read(details.buffered_bytes)},
                            {"direct_bytes", read(details.direct_bytes)},
                            {"hole_bytes", read(details.hole_bytes)}});
    }
    text += '}';
  }
  text += ", \"refusals\": {";
  bool first = true;
  for (std::size_t bit = 0; bit < kRefusalCount; ++bit) {
    const std::uint64_t times = region.refusals(device, Backend::kFastpath, flow, bit);
    if (times == 0) continue;
    if (!first) text += ", ";
    first = false;
    append_numbers(text, {{kRefusalNames[bit], times}});
  }
  text += "}}";
}

}  // namespace

std::string transfer_statistics_json(const std::vector<observe::DeviceCounters>& devices,
                                     const BouncePool::Statistics& pool, std::size_t active) {
  std::string text = "{\"active\": " + std::to_string(active) + ", \"devices\": [";
  for (const observe::DeviceCounters& device : devices) {
    if (&device != &devices.front()) text += ", ";
    text += "{\"load\": ";
    append_direction(text, device, Direction::kLoad);
    text += ", \"store\": ";
    append_direction(text, device, Direction::kStore);
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
