// The fake libamdhip64: fake_gpu.h's control, and the file calls that only HIP has.
// Owned by the fake library, which is loaded once for the process and keeps one state.
// Any thread.
#pragma once

#include <cstdint>

#include "fake_gpu/fake_gpu.h"

// How one hipAmdFileRead or hipAmdFileWrite ends.
struct FakeHipFilePlan {
  int result = 0;
  std::int32_t status = 0;
  int error_number = 0;                // what errno is left as; -1: as the caller had it
  std::uint64_t bytes = UINT64_MAX;    // moved at most, before it ends
  bool outputs_untouched = false;      // an early failure: nothing is moved, and nothing is said
  std::uint64_t claimed = UINT64_MAX;  // what it says that it has moved, where that is not the truth
};

struct FakeHipFileCall {
  bool write;
  int fd;
  std::uint64_t device_address;
  std::uint64_t bytes;
  std::int64_t file_offset;
  std::uint64_t copied;
  int result;
  std::int32_t status;
  int device;           // current on the calling thread
  bool outputs_zeroed;  // by the caller, beforehand
  bool errno_zeroed;
};

struct FakeHipControl : FakeGpuControl {
  // The next file call that has no plan yet ends like this.
  void (*plan_file_call)(const FakeHipFilePlan* plan);
  // Copies the first `room` records of file calls since reset() and returns how many there are.
  int (*file_calls)(FakeHipFileCall* records, int room);
  // hipHostRegister's flags at the last successful call.
  unsigned (*last_pin_flags)();
};

extern "C" const FakeHipControl* fake_hip_control();
