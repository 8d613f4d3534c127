#include "base/cpus.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>

namespace gpufs {

namespace {

// The CPUs in a file of sysfs ("0-7,16-23"), ascending; empty if it cannot be read.
std::vector<int> listed_cpus(const std::string& path) {
  std::vector<int> cpus;
  std::ifstream file(path);
  for (std::string item; std::getline(file, item, ',');) {
    std::istringstream range(item);
    int first = 0;
    int last = 0;
    char dash = 0;
    if (!(range >> first)) return {};
    if (!(range >> dash >> last)) last = first;
    for (int cpu = first; cpu <= last; ++cpu) cpus.push_back(cpu);
  }
  return cpus;
}

}  // namespace

std::vector<int> allowed_cpus(int node) {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> cpus;
  if (::sched_getaffinity(0, sizeof set, &set) == 0) {
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
    }
  }
  if (cpus.empty()) cpus.push_back(0);
  if (node < 0) return cpus;
  std::vector<int> near = listed_cpus("/sys/devices/system/node/node" + std::to_string(node) + "/cpulist");
  std::erase_if(near, [&](int cpu) { return !std::ranges::binary_search(cpus, cpu); });
  return near.empty() ? cpus : near;
}

void run_on_node(int node) {
  if (node < 0) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : allowed_cpus(node)) CPU_SET(cpu, &set);
  (void)::sched_setaffinity(0, sizeof set, &set);
}

}  // namespace gpufs
