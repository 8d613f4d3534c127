// What the C interface's transfers and operations share.
// Any thread may call it.
#pragma once

#include "abi/engine.h"
#include "gpufs.h"
#include "io/transfer_engine.h"

namespace gpufs {

// What the other side asks for, with its handles resolved.
Result<TransferRequest> transfer_request_from(const Engine& engine, const gpufs_transfer_request& given);

}  // namespace gpufs
