// The processor's own counter as a clock: a third of what the system's clock costs to read. Its numbers mean something
// once the times of two moments are known in both clocks (Timeline in observe/timeline.h).
// Owned by nobody (functions).
// Any thread.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

#include "observe/counters.h"

namespace gpufs::observe {

// Whether the counter runs evenly, the same on all processors: the system's own clock then rests on it. Looked up once.
[[nodiscard]] bool ticks_are_even();

// Not ordered with what stands around it: two readings close together may come out the wrong way round, by nanoseconds.
[[nodiscard]] inline std::uint64_t read_ticks() {
#if defined(__x86_64__)
  return __rdtsc();
#elif defined(__aarch64__)
  std::uint64_t ticks = 0;
  asm volatile("mrs %0, cntvct_el0" : "=r"(ticks));
  return ticks;
#else
  return now_ns();
#endif
}

}  // namespace gpufs::observe
