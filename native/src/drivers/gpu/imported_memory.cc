#include "drivers/gpu/imported_memory.h"

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <mutex>
#include <utility>
#include <vector>

#include "base/math.h"

namespace gpufs::gpu {

Result<std::unique_ptr<ImportedRange>> ImportedMemory::create(std::shared_ptr<GpuDevice> device, std::uint64_t capacity,
                                                              bool writable) {
  const auto& import = device->functions().memory_import;
  if (!device->virtual_memory() || !import) {
    return device->lacks("cannot map memory of other programs", import.symbol());
  }
  const std::uint64_t granule = device->info().granule;
  if (capacity == 0 || capacity > UINT64_MAX - granule) return Status{EINVAL, "a mapping of size zero, or too large"};
  capacity = round_up(capacity, granule);
  const Current current(*device);
  if (!current.status().ok()) return current.status();
  DeviceAddress base = 0;
  Status status = device->call(device->functions().address_reserve, &base, capacity, 0, 0, 0);
  if (!status.ok()) return status;
  return std::unique_ptr<ImportedRange>(new ImportedMemory(std::move(device), base, capacity, writable));
}

struct ImportedMemory::Kept {
  std::mutex mutex;  // guards all below
  std::vector<Mapped> mapped;

  static Kept& instance() {
    static Kept& one = *new Kept;  // never destroyed: the process's end releases all
    return one;
  }
};

ImportedMemory::~ImportedMemory() {
  Kept& kept = Kept::instance();
  std::vector<Mapped> ended;
  {
    const std::lock_guard lock(kept.mutex);
    const auto others = std::partition(kept.mapped.begin(), kept.mapped.end(),
                                       [&](const Mapped& one) { return one.device != mapped_.device; });
    std::move(others, kept.mapped.end(), std::back_inserter(ended));
    kept.mapped.erase(others, kept.mapped.end());
  }
  ended.push_back(std::move(mapped_));
  GpuDevice& device = *ended.back().device;
  // Tensors are freed while kernels that read them are still queued, and unmapping does not wait for those. While the
  // program captures a graph, waiting is impossible: then it is left to the next mapping of the device that ends.
  if (!device.try_synchronize().ok() && device.health().ok()) {
    const std::lock_guard lock(kept.mutex);
    std::move(ended.begin(), ended.end(), std::back_inserter(kept.mapped));
    return;
  }
  for (const Mapped& one : ended) one.unmap();
}

void ImportedMemory::Mapped::unmap() const {
  const Current current(*device);
  const Functions& functions = device->functions();
  const std::uint64_t end = pieces.empty() ? 0 : pieces.rbegin()->first + pieces.rbegin()->second;
  // Failures have no remedy: the driver then keeps the addresses and the memory until the process ends.
  if (!device->spans_pieces() || (end > 0 && functions.memory_unmap(base, end) != api::kSuccess)) {
    for (const auto& [offset, bytes] : pieces) functions.memory_unmap(base + offset, bytes);
  }
  functions.address_free(base, capacity);
}

Status ImportedMemory::map(const ExportedMemory& piece) {
  GpuDevice& device = *mapped_.device;
  const Current current(device);
  if (!current.status().ok()) return current.status();
  const Functions& functions = device.functions();
  PhysicalHandle handle = 0;
  Status status = device.import_physical(piece.descriptor.get(), &handle);
  if (!status.ok()) return status;
  const DeviceAddress address = mapped_.base + piece.offset;
  status = device.map(address, piece.bytes, handle);
  functions.memory_release(handle);  // the mapping holds the memory
  if (!status.ok()) return status;
  status = device.allow_own(address, piece.bytes, writable_);
  if (!status.ok()) {
    functions.memory_unmap(address, piece.bytes);
    return status;
  }
  mapped_.pieces.emplace(piece.offset, piece.bytes);
  return {};
}

}  // namespace gpufs::gpu
