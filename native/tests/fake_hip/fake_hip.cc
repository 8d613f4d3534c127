// A libamdhip64 over host memory. Streams are really asynchronous: each has a thread that does its work in order.
//
// Compiled three times: complete; FAKE_HIP_BARE, without all that a runtime may lack; FAKE_HIP_OLD, without a function
// that every runtime must have. Where no test is in the same process the environment sets it up:
//   FAKE_HIP_DEVICES=2  FAKE_HIP_MEMORY=BYTES  FAKE_HIP_FAULTS=SYMBOL:N:CODE:TIMES,...
//   FAKE_HIP_FILE_PLANS=RESULT:STATUS:ERRNO:BYTES,...   how the first file calls end, in order
//   FAKE_HIP_RECORDS=FILE   a line for each file call: name, descriptor's file, bytes, offset, copied, result, status
#include "fake_hip.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
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

#include "drivers/hip/hip_api.h"

using namespace gpufs::hip;

namespace {

// A point in a stream's order: `recorded` counts the recordings, `done` those that the streams have come to.
struct EventCore {
  std::mutex mutex;
  std::condition_variable changed;
  std::uint64_t recorded = 0;
  std::uint64_t done = 0;

  void wait(std::uint64_t number) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return done >= number; });
  }
};

}  // namespace

namespace gpufs::gpu::api {

struct EventObject {
  int device = 0;
  std::shared_ptr<EventCore> core = std::make_shared<EventCore>();
};

struct StreamObject {
  explicit StreamObject(int on) : device(on), worker([this] { run(); }) {}
  ~StreamObject() {
    {
      const std::scoped_lock lock(mutex);
      ending = true;
    }
    changed.notify_all();
    worker.join();
  }
  StreamObject(const StreamObject&) = delete;
  StreamObject& operator=(const StreamObject&) = delete;

  void queue(std::function<void()> task) {
    {
      const std::scoped_lock lock(mutex);
      tasks.push_back(std::move(task));
    }
    changed.notify_all();
  }
  void synchronize() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return tasks.empty() && !busy; });
  }
  void hold(bool now) {
    {
      const std::scoped_lock lock(mutex);
      held = now;
    }
    changed.notify_all();
  }
  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [this] { return (!tasks.empty() && !held) || (ending && tasks.empty()); });
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

  const int device;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
  bool busy = false;
  bool held = false;
  bool ending = false;
  std::thread worker;  // last: it uses all the others
};

}  // namespace gpufs::gpu::api

namespace gpufs::hip {

struct HipMemoryHandleObject {
  int fd = -1;
  int device = 0;
  std::uint64_t bytes = 0;
  bool released = false;
  int mappings = 0;
};

}  // namespace gpufs::hip

namespace {

constexpr std::uint64_t kGranule = std::uint64_t{2} << 20;
constexpr std::uint64_t kPage = 4096;  // the granularity that the runtime states
constexpr int kMaximumDevices = 8;

using Address = std::uintptr_t;

struct Mapping {
  std::uint64_t bytes = 0;
  HipMemoryHandle handle = nullptr;
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
  FakeHipSetup setup;
  int poison[kMaximumDevices] = {};  // what every call on a device answers since a fatal failure
  std::set<HipMemoryHandle> physical;
  std::map<Address, std::uint64_t> reservations;
  std::map<Address, Mapping> mappings;
  std::map<Address, std::pair<int, std::uint64_t>> allocations;
  std::set<api::Stream> streams;
  std::set<api::Event> events;
  std::map<const void*, std::uint64_t> pinned;
  unsigned pin_flags = 0;
  std::uint64_t used[kMaximumDevices] = {};
  std::map<std::string, Fault, std::less<>> faults;
  std::map<std::string, int, std::less<>> calls;
  std::deque<FakeHipFilePlan> file_plans;
  std::vector<FakeHipFileCall> file_calls;
  std::string records;
  bool held = false;
  int leaked = 0;  // what was open at the last reset

  State() {
    if (const char* devices = std::getenv("FAKE_HIP_DEVICES")) setup.devices = std::atoi(devices);
    if (const char* memory = std::getenv("FAKE_HIP_MEMORY")) setup.memory_bytes = std::strtoull(memory, nullptr, 10);
    for (const std::string& plan : split(std::getenv("FAKE_HIP_FAULTS"), ',')) {
      const std::vector<std::string> part = split(plan.c_str(), ':');
      if (part.size() == 4) faults[part[0]] = Fault{std::stoi(part[1]) - 1, std::stoi(part[2]), std::stoi(part[3])};
    }
    for (const std::string& plan : split(std::getenv("FAKE_HIP_FILE_PLANS"), ',')) {
      const std::vector<std::string> part = split(plan.c_str(), ':');
      if (part.size() != 4) continue;
      FakeHipFilePlan end;
      end.result = std::stoi(part[0]);
      end.status = std::stoi(part[1]);
      end.error_number = std::stoi(part[2]);
      end.bytes = std::stoull(part[3]);
      file_plans.push_back(end);
    }
    if (const char* path = std::getenv("FAKE_HIP_RECORDS")) records = path;
  }
};

State& state() {
  static State* const instance = new State;  // never destroyed: the library may be called until the process ends
  return *instance;
}

thread_local int current_device = 0;
thread_local bool initialised = false;

bool is_fatal(int code) {
  return code == api::kIllegalAddress || code == api::kLaunchTimeout || code == api::kContextIsDestroyed ||
         code == api::kEccUncorrectable || code == api::kLaunchFailed || code == api::kAssert ||
         code == kHipPriorLaunchFailure;
}

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
  if (is_fatal(code)) s.poison[current_device] = code;
  return code;
}

#define ENTER(symbol)             \
  State& s = state();             \
  std::unique_lock lock(s.mutex); \
  if (const api::Code planned = enter(symbol); planned != api::kSuccess) return planned

#define ENTER_ON_DEVICE(symbol)                                      \
  ENTER(symbol);                                                     \
  if (!initialised) return api::kNotInitialized;                     \
  if (current_device >= s.setup.devices) return api::kInvalidDevice; \
  if (s.poison[current_device] != api::kSuccess) return s.poison[current_device]

#ifndef FAKE_HIP_BARE
void* pointer(Address address) { return reinterpret_cast<void*>(address); }

void free_physical_if_unused(HipMemoryHandle handle) {
  if (!handle->released || handle->mappings != 0) return;
  State& s = state();
  s.used[handle->device] -= handle->bytes;
  ::close(handle->fd);
  s.physical.erase(handle);
  delete handle;
}
#endif

Address number(const void* address) { return reinterpret_cast<Address>(address); }

// Whether the device may touch all of [address, address + bytes).
bool reachable(Address address, std::uint64_t bytes, int device) {
  State& s = state();
  const Address end = address + bytes;
  while (address < end) {
    auto mapping = s.mappings.upper_bound(address);
    if (mapping != s.mappings.begin() && std::prev(mapping)->first + std::prev(mapping)->second.bytes > address) {
      --mapping;
      if (!mapping->second.devices.contains(device)) return false;
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

// The pinned range that has a byte of [address, address + bytes), if there is one.
std::map<const void*, std::uint64_t>::iterator pinned_around(const void* address, std::uint64_t bytes) {
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

// A stray access takes the device down, as real ones do.
api::Code checked(std::initializer_list<const void*> addresses, std::uint64_t bytes, api::Stream stream) {
  State& s = state();
  if (!s.streams.contains(stream) || stream->device != current_device) return api::kInvalidHandle;
  for (const void* address : addresses) {
    if (reachable(number(address), bytes, current_device)) continue;
    s.poison[current_device] = api::kIllegalAddress;
    return api::kIllegalAddress;
  }
  return api::kSuccess;
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

#ifndef FAKE_HIP_BARE
void record(const FakeHipFileCall& call) {
  State& s = state();
  s.file_calls.push_back(call);
  if (s.records.empty()) return;
  char path[4096] = {};
  const std::string link = "/proc/self/fd/" + std::to_string(call.fd);
  if (::readlink(link.c_str(), path, sizeof path - 1) < 0) std::strcpy(path, "?");
  std::ostringstream line;
  line << (call.write ? "hipAmdFileWrite " : "hipAmdFileRead ") << path << ' ' << call.bytes << ' ' << call.file_offset
       << ' ' << call.copied << ' ' << call.result << ' ' << call.status << '\n';
  const int fd = ::open(s.records.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
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
  if (!s.file_plans.empty()) {
    plan = s.file_plans.front();
    s.file_plans.pop_front();
  }
  if (!reachable(number(device), bytes, current_device)) {
    plan = {};
    plan.result = api::kInvalidValue;
    plan.outputs_untouched = true;
  }
  if (plan.outputs_untouched) {
    call.result = plan.result;
    record(call);
    errno = plan.error_number;
    return plan.result;
  }
  lock.unlock();
  call.status = move(write, handle.fd, device, std::min(bytes, plan.bytes), offset, &call.copied);
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
  errno = plan.error_number;
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

int reset(const FakeHipSetup* setup) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  const int open = static_cast<int>(s.physical.size() + s.mappings.size() + s.reservations.size() +
                                    s.allocations.size() + s.streams.size() + s.events.size() + s.pinned.size());
  const int leaked = open - s.leaked;
  s.leaked = open;
  s.setup = *setup;
  std::fill(std::begin(s.poison), std::end(s.poison), api::kSuccess);
  s.faults.clear();
  s.calls.clear();
  s.file_plans.clear();
  s.file_calls.clear();
  s.held = false;
  for (api::Stream stream : s.streams) stream->hold(false);
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

void read_state(FakeHipState* out) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  *out = {};
  for (const std::uint64_t used : s.used) out->bytes_used += used;
  for (HipMemoryHandle handle : s.physical) out->handles += handle->released ? 0 : 1;
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
  for (api::Stream stream : s.streams) stream->hold(held);
}

int read_current() { return current_device; }

void plan_file_call(const FakeHipFilePlan* plan) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  s.file_plans.push_back(*plan);
}

int read_file_calls(FakeHipFileCall* records, int room) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  const int there = static_cast<int>(s.file_calls.size());
  std::copy_n(s.file_calls.begin(), std::min(there, room), records);
  return there;
}

unsigned last_pin_flags() {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  return s.pin_flags;
}

constexpr FakeHipControl kControl{reset,        fail,           calls,           read_state,    hold,
                                  read_current, plan_file_call, read_file_calls, last_pin_flags};

}  // namespace

extern "C" {

const FakeHipControl* fake_hip_control() { return &kControl; }

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
  *count = s.setup.devices;
  return s.setup.devices == 0 ? api::kNoDevice : api::kSuccess;
}

api::Code hipDeviceGetName(char* name, int bytes, int device) {
  ENTER("hipDeviceGetName");
  std::snprintf(name, static_cast<std::size_t>(bytes), "fake device %d", device);
  return api::kSuccess;
}

api::Code hipDeviceGetPCIBusId(char* text, int bytes, int device) {
  ENTER("hipDeviceGetPCIBusId");
  std::snprintf(text, static_cast<std::size_t>(bytes), "FFFF:%02X:00.0", 0xC0 + device);
  return api::kSuccess;
}

api::Code hipDeviceTotalMem(std::size_t* bytes, int /*device*/) {
  ENTER("hipDeviceTotalMem");
  *bytes = s.setup.memory_bytes;
  return api::kSuccess;
}

api::Code hipDeviceGetAttribute(int* value, int attribute, int /*device*/) {
  ENTER("hipDeviceGetAttribute");
  if (attribute != kHipAttributeVirtualMemory) return api::kInvalidValue;
  *value = s.setup.virtual_memory ? 1 : 0;
  return api::kSuccess;
}

api::Code hipGetDevice(int* device) {
  ENTER("hipGetDevice");
  *device = current_device;
  return api::kSuccess;
}

api::Code hipSetDevice(int device) {
  ENTER("hipSetDevice");
  if (device < 0 || device >= s.setup.devices) return api::kInvalidDevice;
  current_device = device;
  return api::kSuccess;
}

api::Code hipMemGetInfo(std::size_t* free_bytes, std::size_t* total) {
  ENTER_ON_DEVICE("hipMemGetInfo");
  *total = s.setup.memory_bytes;
  *free_bytes = s.setup.memory_bytes - s.used[current_device];
  return api::kSuccess;
}

api::Code hipMalloc(void** address, std::size_t bytes) {
  ENTER_ON_DEVICE("hipMalloc");
  if (bytes == 0) return api::kInvalidValue;
  if (s.used[current_device] + bytes > s.setup.memory_bytes) return api::kOutOfMemory;
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return api::kOutOfMemory;
  std::memset(memory, 0xA5, std::min<std::size_t>(bytes, kGranule));  // fresh memory is not zero
  *address = memory;
  s.allocations[number(memory)] = {current_device, bytes};
  s.used[current_device] += bytes;
  return api::kSuccess;
}

api::Code hipFree(void* address) {
  ENTER_ON_DEVICE("hipFree");
  const auto allocation = s.allocations.find(number(address));
  if (allocation == s.allocations.end()) return api::kInvalidValue;
  ::munmap(address, allocation->second.second);
  s.used[allocation->second.first] -= allocation->second.second;
  s.allocations.erase(allocation);
  return api::kSuccess;
}

#ifndef FAKE_HIP_OLD
api::Code hipHostRegister(void* address, std::size_t bytes, unsigned flags) {
  ENTER_ON_DEVICE("hipHostRegister");
  if (pinned_around(address, bytes) != s.pinned.end()) return api::kHostMemoryAlreadyRegistered;
  s.pinned.emplace(address, bytes);
  s.pin_flags = flags;
  return api::kSuccess;
}
#endif

api::Code hipHostUnregister(void* address) {
  ENTER_ON_DEVICE("hipHostUnregister");
  return s.pinned.erase(address) == 1 ? api::kSuccess : api::kHostMemoryNotRegistered;
}

api::Code hipMemcpyHtoDAsync(void* destination, const void* source, std::size_t bytes, api::Stream stream) {
  ENTER_ON_DEVICE("hipMemcpyHtoDAsync");
  if (const api::Code code = checked({destination}, bytes, stream); code != api::kSuccess) return code;
  if (const api::Code code = count_host_copy(source, bytes); code != api::kSuccess) return code;
  stream->queue([=] { std::memcpy(destination, source, bytes); });
  return api::kSuccess;
}

api::Code hipMemcpyDtoHAsync(void* destination, void* source, std::size_t bytes, api::Stream stream) {
  ENTER_ON_DEVICE("hipMemcpyDtoHAsync");
  if (const api::Code code = checked({source}, bytes, stream); code != api::kSuccess) return code;
  if (const api::Code code = count_host_copy(destination, bytes); code != api::kSuccess) return code;
  stream->queue([=] { std::memcpy(destination, source, bytes); });
  return api::kSuccess;
}

api::Code hipMemcpyDtoDAsync(void* destination, void* source, std::size_t bytes, api::Stream stream) {
  ENTER_ON_DEVICE("hipMemcpyDtoDAsync");
  if (const api::Code code = checked({source, destination}, bytes, stream); code != api::kSuccess) return code;
  stream->queue([=] { std::memmove(destination, source, bytes); });
  return api::kSuccess;
}

api::Code hipMemsetD8Async(void* destination, unsigned char value, std::size_t bytes, api::Stream stream) {
  ENTER_ON_DEVICE("hipMemsetD8Async");
  if (const api::Code code = checked({destination}, bytes, stream); code != api::kSuccess) return code;
  stream->queue([=] {
    // Memory that nobody looks at need not really be there: whole pages are given back, which makes them zero.
    auto* at = static_cast<char*>(destination);
    if (value != 0 || number(destination) % kPage != 0 || bytes % kPage != 0 ||
        ::madvise(at, bytes, MADV_REMOVE) != 0) {
      std::memset(at, value, bytes);
    }
  });
  return api::kSuccess;
}

api::Code hipStreamCreateWithFlags(api::Stream* stream, unsigned flags) {
  ENTER_ON_DEVICE("hipStreamCreateWithFlags");
  if (flags != api::kStreamNonBlocking) return api::kInvalidValue;
  *stream = new api::StreamObject(current_device);
  (*stream)->hold(s.held);
  s.streams.insert(*stream);
  return api::kSuccess;
}

api::Code hipStreamDestroy(api::Stream stream) {
  {
    ENTER("hipStreamDestroy");
    if (s.streams.erase(stream) == 0) return api::kInvalidHandle;
  }
  delete stream;  // does what is queued first
  return api::kSuccess;
}

// One that was planned to fail waits all the same: the work that was queued is real.
api::Code hipStreamSynchronize(api::Stream stream) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  const api::Code planned = enter("hipStreamSynchronize");
  if (!initialised || !s.streams.contains(stream)) return api::kInvalidHandle;
  const api::Code outcome = planned != api::kSuccess ? planned : s.poison[current_device];
  lock.unlock();
  stream->synchronize();
  return outcome;
}

api::Code hipStreamWaitEvent(api::Stream stream, api::Event event, unsigned /*flags*/) {
  ENTER_ON_DEVICE("hipStreamWaitEvent");
  if (!s.streams.contains(stream) || !s.events.contains(event)) return api::kInvalidHandle;
  const std::scoped_lock event_lock(event->core->mutex);
  stream->queue([core = event->core, number = event->core->recorded] { core->wait(number); });
  return api::kSuccess;
}

#ifndef FAKE_HIP_BARE
// The functions of all streams are called one after the other, as by a runtime that has one thread for them.
api::Code hipLaunchHostFunc(api::Stream stream, void (*function)(void*), void* argument) {
  ENTER_ON_DEVICE("hipLaunchHostFunc");
  if (!s.streams.contains(stream)) return api::kInvalidHandle;
  stream->queue([function, argument] {
    static std::mutex one_at_a_time;
    const std::scoped_lock calling(one_at_a_time);
    function(argument);
  });
  return api::kSuccess;
}

api::Code hipStreamWaitValue32(api::Stream stream, void* cell, std::uint32_t value, unsigned flags,
                               std::uint32_t mask) {
  ENTER_ON_DEVICE("hipStreamWaitValue32");
  if (!s.streams.contains(stream)) return api::kInvalidHandle;
  if (!s.setup.stream_waits) return api::kInvalidValue;
  if (flags != api::kWaitValueNotLess || mask != kHipWholeValue) return api::kInvalidValue;
  stream->queue([cell, value] {
    const std::atomic_ref<std::uint32_t> word(*static_cast<std::uint32_t*>(cell));
    while (static_cast<std::int32_t>(word.load() - value) < 0)
      std::this_thread::sleep_for(std::chrono::microseconds(20));
  });
  return api::kSuccess;
}

api::Code hipStreamGetDevice(api::Stream stream, int* device) {
  ENTER("hipStreamGetDevice");
  if (!s.streams.contains(stream)) return api::kInvalidHandle;
  *device = stream->device;
  return api::kSuccess;
}

api::Code hipStreamIsCapturing(api::Stream /*stream*/, int* capturing) {
  ENTER("hipStreamIsCapturing");
  *capturing = s.setup.capturing ? 1 : 0;
  return api::kSuccess;
}

api::Code hipHostGetDevicePointer(void** seen, void* address, unsigned flags) {
  ENTER_ON_DEVICE("hipHostGetDevicePointer");
  if (flags != 0 || !s.pinned.contains(address)) return api::kInvalidValue;
  *seen = address;
  return api::kSuccess;
}
#endif

api::Code hipEventCreateWithFlags(api::Event* event, unsigned flags) {
  ENTER_ON_DEVICE("hipEventCreateWithFlags");
  if ((flags & api::kEventDisableTiming) == 0) return api::kInvalidValue;
  *event = new api::EventObject;
  (*event)->device = current_device;
  s.events.insert(*event);
  return api::kSuccess;
}

api::Code hipEventDestroy(api::Event event) {
  ENTER("hipEventDestroy");
  if (s.events.erase(event) == 0) return api::kInvalidHandle;
  delete event;
  return api::kSuccess;
}

api::Code hipEventRecord(api::Event event, api::Stream stream) {
  ENTER_ON_DEVICE("hipEventRecord");
  if (!s.events.contains(event) || !s.streams.contains(stream)) return api::kInvalidHandle;
  if (event->device != stream->device) return api::kInvalidHandle;
  std::uint64_t number = 0;
  {
    const std::scoped_lock event_lock(event->core->mutex);
    number = ++event->core->recorded;
  }
  stream->queue([core = event->core, number] {
    {
      const std::scoped_lock event_lock(core->mutex);
      core->done = std::max(core->done, number);
    }
    core->changed.notify_all();
  });
  return api::kSuccess;
}

api::Code hipEventQuery(api::Event event) {
  ENTER_ON_DEVICE("hipEventQuery");
  if (!s.events.contains(event)) return api::kInvalidHandle;
  const std::scoped_lock event_lock(event->core->mutex);
  return event->core->done >= event->core->recorded ? api::kSuccess : api::kNotReady;
}

api::Code hipEventSynchronize(api::Event event) {
  ENTER_ON_DEVICE("hipEventSynchronize");
  if (!s.events.contains(event)) return api::kInvalidHandle;
  const std::shared_ptr<EventCore> core = event->core;
  lock.unlock();
  std::uint64_t number = 0;
  {
    const std::scoped_lock event_lock(core->mutex);
    number = core->recorded;
  }
  core->wait(number);
  return api::kSuccess;
}

#ifndef FAKE_HIP_BARE

api::Code hipRuntimeGetVersion(int* version) {
  ENTER("hipRuntimeGetVersion");
  *version = s.setup.version;
  return api::kSuccess;
}

api::Code hipGetProcAddress(const char* symbol, void** address, int version, std::uint64_t flags, int* status) {
  ENTER("hipGetProcAddress");
  *address = nullptr;
  *status = 1;  // not found
  if (version != s.setup.version || flags != 0) return api::kInvalidValue;
  if (!s.setup.file_calls) return api::kSuccess;
  const std::string wanted = symbol;
  if (wanted == "hipAmdFileRead") *address = reinterpret_cast<void*>(file_read);
  if (wanted == "hipAmdFileWrite" && s.setup.file_write) *address = reinterpret_cast<void*>(file_write);
  if (*address != nullptr) *status = kHipSymbolFound;
  return api::kSuccess;
}

api::Code hipPointerGetAttribute(void* value, int attribute, void* address) {
  ENTER_ON_DEVICE("hipPointerGetAttribute");
  const auto range = pinned_around(address, 1);
  if (range == s.pinned.end()) return api::kInvalidValue;
  if (attribute == api::kPointerRangeStart) {
    std::memcpy(value, &range->first, sizeof(void*));
  } else if (attribute == api::kPointerRangeBytes) {
    std::memcpy(value, &range->second, sizeof(std::uint64_t));
  } else {
    return api::kInvalidValue;
  }
  return api::kSuccess;
}

api::Code hipPointerGetAttributes(HipPointerAttributes* attributes, const void* address) {
  ENTER("hipPointerGetAttributes");
  if (s.pinned.contains(address)) {
    attributes->type = 1;
    return api::kSuccess;
  }
  const Address where = number(address);
  const auto allocation = s.allocations.upper_bound(where);
  const auto mapping = s.mappings.upper_bound(where);
  attributes->type = api::kMemoryTypeDevice;
  if (allocation != s.allocations.begin() &&
      where < std::prev(allocation)->first + std::prev(allocation)->second.second) {
    attributes->device = std::prev(allocation)->second.first;
    return api::kSuccess;
  }
  if (mapping != s.mappings.begin() && where < std::prev(mapping)->first + std::prev(mapping)->second.bytes) {
    attributes->device = std::prev(mapping)->second.handle->device;
    return api::kSuccess;
  }
  return api::kInvalidValue;
}

api::Code hipDeviceCanAccessPeer(int* value, int a, int b) {
  ENTER("hipDeviceCanAccessPeer");
  *value = s.setup.peers && a != b ? 1 : 0;
  return api::kSuccess;
}

api::Code hipDeviceEnablePeerAccess(int /*peer*/, unsigned /*flags*/) {
  ENTER_ON_DEVICE("hipDeviceEnablePeerAccess");
  return api::kSuccess;
}

api::Code hipMemcpyPeerAsync(void* destination, int destination_device, const void* source, int source_device,
                             std::size_t bytes, api::Stream stream) {
  ENTER_ON_DEVICE("hipMemcpyPeerAsync");
  if (source_device != current_device || destination_device == current_device) return api::kInvalidDevice;
  if (const api::Code code = checked({source, destination}, bytes, stream); code != api::kSuccess) return code;
  stream->queue([=] { std::memcpy(destination, source, bytes); });
  return api::kSuccess;
}

api::Code hipMemGetAllocationGranularity(std::size_t* bytes, const api::AllocationProperties* properties,
                                         int /*option*/) {
  ENTER("hipMemGetAllocationGranularity");
  if (properties->type != api::kAllocationPinned || properties->location.type != api::kLocationDevice) {
    return api::kInvalidValue;
  }
  *bytes = kPage;
  return api::kSuccess;
}

api::Code hipMemAddressReserve(void** address, std::size_t bytes, std::size_t /*alignment*/, void* /*where*/,
                               unsigned long long /*flags*/) {
  ENTER("hipMemAddressReserve");
  if (bytes == 0 || bytes % kPage != 0) return api::kInvalidValue;
  std::uint64_t reserved = 0;
  for (const auto& reservation : s.reservations) reserved += reservation.second;
  if (reserved + bytes > s.setup.address_space_bytes) return api::kOutOfMemory;
  // Ranges of device memory lie at multiples of large pages.
  void* memory = ::mmap(nullptr, bytes + kGranule, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return api::kOutOfMemory;
  const Address base = (number(memory) + kGranule - 1) / kGranule * kGranule;
  if (base > number(memory)) ::munmap(memory, base - number(memory));
  ::munmap(pointer(base + bytes), number(memory) + kGranule - base);
  *address = pointer(base);
  s.reservations[base] = bytes;
  return api::kSuccess;
}

api::Code hipMemAddressFree(void* address, std::size_t bytes) {
  ENTER("hipMemAddressFree");
  const auto reservation = s.reservations.find(number(address));
  if (reservation == s.reservations.end() || reservation->second != bytes) return api::kInvalidValue;
  const auto mapping = s.mappings.lower_bound(number(address));
  if (mapping != s.mappings.end() && mapping->first < number(address) + bytes) return api::kInvalidValue;
  ::munmap(address, bytes);
  s.reservations.erase(reservation);
  return api::kSuccess;
}

api::Code hipMemCreate(HipMemoryHandle* handle, std::size_t bytes, const api::AllocationProperties* properties,
                       unsigned long long /*flags*/) {
  ENTER("hipMemCreate");
  const int device = properties->location.id;
  if (bytes == 0 || bytes % kPage != 0 || device < 0 || device >= s.setup.devices) return api::kInvalidValue;
  if (s.used[device] + bytes > s.setup.memory_bytes) return api::kOutOfMemory;
  const int fd = ::memfd_create("fake_hip", MFD_CLOEXEC);
  if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(bytes)) != 0) return api::kOutOfMemory;
  // Fresh memory is not zero, in every granule.
  for (std::uint64_t at = 0; at < bytes; at += kGranule) {
    if (::pwrite(fd, "stale", 5, static_cast<off_t>(at)) != 5) return api::kOutOfMemory;
  }
  *handle = new HipMemoryHandleObject{fd, device, bytes, false, 0};
  s.physical.insert(*handle);
  s.used[device] += bytes;
  return api::kSuccess;
}

api::Code hipMemRelease(HipMemoryHandle handle) {
  ENTER("hipMemRelease");
  if (!s.physical.contains(handle) || handle->released) return api::kInvalidValue;
  handle->released = true;
  free_physical_if_unused(handle);
  return api::kSuccess;
}

api::Code hipMemMap(void* address, std::size_t bytes, std::size_t offset, HipMemoryHandle handle,
                    unsigned long long /*flags*/) {
  ENTER("hipMemMap");
  if (!s.physical.contains(handle) || handle->released || offset != 0 || bytes != handle->bytes) {
    return api::kInvalidValue;
  }
  const Address at = number(address);
  const auto next = s.mappings.lower_bound(at);
  if (next != s.mappings.end() && next->first < at + bytes) return api::kInvalidValue;
  if (next != s.mappings.begin() && std::prev(next)->first + std::prev(next)->second.bytes > at) {
    return api::kInvalidValue;
  }
  auto reservation = s.reservations.upper_bound(at);
  if (reservation == s.reservations.begin()) return api::kInvalidValue;
  --reservation;
  if (at + bytes > reservation->first + reservation->second) return api::kInvalidValue;
  if (::mmap(address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, handle->fd, 0) == MAP_FAILED) return api::kOutOfMemory;
  s.mappings[at] = Mapping{bytes, handle, {}};
  ++handle->mappings;
  return api::kSuccess;
}

// One piece a call, as the real runtime.
api::Code hipMemUnmap(void* address, std::size_t bytes) {
  ENTER("hipMemUnmap");
  const auto mapping = s.mappings.find(number(address));
  if (mapping == s.mappings.end() || mapping->second.bytes != bytes) return api::kInvalidValue;
  ::mmap(address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  HipMemoryHandle handle = mapping->second.handle;
  s.mappings.erase(mapping);
  --handle->mappings;
  free_physical_if_unused(handle);
  return api::kSuccess;
}

api::Code hipMemSetAccess(void* address, std::size_t bytes, const api::Access* access, std::size_t count) {
  ENTER("hipMemSetAccess");
  const auto mapping = s.mappings.find(number(address));
  if (mapping == s.mappings.end() || mapping->second.bytes != bytes) return api::kInvalidValue;
  if (::mprotect(address, bytes, PROT_READ | PROT_WRITE) != 0) return api::kInvalidValue;
  for (std::size_t i = 0; i < count; ++i) mapping->second.devices.insert(access[i].location.id);
  return api::kSuccess;
}

api::Code hipMemExportToShareableHandle(void* out, HipMemoryHandle handle, int type, unsigned long long /*flags*/) {
  ENTER("hipMemExportToShareableHandle");
  if (!s.physical.contains(handle) || type != api::kHandleDescriptor) return api::kInvalidValue;
  const int fd = ::dup(handle->fd);
  if (fd < 0) return api::kOutOfMemory;
  std::memcpy(out, &fd, sizeof fd);
  return api::kSuccess;
}

#endif

}  // extern "C"
