// The fake libcuda: fake_gpu.h's control, and what only CUDA has.
// Owned by the fake library, which is loaded once for the process and keeps one state.
// Any thread.
#pragma once

#include "fake_gpu/fake_gpu.h"

struct FakeCudaControl : FakeGpuControl {
  // How deep the calling thread's stack of contexts is.
  int (*depth)();
};

extern "C" const FakeCudaControl* fake_cuda_control();
