// AMD's hipAmdFileRead and hipAmdFileWrite as a direct path: the kernel's GPU driver moves bytes between storage and
// the device. Thread-safe. The runtime stays loaded.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "io/direct_path.h"

namespace gpufs {

// Always returns a path: one that refuses everything, with the reasons, if the runtime lacks one of the calls or the
// kernel's GPU driver cannot be opened. Whether the kernel supports the calls shows only at the first one: if it does
// not, the path refuses from then on.
// candidates: the first of these libraries that works is used. kernel_driver: /dev/kfd can be used.
std::shared_ptr<DirectPath> open_hip_file_path(const std::vector<std::string>& candidates, bool kernel_driver);

}  // namespace gpufs
