#include "drivers/cuda/cuda_context.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <fstream>
#include <utility>

#include "base/log.h"

namespace gpufs::cuda {
namespace {

constexpr std::uint64_t kPlainGranule = std::uint64_t{2} << 20;

// The NUMA node that the kernel gives for a PCI device, -1 where it gives none.
int numa_node_of(const std::string& pci_address) {
  std::ifstream file("/sys/bus/pci/devices/" + pci_address + "/numa_node");
  int node = -1;
  if (!(file >> node)) return -1;
  return node;
}

}  // namespace

Result<std::shared_ptr<Context>> Context::open(std::shared_ptr<const Library> library, int index, std::uint64_t cap) {
  CuDevice device = 0;
  const CuResult code = library->call<&Functions::device_get>(&device, index);
  if (code != kCuSuccess) {
    return Status{ENODEV, "gpu " + std::to_string(index) + ": cuDeviceGet: " + library->describe(code), code};
  }
  std::shared_ptr<Context> context(new Context(std::move(library), device, cap));
  context->info_.index = index;
  if (Status status = context->describe_device(); !status.ok()) return status;
  return context;
}

Status Context::describe_device() {
  std::array<char, 128> text{};
  Status status =
      check(library_->call<&Functions::device_name>(text.data(), int{text.size()}, device_), "cuDeviceGetName");
  if (!status.ok()) return status;
  info_.name = text.data();

  text.fill('\0');
  status = check(library_->call<&Functions::device_pci_address>(text.data(), int{text.size()}, device_),
                 "cuDeviceGetPCIBusId");
  if (!status.ok()) return status;
  info_.pci_address = text.data();
  std::transform(info_.pci_address.begin(), info_.pci_address.end(), info_.pci_address.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  info_.numa_node = numa_node_of(info_.pci_address);

  std::size_t total = 0;
  status = check(library_->call<&Functions::device_total_memory>(&total, device_), "cuDeviceTotalMem");
  if (!status.ok()) return status;
  // Every call makes the context current for itself, which is far cheaper than waking another thread: growing a file by
  // a granule costs 50 us here.
  info_.binds_threads = false;
  info_.total_bytes = cap_ != 0 ? std::min<std::uint64_t>(cap_, total) : total;

  const auto attribute = [this](int which) {
    int value = 0;
    // A driver that does not know an attribute has not got what it stands for either.
    return library_->call<&Functions::device_attribute>(&value, which, device_) == kCuSuccess && value != 0;
  };
  virtual_memory_ = library_->has_virtual_memory() && attribute(kCuAttributeVirtualMemory);
  read_only_pinning_ = attribute(kCuAttributeReadOnlyHostRegister);

  status = check(library_->call<&Functions::primary_context_retain>(&context_, device_), "cuDevicePrimaryCtxRetain",
                 Purpose::kHost);
  if (!status.ok()) {
    context_ = nullptr;
    return status;
  }
  if (!virtual_memory_) {
    info_.granule = kPlainGranule;
    info_.reserve_copies = true;
    return {};
  }
  allocation_.type = kCuAllocationPinned;
  allocation_.location = {kCuLocationDevice, device_};
  if (attribute(kCuAttributeExportDescriptor)) allocation_.handle_types = kCuHandleDescriptor;
  if (attribute(kCuAttributeDirectRdmaWithVirtualMemory)) allocation_.flags.direct_rdma = 1;
  access_ = {{allocation_.location, kCuAccessReadWrite}};

  const Current current(*this);
  if (!current.status().ok()) return current.status();
  std::size_t granule = 0;
  status = check(library_->call<&Functions::granularity>(&granule, &allocation_, unsigned{kCuGranularityMinimum}),
                 "cuMemGetAllocationGranularity");
  if (!status.ok()) return status;
  info_.granule = granule;
  return {};
}

Context::~Context() {
  if (context_ == nullptr) return;
  // Nothing can be done about failures here, and after a fatal one all of these fail.
  {
    const Current current(*this);
    for (CuStream stream : idle_streams_) library_->call<&Functions::stream_destroy>(stream);
  }
  library_->call<&Functions::primary_context_release>(device_);
}

Status Context::check(CuResult code, const char* call, Purpose purpose) {
  if (code == kCuSuccess) return {};
  std::string text = "gpu " + std::to_string(info_.index) + ": " + call + ": " + library_->describe(code);
  const int error = errno_of(code, purpose);
  if (error == ENOSPC) text = "No space left on device (" + text + ")";
  Status status{error, std::move(text), code};
  if (is_fatal(code)) fail(status);
  return status;
}

void Context::fail(const Status& reason) {
  {
    const std::scoped_lock lock(failure_mutex_);
    if (!failure_.ok()) return;
    failure_ = Status{EIO, "out of service since " + reason.message(), reason.device_code()};
    failed_.store(true, std::memory_order_release);
  }
  log_error("gpu " + std::to_string(info_.index) + " is out of service: " + reason.message());
}

Status Context::health() {
  if (!failed_.load(std::memory_order_acquire)) return {};
  const std::scoped_lock lock(failure_mutex_);
  return failure_;
}

Status Context::take(std::uint64_t bytes) {
  std::uint64_t taken = taken_.load(std::memory_order_relaxed);
  do {
    if (cap_ != 0 && (taken > cap_ || bytes > cap_ - taken)) {
      return {ENOSPC, "No space left on device (gpu " + std::to_string(info_.index) + ": " + std::to_string(bytes) +
                          " more bytes would exceed the cap of " + std::to_string(cap_) + ")"};
    }
  } while (!taken_.compare_exchange_weak(taken, taken + bytes, std::memory_order_relaxed));
  return {};
}

Result<MemoryInfo> Context::memory() {
  const Current current(*this);
  if (!current.status().ok()) return current.status();
  std::size_t free_bytes = 0;
  std::size_t total = 0;
  Status status = check(library_->call<&Functions::memory_info>(&free_bytes, &total), "cuMemGetInfo");
  if (!status.ok()) return status;
  MemoryInfo info{info_.total_bytes, free_bytes};
  if (cap_ != 0) {
    const std::uint64_t taken = taken_.load(std::memory_order_relaxed);
    info.free_bytes = std::min<std::uint64_t>(info.free_bytes, taken < cap_ ? cap_ - taken : 0);
  }
  return info;
}

Result<CuStream> Context::borrow_stream() {
  {
    const std::scoped_lock lock(streams_mutex_);
    if (!idle_streams_.empty()) {
      CuStream stream = idle_streams_.back();
      idle_streams_.pop_back();
      return stream;
    }
  }
  CuStream stream = nullptr;
  Status status =
      check(library_->call<&Functions::stream_create>(&stream, unsigned{kCuStreamNonBlocking}), "cuStreamCreate");
  if (!status.ok()) return status;
  return stream;
}

void Context::return_stream(CuStream stream) {
  const std::scoped_lock lock(streams_mutex_);
  idle_streams_.push_back(stream);
}

Current::Current(Context& context) : context_(context), status_(context.health()) {
  if (!status_.ok()) return;
  CuContext before = nullptr;
  status_ = context_.check(context_.library().call<&Functions::context_get>(&before), "cuCtxGetCurrent");
  if (!status_.ok() || before == context_.handle()) return;
  status_ = context_.check(context_.library().call<&Functions::context_push>(context_.handle()), "cuCtxPushCurrent");
  pushed_ = status_.ok();
}

Current::~Current() {
  if (!pushed_) return;
  CuContext popped = nullptr;
  context_.library().call<&Functions::context_pop>(&popped);
}

SynchronousWork::SynchronousWork(Context& context) : context_(context), current_(context), status_(current_.status()) {
  if (!status_.ok()) return;
  Result<CuStream> stream = context_.borrow_stream();
  if (stream.ok()) {
    stream_ = stream.value();
  } else {
    status_ = stream.status();
  }
}

SynchronousWork::~SynchronousWork() {
  if (stream_ == nullptr) return;
  if (!finished_) static_cast<void>(finish());
  context_.return_stream(stream_);
}

Status SynchronousWork::finish() {
  finished_ = true;
  return context_.check(context_.library().call<&Functions::stream_synchronize>(stream_), "cuStreamSynchronize");
}

}  // namespace gpufs::cuda
