// The devices behind a fake library: memory, streams and events over host memory, planned faults, and an account of
// everything that is open. Streams are really asynchronous: each has a thread that does its work in order. Copies over
// the bus pass through a few queues for each direction, which all streams of a device share: each is done in the order
// in which it was queued there, so those behind a copy of a blocked stream wait. A stream that waits for a value does
// so in the queue of its last copy, unless other work came in between. A stray access, or a planned fault of that kind,
// poisons its device: every later call on it fails.
// Owned by the library that is built with it, which has one for the process.
// Any thread. A vendor's function holds the mutex (ENTER) except while it waits.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "drivers/gpu/api.h"
#include "fake_gpu/fake_gpu.h"

namespace gpufs::gpu::api {

// A point in a stream's order: `recorded` counts the recordings, `done` those that the streams have come to.
struct EventObject {
  struct Core {
    std::mutex mutex;
    std::uint64_t recorded = 0;
    std::uint64_t done = 0;
  };

  explicit EventObject(int on) : device(on) {}

  const int device;
  const std::shared_ptr<Core> core = std::make_shared<Core>();
};

// Copies of several streams that are done one after the other.
struct CopyQueue {
  // Its place, given as it is queued; the stream that comes to it enters it, and leaves it once it is done.
  std::uint64_t join() {
    const std::scoped_lock lock(mutex);
    return last++;
  }
  void enter(std::uint64_t place) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return first == place; });
  }
  void leave() {
    {
      const std::scoped_lock lock(mutex);
      ++first;
    }
    changed.notify_all();
  }

  std::mutex mutex;  // guards all below
  std::condition_variable changed;
  std::uint64_t first = 0;  // the place whose turn it is
  std::uint64_t last = 0;   // the next one to be given
};

struct StreamObject {
  // in, out: the device's queues in which its copies from and to the host are.
  StreamObject(int on, CopyQueue& in, CopyQueue& out)
      : device(on), copies_in(in), copies_out(out), worker([this] { run(); }) {}
  ~StreamObject() {
    {
      const std::scoped_lock lock(mutex);
      ending = true;
    }
    changed.notify_all();
    worker.join();
  }

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
  bool idle() {
    const std::scoped_lock lock(mutex);
    return tasks.empty() && !busy;
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
  CopyQueue& copies_in;
  CopyQueue& copies_out;
  CopyQueue* last_queue =
      nullptr;       // of the work queued last, null where that was not a copy; the machine's mutex guards it
  std::mutex mutex;  // guards all below but the thread
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
  bool busy = false;
  bool held = false;
  bool ending = false;
  std::thread worker;  // last: it uses all the others
};

}  // namespace gpufs::gpu::api

namespace fake_gpu {

namespace api = gpufs::gpu::api;

using Address = std::uint64_t;
using Handle = std::uint64_t;  // of physical memory

constexpr std::uint64_t kLargePage = std::uint64_t{2} << 20;
constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kInline = 24576;  // the largest copy that travels in a queue of the hardware itself
constexpr int kMaximumDevices = 8;
constexpr int kHostNode = kMaximumDevices;  // where host memory lies that devices map
constexpr int kMaximumCopyQueues = 32;
constexpr int kHarmless = 5;  // so many blocked streams leave the hardware a queue for work of others

// How the fakes differ.
struct Vendor {
  std::string prefix;                      // of the environment's variables: "FAKE_CUDA_"
  std::uint64_t granularity;               // of memory, as the library states it
  unsigned first_bus;                      // of the devices' PCI addresses
  bool piece_by_piece;                     // whether a call unmaps or opens one mapping alone, or several side by side
  const char* visible_devices;             // the environment's variable that chooses and orders devices
  std::string (*uuid_text)(int physical);  // "GPU-..."
  const char* copy_queues;                 // the environment's variable for the number of queues of copies, or null
  bool (*is_fatal)(api::Code code);
  int (*current)();  // the device current on the calling thread, -1 if none
};

// Physical memory is a file of this name and the number of its device, by which other processes know it again.
inline const std::string kMemoryName = "fake_gpu_";

inline void* pointer(Address address) { return reinterpret_cast<void*>(address); }
inline Address number(const void* address) { return reinterpret_cast<Address>(address); }

// "A,B" as "A", "B"; nothing for null.
inline std::vector<std::string> split(const char* text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text == nullptr ? "" : text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

// Whether this thread is in a function of call_host(), from which the vendors allow no call.
inline thread_local bool in_host_function = false;
inline thread_local int capture_mode = api::kCaptureGlobal;
constexpr api::Code kCaptureUnsupported = 900;

class Machine {
 public:
  // Where no test is in the same process the environment sets it up.
  explicit Machine(Vendor vendor) : vendor_(std::move(vendor)) {
    if (const char* devices = variable("DEVICES")) setup.devices = std::atoi(devices);
    if (const char* visible = std::getenv(vendor_.visible_devices)) {
      // As the vendors document it: the devices named, in that order, up to the first that does not exist.
      for (const std::string& word : split(visible, ',')) {
        int device = word.empty() || std::isdigit(static_cast<unsigned char>(word[0])) == 0 ? 0 : std::stoi(word);
        if (word.starts_with("GPU-")) {
          while (device < setup.devices && !vendor_.uuid_text(device).starts_with(word)) ++device;
        } else if (word != std::to_string(device)) {
          break;
        }
        if (device >= setup.devices) break;
        visible_.push_back(device);
      }
      setup.devices = static_cast<int>(visible_.size());
    }
    if (const char* tails = variable("TAIL_ACCESS")) setup.tail_access = std::atoi(tails) != 0;
    if (const char* memory = variable("MEMORY")) setup.memory_bytes = std::strtoull(memory, nullptr, 10);
    const char* queues = vendor_.copy_queues == nullptr ? nullptr : std::getenv(vendor_.copy_queues);
    if (queues != nullptr) copy_queues_ = std::clamp(std::atoi(queues), 1, kMaximumCopyQueues);
    for (const std::string& plan : split(variable("FAULTS"), ',')) {
      const std::vector<std::string> part = split(plan.c_str(), ':');
      if (part.size() == 4) faults_[part[0]] = Fault{std::stoi(part[1]) - 1, std::stoi(part[2]), std::stoi(part[3])};
    }
  }

  [[nodiscard]] const char* variable(const char* name) const { return std::getenv((vendor_.prefix + name).c_str()); }

  // ---- what tests do ----

  // more: what the vendor has open besides.
  int reset(const FakeGpuSetup& wanted, int more = 0) {
    const std::scoped_lock lock(mutex);
    const auto open = static_cast<int>(physical_.size() + mappings_.size() + reservations_.size() +
                                       allocations_.size() + streams_.size() + events_.size() + pinned_.size()) +
                      more;
    const int leaked = open - leaked_;
    leaked_ = open;
    setup = wanted;
    for (std::atomic<api::Code>& poison : poison_) poison = api::kSuccess;
    faults_.clear();
    calls_.clear();
    hold_streams(false);
    shared_queues_ = false;
    return leaked;
  }
  void fail(const char* symbol, int n, int code, int times) {
    const std::scoped_lock lock(mutex);
    faults_[symbol] = Fault{n - 1, code, times};
  }
  int calls(const char* symbol) {
    const std::scoped_lock lock(mutex);
    const auto found = calls_.find(symbol);
    return found == calls_.end() ? 0 : found->second;
  }
  FakeGpuState state() {
    const std::scoped_lock lock(mutex);
    FakeGpuState state{};
    for (const std::uint64_t used : used_) state.bytes_used += used;
    for (const auto& [handle, physical] : physical_) state.handles += physical.released ? 0 : 1;
    state.mappings = static_cast<int>(mappings_.size());
    state.reservations = static_cast<int>(reservations_.size());
    state.allocations = static_cast<int>(allocations_.size());
    state.streams = static_cast<int>(streams_.size());
    state.events = static_cast<int>(events_.size());
    state.pinned = static_cast<int>(pinned_.size());
    return state;
  }
  void share_queues() {
    const std::scoped_lock lock(mutex);
    shared_queues_ = true;
  }
  void hold(bool held) {
    const std::scoped_lock lock(mutex);
    hold_streams(held);
  }

  // ---- what the vendor's functions do, with the mutex held ----

  std::mutex mutex;
  FakeGpuSetup setup;
  unsigned pin_flags = 0;  // of the last call of pin()

  // Counts a call and answers its planned failure, if there is one. Every call from a function of call_host() fails.
  api::Code enter(const char* symbol) {
    ++calls_[symbol];
    if (in_host_function) {
      ++calls_["in a host function"];
      std::fprintf(stderr, "%s: %s was called in a host function\n", vendor_.prefix.c_str(), symbol);
      return api::kNotPermitted;
    }
    if (setup.program_captures && ends_captures(symbol)) {
      ++calls_["captures ended"];
      return kCaptureUnsupported;
    }
    const auto fault = faults_.find(symbol);
    if (fault == faults_.end()) return api::kSuccess;
    if (fault->second.skip > 0) {
      --fault->second.skip;
      return api::kSuccess;
    }
    const api::Code code = fault->second.code;
    if (--fault->second.times <= 0) faults_.erase(fault);
    if (vendor_.is_fatal(code) && current() >= 0) poison(current()) = code;
    return code;
  }
  [[nodiscard]] int current() const { return vendor_.current(); }
  // What every call on the device answers since a fatal failure.
  std::atomic<api::Code>& poison(int device) { return poison_.at(static_cast<std::size_t>(device)); }

  api::Code device_name(char* name, int bytes, int device) const {
    std::snprintf(name, static_cast<std::size_t>(bytes), "fake device %d", physical(device));
    return api::kSuccess;
  }
  api::Code pci_address(char* text, int bytes, int device) const {
    std::snprintf(text, static_cast<std::size_t>(bytes), "FFFF:%02X:00.0",
                  vendor_.first_bus + static_cast<unsigned>(physical(device)));
    return api::kSuccess;
  }
  // The number that a device has where none is hidden.
  [[nodiscard]] int physical(int device) const {
    return visible_.empty() || device == kHostNode ? device : visible_.at(static_cast<std::size_t>(device));
  }
  api::Code total_memory(std::size_t* bytes) const {
    *bytes = setup.memory_bytes;
    return api::kSuccess;
  }
  api::Code can_access_peer(int* value, int a, int b) const {
    *value = setup.peers && a != b ? 1 : 0;
    return api::kSuccess;
  }
  static api::Code exchange_capture_mode(int* mode) {
    std::swap(capture_mode, *mode);
    return api::kSuccess;
  }
  api::Code is_capturing(int* capturing) const {
    *capturing = setup.capturing ? 1 : 0;
    return api::kSuccess;
  }
  api::Code memory_info(std::size_t* free_bytes, std::size_t* total) {
    *total = setup.memory_bytes;
    *free_bytes = setup.memory_bytes - used(current());
    return api::kSuccess;
  }

  api::Code allocate(Address* address, std::size_t bytes) {
    if (bytes == 0) return api::kInvalidValue;
    if (used(current()) + bytes > setup.memory_bytes) return api::kOutOfMemory;
    const int fd = ::memfd_create("fake_gpu", MFD_CLOEXEC);  // other processes open it by its handle
    if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(bytes)) != 0) return api::kOutOfMemory;
    void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (memory == MAP_FAILED) return api::kOutOfMemory;
    std::memset(memory, 0xA5, std::min<std::size_t>(bytes, kLargePage));  // fresh memory is not zero
    *address = number(memory);
    allocations_[*address] = {current(), bytes, fd};
    used(current()) += bytes;
    return api::kSuccess;
  }
  api::Code free(std::unique_lock<std::mutex>& lock, Address address) {
    wait_for_blocked(lock, 0);
    synchronize(lock);
    const auto allocation = allocations_.find(address);
    if (allocation == allocations_.end() || allocation->second.fd < 0) return api::kInvalidValue;
    ::munmap(pointer(address), allocation->second.bytes);
    ::close(allocation->second.fd);
    used(allocation->second.device) -= allocation->second.bytes;
    allocations_.erase(allocation);
    return api::kSuccess;
  }

  // The handle of the allocation around an address names its file in its process.
  api::Code ipc_handle(api::IpcHandle* handle, Address address) const {
    const auto allocation = around(allocations_, address);
    if (allocation == allocations_.end() || allocation->second.fd < 0) return api::kInvalidValue;
    const SharedAllocation shared{kIpcMagic, ::getpid(), allocation->second.fd, allocation->second.device,
                                  allocation->second.bytes};
    *handle = {};
    std::memcpy(handle->bytes, &shared, sizeof shared);
    return api::kSuccess;
  }
  api::Code ipc_open(Address* address, const api::IpcHandle& handle) {
    SharedAllocation shared{};
    std::memcpy(&shared, handle.bytes, sizeof shared);
    if (shared.magic != kIpcMagic || shared.device < 0 || shared.device >= setup.devices) return api::kInvalidHandle;
    const std::string path = "/proc/" + std::to_string(shared.process) + "/fd/" + std::to_string(shared.fd);
    const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) return api::kInvalidHandle;
    void* memory = ::mmap(nullptr, shared.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    ::close(fd);
    if (memory == MAP_FAILED) return api::kOutOfMemory;
    *address = number(memory);
    allocations_[*address] = {shared.device, shared.bytes, -1};
    return api::kSuccess;
  }
  api::Code ipc_close(Address address) {
    const auto allocation = allocations_.find(address);
    if (allocation == allocations_.end() || allocation->second.fd >= 0) return api::kInvalidValue;
    ::munmap(pointer(address), allocation->second.bytes);
    allocations_.erase(allocation);
    return api::kSuccess;
  }
  // The allocation or mapping around an address.
  api::Code address_range(Address* start, std::size_t* bytes, Address address) const {
    if (const auto found = around(allocations_, address); found != allocations_.end()) {
      *start = found->first;
      *bytes = found->second.bytes;
      return api::kSuccess;
    }
    const auto mapping = around(mappings_, address);
    if (mapping == mappings_.end()) return api::kInvalidValue;
    *start = mapping->first;
    *bytes = mapping->second.bytes;
    return api::kSuccess;
  }
  // A further reference to the physical memory behind an address, for release().
  api::Code retain(Handle* handle, Address address) {
    const auto mapping = around(mappings_, address);
    if (mapping == mappings_.end()) return api::kInvalidValue;
    ++physical_.at(mapping->second.handle).retained;
    *handle = mapping->second.handle;
    return api::kSuccess;
  }
  // Of memory of a device, or of pinned memory of the host. Both vendors have the same numbers.
  api::Code pointer_attribute(void* answer, int attribute, Address address) const {
    enum { kMemoryType = 2, kIsManaged = 8, kDeviceOrdinal = 9, kIpcCapable = 10, kMemoryTypeHost = 1 };
    const int device = owner_of(address);
    const bool pinned = pinned_around(pointer(address), 1) != pinned_.end();
    if (device < 0 && (!pinned || attribute != kMemoryType)) return api::kInvalidValue;
    const auto type = static_cast<unsigned>(device < 0 ? int{kMemoryTypeHost} : int{api::kMemoryTypeDevice});
    const unsigned char managed = setup.managed ? 1 : 0;
    const unsigned char capable = around(allocations_, address) != allocations_.end() ? 1 : 0;
    if (attribute == kMemoryType) std::memcpy(answer, &type, sizeof type);
    if (attribute == kIsManaged) std::memcpy(answer, &managed, sizeof managed);
    if (attribute == kDeviceOrdinal) std::memcpy(answer, &device, sizeof device);
    if (attribute == kIpcCapable) std::memcpy(answer, &capable, sizeof capable);
    return api::kSuccess;
  }

  api::Code granularity(std::size_t* bytes, const api::AllocationProperties& properties) const {
    if (properties.type != api::kAllocationPinned || properties.location.type != api::kLocationDevice) {
      return api::kInvalidValue;
    }
    *bytes = vendor_.granularity;
    return api::kSuccess;
  }
  api::Code reserve(Address* address, std::size_t bytes) {
    if (bytes == 0 || bytes % vendor_.granularity != 0) return api::kInvalidValue;
    std::uint64_t reserved = 0;
    for (const auto& reservation : reservations_) reserved += reservation.second;
    if (reserved + bytes > setup.address_space_bytes) return api::kOutOfMemory;
    // Ranges of device memory lie at multiples of large pages.
    void* memory = ::mmap(nullptr, bytes + kLargePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return api::kOutOfMemory;
    const Address base = (number(memory) + kLargePage - 1) / kLargePage * kLargePage;
    if (base > number(memory)) ::munmap(memory, base - number(memory));
    ::munmap(pointer(base + bytes), number(memory) + kLargePage - base);
    *address = base;
    reservations_[base] = bytes;
    return api::kSuccess;
  }
  api::Code unreserve(Address address, std::size_t bytes) {
    const auto reservation = reservations_.find(address);
    if (reservation == reservations_.end() || reservation->second != bytes) return api::kInvalidValue;
    const auto mapping = mappings_.lower_bound(address);
    if (mapping != mappings_.end() && mapping->first < address + bytes) return api::kInvalidValue;
    ::munmap(pointer(address), bytes);
    reservations_.erase(reservation);
    return api::kSuccess;
  }
  api::Code create(Handle* handle, std::size_t bytes, const api::AllocationProperties& properties) {
    const bool on_host = properties.location.type == api::kLocationHostNode;
    const int device = on_host ? kHostNode : properties.location.id;
    if (bytes == 0 || bytes % vendor_.granularity != 0 || device < 0 || (device >= setup.devices && !on_host)) {
      return api::kInvalidValue;
    }
    if (!on_host && used(device) + bytes > setup.memory_bytes) return api::kOutOfMemory;
    const int fd = ::memfd_create((kMemoryName + std::to_string(physical(device))).c_str(), MFD_CLOEXEC);
    if (fd < 0 || ::ftruncate(fd, static_cast<off_t>(bytes)) != 0) return api::kOutOfMemory;
    // Fresh memory is not zero, in every large page.
    for (std::uint64_t at = 0; at < bytes; at += kLargePage) {
      if (::pwrite(fd, "stale", 5, static_cast<off_t>(at)) != 5) return api::kOutOfMemory;
    }
    *handle = next_handle_;
    physical_[next_handle_++] = Physical{fd, device, bytes};
    used(device) += bytes;
    return api::kSuccess;
  }
  api::Code release(Handle handle) {
    const auto physical = physical_.find(handle);
    if (physical != physical_.end() && physical->second.retained > 0) {
      --physical->second.retained;
      free_if_unused(physical);
      return api::kSuccess;
    }
    if (physical == physical_.end() || physical->second.released) return api::kInvalidValue;
    physical->second.released = true;
    free_if_unused(physical);
    return api::kSuccess;
  }
  api::Code export_memory(void* out, Handle handle, int type) {
    const auto physical = physical_.find(handle);
    if (physical == physical_.end() || type != api::kHandleDescriptor) return api::kInvalidValue;
    if (physical->second.imported) return api::kInvalidValue;  // vendors promise it for what this process has created
    const int fd = ::dup(physical->second.fd);
    if (fd < 0) return api::kOutOfMemory;
    std::memcpy(out, &fd, sizeof fd);
    return api::kSuccess;
  }
  // Memory of this process or another one. It is accounted where it was created.
  api::Code import_memory(Handle* handle, int fd, int type) {
    if (type != api::kHandleDescriptor) return api::kInvalidValue;
    std::array<char, 64> name{};
    const std::string path = "/proc/self/fd/" + std::to_string(fd);
    const std::string prefix = "/memfd:" + kMemoryName;
    if (::readlink(path.c_str(), name.data(), name.size() - 1) < 0) return api::kUnknown;
    const off_t bytes = ::lseek(fd, 0, SEEK_END);
    const int own = ::dup(fd);
    // The code of CUDA's driver 580 for a descriptor of something else.
    if (!std::string(name.data()).starts_with(prefix) || own < 0) return api::kUnknown;
    *handle = next_handle_;
    int device = 0;
    const int owner = std::atoi(name.data() + prefix.size());
    while (device < setup.devices && physical(device) != owner) ++device;
    if (owner == kHostNode) device = kHostNode;
    physical_[next_handle_++] = Physical{own, device, static_cast<std::uint64_t>(bytes), false, 0, true};
    return api::kSuccess;
  }
  api::Code map(Address address, std::size_t bytes, std::size_t offset, Handle handle) {
    const auto physical = physical_.find(handle);
    if (physical == physical_.end() || physical->second.released || offset != 0) return api::kInvalidValue;
    if (bytes != physical->second.bytes) return physical->second.imported ? api::kUnknown : api::kInvalidValue;
    const auto next = mappings_.lower_bound(address);
    if (next != mappings_.end() && next->first < address + bytes) return api::kInvalidValue;
    if (next != mappings_.begin() && std::prev(next)->first + std::prev(next)->second.bytes > address) {
      return api::kInvalidValue;
    }
    auto reservation = reservations_.upper_bound(address);
    if (reservation == reservations_.begin()) return api::kInvalidValue;
    --reservation;
    if (address + bytes > reservation->first + reservation->second) return api::kInvalidValue;
    if (::mmap(pointer(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, physical->second.fd, 0) == MAP_FAILED) {
      return api::kOutOfMemory;
    }
    mappings_[address] = Mapping{bytes, handle, {}};
    ++physical->second.mappings;
    return api::kSuccess;
  }
  api::Code unmap(Address address, std::size_t bytes) {
    if (!are_mapped(address, bytes)) return api::kInvalidValue;
    for (auto mapping = mappings_.find(address); mapping != mappings_.end() && mapping->first < address + bytes;) {
      ::mmap(pointer(mapping->first), mapping->second.bytes, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
      const auto physical = physical_.find(mapping->second.handle);
      --physical->second.mappings;
      free_if_unused(physical);
      mapping = mappings_.erase(mapping);
    }
    return api::kSuccess;
  }
  api::Code set_access(Address address, std::size_t bytes, const api::Access* access, std::size_t count) {
    if (!are_mapped(address, bytes)) return api::kInvalidValue;
    if (!setup.tail_access && reservations_.size() > 1 && !reservations_.contains(address)) return api::kInvalidValue;
    const bool writes = std::any_of(access, access + count,
                                    [](const api::Access& given) { return given.flags == api::kAccessReadWrite; });
    if (::mprotect(pointer(address), bytes, writes ? PROT_READ | PROT_WRITE : PROT_READ) != 0)
      return api::kInvalidValue;
    for (auto mapping = mappings_.find(address); mapping != mappings_.end() && mapping->first < address + bytes;
         ++mapping) {
      for (std::size_t i = 0; i < count; ++i) {
        const bool is_host = access[i].location.type == api::kLocationHostNode;
        mapping->second.access[is_host ? kHostNode : access[i].location.id] = access[i].flags;
      }
    }
    return api::kSuccess;
  }

  // Whether the device may touch all of [address, address + bytes).
  [[nodiscard]] bool reachable(Address address, std::uint64_t bytes, int device) const {
    const Address end = address + bytes;
    while (address < end) {
      if (const auto mapping = around(mappings_, address); mapping != mappings_.end()) {
        if (!mapping->second.access.contains(device)) return false;
        address = mapping->first + mapping->second.bytes;
      } else if (const auto allocation = around(allocations_, address); allocation != allocations_.end()) {
        address = allocation->first + allocation->second.bytes;
      } else if (const auto range = around(pinned_, address); range != pinned_.end()) {
        address = range->first + range->second.bytes;
      } else {
        return false;
      }
    }
    return true;
  }
  // Whether a part of [address, address + bytes) is mapped for reading alone.
  [[nodiscard]] bool read_only(Address address, std::uint64_t bytes, int device) const {
    return std::any_of(mappings_.begin(), mappings_.end(), [&](const auto& mapping) {
      const auto access = mapping.second.access.find(device);
      return mapping.first < address + bytes && address < mapping.first + mapping.second.bytes &&
             access != mapping.second.access.end() && access->second != api::kAccessReadWrite;
    });
  }
  // Whether an address lies in a range of virtual memory.
  [[nodiscard]] bool is_mapped_at(Address address) const { return around(mappings_, address) != mappings_.end(); }
  // The device whose memory an address lies in, -1 for none.
  [[nodiscard]] int owner_of(Address address) const {
    if (const auto found = around(allocations_, address); found != allocations_.end()) return found->second.device;
    const auto mapping = around(mappings_, address);
    return mapping == mappings_.end() ? -1 : physical_.at(mapping->second.handle).device;
  }

  api::Code pin(void* address, std::size_t bytes, unsigned flags) {
    if (pinned_around(address, bytes) != pinned_.end()) return api::kHostMemoryAlreadyRegistered;
    pinned_.emplace(number(address), Range{bytes});
    pin_flags = flags;
    return api::kSuccess;
  }
  api::Code unpin(std::unique_lock<std::mutex>& lock, void* address) {
    wait_for_blocked(lock, 0);
    return pinned_.erase(number(address)) == 1 ? api::kSuccess : api::kHostMemoryNotRegistered;
  }
  [[nodiscard]] bool is_pinned_at(const void* address) const { return pinned_.contains(number(address)); }
  api::Code address_of_pinned(Address* seen, void* address, unsigned flags) const {
    if (flags != 0 || !is_pinned_at(address)) return api::kInvalidValue;
    *seen = number(address);
    return api::kSuccess;
  }
  // Start or size of the pinned range around an address.
  api::Code pinned_attribute(void* answer, int attribute, Address address) const {
    const auto range = pinned_around(pointer(address), 1);
    if (range == pinned_.end()) return api::kInvalidValue;
    if (attribute == api::kPointerRangeStart) {
      std::memcpy(answer, &range->first, sizeof range->first);
    } else if (attribute == api::kPointerRangeBytes) {
      std::memcpy(answer, &range->second.bytes, sizeof range->second.bytes);
    } else {
      return api::kInvalidValue;
    }
    return api::kSuccess;
  }

  api::Code copy_in(Address destination, const void* source, std::size_t bytes, api::Stream handle) {
    if (bytes <= kInline) come_behind_blocked(handle);
    return copy(handle, {destination}, pointer(destination), source, bytes, source,
                bytes > kInline ? to_device : nullptr);
  }
  api::Code copy_out(void* destination, Address source, std::size_t bytes, api::Stream handle) {
    return copy(handle, {source}, destination, pointer(source), bytes, destination, to_host);
  }
  api::Code copy_within(Address destination, Address source, std::size_t bytes, api::Stream handle) {
    come_behind_blocked(handle);
    return copy(handle, {source, destination}, pointer(destination), pointer(source), bytes, nullptr);
  }
  api::Code fill(Address destination, unsigned char value, std::size_t bytes, api::Stream handle) {
    api::Stream stream = nullptr;
    if (const api::Code code = checked({destination}, destination, bytes, handle, &stream); code != api::kSuccess)
      return code;
    if (captured()) return api::kSuccess;
    come_behind_blocked(handle);
    stream->last_queue = nullptr;
    stream->queue([=] {
      // Zeroed memory need not be allocated: whole pages are released, which makes them zero.
      const bool pages = value == 0 && destination % kPage == 0 && bytes % kPage == 0;
      if (!pages || ::madvise(pointer(destination), bytes, MADV_REMOVE) != 0) {
        std::memset(pointer(destination), value, bytes);
      }
    });
    return api::kSuccess;
  }

  api::Code create_stream(std::unique_lock<std::mutex>& lock, api::Stream* stream, unsigned flags) {
    if (flags != api::kStreamNonBlocking) return api::kInvalidValue;
    wait_for_blocked(lock, kHarmless);
    *stream = new_stream();
    (*stream)->hold(held_);
    streams_.insert(*stream);
    return api::kSuccess;
  }
  // Queued work is done first, with the mutex released.
  api::Code destroy_stream(std::unique_lock<std::mutex>& lock, api::Stream stream) {
    if (streams_.erase(stream) == 0) return api::kInvalidHandle;
    wait_for_blocked(lock, kHarmless);
    lock.unlock();
    delete stream;
    return api::kSuccess;
  }
  // One that was planned to fail waits all the same: the work that was queued is real.
  api::Code synchronize_stream(std::unique_lock<std::mutex>& lock, api::Stream handle, api::Code planned) {
    const api::Stream stream = stream_at(handle);
    if (stream == nullptr) return api::kInvalidHandle;
    const int device = stream->device;
    lock.unlock();
    stream->synchronize();
    return planned != api::kSuccess ? planned : poison(device).load();
  }
  // Waits with the mutex free for a moment at a time, because streams come and go.
  api::Code synchronize(std::unique_lock<std::mutex>& lock) {
    const int device = current();
    const auto works = [&](api::Stream stream) { return stream->device == device && !stream->idle(); };
    const auto& ordinary = defaults_.at(static_cast<std::size_t>(device));
    while (std::any_of(streams_.begin(), streams_.end(), works) || (ordinary != nullptr && works(ordinary.get()))) {
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      lock.lock();
    }
    return poison(device).load();
  }
  // The stream of a handle: the current device's default stream for the first numbers, null for what is none.
  api::Stream stream_at(api::Stream handle) {
    if (number(handle) > api::kLastDefaultStream) return streams_.contains(handle) ? handle : nullptr;
    std::unique_ptr<api::StreamObject>& stream = defaults_.at(static_cast<std::size_t>(current()));
    if (stream == nullptr) stream.reset(new_stream());
    return stream.get();
  }
  // The functions of all streams are called one after the other, as by a library that has one thread for them; those on
  // a device that has failed are dropped.
  api::Code call_host(api::Stream handle, void (*function)(void*), void* argument) {
    const api::Stream stream = stream_at(handle);
    if (stream == nullptr) return api::kInvalidHandle;
    if (captured()) return api::kSuccess;
    stream->queue([this, function, argument, device = stream->device] {
      static std::mutex one_at_a_time;
      const std::scoped_lock calling(one_at_a_time);
      ++blocked_;
      in_host_function = true;
      if (poison(device) == api::kSuccess) function(argument);
      in_host_function = false;
      --blocked_;
    });
    return api::kSuccess;
  }
  api::Code wait_for_value(api::Stream handle, Address cell, std::uint32_t value, unsigned flags) {
    const api::Stream stream = stream_at(handle);
    if (stream == nullptr) return api::kInvalidHandle;
    const auto range = around(pinned_, cell);
    if (flags != api::kWaitValueNotLess || range == pinned_.end()) return api::kInvalidValue;
    if (range->first + range->second.bytes < cell + sizeof value) return api::kInvalidValue;
    if (captured()) return api::kSuccess;
    api::CopyQueue* const queue = stream->last_queue;
    const std::uint64_t place = queue == nullptr ? 0 : queue->join();
    stream->queue([this, cell, value, queue, place, device = stream->device] {
      if (queue != nullptr) queue->enter(place);
      const std::atomic_ref<std::uint32_t> word(*static_cast<std::uint32_t*>(pointer(cell)));
      ++blocked_;
      while (poison(device) == api::kSuccess && static_cast<std::int32_t>(word.load() - value) < 0) {
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
      --blocked_;
      if (queue != nullptr) queue->leave();
    });
    return api::kSuccess;
  }

  api::Code create_event(api::Event* event, unsigned flags) {
    if ((flags & api::kEventDisableTiming) == 0) return api::kInvalidValue;
    *event = new api::EventObject(current());
    events_.insert(*event);
    return api::kSuccess;
  }
  api::Code destroy_event(api::Event event) {
    if (events_.erase(event) == 0) return api::kInvalidHandle;
    delete event;
    return api::kSuccess;
  }
  api::Code record(api::Event event, api::Stream handle) {
    const api::Stream stream = stream_at(handle);
    if (stream == nullptr || !events_.contains(event) || event->device != stream->device) return api::kInvalidHandle;
    if (captured()) return api::kSuccess;
    std::uint64_t number = 0;
    {
      const std::scoped_lock event_lock(event->core->mutex);
      number = ++event->core->recorded;
    }
    stream->queue([core = event->core, number] {
      const std::scoped_lock event_lock(core->mutex);
      core->done = std::max(core->done, number);
    });
    return api::kSuccess;
  }
  api::Code query(api::Event event) {
    if (!events_.contains(event)) return api::kInvalidHandle;
    const std::scoped_lock event_lock(event->core->mutex);
    return event->core->done < event->core->recorded ? api::kNotReady : api::kSuccess;
  }

 private:
  struct Physical {
    int fd = -1;
    int device = 0;
    std::uint64_t bytes = 0;
    bool released = false;
    int mappings = 0;
    bool imported = false;
    int retained = 0;  // references beside the first
  };
  struct Mapping {
    std::uint64_t bytes = 0;
    Handle handle = 0;
    std::map<int, int> access;  // by device
  };
  struct Allocation {
    int device = 0;
    std::uint64_t bytes = 0;
    int fd = -1;  // of its memory; -1: another process's, opened by its handle
  };
  // What a handle for other processes contains.
  struct SharedAllocation {
    std::uint32_t magic;
    int process;
    int fd;
    int device;
    std::uint64_t bytes;
  };
  static constexpr std::uint32_t kIpcMagic = 0x1FC0FFEE;
  struct Range {
    std::uint64_t bytes = 0;
  };
  struct Fault {
    int skip = 0;
    int code = 0;
    int times = 0;
  };
  template <typename Value>
  using ByAddress = std::map<Address, Value>;

  std::uint64_t& used(int device) { return used_.at(static_cast<std::size_t>(device)); }

  // The entry whose bytes an address lies in, end() for none.
  template <typename Value>
  static typename ByAddress<Value>::const_iterator around(const ByAddress<Value>& entries, Address address) {
    const auto next = entries.upper_bound(address);
    if (next == entries.begin()) return entries.end();
    const auto found = std::prev(next);
    return address < found->first + found->second.bytes ? found : entries.end();
  }
  // The pinned range that has a byte of [address, address + bytes), end() for none.
  [[nodiscard]] ByAddress<Range>::const_iterator pinned_around(const void* address, std::uint64_t bytes) const {
    const Address start = number(address);
    return std::find_if(pinned_.begin(), pinned_.end(), [&](const auto& range) {
      return range.first < start + bytes && start < range.first + range.second.bytes;
    });
  }

  // Whether mappings that one call may name make up just [address, address + bytes).
  [[nodiscard]] bool are_mapped(Address address, std::size_t bytes) const {
    const Address end = address + bytes;
    for (Address at = address; at < end;) {
      const auto mapping = mappings_.find(at);
      if (mapping == mappings_.end() || at + mapping->second.bytes > end) return false;
      at += mapping->second.bytes;
      if (vendor_.piece_by_piece && at != end) return false;
    }
    return true;
  }

  // As seen on an H100.
  static bool ends_captures(std::string_view symbol) {
    if (symbol == "cuCtxSynchronize" || symbol == "hipDeviceSynchronize") return true;
    if (capture_mode == api::kCaptureRelaxed) return false;
    constexpr std::string_view kUnsafe[] = {"cuEventQuery",  "cuStreamSynchronize",  "cuMemAlloc_v2",
                                            "cuMemFree_v2",  "cuMemHostRegister_v2", "cuMemHostUnregister",
                                            "hipEventQuery", "hipStreamSynchronize", "hipMalloc",
                                            "hipFree",       "hipHostRegister",      "hipHostUnregister"};
    return std::find(std::begin(kUnsafe), std::end(kUnsafe), symbol) != std::end(kUnsafe);
  }

  // Whether streams are being captured: then the work is counted as a node of the graph and not done.
  bool captured() {
    if (setup.capturing) ++calls_["captured"];
    return setup.capturing;
  }
  // With shared queues: what is queued next on the stream waits while too many streams are blocked.
  void come_behind_blocked(api::Stream handle) {
    api::Stream stream = shared_queues_ ? stream_at(handle) : nullptr;
    if (stream == nullptr) return;
    stream->queue([this] {
      while (blocked_ > kHarmless) std::this_thread::sleep_for(std::chrono::microseconds(20));
    });
  }
  void wait_for_blocked(std::unique_lock<std::mutex>& lock, int allowed) {
    while (shared_queues_ && blocked_ > allowed) {
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(20));
      lock.lock();
    }
  }
  void hold_streams(bool held) {
    held_ = held;
    for (api::Stream stream : streams_) stream->hold(held);
  }
  void free_if_unused(std::map<Handle, Physical>::iterator it) {
    if (!it->second.released || it->second.mappings != 0 || it->second.retained != 0) return;
    if (!it->second.imported) used(it->second.device) -= it->second.bytes;
    ::close(it->second.fd);
    physical_.erase(it);
  }

  // The stream, if it is one of the current device's and that may touch all the addresses, and write to one of them.
  api::Code checked(std::initializer_list<Address> addresses, Address written, std::uint64_t bytes, api::Stream handle,
                    api::Stream* stream) {
    *stream = stream_at(handle);
    if (*stream == nullptr || (*stream)->device != current()) return api::kInvalidHandle;
    for (const Address address : addresses) {
      if (reachable(address, bytes, current())) continue;
      poison(current()) = api::kIllegalAddress;
      return api::kIllegalAddress;
    }
    return read_only(written, bytes, current()) ? api::kInvalidValue : api::kSuccess;
  }
  static api::CopyQueue& to_device(api::StreamObject& stream) { return stream.copies_in; }
  static api::CopyQueue& to_host(api::StreamObject& stream) { return stream.copies_out; }
  // Streams are spread over the queues as they come.
  api::Stream new_stream() {
    const auto device = static_cast<std::size_t>(current());
    const auto queue = static_cast<std::size_t>(next_queue_.at(device)++ % copy_queues_);
    return new api::StreamObject(current(), copies_in_.at(device).at(queue), copies_out_.at(device).at(queue));
  }
  // host: the side of the copy that is host memory, null for none. in: which of the stream's queues it goes through,
  // null for none.
  api::Code copy(api::Stream handle, std::initializer_list<Address> addresses, void* destination, const void* source,
                 std::size_t bytes, const void* host, api::CopyQueue& (*in)(api::StreamObject&) = nullptr) {
    api::Stream stream = nullptr;
    api::Code code = checked(addresses, number(destination), bytes, handle, &stream);
    if (code == api::kSuccess && host != nullptr) code = count_host_copy(host, bytes);
    if (code != api::kSuccess) return code;
    if (captured()) return api::kSuccess;
    stream->last_queue = in == nullptr ? nullptr : &in(*stream);
    if (in == nullptr) {
      stream->queue([=] { std::memmove(destination, source, bytes); });
      return code;
    }
    api::CopyQueue& queue = in(*stream);
    stream->queue([=, place = queue.join(), &queue] {
      queue.enter(place);
      std::memmove(destination, source, bytes);
      queue.leave();
    });
    return code;
  }
  // Counts a copy from or to host memory by what that is. One that is pinned in part only is refused, as by a driver.
  api::Code count_host_copy(const void* address, std::uint64_t bytes) {
    const auto range = pinned_around(address, bytes);
    if (range == pinned_.end()) {
      ++calls_["copy, pageable"];
      return api::kSuccess;
    }
    const Address start = number(address);
    if (start < range->first || start + bytes > range->first + range->second.bytes) return api::kInvalidValue;
    ++calls_["copy, pinned"];
    return api::kSuccess;
  }

  const Vendor vendor_;
  std::vector<int> visible_;  // physical numbers; empty: all
  std::array<std::atomic<api::Code>, kMaximumDevices> poison_{};
  std::array<std::uint64_t, kHostNode + 1> used_{};
  std::map<Handle, Physical> physical_;
  Handle next_handle_ = 1;
  ByAddress<std::uint64_t> reservations_;
  ByAddress<Mapping> mappings_;
  ByAddress<Allocation> allocations_;
  ByAddress<Range> pinned_;
  // By device. Streams have references to them.
  using CopyQueues = std::array<std::array<api::CopyQueue, kMaximumCopyQueues>, kMaximumDevices>;
  CopyQueues copies_in_;
  CopyQueues copies_out_;
  std::array<int, kMaximumDevices> next_queue_{};
  int copy_queues_ = 4;
  std::set<api::Stream> streams_;
  // Default streams do not count as open: they are created at the first use of one and stay.
  std::array<std::unique_ptr<api::StreamObject>, kMaximumDevices> defaults_;
  std::set<api::Event> events_;
  std::map<std::string, Fault, std::less<>> faults_;
  std::map<std::string, int, std::less<>> calls_;
  bool held_ = false;
  bool shared_queues_ = false;
  std::atomic<int> blocked_{0};  // streams that wait for a value or for a call of the host
  int leaked_ = 0;               // what was open at the last reset
};

// Each fake's own: the machine, which is never destroyed, for the library may be called until the process ends; and
// what stands against a call on the current device.
Machine& machine();
api::Code readiness(Machine& m);

// What a fake's control does.
inline void plan_failure(const char* symbol, int n, int code, int times) { machine().fail(symbol, n, code, times); }
inline int count_calls(const char* symbol) { return machine().calls(symbol); }
inline void hold(bool held) { machine().hold(held); }
inline void share_queues() { machine().share_queues(); }
inline int read_capture_mode() { return capture_mode; }

}  // namespace fake_gpu

// How a function of the library begins: `m` and `lock` are the machine and its mutex. A planned failure ends it.
#define ENTER(symbol)                         \
  fake_gpu::Machine& m = fake_gpu::machine(); \
  std::unique_lock lock(m.mutex);             \
  if (const api::Code planned = m.enter(symbol); planned != api::kSuccess) return planned
#define ENTER_ON_DEVICE(symbol) \
  ENTER(symbol);                \
  if (const api::Code code = fake_gpu::readiness(m); code != api::kSuccess) return code

// A whole function: CALL(cuMemFree_v2, (CuAddress address), m.free(address)). ON_DEVICE: that needs a current device.
#define CALL(symbol, parameters, work) \
  api::Code symbol parameters {        \
    ENTER(#symbol);                    \
    return work;                       \
  }
#define ON_DEVICE(symbol, parameters, work) \
  api::Code symbol parameters {             \
    ENTER_ON_DEVICE(#symbol);               \
    return work;                            \
  }
