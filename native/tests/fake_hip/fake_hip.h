// How tests set up the fake libamdhip64, plan its faults and read what it saw.
// Owned by the fake library, which is loaded once for the process and keeps one state.
// Any thread.
#pragma once

#include <cstdint>

struct FakeHipSetup {
  int devices = 1;
  std::uint64_t memory_bytes = std::uint64_t{4} << 30;  // of each device; only accounted, until it is touched
  std::uint64_t address_space_bytes = std::uint64_t{1} << 47;
  int version = 70'100'000;
  bool virtual_memory = true;
  bool peers = true;
  bool stream_waits = true;  // hipStreamWaitValue32 works on memory that is merely pinned
  bool capturing = false;    // every stream is being captured into a graph
  bool file_calls = true;    // hipGetProcAddress knows hipAmdFileRead and hipAmdFileWrite
  bool file_write = true;    // and the second of them
};

// What is open now; all zero once everything has been given back.
struct FakeHipState {
  std::uint64_t bytes_used;  // physical memory and plain allocations, all devices
  int handles;               // hipMemCreate without hipMemRelease
  int mappings;
  int reservations;
  int allocations;
  int streams;
  int events;
  int pinned;
};

// How one hipAmdFileRead or hipAmdFileWrite ends.
struct FakeHipFilePlan {
  int result = 0;
  std::int32_t status = 0;
  int error_number = 0;                // what errno is left as
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

struct FakeHipControl {
  // Forgets plans, counts and records. Returns how many more objects are open than at the last reset: what leaked.
  int (*reset)(const FakeHipSetup* setup);
  // The n-th call of `symbol` from now (1: the next) and `times - 1` after it fail with `code`, without effect.
  void (*fail)(const char* symbol, int n, int code, int times);
  // Calls of `symbol` since reset(), the failed ones too. "copy, pinned" and "copy, pageable": copies from or to host
  // memory of that kind.
  int (*calls)(const char* symbol);
  void (*state)(FakeHipState* state);
  // While held, no stream does any of its work.
  void (*hold)(bool held);
  // The device current on the calling thread.
  int (*current)();
  // The next file call that has no plan yet ends like this.
  void (*plan_file_call)(const FakeHipFilePlan* plan);
  // Copies the first `room` records of file calls since reset() and returns how many there are.
  int (*file_calls)(FakeHipFileCall* records, int room);
  // hipHostRegister's flags at the last successful call.
  unsigned (*last_pin_flags)();
};

extern "C" const FakeHipControl* fake_hip_control();
