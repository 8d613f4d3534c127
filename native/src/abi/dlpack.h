// DLPack tensors of memory that an object keeps. Consumers may release them on any thread.
// Ownership: the consumer's, which calls the tensor's deleter.
// Thread-safe.
#pragma once

#include <memory>

#include "gpufs.h"

namespace gpufs {

// A DLManagedTensor or DLManagedTensorVersioned, which holds `keep` until its deleter is called.
void* export_tensor(const gpufs_tensor& tensor, const std::shared_ptr<void>& keep);

void release_tensor(void* managed, bool versioned);

}  // namespace gpufs
