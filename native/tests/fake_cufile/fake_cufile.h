// How tests set up the fake libcufile, plan how its calls end and read what it saw.
// Owned by the fake library, which is loaded once for the process and keeps one state.
// Any thread.
#pragma once

#include <sys/types.h>

#include <cstdint>

struct FakeCufileSetup {
  unsigned major = 2;               // of the kernel module, as the properties have it
  unsigned supported = 1U << 4;     // NVMe
  unsigned control = 0;             // bit 1: it may copy through the host
  bool (*has_context)() = nullptr;  // whether the calling thread has a CUDA context; null: nobody asks
};

// How one cuFileRead or cuFileWrite ends.
struct FakeCufilePlan {
  ssize_t result = 0;  // below 0: returned as it is, and nothing moves
  int error_number = 0;
  std::uint64_t bytes = UINT64_MAX;  // moved at most
  std::uint64_t claimed = 0;         // returned instead of what was moved, where it is not 0
};

struct FakeCufileCall {
  bool write;
  int fd;
  std::uint64_t device_base;
  std::uint64_t bytes;
  std::int64_t file_offset;
  std::int64_t device_offset;
  std::int64_t result;
  bool context;  // the calling thread had one
};

struct FakeCufileControl {
  // Forgets plans, counts and records. Returns how many handles are registered.
  int (*reset)(const FakeCufileSetup* setup);
  // The n-th call of `symbol` from now (1: the next) answers `code`, without effect.
  void (*fail)(const char* symbol, int n, int code);
  int (*calls)(const char* symbol);
  int (*registered)();
  // The next read or write that has no plan yet ends like this.
  void (*plan)(const FakeCufilePlan* plan);
  // Copies the first `room` records since reset() and returns how many there are.
  int (*records)(FakeCufileCall* records, int room);
};

extern "C" const FakeCufileControl* fake_cufile_control();
