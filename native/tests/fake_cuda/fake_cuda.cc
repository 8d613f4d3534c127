// A libcuda over host memory (fake_gpu/machine.h): contexts, the threads' stacks of them, and the entry points.
//
// Compiled twice: complete; FAKE_GPU_OLD, without a function that every driver must have.
#include "fake_cuda.h"

#include "drivers/cuda/cuda_api.h"
#include "fake_gpu/machine.h"

using namespace gpufs::cuda;

namespace gpufs::cuda {
struct CuContextObject {
  const int device;
  std::atomic<int> retained = 0;
};
}  // namespace gpufs::cuda

namespace {

static_assert(fake_gpu::kMaximumDevices == 8);
// Primary contexts.
std::array<CuContextObject, fake_gpu::kMaximumDevices> contexts{{{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}}};

thread_local std::vector<CuContext> stack;

int current_device() { return stack.empty() ? -1 : stack.back()->device; }
int depth() { return static_cast<int>(stack.size()); }

bool is_fatal(api::Code code) {
  return code == api::kIllegalAddress || code == api::kLaunchTimeout || code == api::kContextIsDestroyed ||
         code == api::kUnknown || (code >= kCuHardwareStackError && code <= api::kLaunchFailed);
}

int retained_contexts() {
  int count = 0;
  for (const CuContextObject& context : contexts) count += context.retained;
  return count;
}

CuUuid uuid_of(int physical) {
  CuUuid uuid{};
  for (std::size_t at = 0; at < uuid.size(); ++at) uuid[at] = static_cast<unsigned char>(at * 17);
  uuid[0] = static_cast<unsigned char>(0xA0 + physical);
  return uuid;
}

std::string uuid_text(int physical) {
  const CuUuid uuid = uuid_of(physical);
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
                uuid[0], uuid[1], uuid[2], uuid[3], uuid[4], uuid[5], uuid[6], uuid[7], uuid[8], uuid[9], uuid[10],
                uuid[11], uuid[12], uuid[13], uuid[14], uuid[15]);
  return text.data();
}

api::Code give_uuid(CuUuid* out, int physical) {
  *out = uuid_of(physical);
  return api::kSuccess;
}

const char* name_of(api::Code code) {
  switch (code) {
    case api::kSuccess:
      return "CUDA_SUCCESS";
    case api::kInvalidValue:
      return "CUDA_ERROR_INVALID_VALUE";
    case api::kOutOfMemory:
      return "CUDA_ERROR_OUT_OF_MEMORY";
    case api::kNoDevice:
      return "CUDA_ERROR_NO_DEVICE";
    case api::kIllegalAddress:
      return "CUDA_ERROR_ILLEGAL_ADDRESS";
    case api::kLaunchFailed:
      return "CUDA_ERROR_LAUNCH_FAILED";
    default:
      return nullptr;
  }
}

}  // namespace

fake_gpu::Machine& fake_gpu::machine() {
  static Machine* const instance =
      new Machine({"FAKE_CUDA_", kLargePage, 0xA0, /*piece_by_piece=*/false, "CUDA_VISIBLE_DEVICES", uuid_text,
                   "CUDA_DEVICE_MAX_COPY_CONNECTIONS", is_fatal, current_device});
  return *instance;
}

api::Code fake_gpu::readiness(Machine& m) {
  return stack.empty() ? kCuInvalidContext : m.poison(current_device()).load();
}

namespace {

int reset(const FakeGpuSetup* setup) { return fake_gpu::machine().reset(*setup, retained_contexts()); }
void read_state(FakeGpuState* state) {
  *state = fake_gpu::machine().state();
  state->contexts = retained_contexts();
}

constexpr FakeCudaControl kControl{{reset, fake_gpu::plan_failure, fake_gpu::count_calls, read_state, fake_gpu::hold,
                                    fake_gpu::share_queues, current_device, fake_gpu::read_capture_mode},
                                   depth};

api::Code attribute_of(const FakeGpuSetup& setup, int attribute, int* value) {
  switch (attribute) {
    case kCuAttributeVirtualMemory:
      *value = setup.virtual_memory ? 1 : 0;
      return api::kSuccess;
    case kCuAttributeExportDescriptor:
      *value = setup.export_descriptors ? 1 : 0;
      return api::kSuccess;
    case kCuAttributeHostVirtualMemory:
      *value = setup.virtual_memory && setup.export_descriptors ? 1 : 0;
      return api::kSuccess;
    case kCuAttributeSameHostAddresses:
    case kCuAttributeReadOnlyHostRegister:
      *value = 1;
      return api::kSuccess;
    default:
      return api::kInvalidValue;
  }
}

api::Code give(CuContext* out, CuContext context) {
  *out = context;
  return api::kSuccess;
}

}  // namespace

extern "C" {

const FakeCudaControl* fake_cuda_control() { return &kControl; }

#define FAKE_CUDA
#include "fake_gpu/functions.h"

CALL(cuInit, (unsigned /*flags*/), api::kSuccess)

api::Code cuGetErrorName(api::Code code, const char** name) {
  *name = name_of(code);
  return *name != nullptr ? api::kSuccess : api::kInvalidValue;
}

api::Code cuGetErrorString(api::Code code, const char** text) {
  *text = name_of(code) != nullptr ? "as the test planned" : nullptr;
  return *text != nullptr ? api::kSuccess : api::kInvalidValue;
}

api::Code cuDeviceGetCount(int* count) {
  ENTER("cuDeviceGetCount");
  *count = m.setup.devices;
  return api::kSuccess;
}

api::Code cuDeviceGet(CuDevice* device, int ordinal) {
  ENTER("cuDeviceGet");
  if (ordinal < 0 || ordinal >= m.setup.devices) return api::kInvalidDevice;
  *device = ordinal;
  return api::kSuccess;
}

CALL(cuDeviceGetUuid, (CuUuid * uuid, CuDevice device), give_uuid(uuid, m.physical(device)))
CALL(cuDeviceGetAttribute, (int* value, int attribute, CuDevice /*device*/), attribute_of(m.setup, attribute, value))

api::Code cuDevicePrimaryCtxRetain(CuContext* context, CuDevice device) {
  ENTER("cuDevicePrimaryCtxRetain");
  *context = &contexts.at(static_cast<std::size_t>(device));
  ++(*context)->retained;
  return api::kSuccess;
}

api::Code cuDevicePrimaryCtxRelease_v2(CuDevice device) {
  ENTER("cuDevicePrimaryCtxRelease_v2");
  CuContextObject& context = contexts.at(static_cast<std::size_t>(device));
  if (context.retained == 0) return kCuInvalidContext;
  --context.retained;
  return api::kSuccess;
}

CALL(cuCtxGetCurrent, (CuContext * context), give(context, stack.empty() ? nullptr : stack.back()))

api::Code cuCtxSetCurrent(CuContext context) {
  ENTER("cuCtxSetCurrent");
  if (!stack.empty()) stack.pop_back();
  if (context != nullptr) stack.push_back(context);
  return api::kSuccess;
}

api::Code cuCtxPushCurrent_v2(CuContext context) {
  ENTER("cuCtxPushCurrent_v2");
  stack.push_back(context);
  return api::kSuccess;
}

api::Code cuCtxPopCurrent_v2(CuContext* context) {
  ENTER("cuCtxPopCurrent_v2");
  if (stack.empty()) return kCuInvalidContext;
  *context = stack.back();
  stack.pop_back();
  return api::kSuccess;
}

ON_DEVICE(cuCtxEnablePeerAccess, (CuContext /*peer*/, unsigned /*flags*/), api::kSuccess)

api::Code cuPointerGetAttribute(void* answer, int attribute, CuAddress address) {
  ENTER_ON_DEVICE("cuPointerGetAttribute");
  if (attribute == api::kPointerRangeStart || attribute == api::kPointerRangeBytes) {
    return m.pinned_attribute(answer, attribute, address);
  }
  const int device = m.owner_of(address);
  if (attribute == kCuPointerContext && device >= 0) {
    CuContext const context = &contexts.at(static_cast<std::size_t>(device));
    std::memcpy(answer, &context, sizeof(CuContext));
    return api::kSuccess;
  }
  return m.pointer_attribute(answer, attribute, address);
}

api::Code cuMemcpyBatchAsync(CuAddress* destinations, CuAddress* sources, std::size_t* sizes, std::size_t count,
                             CuCopyAttributes* attributes, std::size_t* attributes_from, std::size_t kinds,
                             std::size_t* /*failed*/, api::Stream stream) {
  ENTER_ON_DEVICE("cuMemcpyBatchAsync");
  if (kinds != 1 || *attributes_from != 0 || attributes->source_order != kCuSourceInStreamOrder) {
    return api::kInvalidValue;
  }
  for (std::size_t at = 0; at < count; ++at) {
    const CuAddress to = destinations[at];
    const CuAddress from = sources[at];
    const api::Code code = m.reachable(to, sizes[at], stack.back()->device)
                               ? m.copy_in(to, reinterpret_cast<const void*>(from), sizes[at], stream)
                               : m.copy_out(reinterpret_cast<void*>(to), from, sizes[at], stream);
    if (code != api::kSuccess) return code;
  }
  return api::kSuccess;
}

api::Code cuMemcpyPeerAsync(CuAddress destination, CuContext peer, CuAddress source, CuContext context,
                            std::size_t bytes, api::Stream stream) {
  ENTER_ON_DEVICE("cuMemcpyPeerAsync");
  if (context != stack.back() || peer == context) return kCuInvalidContext;
  if (const api::Code code = m.poison(peer->device).load(); code != api::kSuccess) return code;
  if (!m.reachable(destination, bytes, peer->device)) return api::kInvalidValue;
  return m.copy_within(destination, source, bytes, stream);
}

api::Code cuStreamSynchronize(api::Stream stream) {
  fake_gpu::Machine& m = fake_gpu::machine();
  std::unique_lock lock(m.mutex);
  const api::Code planned = m.enter("cuStreamSynchronize");
  return stack.empty() ? kCuInvalidContext : m.synchronize_stream(lock, stream, planned);
}

ON_DEVICE(cuStreamWaitValue32_v2, (api::Stream stream, CuAddress cell, std::uint32_t value, unsigned flags),
          m.setup.stream_waits ? m.wait_for_value(stream, cell, value, flags) : api::kNotSupported)

api::Code cuStreamGetCtx(api::Stream handle, CuContext* context) {
  ENTER_ON_DEVICE("cuStreamGetCtx");
  const api::Stream stream = m.stream_at(handle);
  if (stream == nullptr) return api::kInvalidHandle;
  return give(context, &contexts.at(static_cast<std::size_t>(stream->device)));
}

CALL(cuMemImportFromShareableHandle, (Handle * handle, void* descriptor, int type),
     m.import_memory(handle, static_cast<int>(reinterpret_cast<std::intptr_t>(descriptor)), type))

}  // extern "C"
