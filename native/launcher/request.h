// The two messages that ask a mount's daemon for a copy; docs/protocol.md describes them.
// Functions without a state of their own.
// Any thread may call them.
#pragma once

#include <string>

namespace gpufs::launcher {

struct CopyRequest {
  bool store = false;           // from the mount to the host
  double progress_seconds = 0;  // between two messages of progress, 0 for none
};

// The first message of a connection.
std::string hello_message();

// All of the source to the start of the destination, with the id 1; its descriptors go with it.
std::string copy_message(const CopyRequest& request);

}  // namespace gpufs::launcher
