#include "base/cpus.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <string>
#include <string_view>

namespace gpufs {
namespace {

// Reads "0-7,16-23" from sysfs and removes what this process may not use. False if the node is unknown.
bool cpus_of_node(int node, cpu_set_t* cpus) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return false;
  *cpus = allowed;
  if (node < 0) return true;
  std::ifstream file("/sys/devices/system/node/node" + std::to_string(node) + "/cpulist");
  std::string text;
  if (!std::getline(file, text)) return false;
  cpu_set_t listed;
  CPU_ZERO(&listed);
  std::string_view rest = text;
  while (!rest.empty()) {
    const std::string_view item = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(item.size() + 1, rest.size()));
    std::size_t first = 0;
    const std::from_chars_result start = std::from_chars(item.data(), item.data() + item.size(), first);
    if (start.ec != std::errc()) return false;
    std::size_t last = first;
    if (start.ptr != item.data() + item.size()) {
      if (std::from_chars(start.ptr + 1, item.data() + item.size(), last).ec != std::errc()) return false;
    }
    for (std::size_t cpu = first; cpu <= last && cpu < CPU_SETSIZE; ++cpu) CPU_SET(cpu, &listed);
  }
  CPU_AND(cpus, &allowed, &listed);
  return CPU_COUNT(cpus) > 0;
}

}  // namespace

int usable_cpus(int node) {
  cpu_set_t cpus;
  if (cpus_of_node(node, &cpus) || cpus_of_node(-1, &cpus)) return std::max(CPU_COUNT(&cpus), 1);
  return 1;
}

void run_on_node(int node) {
  cpu_set_t cpus;
  if (node >= 0 && cpus_of_node(node, &cpus)) (void)::sched_setaffinity(0, sizeof cpus, &cpus);
}

}  // namespace gpufs
