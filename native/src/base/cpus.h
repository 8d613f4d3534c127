// The CPUs that this process may use, by NUMA node.
#pragma once

#include <sched.h>

namespace gpufs {

// The number of CPUs that this process may use on `node`; on all nodes for -1 or an unknown node. At least 1.
int usable_cpus(int node);

// Restricts the calling thread to the CPUs of `node`. Has no effect for -1 or an unknown node.
void run_on_node(int node);

}  // namespace gpufs
