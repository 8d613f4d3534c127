// CPUs of the machine and those that this process may use, by NUMA node.
#pragma once

#include <vector>

namespace gpufs {

// The CPUs that this process may use on `node`; on all nodes for -1 or an unknown node. At least one.
std::vector<int> allowed_cpus(int node);
inline int usable_cpus(int node) { return static_cast<int>(allowed_cpus(node).size()); }

// Restricts the calling thread to the CPUs of `node`. Has no effect for -1 or an unknown node.
void run_on_node(int node);

}  // namespace gpufs
