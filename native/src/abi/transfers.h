// The engine's TransferEngine as the rest of the C interface gets it: made at the first use, with what was configured.
// Owned by the Engine.
// Any thread may call it.
#pragma once

#include <memory>

#include "abi/engine.h"
#include "gpufs.h"
#include "io/transfer_engine.h"

namespace gpufs {

// From the first call on the transfer options are fixed. Starts no thread. ESHUTDOWN once the engine is closed.
Result<std::shared_ptr<TransferEngine>> engine_transfers(Engine& engine);

// What the other side asks for, with its handles resolved.
Result<TransferRequest> transfer_request_from(const Engine& engine, const gpufs_transfer_request& given);

}  // namespace gpufs
