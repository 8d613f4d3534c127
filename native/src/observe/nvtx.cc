#include "observe/nvtx.h"

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>

namespace gpufs::observe::nvtx {
namespace {

// Null without a profiler.
nvtxDomainHandle_t domain() {
  static const nvtxDomainHandle_t handle = nvtxDomainCreateA("gpufs");
  return handle;
}

}  // namespace

bool on() { return domain() != nullptr; }

void push(const char* name, std::uint64_t bytes) {
  nvtxEventAttributes_t range{};
  range.version = NVTX_VERSION;
  range.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  range.payloadType = NVTX_PAYLOAD_TYPE_UNSIGNED_INT64;
  range.payload.ullValue = bytes;
  range.messageType = NVTX_MESSAGE_TYPE_ASCII;
  range.message.ascii = name;
  nvtxDomainRangePushEx(domain(), &range);
}

void pop() { nvtxDomainRangePop(domain()); }

}  // namespace gpufs::observe::nvtx

#else

namespace gpufs::observe::nvtx {

bool on() { return false; }
void push(const char*, std::uint64_t) {}
void pop() {}

}  // namespace gpufs::observe::nvtx

#endif
