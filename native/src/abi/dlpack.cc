#include "abi/dlpack.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace gpufs {
namespace {

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

}  // namespace

void* export_tensor(const gpufs_dl_tensor& tensor, bool versioned, bool read_only, const std::shared_ptr<void>& keep) {
  if (!versioned) return make<gpufs_dl_legacy>(tensor, keep);
  gpufs_dl_versioned* const managed = make<gpufs_dl_versioned>(tensor, keep);
  managed->major = 1;
  managed->flags = read_only ? kReadOnly : 0;
  return managed;
}

void release_tensor(void* managed, bool versioned) {
  const auto deleter =
      versioned ? static_cast<gpufs_dl_versioned*>(managed)->deleter : static_cast<gpufs_dl_legacy*>(managed)->deleter;
  deleter(managed);
}

}  // namespace gpufs
