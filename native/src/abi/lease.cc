// The functions of the C interface for memory that programs share: leases, mappings, DLPack tensors.

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "abi/barrier.h"
#include "abi/handles.h"
#include "base/unique_fd.h"
#include "drivers/driver.h"
#include "drivers/host/write_notice.h"
#include "fuse/inode_table.h"
#include "fuse/mount.h"
#include "gpufs.h"
#include "memory/buffer.h"

namespace gpufs {
namespace {

// The object that a mapping's handle names.
struct Mapping {
  Mapping(std::shared_ptr<Device> on, std::unique_ptr<ImportedRange> imported)
      : device(std::move(on)), range(std::move(imported)) {}

  std::mutex mutex;  // guards the range's growth
  const std::shared_ptr<Device> device;
  const std::unique_ptr<ImportedRange> range;  // destroyed before the device
  std::unique_ptr<WriteNotice> notice;         // destroyed before the range; guarded by `mutex`
};

// The devices that mappings of this process use, each opened once and kept: making a GPU's context takes 100 ms.
Result<std::shared_ptr<Device>> shared_device(const std::string& driver, const std::string& pci_address) {
  static std::mutex& mutex = *new std::mutex;
  static auto& devices = *new std::map<std::pair<std::string, std::string>, std::shared_ptr<Device>>;
  const std::lock_guard lock(mutex);
  std::shared_ptr<Device>& known = devices[{driver, pci_address}];
  if (known) return known;
  Result<std::shared_ptr<Device>> opened = open_device(driver, pci_address);
  if (opened.ok()) known = opened.value();
  return opened;
}

std::vector<ExportedMemory> take_over(const gpufs_shared_piece* pieces, std::uint64_t count) {
  std::vector<ExportedMemory> taken;
  taken.reserve(count);
  for (std::uint64_t i = 0; i < count; ++i) {
    taken.push_back({{pieces[i].offset, pieces[i].bytes}, UniqueFd(pieces[i].fd)});
  }
  return taken;
}

// ---- DLPack tensors: their consumers release them, on any thread ----

static_assert(sizeof(gpufs_dl_tensor) == 48);

constexpr std::uint64_t kReadOnly = 1;

template <typename Managed>
struct Exported {
  Managed managed{};
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;  // in elements
  std::shared_ptr<void> keep;
};

template <typename Managed>
Managed* make(const gpufs_dl_tensor& tensor, const std::shared_ptr<void>& keep) {
  auto exported = std::make_unique<Exported<Managed>>();
  const auto dimensions = static_cast<std::size_t>(tensor.ndim);
  exported->shape.assign(tensor.shape, tensor.shape + dimensions);
  exported->strides.resize(dimensions);
  std::int64_t stride = 1;
  for (std::size_t axis = dimensions; axis-- > 0;) {
    exported->strides[axis] = tensor.strides == nullptr ? stride : tensor.strides[axis];
    stride *= exported->shape[axis];
  }
  exported->keep = keep;
  Managed& managed = exported->managed;
  managed.tensor = tensor;
  managed.tensor.shape = exported->shape.data();
  managed.tensor.strides = exported->strides.data();
  managed.deleter = [](void* released) {
    delete static_cast<Exported<Managed>*>(static_cast<Managed*>(released)->context);
  };
  managed.context = exported.get();
  return &exported.release()->managed;
}

// A gpufs_dl_legacy or gpufs_dl_versioned, which holds `keep` until its deleter is called.
void* export_tensor(const gpufs_dl_tensor& tensor, bool versioned, bool read_only, const std::shared_ptr<void>& keep) {
  if (!versioned) return make<gpufs_dl_legacy>(tensor, keep);
  gpufs_dl_versioned* const managed = make<gpufs_dl_versioned>(tensor, keep);
  managed->major = 1;
  managed->flags = read_only ? kReadOnly : 0;
  return managed;
}

Result<std::optional<std::uint64_t>> placement_of(std::int64_t wanted) {
  if (wanted < 0) return std::optional<std::uint64_t>();
  if (wanted < static_cast<std::int64_t>(kPlacementEnd)) return std::optional(static_cast<std::uint64_t>(wanted));
  return Status(EINVAL, "placement: " + std::to_string(wanted) + " is not below " + std::to_string(kPlacementEnd));
}

}  // namespace

extern "C" {

gpufs_status gpufs_lease_open(gpufs_handle buffer, uint32_t flags, const char* label, int64_t placement,
                              gpufs_handle* lease) {
  return with_handle<Buffer>(buffer, [&](Buffer& found) -> Status {
    const std::optional<std::uint64_t> wanted = TRY(placement_of(placement));
    const gpufs_handle owner = TRY(HandleTable::instance().owner_of(buffer));
    return open_handle(found.lease((flags & GPUFS_LEASE_WRITE) != 0, (flags & GPUFS_LEASE_LOCAL) == 0,
                                   label == nullptr ? "" : label, wanted),
                       owner, lease);
  });
}

gpufs_status gpufs_lease_open_again(gpufs_handle mount, uint64_t ino, uint32_t flags, uint64_t bytes, const char* label,
                                    int64_t placement, gpufs_handle* lease) {
  return with_handle<fuse::Mount>(mount, [&](fuse::Mount& found) -> Status {
    const std::shared_ptr<fuse::Inode> inode = found.table().find(ino);
    if (!inode || !inode->buffer()) return Status(ENOENT, "no file with the inode " + std::to_string(ino));
    return open_handle(inode->buffer()->lease((flags & GPUFS_LEASE_WRITE) != 0, /*exports=*/true,
                                              label == nullptr ? "" : label, TRY(placement_of(placement)), bytes),
                       mount, lease);
  });
}

gpufs_status gpufs_lease_info_get(gpufs_handle lease, gpufs_lease_info* info) {
  return with_handle<Buffer::Lease>(lease, [&](Buffer::Lease& found) {
    *info = {found.bytes(), found.address(), found.placement()};
  });
}

gpufs_status gpufs_lease_refresh(gpufs_handle lease) {
  return with_handle<Buffer::Lease>(lease, [](Buffer::Lease& found) { return found.refresh(); });
}

gpufs_status gpufs_lease_pieces(gpufs_handle lease, uint64_t from, gpufs_shared_piece* pieces, uint64_t capacity,
                                uint64_t* count) {
  return with_handle<Buffer::Lease>(lease, [&](Buffer::Lease& found) -> Status {
    *count = 0;
    std::vector<ExportedMemory> exported = TRY(found.pieces(from, capacity));
    for (ExportedMemory& piece : exported) {
      pieces[(*count)++] = {piece.offset, piece.bytes, piece.descriptor.release(), 0};
    }
    return {};
  });
}

gpufs_status gpufs_mapping_open(const char* driver, const char* pci_address, uint32_t flags, uint64_t reserve_bytes,
                                gpufs_handle* mapping) {
  return catch_all([&]() -> Status {
    const ImportAccess access = (flags & GPUFS_MAPPING_PRIVATE) != 0 ? ImportAccess::kPrivate
                                : (flags & GPUFS_LEASE_WRITE) != 0   ? ImportAccess::kWrite
                                                                     : ImportAccess::kRead;
    std::shared_ptr<Device> device = TRY(shared_device(driver, pci_address));
    std::unique_ptr<ImportedRange> range = TRY(device->create_import(reserve_bytes, access));
    return open_handle<Mapping>(std::make_shared<Mapping>(std::move(device), std::move(range)), 0, mapping);
  });
}

gpufs_status gpufs_mapping_add(gpufs_handle mapping, const gpufs_shared_piece* pieces, uint64_t count) {
  return catch_all([&]() -> Status {
    std::vector<ExportedMemory> taken = take_over(pieces, count);
    std::shared_ptr<Mapping> found = TRY(HandleTable::instance().get<Mapping>(mapping));
    const std::lock_guard lock(found->mutex);
    for (ExportedMemory& piece : taken) {
      TRY(found->range->add(piece));
      piece.descriptor.reset();
    }
    return {};
  });
}

gpufs_status gpufs_mapping_clear(gpufs_handle mapping) {
  return with_handle<Mapping>(mapping, [](Mapping& found) -> Status {
    const std::lock_guard lock(found.mutex);
    return found.range->clear();
  });
}

gpufs_status gpufs_mapping_read(gpufs_handle mapping, uint64_t offset, void* destination, uint64_t bytes) {
  return with_handle<Mapping>(mapping, [&](Mapping& found) -> Status {
    {
      const std::lock_guard lock(found.mutex);
      const std::uint64_t mapped = found.range->bytes();
      if (offset > mapped || bytes > mapped - offset) {
        return {EINVAL, std::to_string(bytes) + " bytes at offset " + std::to_string(offset) + ", where " +
                            std::to_string(mapped) + " are mapped"};
      }
    }
    found.device->synchronize();
    return found.device->copy_out(destination, found.range->base() + offset, static_cast<std::size_t>(bytes));
  });
}

gpufs_status gpufs_mapping_info_get(gpufs_handle mapping, gpufs_mapping_info* info) {
  return with_handle<Mapping>(mapping, [&](Mapping& found) {
    const std::lock_guard lock(found.mutex);
    *info = {found.range->base(), found.range->bytes(), found.range->capacity(), found.device->info().index};
  });
}

gpufs_status gpufs_mapping_explain_accesses(gpufs_handle mapping, const char* text) {
  return with_handle<Mapping>(mapping, [&](Mapping& found) -> Status {
    const std::lock_guard lock(found.mutex);
    found.notice.reset();
    const ImportedRange& range = *found.range;
    if (*text == '\0') return {};
    found.notice = WriteNotice::watch(range.base(), static_cast<std::size_t>(range.capacity()), text);
    return {};
  });
}

gpufs_status gpufs_tensor_export(gpufs_handle owner, void* object, void (*release)(void*),
                                 const gpufs_dl_tensor* tensor, int32_t versioned, int32_t read_only, void** managed) {
  return catch_all([&]() -> Status {
    std::shared_ptr<void> keep;
    if (owner == 0) {
      keep = std::shared_ptr<void>(object, release);
    } else if (Result<std::shared_ptr<Buffer::Lease>> lease = HandleTable::instance().get<Buffer::Lease>(owner);
               lease.ok()) {
      keep = lease.take();
    } else {
      keep = TRY(HandleTable::instance().get<Mapping>(owner));
    }
    *managed = export_tensor(*tensor, versioned != 0, read_only != 0, keep);
    return {};
  });
}

void gpufs_tensor_release(void* managed, int32_t versioned) {
  const auto deleter = versioned != 0 ? static_cast<gpufs_dl_versioned*>(managed)->deleter
                                      : static_cast<gpufs_dl_legacy*>(managed)->deleter;
  deleter(managed);
}

}  // extern "C"

}  // namespace gpufs
