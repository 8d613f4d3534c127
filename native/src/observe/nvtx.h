// Shows spans to NVIDIA's profilers (Nsight Systems, CUPTI) as NVTX ranges of the domain "gpufs".
// Thread-safe. Costs one check where no profiler has loaded itself into the process, and nothing exists without NVTX's
// headers at build time.
#pragma once

#include <cstdint>

namespace gpufs::observe::nvtx {

// Whether a profiler receives ranges. Asked once: a profiler is there from the start of the process or never.
[[nodiscard]] bool on();

// Opens a range of the calling thread, whose payload is a number of bytes; pop() closes the one opened last.
void push(const char* name, std::uint64_t bytes);
void pop();

}  // namespace gpufs::observe::nvtx
