// A libcufile over host memory. Compiled twice: complete, and FAKE_CUFILE_OLD, without cuFileWrite. Where no test is in
// the same process the environment sets it up:
//   FAKE_CUFILE_MAJOR=2  FAKE_CUFILE_SUPPORTED=BITS  FAKE_CUFILE_CONTROL=BITS
//   FAKE_CUFILE_FAULTS=SYMBOL:N:CODE[:TIMES],...   which calls fail
//   FAKE_CUFILE_PLANS=RESULT:ERRNO:BYTES,...   how the first reads and writes end, in order
//   FAKE_CUFILE_RECORDS=FILE   a line for each read and write: name, the descriptor's file, bytes, offset, result
#include "fake_cufile.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "io/cufile.h"

using gpufs::CufileDescriptor;
using gpufs::CufileError;
using gpufs::CufileProperties;

namespace {

constexpr int kNotInitialised = 5001;
constexpr int kInvalidFileType = 5018;
constexpr int kDirectNotSet = 5020;
constexpr int kInvalidValue = 5022;
constexpr int kNotRegistered = 5027;

struct Handle {
  int fd;
};

struct Fault {
  int skip = 0;
  int code = 0;
  int times = 1;
};

std::vector<std::string> split(const char* text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text == nullptr ? "" : text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

unsigned number_of(const char* name, unsigned otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : static_cast<unsigned>(std::strtoul(text, nullptr, 0));
}

struct State {
  std::mutex mutex;  // guards all
  FakeCufileSetup setup;
  bool opened = false;
  std::map<std::string, Fault, std::less<>> faults;
  std::map<std::string, int, std::less<>> calls;
  std::set<Handle*> handles;
  std::deque<FakeCufilePlan> plans;
  std::vector<FakeCufileCall> records;
  std::string file;

  State() {
    setup.major = number_of("FAKE_CUFILE_MAJOR", setup.major);
    setup.supported = number_of("FAKE_CUFILE_SUPPORTED", setup.supported);
    setup.control = number_of("FAKE_CUFILE_CONTROL", setup.control);
    for (const std::string& fault : split(std::getenv("FAKE_CUFILE_FAULTS"), ',')) {
      const std::vector<std::string> part = split(fault.c_str(), ':');
      if (part.size() < 3) continue;
      faults[part[0]] = Fault{std::stoi(part[1]) - 1, std::stoi(part[2]), part.size() > 3 ? std::stoi(part[3]) : 1};
    }
    for (const std::string& text : split(std::getenv("FAKE_CUFILE_PLANS"), ',')) {
      const std::vector<std::string> part = split(text.c_str(), ':');
      if (part.size() == 3) plans.push_back({std::stol(part[0]), std::stoi(part[1]), std::stoull(part[2]), 0});
    }
    if (const char* path = std::getenv("FAKE_CUFILE_RECORDS")) file = path;
  }
};

State& state() {
  static State* const instance = new State;  // never destroyed: the library may be called until the process ends
  return *instance;
}

// Counts a call and answers its planned failure, if there is one. The state's mutex is held.
int enter(const char* symbol) {
  State& s = state();
  ++s.calls[symbol];
  const auto fault = s.faults.find(symbol);
  if (fault == s.faults.end()) return 0;
  if (fault->second.skip-- > 0) return 0;
  const int code = fault->second.code;
  if (--fault->second.times == 0) s.faults.erase(fault);
  return code;
}

void record(const FakeCufileCall& call) {
  State& s = state();
  s.records.push_back(call);
  if (s.file.empty()) return;
  char path[4096] = {};
  const std::string link = "/proc/self/fd/" + std::to_string(call.fd);
  if (::readlink(link.c_str(), path, sizeof path - 1) < 0) path[0] = '?';
  std::ostringstream line;
  line << (call.write ? "cuFileWrite " : "cuFileRead ") << path << ' ' << call.bytes << ' ' << call.file_offset << ' '
       << call.result << '\n';
  const int fd = ::open(s.file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (fd < 0) return;
  const std::string text = line.str();
  if (::write(fd, text.data(), text.size()) < 0) std::perror("fake_cufile: records");
  ::close(fd);
}

ssize_t move(bool write, void* handle, void* base, std::size_t bytes, off_t file_offset, off_t device_offset) {
  State& s = state();
  std::unique_lock lock(s.mutex);
  auto* const known = static_cast<Handle*>(handle);
  const int planned = enter(write ? "cuFileWrite" : "cuFileRead");
  if (planned != 0) return -planned;
  if (!s.opened) return -kNotInitialised;
  if (!s.handles.contains(known)) return -kNotRegistered;
  FakeCufileCall call{};
  call.write = write;
  call.fd = known->fd;
  call.device_base = reinterpret_cast<std::uint64_t>(base);
  call.bytes = bytes;
  call.file_offset = file_offset;
  call.device_offset = device_offset;
  call.context = s.setup.has_context == nullptr || s.setup.has_context();
  FakeCufilePlan plan;
  if (!s.plans.empty()) {
    plan = s.plans.front();
    s.plans.pop_front();
  }
  int error_number = plan.error_number;
  if (plan.result < 0) {
    call.result = plan.result;
  } else if (device_offset != 0) {
    call.result = -kInvalidValue;  // only memory that was registered has offsets
  } else {
    lock.unlock();
    const std::size_t wanted = std::min<std::size_t>(bytes, plan.bytes);
    const ssize_t count =
        write ? ::pwrite(call.fd, base, wanted, file_offset) : ::pread(call.fd, base, wanted, file_offset);
    if (count < 0) error_number = errno;
    lock.lock();
    call.result = plan.claimed != 0 ? static_cast<std::int64_t>(plan.claimed) : count;
  }
  record(call);
  errno = error_number;
  return call.result;
}

int reset(const FakeCufileSetup* setup) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  s.setup = *setup;
  s.opened = false;
  s.faults.clear();
  s.calls.clear();
  s.plans.clear();
  s.records.clear();
  return static_cast<int>(s.handles.size());
}

void fail(const char* symbol, int n, int code) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  s.faults[symbol] = Fault{n - 1, code};
}

int calls(const char* symbol) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  const auto found = s.calls.find(symbol);
  return found == s.calls.end() ? 0 : found->second;
}

int registered() {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  return static_cast<int>(s.handles.size());
}

void plan_next(const FakeCufilePlan* plan) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  s.plans.push_back(*plan);
}

int read_records(FakeCufileCall* records, int room) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  const int there = static_cast<int>(s.records.size());
  std::copy_n(s.records.begin(), std::min(there, room), records);
  return there;
}

constexpr FakeCufileControl kControl{reset, fail, calls, registered, plan_next, read_records};

}  // namespace

extern "C" {

const FakeCufileControl* fake_cufile_control() { return &kControl; }

CufileError cuFileDriverOpen() {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  if (const int planned = enter("cuFileDriverOpen"); planned != 0) {
    // Somebody else in the process has opened it.
    s.opened = planned == gpufs::kCufileAlreadyOpen;
    return {planned, 0};
  }
  s.opened = true;
  return {0, 0};
}

CufileError cuFileDriverGetProperties(CufileProperties* properties) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  if (const int planned = enter("cuFileDriverGetProperties"); planned != 0) return {planned, 0};
  if (!s.opened) return {kNotInitialised, 0};
  properties->module.major_version = s.setup.major;
  properties->module.supported = s.setup.supported;
  properties->module.control = s.setup.control;
  return {0, 0};
}

CufileError cuFileHandleRegister(void** handle, CufileDescriptor* descriptor) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  if (const int planned = enter("cuFileHandleRegister"); planned != 0) return {planned, 0};
  if (!s.opened) return {kNotInitialised, 0};
  if (descriptor->type != 1 || descriptor->operations != nullptr) return {kInvalidFileType, 0};
  const int flags = ::fcntl(descriptor->handle.fd, F_GETFL);
  if (flags < 0 || (flags & O_DIRECT) == 0) return {kDirectNotSet, 0};
  auto* const made = new Handle{descriptor->handle.fd};
  s.handles.insert(made);
  *handle = made;
  return {0, 0};
}

void cuFileHandleDeregister(void* handle) {
  State& s = state();
  const std::scoped_lock lock(s.mutex);
  enter("cuFileHandleDeregister");
  auto* const known = static_cast<Handle*>(handle);
  if (s.handles.erase(known) == 1) delete known;
}

ssize_t cuFileRead(void* handle, void* base, std::size_t bytes, off_t file_offset, off_t device_offset) {
  return move(false, handle, base, bytes, file_offset, device_offset);
}

#ifndef FAKE_CUFILE_OLD
ssize_t cuFileWrite(void* handle, const void* base, std::size_t bytes, off_t file_offset, off_t device_offset) {
  return move(true, handle, const_cast<void*>(base), bytes, file_offset, device_offset);
}
#endif

}  // extern "C"
