// How tests set up a vendor's fake library, plan its faults and read what it saw.
// Programs that do not know of the fake plan by the environment, with VENDOR for CUDA or HIP: FAKE_VENDOR_DEVICES,
// FAKE_VENDOR_MEMORY=BYTES, FAKE_HIP_TAIL_ACCESS=0, and FAKE_VENDOR_FAULTS=SYMBOL:N:CODE:TIMES,... as fail() does.
// Owned by the fake library, which is loaded once for the process and keeps one state.
// Any thread.
#pragma once

#include <cstdint>

struct FakeGpuSetup {
  int devices = 1;
  std::uint64_t memory_bytes = std::uint64_t{4} << 30;  // of each device; only accounted, until it is touched
  std::uint64_t address_space_bytes = std::uint64_t{1} << 47;
  bool virtual_memory = true;
  bool peers = true;
  bool stream_waits = true;  // streams can wait for a value in memory that is merely pinned
  bool capturing = false;    // every stream is being captured into a graph
  // The program captures a stream that the tests do not see, in the default mode: calls that wait, allocate or free are
  // refused on threads whose own mode is not relaxed, and those that wait for the whole device always. Each such call
  // ends the capture, and is counted as "captures ended".
  bool program_captures = false;
  // CUDA alone:
  bool export_descriptors = true;
  bool managed = false;  // all memory claims to be managed memory
  // HIP alone:
  int version = 70'100'000;
  bool file_calls = true;  // hipGetProcAddress knows hipAmdFileRead and hipAmdFileWrite
  bool file_write = true;  // and the second of them
  // False: access cannot be set for a part of a range that does not start it, once there are several ranges. Some
  // versions of ROCm are like that.
  bool tail_access = true;
};

// What is open now; all zero once everything has been released.
struct FakeGpuState {
  std::uint64_t bytes_used;  // physical memory and plain allocations, all devices
  int contexts;              // CUDA: primary contexts retained
  int handles;               // physical memory created and not released
  int mappings;
  int reservations;
  int allocations;
  int streams;
  int events;
  int pinned;
};

struct FakeGpuControl {
  // Forgets plans, counts and records. Returns how many more objects are open than at the last reset: what leaked.
  int (*reset)(const FakeGpuSetup* setup);
  // The n-th call of `symbol` from now (1: the next) and `times - 1` after it fail with `code`, without effect.
  void (*fail)(const char* symbol, int n, int code, int times);
  // Calls of `symbol` since reset(), the failed ones too. "copy, pinned" and "copy, pageable": copies from or to host
  // memory of that kind. "in a host function": calls that were refused because a host function made them. "captured":
  // nodes of the graph that streams are being captured into.
  int (*calls)(const char* symbol);
  void (*state)(FakeGpuState* state);
  // While held, no stream does any of its work.
  void (*hold)(bool held);
  // From now on, until reset(), unpinning and freeing memory wait for all blocked streams. While six or more are
  // blocked, creating and destroying streams waits for them as well, and so does all work but large copies.
  void (*share_queues)();
  // The device current on the calling thread, -1 if none.
  int (*current)();
  // The calling thread's capture mode, 0 unless somebody has changed it.
  int (*capture_mode)();
};
