// How tests set up the fake libcuda, plan its faults and read what it saw.
// Programs that do not know of the fake plan by the environment: FAKE_CUDA_DEVICES, FAKE_CUDA_MEMORY, and
// FAKE_CUDA_FAULTS=SYMBOL:N:CODE:TIMES,... as fail() does.
// Owned by the fake library, which is loaded once for the process and keeps one state.
// Any thread.
#pragma once

#include <cstdint>

struct FakeCudaSetup {
  int devices = 1;
  std::uint64_t memory_bytes = std::uint64_t{4} << 30;  // of each device; only accounted, until it is touched
  std::uint64_t address_space_bytes = std::uint64_t{1} << 47;
  bool virtual_memory = true;
  bool export_descriptors = true;
  bool peers = true;
  bool stream_waits = true;  // cuStreamWaitValue32_v2 works
  bool capturing = false;    // every stream is being captured into a graph
  bool managed = false;      // all memory claims to be managed memory
};

// What is open now; all zero once everything has been given back.
struct FakeCudaState {
  std::uint64_t bytes_used;  // physical memory and plain allocations, all devices
  int contexts;              // primary contexts retained
  int handles;               // cuMemCreate without cuMemRelease
  int mappings;
  int reservations;
  int allocations;
  int streams;
  int events;
  int pinned;
};

struct FakeCudaControl {
  // Forgets plans and counts. Returns how many more objects are open than at the last reset: what leaked.
  int (*reset)(const FakeCudaSetup* setup);
  // The n-th call of `symbol` from now (1: the next) and `times - 1` after it fail with `code`, without effect.
  void (*fail)(const char* symbol, int n, int code, int times);
  // Calls of `symbol` since reset(), the failed ones too. "copy, pinned" and "copy, pageable": copies from or to host
  // memory of that kind.
  int (*calls)(const char* symbol);
  void (*state)(FakeCudaState* state);
  // While held, no event is done and waiting for one blocks.
  void (*hold)(bool held);
  // The context current on the calling thread, by device; -1 if none; and how deep the thread's stack is.
  int (*current)(int* depth);
};

extern "C" const FakeCudaControl* fake_cuda_control();
