#include "fake_cuda.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "drivers/cuda/cuda_api.h"

using namespace gpufs::cuda;

namespace gpufs::cuda {
struct CuContextObject {
  int device = 0;
  int retained = 0;
  std::atomic<api::Code> poison = api::kSuccess;  // what every call in this context answers since a fatal failure
};
}  // namespace gpufs::cuda

namespace gpufs::gpu::api {
// Copies are done when they are queued. Functions of the host, waits and events are done in order by a thread of the
// stream's, which starts with the first of them; in a context that has failed they are dropped.
struct StreamObject {
  explicit StreamObject(CuContext in) : context(in) {}
  ~StreamObject() {
    {
      const std::scoped_lock lock(mutex);
      ending = true;
    }
    changed.notify_all();
    if (worker.joinable()) worker.join();
  }
  StreamObject(const StreamObject&) = delete;
  StreamObject& operator=(const StreamObject&) = delete;

  void queue(std::function<void()> task) {
    {
      const std::scoped_lock lock(mutex);
      tasks.push_back(std::move(task));
      if (!worker.joinable()) worker = std::thread([this] { run(); });
    }
    changed.notify_all();
  }
  [[nodiscard]] bool idle() {
    const std::scoped_lock lock(mutex);
    return tasks.empty() && !busy;
  }
  void synchronize() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return tasks.empty() && !busy; });
  }
  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [this] { return ending || !tasks.empty(); });
      if (tasks.empty()) return;
      const std::function<void()> task = std::move(tasks.front());
      tasks.pop_front();
      busy = true;
      lock.unlock();
      task();
      lock.lock();
      busy = false;
      changed.notify_all();
    }
  }

  const CuContext context;
  std::mutex mutex;  // guards all below
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
  bool busy = false;
  bool ending = false;
  std::thread worker;
};

// `recorded` counts the recordings, `done` those that the streams have come to.
struct EventObject {
  CuContext context = nullptr;
  struct Core {
    std::mutex mutex;
    std::condition_variable changed;
    std::uint64_t recorded = 0;
    std::uint64_t done = 0;
  };
  std::shared_ptr<Core> core = std::make_shared<Core>();
};
}  // namespace gpufs::gpu::api

namespace {

constexpr std::uint64_t kGranule = std::uint64_t{2} << 20;
constexpr int kMaximumDevices = 8;

struct Physical {
  int fd = -1;
  int device = 0;
  std::uint64_t bytes = 0;
  bool released = false;
  int mappings = 0;
};

struct Mapping {
  std::uint64_t bytes = 0;
  CuMemoryHandle handle = 0;
  std::set<int> devices;  // that have access
};

struct Fault {
  int skip = 0;
  int code = 0;
  int times = 0;
};

std::vector<std::string> split(const char* text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text == nullptr ? "" : text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

struct State {
  std::mutex mutex;
  std::condition_variable changed;
  FakeCudaSetup setup;
  bool initialised = false;
  CuContextObject contexts[kMaximumDevices];
  std::map<CuMemoryHandle, Physical> physical;
  CuMemoryHandle next_handle = 1;
  std::map<CuAddress, std::uint64_t> reservations;
  std::map<CuAddress, Mapping> mappings;
  std::map<CuAddress, std::pair<int, std::uint64_t>> allocations;
  std::set<api::Stream> streams;
  std::set<api::Event> events;
  std::map<void*, std::uint64_t> pinned;
  std::uint64_t used[kMaximumDevices] = {};
  std::map<std::string, Fault> faults;
  std::map<std::string, int> calls;
  bool held = false;
  int leaked = 0;  // what was open at the last reset

  // Where no test is in the same process the environment sets it up.
  State() {
    if (const char* devices = std::getenv("FAKE_CUDA_DEVICES")) setup.devices = std::atoi(devices);
    if (const char* memory = std::getenv("FAKE_CUDA_MEMORY")) setup.memory_bytes = std::strtoull(memory, nullptr, 10);
    for (const std::string& plan : split(std::getenv("FAKE_CUDA_FAULTS"), ',')) {
      const std::vector<std::string> part = split(plan.c_str(), ':');
      if (part.size() == 4) faults[part[0]] = Fault{std::stoi(part[1]) - 1, std::stoi(part[2]), std::stoi(part[3])};
    }
  }
};

State& state() {
  static State* const instance = new State;  // never destroyed: the library may be called until the process ends
  return *instance;
}

// Default streams are no objects of their own: they are made with the context's first use of one and stay.
struct Defaults {
  std::unique_ptr<api::StreamObject> of[kMaximumDevices];
};
Defaults& defaults() {
  static Defaults* const instance = new Defaults;  // never destroyed, as the state
  return *instance;
}

thread_local std::vector<CuContext> stack;

CuContext current() { return stack.empty() ? nullptr : stack.back(); }

// The stream of a handle: the current context's default stream for the first three numbers, null for what is none. The
// state's mutex is held.
api::Stream stream_at(api::Stream handle);

// Counts a call and answers its planned failure, if there is one. The state's mutex is held.
api::Code enter(const char* symbol) {
  State& s = state();
  ++s.calls[symbol];
  const auto fault = s.faults.find(symbol);
  if (fault == s.faults.end()) return api::kSuccess;
  if (fault->second.skip > 0) {
    --fault->second.skip;
    return api::kSuccess;
  }
  const api::Code code = fault->second.code;
  if (--fault->second.times <= 0) s.faults.erase(fault);
  const bool fatal = code == api::kIllegalAddress || code == api::kLaunchTimeout || code == api::kContextIsDestroyed ||
                     code == api::kUnknown || (code >= kCuHardwareStackError && code <= api::kLaunchFailed);
  if (fatal && current() != nullptr) current()->poison = code;
  return code;
}

#define ENTER(symbol)             \
  State& s = state();             \
  std::unique_lock lock(s.mutex); \
  if (const api::Code planned = enter(symbol); planned != api::kSuccess) return planned

#define ENTER_WITH_CONTEXT(symbol)                    \
  ENTER(symbol);                                      \
  if (current() == nullptr) return kCuInvalidContext; \
  if (current()->poison != api::kSuccess) return current()->poison

api::Stream stream_at(api::Stream handle) {
  if (reinterpret_cast<std::uintptr_t>(handle) > api::kLastDefaultStream) {
    return state().streams.contains(handle) ? handle : nullptr;
  }
  std::unique_ptr<api::StreamObject>& stream = defaults().of[current()->device];
  if (stream == nullptr) stream = std::make_unique<api::StreamObject>(current());
  return stream.get();
}

void* pointer(CuAddress address) { return reinterpret_cast<void*>(address); }

void punch(CuAddress address, std::uint64_t bytes) {
  ::mmap(pointer(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
}

void free_physical_if_unused(std::map<CuMemoryHandle, Physical>::iterator it) {
  if (!it->second.released || it->second.mappings != 0) return;
  State& s = state();
  s.used[it->second.device] -= it->second.bytes;
  ::close(it->second.fd);
  s.physical.erase(it);
}

// Whether the device of the current context may touch all of [address, address + bytes).
bool reachable(CuAddress address, std::uint64_t bytes, CuContext context) {
  State& s = state();
  const CuAddress end = address + bytes;
  while (address < end) {
    auto mapping = s.mappings.upper_bound(address);
    if (mapping != s.mappings.begin() && std::prev(mapping)->first + std::prev(mapping)->second.bytes > address) {
      --mapping;
      if (!mapping->second.devices.contains(context->device)) return false;
      address = mapping->first + mapping->second.bytes;
      continue;
    }
    auto allocation = s.allocations.upper_bound(address);
    if (allocation == s.allocations.begin()) return false;
    --allocation;
    if (allocation->first + allocation->second.second <= address) return false;
    address = allocation->first + allocation->second.second;
  }
  return true;
}

// A stray access kills the context, as on a device.
api::Code checked(std::initializer_list<CuAddress> addresses, std::uint64_t bytes, api::Stream stream) {
  State& s = state();
  if (!s.streams.contains(stream) || stream->context != current()) return api::kInvalidHandle;
  for (const CuAddress address : addresses) {
    if (reachable(address, bytes, current())) continue;
    current()->poison = api::kIllegalAddress;
    return api::kIllegalAddress;
  }
  return api::kSuccess;
}

// The pinned range that has a byte of [address, address + bytes), if there is one.
std::map<void*, std::uint64_t>::iterator pinned_around(const void* address, std::uint64_t bytes) {
  State& s = state();
  const auto start = reinterpret_cast<std::uintptr_t>(address);
  return std::find_if(s.pinned.begin(), s.pinned.end(), [&](const auto& range) {
    const auto first = reinterpret_cast<std::uintptr_t>(range.first);
    return first < start + bytes && start < first + range.second;
  });
}

// Counts a copy from or to host memory by what that is. One that is pinned in part only is refused, as by a driver.
api::Code count_host_copy(const void* address, std::uint64_t bytes) {
  State& s = state();
  const auto range = pinned_around(address, bytes);
  if (range == s.pinned.end()) {
    ++s.calls["copy, pageable"];
    return api::kSuccess;
  }
  const auto first = reinterpret_cast<std::uintptr_t>(range->first);
  const auto start = reinterpret_cast<std::uintptr_t>(address);
  if (start < first || start + bytes > first + range->second) return api::kInvalidValue;
  ++s.calls["copy, pinned"];
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

int reset(const FakeCudaSetup* setup) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  int open = static_cast<int>(s.physical.size() + s.mappings.size() + s.reservations.size() + s.allocations.size() +
                              s.streams.size() + s.events.size() + s.pinned.size());
  for (const CuContextObject& context : s.contexts) open += context.retained;
  const int leaked = open - s.leaked;
  s.leaked = open;
  s.setup = *setup;
  for (int i = 0; i < kMaximumDevices; ++i) {
    s.contexts[i].device = i;
    s.contexts[i].poison = api::kSuccess;
  }
  s.faults.clear();
  s.calls.clear();
  s.held = false;
  return leaked;
}

void fail(const char* symbol, int n, int code, int times) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  s.faults[symbol] = Fault{n - 1, code, times};
}

int calls(const char* symbol) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  const auto found = s.calls.find(symbol);
  return found == s.calls.end() ? 0 : found->second;
}

void read_state(FakeCudaState* out) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  *out = {};
  for (const std::uint64_t used : s.used) out->bytes_used += used;
  for (const CuContextObject& context : s.contexts) out->contexts += context.retained;
  for (const auto& physical : s.physical) out->handles += physical.second.released ? 0 : 1;
  out->mappings = static_cast<int>(s.mappings.size());
  out->reservations = static_cast<int>(s.reservations.size());
  out->allocations = static_cast<int>(s.allocations.size());
  out->streams = static_cast<int>(s.streams.size());
  out->events = static_cast<int>(s.events.size());
  out->pinned = static_cast<int>(s.pinned.size());
}

void hold(bool held) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  s.held = held;
  s.changed.notify_all();
}

int read_current(int* depth) {
  if (depth != nullptr) *depth = static_cast<int>(stack.size());
  return current() == nullptr ? -1 : current()->device;
}

constexpr FakeCudaControl kControl{reset, fail, calls, read_state, hold, read_current};

}  // namespace

extern "C" {

const FakeCudaControl* fake_cuda_control() { return &kControl; }

api::Code cuInit(unsigned /*flags*/) {
  ENTER("cuInit");
  s.initialised = true;
  return api::kSuccess;
}

api::Code cuDriverGetVersion(int* version) {
  *version = 13000;
  return api::kSuccess;
}

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
  *count = s.setup.devices;
  return api::kSuccess;
}

api::Code cuDeviceGet(CuDevice* device, int ordinal) {
  ENTER("cuDeviceGet");
  if (ordinal < 0 || ordinal >= s.setup.devices) return api::kInvalidDevice;
  *device = ordinal;
  return api::kSuccess;
}

api::Code cuDeviceGetName(char* name, int bytes, CuDevice device) {
  ENTER("cuDeviceGetName");
  std::snprintf(name, static_cast<std::size_t>(bytes), "fake device %d", device);
  return api::kSuccess;
}

api::Code cuDeviceGetPCIBusId(char* text, int bytes, CuDevice device) {
  ENTER("cuDeviceGetPCIBusId");
  std::snprintf(text, static_cast<std::size_t>(bytes), "FFFF:%02X:00.0", 0xA0 + device);
  return api::kSuccess;
}

api::Code cuDeviceTotalMem_v2(std::size_t* bytes, CuDevice /*device*/) {
  ENTER("cuDeviceTotalMem_v2");
  *bytes = s.setup.memory_bytes;
  return api::kSuccess;
}

api::Code cuDeviceGetAttribute(int* value, int attribute, CuDevice /*device*/) {
  ENTER("cuDeviceGetAttribute");
  switch (attribute) {
    case kCuAttributeVirtualMemory:
      *value = s.setup.virtual_memory ? 1 : 0;
      return api::kSuccess;
    case kCuAttributeExportDescriptor:
      *value = s.setup.export_descriptors ? 1 : 0;
      return api::kSuccess;
    case kCuAttributeReadOnlyHostRegister:
      *value = 1;
      return api::kSuccess;
    default:
      return api::kInvalidValue;
  }
}

api::Code cuDeviceCanAccessPeer(int* value, CuDevice a, CuDevice b) {
  ENTER("cuDeviceCanAccessPeer");
  *value = s.setup.peers && a != b ? 1 : 0;
  return api::kSuccess;
}

api::Code cuDevicePrimaryCtxRetain(CuContext* context, CuDevice device) {
  ENTER("cuDevicePrimaryCtxRetain");
  *context = &s.contexts[device];
  ++s.contexts[device].retained;
  return api::kSuccess;
}

api::Code cuDevicePrimaryCtxRelease_v2(CuDevice device) {
  ENTER("cuDevicePrimaryCtxRelease_v2");
  if (s.contexts[device].retained == 0) return kCuInvalidContext;
  --s.contexts[device].retained;
  return api::kSuccess;
}

api::Code cuCtxGetCurrent(CuContext* context) {
  ENTER("cuCtxGetCurrent");
  *context = current();
  return api::kSuccess;
}

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

api::Code cuCtxEnablePeerAccess(CuContext /*peer*/, unsigned /*flags*/) {
  ENTER_WITH_CONTEXT("cuCtxEnablePeerAccess");
  return api::kSuccess;
}

api::Code cuMemGetInfo_v2(std::size_t* free_bytes, std::size_t* total) {
  ENTER_WITH_CONTEXT("cuMemGetInfo_v2");
  *total = s.setup.memory_bytes;
  *free_bytes = s.setup.memory_bytes - s.used[current()->device];
  return api::kSuccess;
}

api::Code cuMemAlloc_v2(CuAddress* address, std::size_t bytes) {
  ENTER_WITH_CONTEXT("cuMemAlloc_v2");
  const int device = current()->device;
  if (bytes == 0) return api::kInvalidValue;
  if (s.used[device] + bytes > s.setup.memory_bytes) return api::kOutOfMemory;
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return api::kOutOfMemory;
  std::memset(memory, 0xA5, std::min<std::size_t>(bytes, kGranule));  // fresh memory is not zero
  *address = reinterpret_cast<CuAddress>(memory);
  s.allocations[*address] = {device, bytes};
  s.used[device] += bytes;
  return api::kSuccess;
}

api::Code cuMemFree_v2(CuAddress address) {
  ENTER_WITH_CONTEXT("cuMemFree_v2");
  const auto allocation = s.allocations.find(address);
  if (allocation == s.allocations.end()) return api::kInvalidValue;
  ::munmap(pointer(address), allocation->second.second);
  s.used[allocation->second.first] -= allocation->second.second;
  s.allocations.erase(allocation);
  return api::kSuccess;
}

// Of the device whose allocation or mapping it is; whatever is not, is the host's.
api::Code cuPointerGetAttribute(void* answer, int attribute, CuAddress address) {
  ENTER_WITH_CONTEXT("cuPointerGetAttribute");
  if (attribute == api::kPointerRangeStart || attribute == api::kPointerRangeBytes) {
    const auto range = pinned_around(pointer(address), 1);
    if (range == s.pinned.end()) return api::kInvalidValue;
    if (attribute == api::kPointerRangeStart) std::memcpy(answer, &range->first, sizeof(void*));
    if (attribute == api::kPointerRangeBytes) std::memcpy(answer, &range->second, sizeof(std::uint64_t));
    return api::kSuccess;
  }
  int device = -1;
  for (int candidate = 0; candidate < s.setup.devices && device < 0; ++candidate) {
    const auto allocation = s.allocations.upper_bound(address);
    if (allocation != s.allocations.begin()) {
      const auto& [base, owned] = *std::prev(allocation);
      if (address < base + owned.second && owned.first == candidate) device = candidate;
    }
    const auto mapping = s.mappings.upper_bound(address);
    if (mapping != s.mappings.begin()) {
      const auto& [base, shown] = *std::prev(mapping);
      if (address < base + shown.bytes && s.physical.at(shown.handle).device == candidate) device = candidate;
    }
  }
  if (device < 0) return api::kInvalidValue;
  const auto kind = static_cast<unsigned>(api::kMemoryTypeDevice);
  const unsigned char managed = s.setup.managed ? 1 : 0;
  if (attribute == kCuPointerMemoryType) std::memcpy(answer, &kind, sizeof kind);
  if (attribute == kCuPointerIsManaged) std::memcpy(answer, &managed, sizeof managed);
  if (attribute == kCuPointerDeviceOrdinal) std::memcpy(answer, &device, sizeof device);
  return api::kSuccess;
}

#ifndef FAKE_CUDA_OLD
api::Code cuMemHostRegister_v2(void* address, std::size_t bytes, unsigned /*flags*/) {
  ENTER_WITH_CONTEXT("cuMemHostRegister_v2");
  if (pinned_around(address, bytes) != s.pinned.end()) return api::kHostMemoryAlreadyRegistered;
  s.pinned.emplace(address, bytes);
  return api::kSuccess;
}
#endif

api::Code cuMemHostUnregister(void* address) {
  ENTER_WITH_CONTEXT("cuMemHostUnregister");
  return s.pinned.erase(address) == 1 ? api::kSuccess : api::kHostMemoryNotRegistered;
}

api::Code cuMemcpyHtoDAsync_v2(CuAddress destination, const void* source, std::size_t bytes, api::Stream stream) {
  ENTER_WITH_CONTEXT("cuMemcpyHtoDAsync_v2");
  if (const api::Code code = checked({destination}, bytes, stream); code != api::kSuccess) return code;
  if (const api::Code code = count_host_copy(source, bytes); code != api::kSuccess) return code;
  lock.unlock();
  std::memcpy(pointer(destination), source, bytes);
  return api::kSuccess;
}

api::Code cuMemcpyDtoHAsync_v2(void* destination, CuAddress source, std::size_t bytes, api::Stream stream) {
  ENTER_WITH_CONTEXT("cuMemcpyDtoHAsync_v2");
  if (const api::Code code = checked({source}, bytes, stream); code != api::kSuccess) return code;
  if (const api::Code code = count_host_copy(destination, bytes); code != api::kSuccess) return code;
  lock.unlock();
  std::memcpy(destination, pointer(source), bytes);
  return api::kSuccess;
}

api::Code cuMemcpyDtoDAsync_v2(CuAddress destination, CuAddress source, std::size_t bytes, api::Stream stream) {
  ENTER_WITH_CONTEXT("cuMemcpyDtoDAsync_v2");
  if (const api::Code code = checked({source, destination}, bytes, stream); code != api::kSuccess) return code;
  lock.unlock();
  std::memmove(pointer(destination), pointer(source), bytes);
  return api::kSuccess;
}

api::Code cuMemcpyPeerAsync(CuAddress destination, CuContext destination_context, CuAddress source,
                            CuContext source_context, std::size_t bytes, api::Stream stream) {
  ENTER_WITH_CONTEXT("cuMemcpyPeerAsync");
  if (source_context != current() || destination_context == current()) return kCuInvalidContext;
  if (destination_context->poison != api::kSuccess) return destination_context->poison;
  if (!reachable(destination, bytes, destination_context)) return api::kInvalidValue;
  if (const api::Code code = checked({source, destination}, bytes, stream); code != api::kSuccess) return code;
  std::memcpy(pointer(destination), pointer(source), bytes);
  return api::kSuccess;
}

api::Code cuMemsetD8Async(CuAddress destination, unsigned char value, std::size_t bytes, api::Stream stream) {
  ENTER_WITH_CONTEXT("cuMemsetD8Async");
  if (const api::Code code = checked({destination}, bytes, stream); code != api::kSuccess) return code;
  lock.unlock();
  // Large fills with zero give the pages back instead of touching them all: pieces are hundreds of MiB.
  const bool pages = value == 0 && bytes >= kGranule && destination % kGranule == 0 && bytes % kGranule == 0;
  if (!pages || ::madvise(pointer(destination), bytes, MADV_REMOVE) != 0) {
    std::memset(pointer(destination), value, bytes);
  }
  return api::kSuccess;
}

api::Code cuStreamCreate(api::Stream* stream, unsigned flags) {
  ENTER_WITH_CONTEXT("cuStreamCreate");
  if (flags != api::kStreamNonBlocking) return api::kInvalidValue;
  *stream = new api::StreamObject(current());
  s.streams.insert(*stream);
  return api::kSuccess;
}

api::Code cuStreamDestroy_v2(api::Stream stream) {
  {
    ENTER("cuStreamDestroy_v2");
    if (s.streams.erase(stream) == 0) return api::kInvalidHandle;
  }
  delete stream;  // does what is queued first
  return api::kSuccess;
}

api::Code cuStreamSynchronize(api::Stream stream) {
  ENTER_WITH_CONTEXT("cuStreamSynchronize");
  if (!s.streams.contains(stream) || stream->context != current()) return api::kInvalidHandle;
  lock.unlock();
  stream->synchronize();
  return stream->context->poison;
}

// The functions of all streams are called one after the other, as by a driver that has one thread for them.
api::Code cuLaunchHostFunc(api::Stream handle, void (*function)(void*), void* argument) {
  ENTER_WITH_CONTEXT("cuLaunchHostFunc");
  const api::Stream stream = stream_at(handle);
  if (stream == nullptr) return api::kInvalidHandle;
  stream->queue([function, argument, context = stream->context] {
    static std::mutex one_at_a_time;
    const std::scoped_lock calling(one_at_a_time);
    if (context->poison == api::kSuccess) function(argument);
  });
  return api::kSuccess;
}

api::Code cuStreamWaitValue32_v2(api::Stream handle, CuAddress cell, std::uint32_t value, unsigned flags) {
  ENTER_WITH_CONTEXT("cuStreamWaitValue32_v2");
  if (!s.setup.stream_waits) return api::kNotSupported;
  const api::Stream stream = stream_at(handle);
  if (stream == nullptr) return api::kInvalidHandle;
  auto range = s.pinned.upper_bound(pointer(cell));
  if (flags != api::kWaitValueNotLess || range == s.pinned.begin()) return api::kInvalidValue;
  --range;
  if (reinterpret_cast<CuAddress>(range->first) + range->second < cell + sizeof value) return api::kInvalidValue;
  stream->queue([cell, value, context = stream->context] {
    const std::atomic_ref<std::uint32_t> word(*static_cast<std::uint32_t*>(pointer(cell)));
    while (context->poison == api::kSuccess && static_cast<std::int32_t>(word.load() - value) < 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  });
  return api::kSuccess;
}

api::Code cuStreamGetCtx(api::Stream handle, CuContext* context) {
  ENTER_WITH_CONTEXT("cuStreamGetCtx");
  const api::Stream stream = stream_at(handle);
  if (stream == nullptr) return api::kInvalidHandle;
  *context = stream->context;
  return api::kSuccess;
}

api::Code cuStreamIsCapturing(api::Stream /*stream*/, int* capturing) {
  ENTER_WITH_CONTEXT("cuStreamIsCapturing");
  *capturing = s.setup.capturing ? 1 : 0;
  return api::kSuccess;
}

api::Code cuMemHostGetDevicePointer_v2(CuAddress* seen, void* address, unsigned flags) {
  ENTER_WITH_CONTEXT("cuMemHostGetDevicePointer_v2");
  if (flags != 0 || !s.pinned.contains(address)) return api::kInvalidValue;
  *seen = reinterpret_cast<CuAddress>(address);
  return api::kSuccess;
}

api::Code cuStreamWaitEvent(api::Stream stream, api::Event event, unsigned /*flags*/) {
  ENTER_WITH_CONTEXT("cuStreamWaitEvent");
  return s.streams.contains(stream) && s.events.contains(event) ? api::kSuccess : api::kInvalidHandle;
}

api::Code cuEventCreate(api::Event* event, unsigned flags) {
  ENTER_WITH_CONTEXT("cuEventCreate");
  if ((flags & api::kEventDisableTiming) == 0) return api::kInvalidValue;
  *event = new api::EventObject{current()};
  s.events.insert(*event);
  return api::kSuccess;
}

api::Code cuEventDestroy_v2(api::Event event) {
  ENTER("cuEventDestroy_v2");
  if (s.events.erase(event) == 0) return api::kInvalidHandle;
  delete event;
  return api::kSuccess;
}

api::Code cuEventRecord(api::Event event, api::Stream handle) {
  ENTER_WITH_CONTEXT("cuEventRecord");
  const api::Stream stream = stream_at(handle);
  if (!s.events.contains(event) || stream == nullptr) return api::kInvalidHandle;
  if (event->context != stream->context) return api::kInvalidHandle;
  std::uint64_t number = 0;
  {
    const std::scoped_lock event_lock(event->core->mutex);
    number = ++event->core->recorded;
  }
  const auto reached = [core = event->core, number] {
    {
      const std::scoped_lock event_lock(core->mutex);
      core->done = std::max(core->done, number);
    }
    core->changed.notify_all();
  };
  if (stream->idle()) {
    reached();
  } else {
    stream->queue(reached);
  }
  return api::kSuccess;
}

api::Code cuEventQuery(api::Event event) {
  ENTER_WITH_CONTEXT("cuEventQuery");
  if (!s.events.contains(event)) return api::kInvalidHandle;
  const std::scoped_lock event_lock(event->core->mutex);
  return s.held || event->core->done < event->core->recorded ? api::kNotReady : api::kSuccess;
}

api::Code cuEventSynchronize(api::Event event) {
  ENTER_WITH_CONTEXT("cuEventSynchronize");
  if (!s.events.contains(event)) return api::kInvalidHandle;
  const std::shared_ptr<api::EventObject::Core> core = event->core;
  s.changed.wait(lock, [&s] { return !s.held; });
  lock.unlock();
  std::unique_lock event_lock(core->mutex);
  const std::uint64_t number = core->recorded;
  core->changed.wait(event_lock, [&] { return core->done >= number; });
  return api::kSuccess;
}

api::Code cuMemGetAllocationGranularity(std::size_t* bytes, const api::AllocationProperties* properties,
                                        unsigned /*option*/) {
  ENTER("cuMemGetAllocationGranularity");
  if (properties->type != api::kAllocationPinned || properties->location.type != api::kLocationDevice)
    return api::kInvalidValue;
  *bytes = kGranule;
  return api::kSuccess;
}

api::Code cuMemAddressReserve(CuAddress* address, std::size_t bytes, std::size_t /*alignment*/, CuAddress /*where*/,
                              unsigned long long /*flags*/) {
  ENTER("cuMemAddressReserve");
  if (bytes == 0 || bytes % kGranule != 0) return api::kInvalidValue;
  std::uint64_t reserved = 0;
  for (const auto& reservation : s.reservations) reserved += reservation.second;
  if (reserved + bytes > s.setup.address_space_bytes) return api::kOutOfMemory;
  void* memory = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return api::kOutOfMemory;
  *address = reinterpret_cast<CuAddress>(memory);
  s.reservations[*address] = bytes;
  return api::kSuccess;
}

api::Code cuMemAddressFree(CuAddress address, std::size_t bytes) {
  ENTER("cuMemAddressFree");
  const auto reservation = s.reservations.find(address);
  if (reservation == s.reservations.end() || reservation->second != bytes) return api::kInvalidValue;
  const auto mapping = s.mappings.lower_bound(address);
  if (mapping != s.mappings.end() && mapping->first < address + bytes) return api::kInvalidValue;
  ::munmap(pointer(address), bytes);
  s.reservations.erase(reservation);
  return api::kSuccess;
}

api::Code cuMemCreate(CuMemoryHandle* handle, std::size_t bytes, const api::AllocationProperties* properties,
                      unsigned long long /*flags*/) {
  ENTER("cuMemCreate");
  const int device = properties->location.id;
  if (bytes == 0 || bytes % kGranule != 0 || device < 0 || device >= s.setup.devices) return api::kInvalidValue;
  if (s.used[device] + bytes > s.setup.memory_bytes) return api::kOutOfMemory;
  const int fd = ::memfd_create("fake_cuda", MFD_CLOEXEC);
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(bytes)) != 0) return api::kOutOfMemory;
  // Fresh memory is not zero, in every granule.
  for (std::uint64_t at = 0; at < bytes; at += kGranule) {
    if (::pwrite(fd, "stale", 5, static_cast<off_t>(at)) != 5) return api::kOutOfMemory;
  }
  *handle = s.next_handle++;
  s.physical[*handle] = Physical{fd, device, bytes, false, 0};
  s.used[device] += bytes;
  return api::kSuccess;
}

api::Code cuMemRelease(CuMemoryHandle handle) {
  ENTER("cuMemRelease");
  const auto physical = s.physical.find(handle);
  if (physical == s.physical.end() || physical->second.released) return api::kInvalidValue;
  physical->second.released = true;
  free_physical_if_unused(physical);
  return api::kSuccess;
}

api::Code cuMemMap(CuAddress address, std::size_t bytes, std::size_t offset, CuMemoryHandle handle,
                   unsigned long long /*flags*/) {
  ENTER("cuMemMap");
  const auto physical = s.physical.find(handle);
  if (physical == s.physical.end() || physical->second.released || offset != 0 || bytes != physical->second.bytes) {
    return api::kInvalidValue;
  }
  const auto next = s.mappings.lower_bound(address);
  if (next != s.mappings.end() && next->first < address + bytes) return api::kInvalidValue;
  if (next != s.mappings.begin() && std::prev(next)->first + std::prev(next)->second.bytes > address) {
    return api::kInvalidValue;
  }
  auto reservation = s.reservations.upper_bound(address);
  if (reservation == s.reservations.begin()) return api::kInvalidValue;
  --reservation;
  if (address + bytes > reservation->first + reservation->second) return api::kInvalidValue;
  if (::mmap(pointer(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, physical->second.fd, 0) == MAP_FAILED) {
    return api::kOutOfMemory;
  }
  s.mappings[address] = Mapping{bytes, handle, {}};
  ++physical->second.mappings;
  return api::kSuccess;
}

api::Code cuMemUnmap(CuAddress address, std::size_t bytes) {
  ENTER("cuMemUnmap");
  const CuAddress end = address + bytes;
  CuAddress at = address;
  while (at < end) {
    const auto mapping = s.mappings.find(at);
    if (mapping == s.mappings.end() || at + mapping->second.bytes > end) return api::kInvalidValue;
    at += mapping->second.bytes;
  }
  for (auto mapping = s.mappings.find(address); mapping != s.mappings.end() && mapping->first < end;) {
    punch(mapping->first, mapping->second.bytes);
    const auto physical = s.physical.find(mapping->second.handle);
    --physical->second.mappings;
    free_physical_if_unused(physical);
    mapping = s.mappings.erase(mapping);
  }
  return api::kSuccess;
}

api::Code cuMemSetAccess(CuAddress address, std::size_t bytes, const api::Access* access, std::size_t count) {
  ENTER("cuMemSetAccess");
  const CuAddress end = address + bytes;
  for (CuAddress at = address; at < end;) {
    const auto mapping = s.mappings.find(at);
    if (mapping == s.mappings.end() || at + mapping->second.bytes > end) return api::kInvalidValue;
    at += mapping->second.bytes;
  }
  if (::mprotect(pointer(address), bytes, PROT_READ | PROT_WRITE) != 0) return api::kInvalidValue;
  for (auto mapping = s.mappings.find(address); mapping != s.mappings.end() && mapping->first < end; ++mapping) {
    for (std::size_t i = 0; i < count; ++i) mapping->second.devices.insert(access[i].location.id);
  }
  return api::kSuccess;
}

api::Code cuMemExportToShareableHandle(void* out, CuMemoryHandle handle, int type, unsigned long long /*flags*/) {
  ENTER("cuMemExportToShareableHandle");
  const auto physical = s.physical.find(handle);
  if (physical == s.physical.end() || type != api::kHandleDescriptor) return api::kInvalidValue;
  const int fd = ::dup(physical->second.fd);
  if (fd < 0) return api::kOutOfMemory;
  std::memcpy(out, &fd, sizeof fd);
  return api::kSuccess;
}

}  // extern "C"
