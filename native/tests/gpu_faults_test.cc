// Failures of a GPU's driver, planned through the fake of its vendor's library: the right errno and text, everything
// unchanged, nothing left open.
#include <array>
#include <cerrno>
#include <string>
#include <thread>

#include "cuda_test_support.h"
#include "drivers/cuda/cuda_api.h"
#include "drivers/gpu/vendor_library.h"
#include "drivers/hip/hip_api.h"
#include "hip_test_support.h"

namespace gpufs::gpu_test {
namespace {

// The symbols of a vendor's functions.
struct Symbols {
  const char *device_count, *device_name, *device_pci_address, *device_total_memory, *granularity;
  const char *address_reserve, *memory_create, *memory_map, *memory_unmap, *memory_set_access, *memory_export;
  const char *copy_to_host, *copy_on_device, *fill, *host_register;
  const char *stream_create, *stream_synchronize, *event_query;
};

constexpr Symbols kCudaSymbols = {
    .device_count = "cuDeviceGetCount",
    .device_name = "cuDeviceGetName",
    .device_pci_address = "cuDeviceGetPCIBusId",
    .device_total_memory = "cuDeviceTotalMem_v2",
    .granularity = "cuMemGetAllocationGranularity",
    .address_reserve = "cuMemAddressReserve",
    .memory_create = "cuMemCreate",
    .memory_map = "cuMemMap",
    .memory_unmap = "cuMemUnmap",
    .memory_set_access = "cuMemSetAccess",
    .memory_export = "cuMemExportToShareableHandle",
    .copy_to_host = "cuMemcpyDtoHAsync_v2",
    .copy_on_device = "cuMemcpyDtoDAsync_v2",
    .fill = "cuMemsetD8Async",
    .host_register = "cuMemHostRegister_v2",
    .stream_create = "cuStreamCreate",
    .stream_synchronize = "cuStreamSynchronize",
    .event_query = "cuEventQuery",
};
constexpr Symbols kHipSymbols = {
    .device_count = "hipGetDeviceCount",
    .device_name = "hipDeviceGetName",
    .device_pci_address = "hipDeviceGetPCIBusId",
    .device_total_memory = "hipDeviceTotalMem",
    .granularity = "hipMemGetAllocationGranularity",
    .address_reserve = "hipMemAddressReserve",
    .memory_create = "hipMemCreate",
    .memory_map = "hipMemMap",
    .memory_unmap = "hipMemUnmap",
    .memory_set_access = "hipMemSetAccess",
    .memory_export = "hipMemExportToShareableHandle",
    .copy_to_host = "hipMemcpyDtoHAsync",
    .copy_on_device = "hipMemcpyDtoDAsync",
    .fill = "hipMemsetD8Async",
    .host_register = "hipHostRegister",
    .stream_create = "hipStreamCreateWithFlags",
    .stream_synchronize = "hipStreamSynchronize",
    .event_query = "hipEventQuery",
};

struct Vendor {
  const char* name;
  const FakeGpuControl& (*fake)();
  Result<std::unique_ptr<Driver>> (*open)(const DriverOptions& options);
  Symbols symbols;
  std::vector<const char*> more_steps_of_opening;
  const char* illegal_address;  // as the vendor calls the code
  const char* unknown;          // a code that it has no name for
  std::vector<api::Code> fatal;
  std::vector<api::Code> harmless;
};

const FakeGpuControl& fake_cuda() { return cuda_test::fake(); }
const FakeGpuControl& fake_hip() { return hip_test::fake(); }

const std::vector<Vendor>& vendors() {
  static const std::vector<Vendor> all = {
      {"Cuda",
       fake_cuda,
       cuda_test::open_fake,
       kCudaSymbols,
       {"cuDeviceGet", "cuDevicePrimaryCtxRetain"},
       "CUDA_ERROR_ILLEGAL_ADDRESS",
       "unknown CUDA error",
       {214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 999},
       {1, 2, 400, 701, 800, 801}},
      {"Hip",
       fake_hip,
       hip_test::open_fake,
       kHipSymbols,
       {},
       "hipErrorIllegalAddress",
       "hipErrorUnknown",
       {53, 214, 700, 702, 709, 710, 719},
       {1, 2, 400, 701, 801, 999}},
  };
  return all;
}

class GpuFaults : public FakeGpu, public ::testing::WithParamInterface<std::size_t> {
 protected:
  GpuFaults() : FakeGpu(vendor().fake(), vendor().open) {}
  static const Vendor& vendor() { return vendors().at(GetParam()); }
  static const Symbols& symbols() { return vendor().symbols; }
  [[nodiscard]] const FakeGpuControl& fake() const { return control_; }
  [[nodiscard]] FakeGpuState fake_state() const { return state_of(control_); }
  void expect_zeros(const Filled& filled, std::uint64_t offset, std::uint64_t bytes) {
    std::vector<std::byte> back(bytes, std::byte{1});
    EXPECT_OK(device().copy_out(back.data(), filled.range->base() + offset, bytes));
    EXPECT_TRUE(testing::all_zero(back));
  }
};

INSTANTIATE_TEST_SUITE_P(All, GpuFaults, ::testing::Range(std::size_t{0}, vendors().size()),
                         [](const auto& chosen) { return std::string(vendors().at(chosen.param).name); });

TEST_P(GpuFaults, EveryStepOfOpeningMayFail) {
  setup_.devices = 2;
  fake().reset(&setup_);
  const int before = fake_state().contexts;  // other tests may have left devices open
  std::vector<const char*> steps = vendor().more_steps_of_opening;
  steps.insert(steps.end(), {symbols().device_count, symbols().device_name, symbols().device_pci_address,
                             symbols().device_total_memory, symbols().granularity});
  for (const char* symbol : steps) {
    for (const int n : {1, 2}) {
      if (n == 2 && std::string(symbol) == symbols().device_count) continue;
      fake().fail(symbol, n, api::kNotInitialized, 1);
      EXPECT_FALSE(open_driver().ok()) << symbol;
      EXPECT_EQ(fake_state().contexts, before) << symbol;
    }
  }
}

TEST_P(GpuFaults, DevicesAreCounted) {
  setup_.devices = 2;
  fake().reset(&setup_);
  DriverOptions options;
  options.devices = 3;
  EXPECT_EQ(open_driver(options).error(), ENODEV);
  options.devices = 1;
  EXPECT_EQ(must(open_driver(options))->devices().size(), 1U);
  options.devices = 0;
  EXPECT_EQ(must(open_driver(options))->devices().size(), 2U);
  options.devices = -1;
  EXPECT_EQ(open_driver(options).error(), EINVAL);
  setup_.devices = 0;
  fake().reset(&setup_);
  EXPECT_EQ(open_driver().error(), ENODEV);
}

TEST_P(GpuFaults, PopulateIsAllOrNothing) {
  open();
  auto memory = must(device().create_memory());
  auto range = must(memory->reserve(4096 * kMiB));
  ASSERT_OK(memory->populate(0, kGranule));
  const FakeGpuState before = fake_state();
  struct Plan {
    const char* symbol;
    int n;
    api::Code code;
    int error;
  };
  for (const Plan& plan :
       {Plan{symbols().memory_create, 1, api::kOutOfMemory, ENOSPC},
        Plan{symbols().memory_create, 3, api::kOutOfMemory, ENOSPC},
        Plan{symbols().memory_map, 1, api::kInvalidValue, EIO},
        Plan{symbols().memory_map, 3, api::kOutOfMemory, ENOSPC},
        Plan{symbols().memory_set_access, 1, api::kInvalidValue, EIO}, Plan{symbols().fill, 1, api::kInvalidValue, EIO},
        Plan{symbols().stream_synchronize, 1, api::kInvalidValue, EIO}}) {
    fake().fail(plan.symbol, plan.n, plan.code, 1);
    const Status status = memory->populate(kGranule, 2700 * kMiB);
    EXPECT_EQ(status.error(), plan.error) << plan.symbol;
    EXPECT_EQ(status.device_code(), plan.code) << plan.symbol;
    EXPECT_NE(status.message().find("gpu 0: " + gpu::public_name(plan.symbol) + ": "), std::string::npos)
        << status.message();
    const FakeGpuState after = fake_state();
    EXPECT_EQ(after.bytes_used, before.bytes_used) << plan.symbol;
    EXPECT_EQ(after.handles, before.handles) << plan.symbol;
    EXPECT_EQ(after.mappings, before.mappings) << plan.symbol;
  }
  EXPECT_OK(device().health());
  EXPECT_OK(memory->populate(kGranule, 2700 * kMiB));
  EXPECT_EQ(fake_state().handles, 4);  // 1024 + 1024 + 652 MiB beside the first
}

TEST_P(GpuFaults, ReserveFailsAndTheEarlierRangeStays) {
  open();
  Filled filled = fill(8);
  const FakeGpuState before = fake_state();
  fake().fail(symbols().address_reserve, 1, api::kOutOfMemory, 1);
  EXPECT_EQ(filled.memory->reserve(64 * kGranule).error(), ENOMEM);
  for (const char* symbol : {symbols().memory_map, symbols().memory_set_access}) {
    fake().fail(symbol, 1, api::kInvalidValue, 1);
    EXPECT_EQ(filled.memory->reserve(64 * kGranule).error(), EIO);
    EXPECT_EQ(fake_state().mappings, before.mappings);
    EXPECT_EQ(fake_state().reservations, before.reservations);
  }
  EXPECT_EQ(filled.memory->reserve(kGranule).error(), EINVAL);  // smaller than what is there
  EXPECT_EQ(filled.memory->reserve(0).error(), EINVAL);
  expect_content(filled, 0, 8 * kGranule);
  EXPECT_OK(filled.memory->populate(8 * kGranule, kGranule));
}

TEST_P(GpuFaults, AFailedSplitLeavesThePieceAsItWas) {
  open();
  struct Plan {
    const char* symbol;
    int n;
    int times = 1;
  };
  // Two parts of the piece stay: they are copied to memory that is mapped elsewhere and then unmapped there, and then
  // replace the old mapping.
  for (const auto& [symbol, n, times] :
       {Plan{symbols().address_reserve, 1}, Plan{symbols().memory_create, 1}, Plan{symbols().memory_create, 2},
        Plan{symbols().memory_map, 1}, Plan{symbols().memory_map, 3}, Plan{symbols().memory_map, 3, 3},
        Plan{symbols().memory_map, 4}, Plan{symbols().memory_set_access, 2}, Plan{symbols().memory_set_access, 3, 2},
        Plan{symbols().memory_set_access, 4, 3}, Plan{symbols().memory_unmap, 3}, Plan{symbols().copy_on_device, 1},
        Plan{symbols().stream_synchronize, 1}}) {
    for (const api::Code code : {api::kOutOfMemory, api::kInvalidValue}) {
      SCOPED_TRACE(std::string(symbol) + " " + std::to_string(n) + ": " + std::to_string(code));
      Filled filled = fill(8);
      const FakeGpuState before = fake_state();
      fake().fail(symbol, n, code, times);
      filled.memory->release(3 * kGranule, kGranule);
      EXPECT_EQ(fake_state().bytes_used, before.bytes_used);
      EXPECT_EQ(fake_state().mappings, before.mappings);
      EXPECT_EQ(fake_state().reservations, before.reservations);
      expect_content(filled, 0, 3 * kGranule);
      expect_content(filled, 4 * kGranule, 4 * kGranule);
      // The next release of a part tries again, and succeeds.
      filled.memory->release(6 * kGranule, kGranule);
      EXPECT_EQ(fake_state().bytes_used, 6 * kGranule);
      expect_content(filled, 0, 3 * kGranule);
      expect_content(filled, 4 * kGranule, 2 * kGranule);
      expect_content(filled, 7 * kGranule, kGranule);
      EXPECT_OK(filled.memory->populate(3 * kGranule, kGranule));
      expect_zeros(filled, 3 * kGranule, kGranule);
      EXPECT_OK(device().health());
    }
  }
}

TEST_P(GpuFaults, MemoryThatCannotBeUnmappedIsReused) {
  open();
  Filled filled = fill(8);
  fake().fail(symbols().memory_unmap, 1, api::kInvalidValue, 1);
  filled.memory->release(0, 8 * kGranule);
  EXPECT_EQ(fake_state().bytes_used, 8 * kGranule);
  EXPECT_OK(filled.memory->populate(2 * kGranule, 3 * kGranule));
  expect_zeros(filled, 2 * kGranule, 3 * kGranule);
  EXPECT_EQ(fake_state().bytes_used, 8 * kGranule);
  filled.memory->release(2 * kGranule, 3 * kGranule);
  EXPECT_EQ(fake_state().bytes_used, 0U);

  // Mapped, but without access: access is given before it is used.
  fake().fail(symbols().memory_set_access, 1, api::kInvalidValue, 1);
  fake().fail(symbols().memory_unmap, 1, api::kInvalidValue, 1);
  EXPECT_EQ(filled.memory->populate(0, 4 * kGranule).error(), EIO);
  EXPECT_EQ(fake_state().bytes_used, 4 * kGranule);
  EXPECT_OK(filled.memory->populate(0, 8 * kGranule));
  expect_zeros(filled, 0, 8 * kGranule);
  filled.memory->release(0, 8 * kGranule);
  EXPECT_EQ(fake_state().bytes_used, 0U);

  // A range that is released tries twice.
  ASSERT_OK(filled.memory->populate(0, 8 * kGranule));
  fake().fail(symbols().memory_unmap, 1, api::kInvalidValue, 1);
  filled.memory.reset();
  filled.range.reset();
  EXPECT_EQ(fake_state().bytes_used, 0U);
  EXPECT_EQ(fake_state().reservations, 0);
}

TEST_P(GpuFaults, SeveralSpansArePopulatedTogetherOrNotAtAll) {
  open();
  Filled filled = fill(8);
  filled.memory->release(2 * kGranule, kGranule);
  const FakeGpuState before = fake_state();
  const std::array spans{MemorySpan{2 * kGranule, kGranule}, MemorySpan{8 * kGranule, 4 * kGranule},
                         MemorySpan{16 * kGranule, kGranule}};
  for (const char* symbol :
       {symbols().memory_create, symbols().memory_map, symbols().memory_set_access, symbols().fill}) {
    fake().fail(symbol, 3, api::kOutOfMemory, 1);
    EXPECT_FALSE(filled.memory->populate(spans).ok()) << symbol;
    EXPECT_EQ(fake_state().bytes_used, before.bytes_used);
    EXPECT_EQ(fake_state().mappings, before.mappings);
  }
  ASSERT_OK(filled.memory->populate(spans));
  expect_zeros(filled, 2 * kGranule, kGranule);
  expect_zeros(filled, 16 * kGranule, kGranule);
  expect_content(filled, 3 * kGranule, 5 * kGranule);
  filled.memory->release(spans);
  EXPECT_EQ(fake_state().bytes_used, before.bytes_used);
  expect_content(filled, 3 * kGranule, 5 * kGranule);
}

TEST_P(GpuFaults, ALostMappingPutsTheDeviceOutOfService) {
  open();
  Filled filled = fill(8);
  fake().fail(symbols().memory_map, 3, api::kInvalidValue, 100);  // two for the copy, and then all fail
  filled.memory->release(3 * kGranule, kGranule);
  EXPECT_EQ(device().health().error(), EIO);
  EXPECT_NE(device().health().message().find("a mapping could not be restored"), std::string::npos);
}

TEST_P(GpuFaults, FailuresReportTheVendorsCode) {
  open();
  Filled filled = fill(2);
  constexpr api::Code kNameless = 900;
  std::byte byte{};
  fake().fail(symbols().copy_to_host, 1, kNameless, 1);
  const Status status = device().copy_out(&byte, filled.range->base(), 1);
  EXPECT_EQ(status.error(), EIO);
  EXPECT_EQ(status.device_code(), kNameless);
  EXPECT_EQ(status.message(),
            "gpu 0: " + gpu::public_name(symbols().copy_to_host) + ": " + vendor().unknown + " (900)");
  EXPECT_OK(device().health());
  EXPECT_OK(device().copy_out(&byte, filled.range->base(), 1));

  std::vector<std::byte> memory(kMiB);
  fake().fail(symbols().host_register, 1, api::kOutOfMemory, 1);
  EXPECT_EQ(device().pin(memory.data(), memory.size()).error(), ENOMEM);
  fake().fail(symbols().host_register, 1, api::kNotSupported, 1);
  EXPECT_EQ(device().pin(memory.data(), memory.size()).error(), EOPNOTSUPP);
  EXPECT_OK(device().health());
}

TEST_P(GpuFaults, AFatalFailureStaysWithItsDevice) {
  FakeGpuSetup setup;
  setup.devices = 2;
  open(setup);
  Filled filled = fill(2);
  auto stream = must(device().create_stream());
  auto event = must(device().create_event());
  std::byte byte{};
  fake().fail(symbols().stream_synchronize, 1, api::kIllegalAddress, 1);
  const Status status = device().copy_out(&byte, filled.range->base(), 1);
  EXPECT_EQ(status.error(), EIO);
  EXPECT_EQ(status.device_code(), api::kIllegalAddress);
  const Status health = device().health();
  EXPECT_EQ(health.error(), EIO);
  EXPECT_EQ(health.device_code(), api::kIllegalAddress);
  EXPECT_EQ(health.message(), "out of service since gpu 0: " + gpu::public_name(symbols().stream_synchronize) + ": " +
                                  vendor().illegal_address + " (700): as the test planned");
  const int copies = fake().calls(symbols().copy_to_host);
  EXPECT_EQ(device().copy_out(&byte, filled.range->base(), 1).error(), EIO);
  EXPECT_EQ(fake().calls(symbols().copy_to_host), copies);  // the vendor is not called any more
  EXPECT_EQ(filled.memory->populate(4 * kGranule, kGranule).error(), EIO);
  filled.memory->release(0, kGranule);
  EXPECT_EQ(event->query().error(), EIO);
  EXPECT_EQ(stream->synchronize().error(), EIO);
  EXPECT_EQ(device().memory().error(), EIO);
  EXPECT_EQ(device().create_memory().error(), EIO);

  EXPECT_OK(device(1).health());
  auto memory = must(device(1).create_memory());
  auto range = must(memory->reserve(kGranule));
  ASSERT_OK(memory->populate(0, kGranule));
  EXPECT_OK(device(1).copy_out(&byte, range->base(), 1));
}

TEST_P(GpuFaults, FatalCodesAndOnlyTheyPutTheDeviceOutOfService) {
  std::vector<api::Code> codes = vendor().fatal;
  codes.insert(codes.end(), vendor().harmless.begin(), vendor().harmless.end());
  for (std::size_t i = 0; i < codes.size(); ++i) {
    driver_.reset();
    open();
    fake().fail(symbols().stream_create, 1, codes[i], 1);
    EXPECT_FALSE(device().create_stream().ok());
    EXPECT_EQ(device().health().device_code(), i < vendor().fatal.size() ? codes[i] : 0);
  }
  driver_.reset();
}

TEST_P(GpuFaults, EventsWaitUntilTheWorkIsDone) {
  open();
  Filled filled = fill(1);
  auto one = must(device().create_stream());
  auto two = must(device().create_stream());
  auto loaded = must(device().create_event());
  auto stored = must(device().create_event());
  const std::vector<std::byte> data = pattern(4096, 5);
  std::vector<std::byte> back(data.size());
  fake().hold(true);
  ASSERT_OK(one->copy_to_device(filled.range->base(), data.data(), data.size()));
  ASSERT_OK(one->record(*loaded));
  ASSERT_OK(two->wait(*loaded));
  ASSERT_OK(two->copy_to_host(back.data(), filled.range->base(), back.size()));
  ASSERT_OK(two->record(*stored));
  EXPECT_FALSE(must(stored->query()));
  EXPECT_EQ(back, std::vector<std::byte>(data.size()));  // queued, but not done
  std::thread waiter([&] { EXPECT_OK(stored->synchronize()); });
  fake().hold(false);
  waiter.join();
  EXPECT_TRUE(must(stored->query()));
  EXPECT_EQ(back, data);
  fake().fail(symbols().event_query, 1, api::kLaunchFailed, 1);
  EXPECT_EQ(stored->query().error(), EIO);
  EXPECT_EQ(device().health().device_code(), api::kLaunchFailed);
}

TEST_P(GpuFaults, CopiesToPeersWithoutADirectWayAreRefused) {
  FakeGpuSetup setup;
  setup.devices = 2;
  setup.peers = false;
  open(setup);
  Filled filled = fill(2);
  EXPECT_EQ(device(0).copy_to_peer(device(1), 0, filled.range->base(), 1).error(), EOPNOTSUPP);
}

TEST_P(GpuFaults, AFailedExportClosesItsDescriptors) {
  open();
  Filled filled = fill(2);
  ASSERT_OK(filled.memory->populate(4 * kGranule, kGranule));
  fake().fail(symbols().memory_export, 2, api::kInvalidValue, 1);
  EXPECT_EQ(filled.memory->export_memory(0, UINT64_MAX, SIZE_MAX, true).error(), EIO);
  EXPECT_EQ(must(filled.memory->export_memory(0, UINT64_MAX, SIZE_MAX, true)).size(), 2U);
  EXPECT_EQ(must(filled.memory->export_memory(0, UINT64_MAX, 1, true)).size(), 1U);
  EXPECT_EQ(must(filled.memory->export_memory(2 * kGranule, UINT64_MAX, SIZE_MAX, true)).size(), 1U);
  EXPECT_EQ(filled.memory->release_span(0, kGranule).bytes, 2 * kGranule);
  filled.memory->fix_in_place();
  EXPECT_EQ(filled.memory->release_span(0, kGranule).bytes, kGranule);
  filled.memory->allow_moves();
  EXPECT_EQ(filled.memory->release_span(0, kGranule).bytes, 2 * kGranule);
}

TEST_P(GpuFaults, HostFunctionsMayNotCallTheDriver) {
  open();
  struct Inside {
    Device* device;
    Status status;
  } inside{&device(), {}};
  {
    auto stream = must(device().create_stream());
    ASSERT_OK(stream->call(
        [](void* argument) {
          auto* const mine = static_cast<Inside*>(argument);
          mine->status = mine->device->memory().status();
        },
        &inside));
    ASSERT_OK(stream->synchronize());
  }
  EXPECT_EQ(inside.status.device_code(), api::kNotPermitted);
  EXPECT_OK(device().health());
  EXPECT_GE(fake().calls("in a host function"), 1);
  driver_.reset();
  fake().reset(&setup_);  // forgets the intended call
}

TEST_P(GpuFaults, PlainMemoryReportsAFullDevice) {
  FakeGpuSetup setup;
  setup.virtual_memory = false;
  setup.memory_bytes = 64 * kMiB;
  open(setup);
  EXPECT_TRUE(device().info().reserve_copies);
  auto memory = must(device().create_memory());
  auto range = must(memory->reserve(32 * kMiB));
  ASSERT_OK(memory->populate(0, 32 * kMiB));
  EXPECT_EQ(memory->reserve(40 * kMiB).error(), ENOSPC);
  fake().fail(symbols().copy_on_device, 1, api::kInvalidValue, 1);
  EXPECT_EQ(memory->reserve(32 * kMiB).error(), EIO);
  EXPECT_EQ(fake_state().allocations, 1);
  EXPECT_OK(memory->reserve(32 * kMiB).status());
  EXPECT_EQ(memory->reserve(kGranule).error(), EINVAL);
  EXPECT_EQ(fake_state().allocations, 2);  // `range` still shows the earlier one
}

}  // namespace
}  // namespace gpufs::gpu_test
