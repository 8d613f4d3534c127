// DLPack tensors of memory that native objects keep alive: consumers may release them on any thread, and after the
// interpreter has ended.
// Ownership: the consumer's, which calls the tensor's deleter.
// Thread-safe.
#pragma once

#include <memory>

#include "gpufs.h"

namespace gpufs {

// A DLManagedTensor or DLManagedTensorVersioned, which holds `keep` until its deleter is called.
void* export_tensor(const gpufs_tensor& tensor, std::shared_ptr<void> keep);

void release_tensor(void* managed, bool versioned);

}  // namespace gpufs
