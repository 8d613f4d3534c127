#include "observe/tick_clock.h"

#include <fstream>
#include <string>

namespace gpufs::observe {
namespace {

bool look_up() {
#if defined(__x86_64__)
  // What the kernel trusts enough to tell the time by; where it has found the counter wanting it takes another.
  std::ifstream file("/sys/devices/system/clocksource/clocksource0/current_clocksource");
  std::string source;
  return static_cast<bool>(file >> source) && source == "tsc";
#elif defined(__aarch64__)
  return true;  // the architecture's own timer, even by definition
#else
  return false;
#endif
}

}  // namespace

bool ticks_are_even() {
  static const bool even = look_up();
  return even;
}

}  // namespace gpufs::observe
