#include "abi/dlpack.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace gpufs {
namespace {

// As DLPack's binary interface has them, version 1.0 and before.
struct DlTensor {
  void* data;
  std::int32_t device_type;
  std::int32_t device_id;
  std::int32_t ndim;
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};
static_assert(sizeof(DlTensor) == 48);

struct Legacy {
  DlTensor tensor;
  void* context;
  void (*deleter)(Legacy*);
};

struct Versioned {
  std::uint32_t major;
  std::uint32_t minor;
  void* context;
  void (*deleter)(Versioned*);
  std::uint64_t flags;
  DlTensor tensor;
};

constexpr std::uint64_t kReadOnly = 1;

template <typename Managed>
struct Exported {
  Managed managed{};
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;  // in elements
  std::shared_ptr<void> keep;
};

template <typename Managed>
Managed* make(const gpufs_tensor& tensor, const std::shared_ptr<void>& keep) {
  auto exported = std::make_unique<Exported<Managed>>();
  const auto dimensions = static_cast<std::size_t>(tensor.dimensions);
  exported->shape.assign(tensor.shape, tensor.shape + dimensions);
  exported->strides.resize(dimensions);
  std::int64_t stride = 1;
  for (std::size_t axis = dimensions; axis-- > 0;) {
    exported->strides[axis] = tensor.strides == nullptr ? stride : tensor.strides[axis];
    stride *= exported->shape[axis];
  }
  exported->keep = keep;
  Managed& managed = exported->managed;
  managed.tensor = {reinterpret_cast<void*>(tensor.address),
                    tensor.device_type,
                    tensor.device_id,
                    tensor.dimensions,
                    tensor.type_code,
                    tensor.type_bits,
                    1,
                    exported->shape.data(),
                    exported->strides.data(),
                    0};
  managed.deleter = [](Managed* released) { delete static_cast<Exported<Managed>*>(released->context); };
  managed.context = exported.get();
  return &exported.release()->managed;
}

}  // namespace

void* export_tensor(const gpufs_tensor& tensor, const std::shared_ptr<void>& keep) {
  if (tensor.versioned == 0) return make<Legacy>(tensor, keep);
  Versioned* const managed = make<Versioned>(tensor, keep);
  managed->major = 1;
  managed->flags = tensor.read_only != 0 ? kReadOnly : 0;
  return managed;
}

void release_tensor(void* managed, bool versioned) {
  if (versioned) {
    auto* const tensor = static_cast<Versioned*>(managed);
    tensor->deleter(tensor);
  } else {
    auto* const tensor = static_cast<Legacy*>(managed);
    tensor->deleter(tensor);
  }
}

}  // namespace gpufs
