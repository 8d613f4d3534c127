// A libamdhip64 over host memory (fake_gpu/machine.h): the threads' devices, the entry points, and the file calls.
//
// Compiled three times: complete; FAKE_GPU_BARE, without all that a runtime may lack; FAKE_GPU_OLD, without a function
// that every runtime must have. Beside fake_gpu.h's variables the environment may plan:
//   FAKE_HIP_FILE_PLANS=RESULT:STATUS:ERRNO:BYTES,...   how the first file calls end, in order
//   FAKE_HIP_RECORDS=FILE   a line for each file call: name, descriptor's file, bytes, offset, copied, result, status
#include "fake_hip.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "drivers/hip/hip_api.h"
#include "fake_gpu/machine.h"

using namespace gpufs::hip;
using fake_gpu::number;

namespace {

thread_local int current_device = 0;
thread_local bool initialised = false;

int read_current() { return current_device; }

bool is_fatal(api::Code code) {
  return code == api::kIllegalAddress || code == api::kLaunchTimeout || code == api::kContextIsDestroyed ||
         code == api::kEccUncorrectable || code == api::kLaunchFailed || code == api::kAssert ||
         code == kHipPriorLaunchFailure;
}

std::string uuid_text(int physical) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "GPU-c%d23456789abcdef", physical);
  return text.data();
}

const char* name_of(api::Code code) {
  switch (code) {
    case api::kSuccess:
      return "hipSuccess";
    case api::kInvalidValue:
      return "hipErrorInvalidValue";
    case api::kOutOfMemory:
      return "hipErrorOutOfMemory";
    case api::kNotInitialized:
      return "hipErrorNotInitialized";
    case api::kNoDevice:
      return "hipErrorNoDevice";
    case api::kIllegalAddress:
      return "hipErrorIllegalAddress";
    case api::kNotSupported:
      return "hipErrorNotSupported";
    default:
      return "hipErrorUnknown";
  }
}

}  // namespace

fake_gpu::Machine& fake_gpu::machine() {
  static Machine* const instance =
      new Machine({"FAKE_HIP_", kPage, 0xC0, /*piece_by_piece=*/true, "HIP_VISIBLE_DEVICES", uuid_text,
                   /*copy_queues=*/nullptr, is_fatal, read_current});
  return *instance;
}

api::Code fake_gpu::readiness(Machine& m) {
  if (!initialised) return api::kNotInitialized;
  if (current_device >= m.setup.devices) return api::kInvalidDevice;
  return m.poison(current_device).load();
}

namespace {

// What the file calls are to do and did; the machine's mutex guards it.
struct Files {
  std::deque<FakeHipFilePlan> plans;
  std::vector<FakeHipFileCall> calls;
  std::string records;

  Files() {
    for (const std::string& plan : fake_gpu::split(fake_gpu::machine().variable("FILE_PLANS"), ',')) {
      const std::vector<std::string> part = fake_gpu::split(plan.c_str(), ':');
      if (part.size() != 4) continue;
      FakeHipFilePlan end;
      end.result = std::stoi(part[0]);
      end.status = std::stoi(part[1]);
      end.error_number = std::stoi(part[2]);
      end.bytes = std::stoull(part[3]);
      plans.push_back(end);
    }
    if (const char* path = fake_gpu::machine().variable("RECORDS")) records = path;
  }
};

Files& files() {
  static Files* const instance = new Files;  // never destroyed, as the machine
  return *instance;
}

#ifndef FAKE_GPU_BARE
void record(const FakeHipFileCall& call) {
  Files& f = files();
  f.calls.push_back(call);
  if (f.records.empty()) return;
  char path[4096] = {};
  const std::string link = "/proc/self/fd/" + std::to_string(call.fd);
  if (::readlink(link.c_str(), path, sizeof path - 1) < 0) std::strcpy(path, "?");
  std::ostringstream line;
  line << (call.write ? "hipAmdFileWrite " : "hipAmdFileRead ") << path << ' ' << call.bytes << ' ' << call.file_offset
       << ' ' << call.copied << ' ' << call.result << ' ' << call.status << '\n';
  const int fd = ::open(f.records.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (fd < 0) return;
  const std::string text = line.str();
  if (::write(fd, text.data(), text.size()) < 0) std::perror("fake_hip: records");
  ::close(fd);
}

// What the kernel would do: the transfer itself. 0 or a negative errno.
std::int32_t move(bool write, int fd, void* device, std::uint64_t bytes, std::int64_t offset, std::uint64_t* copied) {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0) return -EBADF;
  if ((flags & O_DIRECT) == 0 || bytes % 512 != 0 || offset % 512 != 0) return -EINVAL;
  while (*copied < bytes) {
    auto* at = static_cast<char*>(device) + *copied;
    const auto want = static_cast<std::size_t>(bytes - *copied);
    const off_t where = offset + static_cast<off_t>(*copied);
    const ssize_t count = write ? ::pwrite(fd, at, want, where) : ::pread(fd, at, want, where);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return -errno;
    if (count == 0) return 0;
    *copied += static_cast<std::uint64_t>(count);
    if (count % 512 != 0) return 0;
  }
  return 0;
}

api::Code file_call(bool write, HipFileHandle handle, void* device, std::uint64_t bytes, std::int64_t offset,
                    std::uint64_t* size_copied, std::int32_t* status) {
  FakeHipFileCall call{};
  call.write = write;
  call.fd = handle.fd;
  call.device_address = number(device);
  call.bytes = bytes;
  call.file_offset = offset;
  call.device = current_device;
  call.outputs_zeroed = *size_copied == 0 && *status == 0;
  call.errno_zeroed = errno == 0;
  const char* const symbol = write ? "hipAmdFileWrite" : "hipAmdFileRead";
  ENTER_ON_DEVICE(symbol);
  if (bytes == 0) return api::kSuccess;
  if (number(handle.handle) >> 32 != 0) return api::kInvalidValue;  // only the descriptor may be set
  FakeHipFilePlan plan;
  if (!files().plans.empty()) {
    plan = files().plans.front();
    files().plans.pop_front();
  }
  if (!m.reachable(number(device), bytes, current_device)) {
    plan = {};
    plan.result = api::kInvalidValue;
    plan.outputs_untouched = true;
  }
  const auto leave_errno = [&] {
    if (plan.error_number >= 0) errno = plan.error_number;
  };
  if (plan.outputs_untouched) {
    call.result = plan.result;
    record(call);
    leave_errno();
    return plan.result;
  }
  // The runtime reserves a range as addresses alone, and the kernel finds no memory of the device's behind them.
  const bool refused = m.is_mapped_at(number(device));
  lock.unlock();
  call.status = refused ? -EINVAL : move(write, handle.fd, device, std::min(bytes, plan.bytes), offset, &call.copied);
  if (call.status != 0) {
    call.result = api::kUnknown;
  } else {
    call.status = plan.status;
    call.result = plan.result;
  }
  lock.lock();
  record(call);
  lock.unlock();
  *size_copied = plan.claimed == UINT64_MAX ? call.copied : plan.claimed;
  *status = call.status;
  leave_errno();
  return call.result;
}

api::Code file_read(HipFileHandle handle, void* device, std::uint64_t bytes, std::int64_t offset,
                    std::uint64_t* size_copied, std::int32_t* status) {
  return file_call(false, handle, device, bytes, offset, size_copied, status);
}

api::Code file_write(HipFileHandle handle, void* device, std::uint64_t bytes, std::int64_t offset,
                     std::uint64_t* size_copied, std::int32_t* status) {
  return file_call(true, handle, device, bytes, offset, size_copied, status);
}
#endif

api::Code give_uuid(HipUuid* out, int physical) {
  std::memcpy(out->data(), uuid_text(physical).data() + 4, out->size());  // without "GPU-"
  return api::kSuccess;
}

int reset(const FakeGpuSetup* setup) {
  {
    const std::scoped_lock lock(fake_gpu::machine().mutex);
    files().plans.clear();
    files().calls.clear();
  }
  return fake_gpu::machine().reset(*setup);
}
void read_state(FakeGpuState* state) { *state = fake_gpu::machine().state(); }

void plan_file_call(const FakeHipFilePlan* plan) {
  const std::scoped_lock lock(fake_gpu::machine().mutex);
  files().plans.push_back(*plan);
}

int read_file_calls(FakeHipFileCall* records, int room) {
  const std::scoped_lock lock(fake_gpu::machine().mutex);
  const int there = static_cast<int>(files().calls.size());
  std::copy_n(files().calls.begin(), std::min(there, room), records);
  return there;
}

unsigned last_pin_flags() {
  const std::scoped_lock lock(fake_gpu::machine().mutex);
  return fake_gpu::machine().pin_flags;
}

constexpr FakeHipControl kControl{{reset, fake_gpu::plan_failure, fake_gpu::count_calls, read_state, fake_gpu::hold,
                                   fake_gpu::share_queues, read_current, fake_gpu::read_capture_mode},
                                  plan_file_call,
                                  read_file_calls,
                                  last_pin_flags};

api::Code give(int* out, int value) {
  *out = value;
  return api::kSuccess;
}

}  // namespace

extern "C" {

const FakeHipControl* fake_hip_control() { return &kControl; }

#include "fake_gpu/functions.h"

api::Code hipInit(unsigned /*flags*/) {
  ENTER("hipInit");
  initialised = true;
  return api::kSuccess;
}

const char* hipGetErrorName(api::Code code) { return name_of(code); }

const char* hipGetErrorString(api::Code code) {
  return std::strcmp(name_of(code), "hipErrorUnknown") != 0 ? "as the test planned" : name_of(code);
}

api::Code hipGetDeviceCount(int* count) {
  ENTER("hipGetDeviceCount");
  *count = m.setup.devices;
  return m.setup.devices == 0 ? api::kNoDevice : api::kSuccess;
}

CALL(hipDeviceGetUuid, (HipUuid * uuid, int device), give_uuid(uuid, m.physical(device)))
CALL(hipDeviceGetAttribute, (int* value, int attribute, int /*device*/),
     attribute == kHipAttributeVirtualMemory ? give(value, m.setup.virtual_memory ? 1 : 0) : api::kInvalidValue)
CALL(hipGetDevice, (int* device), give(device, current_device))

api::Code hipSetDevice(int device) {
  ENTER("hipSetDevice");
  if (device < 0 || device >= m.setup.devices) return api::kInvalidDevice;
  current_device = device;
  return api::kSuccess;
}

api::Code hipStreamSynchronize(api::Stream stream) {
  fake_gpu::Machine& m = fake_gpu::machine();
  std::unique_lock lock(m.mutex);
  const api::Code planned = m.enter("hipStreamSynchronize");
  return initialised ? m.synchronize_stream(lock, stream, planned) : api::kNotInitialized;
}

#ifndef FAKE_GPU_BARE
ON_DEVICE(hipStreamWaitValue32,
          (api::Stream stream, void* cell, std::uint32_t value, unsigned flags, std::uint32_t mask),
          m.setup.stream_waits&& mask == kHipWholeValue ? m.wait_for_value(stream, number(cell), value, flags)
                                                        : api::kInvalidValue)

api::Code hipStreamGetDevice(api::Stream handle, int* device) {
  ENTER("hipStreamGetDevice");
  const api::Stream stream = m.stream_at(handle);
  return stream == nullptr ? api::kInvalidHandle : give(device, stream->device);
}

CALL(hipRuntimeGetVersion, (int* version), give(version, m.setup.version))

api::Code hipGetProcAddress(const char* symbol, void** address, int version, std::uint64_t flags, int* status) {
  ENTER("hipGetProcAddress");
  *address = nullptr;
  *status = 1;  // not found
  if (version != m.setup.version || flags != 0) return api::kInvalidValue;
  if (!m.setup.file_calls) return api::kSuccess;
  const std::string wanted = symbol;
  if (wanted == "hipAmdFileRead") *address = reinterpret_cast<void*>(file_read);
  if (wanted == "hipAmdFileWrite" && m.setup.file_write) *address = reinterpret_cast<void*>(file_write);
  if (*address != nullptr) *status = kHipSymbolFound;
  return api::kSuccess;
}

ON_DEVICE(hipPointerGetAttribute, (void* answer, int attribute, void* address),
          attribute == api::kPointerRangeStart || attribute == api::kPointerRangeBytes
              ? m.pinned_attribute(answer, attribute, number(address))
              : m.pointer_attribute(answer, attribute, number(address)))

api::Code hipPointerGetAttributes(HipPointerAttributes* attributes, const void* address) {
  ENTER("hipPointerGetAttributes");
  if (m.is_pinned_at(address)) {
    attributes->type = 1;
    return api::kSuccess;
  }
  attributes->type = api::kMemoryTypeDevice;
  attributes->device = m.owner_of(number(address));
  return attributes->device < 0 ? api::kInvalidValue : api::kSuccess;
}

ON_DEVICE(hipDeviceEnablePeerAccess, (int /*peer*/, unsigned /*flags*/), api::kSuccess)
ON_DEVICE(hipMemcpyPeerAsync,
          (void* destination, int peer, const void* source, int device, std::size_t bytes, api::Stream stream),
          device == current_device && peer != device ? m.copy_within(number(destination), number(source), bytes, stream)
                                                     : api::kInvalidDevice)

// Before ROCm 7.1 the descriptor is passed by its address.
CALL(hipMemImportFromShareableHandle, (Handle * handle, void* descriptor, int type),
     m.import_memory(handle,
                     m.setup.version < 70'100'000 ? *static_cast<int*>(descriptor)
                                                  : static_cast<int>(reinterpret_cast<std::intptr_t>(descriptor)),
                     type))
#endif

}  // extern "C"
