// CPUs of the machine and those that this process may use, by NUMA node.
#pragma once

#include <string>
#include <vector>

namespace gpufs {

// The CPUs in a file of sysfs ("0-7,16-23"), ascending; empty if it cannot be read.
std::vector<int> listed_cpus(const std::string& path);

// The CPUs that this process may use on `node`; on all nodes for -1 or an unknown node. At least one.
std::vector<int> allowed_cpus(int node);
inline int usable_cpus(int node) { return static_cast<int>(allowed_cpus(node).size()); }

// Restricts the calling thread to the CPUs of `node`. Has no effect for -1 or an unknown node.
void run_on_node(int node);

}  // namespace gpufs
