// AMD's hipAmdFileRead and hipAmdFileWrite as a direct path: the kernel's GPU driver moves bytes between storage and
// the device. The path belongs to the TransferEngine, a file of it to its BackingFile; the runtime stays loaded. Any
// thread may call any function.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "io/direct_path.h"

namespace gpufs {

// Always a path; one that refuses everything, with the reasons, where it cannot work: the runtime does not say its
// version or has not got both calls, or the kernel's GPU driver cannot be reached. A kernel whose driver has no such
// interface shows only at the first call: from then on the path refuses, too.
std::shared_ptr<DirectPath> open_hip_file_path();

// The same through the first of these libraries that works. kernel_driver: /dev/kfd can be used.
std::shared_ptr<DirectPath> open_hip_file_path_from(const std::vector<std::string>& candidates, bool kernel_driver);

}  // namespace gpufs
