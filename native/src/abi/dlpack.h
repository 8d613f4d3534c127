// DLPack tensors of memory that an object keeps. Consumers may release them on any thread.
// Ownership: the consumer's, which calls the tensor's deleter.
// Thread-safe.
#pragma once

#include <memory>

#include "gpufs.h"

namespace gpufs {

// A gpufs_dl_legacy or gpufs_dl_versioned, which holds `keep` until its deleter is called.
void* export_tensor(const gpufs_dl_tensor& tensor, bool versioned, bool read_only, const std::shared_ptr<void>& keep);

void release_tensor(void* managed, bool versioned);

}  // namespace gpufs
