// Failures of a GPU's driver, planned through the fake of its vendor's library: the right errno and text, everything
// unchanged, nothing left open.
#include <cerrno>
#include <thread>
#include <vector>

#include "drivers/gpu/vendor_library.h"
#include "fake_vendors.h"
#include "streams.h"

namespace gpufs::gpu_test {
namespace {

constexpr Names kCopyToHost{"cuMemcpyDtoHAsync_v2", "hipMemcpyDtoHAsync"};
constexpr Names kCopyOnDevice{"cuMemcpyDtoDAsync_v2", "hipMemcpyDtoDAsync"};
constexpr Names kFill{"cuMemsetD8Async", "hipMemsetD8Async"};
constexpr Names kHostRegister{"cuMemHostRegister_v2", "hipHostRegister"};
constexpr Names kStreamCreate{"cuStreamCreate", "hipStreamCreateWithFlags"};
constexpr Names kStreamSynchronize{"cuStreamSynchronize", "hipStreamSynchronize"};

class GpuFaults : public FakeVendorTest {
 protected:
  static bool of_cuda() { return GetParam() == 0; }
  void fail(const Names& function, int n, api::Code code, int times = 1) {
    fake().fail(symbol(function), n, code, times);
  }
  void expect_zeros(const Filled& filled, std::uint64_t offset, std::uint64_t bytes) {
    std::vector<std::byte> back(bytes, std::byte{1});
    EXPECT_OK(device().copy_out(back.data(), filled.range->base() + offset, bytes));
    EXPECT_TRUE(testing::all_zero(back));
  }
};

INSTANTIATE_TEST_SUITE_P(All, GpuFaults, kEachVendor, vendor_name);

TEST_P(GpuFaults, EveryStepOfOpeningMayFail) {
  setup_.devices = 2;
  fake().reset(&setup_);
  const int before = fake_state().contexts;  // other tests may have left devices open
  const std::vector<const char*> steps =
      of_cuda() ? std::vector{"cuDeviceGet",         "cuDevicePrimaryCtxRetain", "cuDeviceGetName",
                              "cuDeviceGetPCIBusId", "cuDeviceTotalMem_v2",      "cuMemGetAllocationGranularity"}
                : std::vector{"hipDeviceGetName", "hipDeviceGetPCIBusId", "hipDeviceTotalMem",
                              "hipMemGetAllocationGranularity"};
  for (const char* step : steps) {
    for (const int n : {1, 2}) {
      fake().fail(step, n, api::kNotInitialized, 1);
      EXPECT_FALSE(open_driver().ok()) << step;
      EXPECT_EQ(fake_state().contexts, before) << step;
    }
  }
  fail({"cuDeviceGetCount", "hipGetDeviceCount"}, 1, api::kNotInitialized);
  EXPECT_EQ(open_driver().error(), ENODEV);
}

// A program may capture a graph while any of its threads attaches, copies or closes an array.
TEST_P(GpuFaults, CallsDoNotEndTheProgramsCaptures) {
  open({.program_captures = true});
  // Other tests have bound the first thread, which changes its mode for good.
  std::thread([&] {
    const Filled filled = fill(1);
    expect_content(filled, 0, kGranule);
    if (device().check_sharing().ok()) {
      auto imported = must(device().create_import(kGranule, ImportAccess::kRead));
      for (const auto& piece : must(filled.memory->export_memory(0, UINT64_MAX, SIZE_MAX, false))) {
        EXPECT_OK(imported->add(piece));
      }
    }
    auto stream = must(device().create_stream());
    auto event = must(device().create_event());
    EXPECT_OK(stream->record(*event));
    EXPECT_OK(event->query().status());
    EXPECT_OK(testing::finished(*event));
    std::vector<std::byte> pinned(kMiB);
    EXPECT_OK(device().pin(pinned.data(), pinned.size()));
    EXPECT_OK(device().unpin(pinned.data()));
    EXPECT_EQ(fake().capture_mode(), 0) << "the thread's own mode comes back";
  }).join();
  EXPECT_EQ(fake().calls("captures ended"), 0);
}

TEST_P(GpuFaults, ImportedMemoryStaysMappedWhileNothingCanWait) {
  open();
  Filled filled = fill(1);
  const auto import = [&]() -> std::unique_ptr<ImportedRange> {
    auto imported = must(device().create_import(kGranule, ImportAccess::kRead));
    for (const auto& piece : must(filled.memory->export_memory(0, UINT64_MAX, SIZE_MAX, false))) {
      EXPECT_OK(imported->add(piece));
    }
    return imported;
  };
  if (device().check_sharing().error() == EOPNOTSUPP) GTEST_SKIP() << device().check_sharing().message();
  auto first = import();
  auto second = import();
  const FakeGpuState both = fake_state();
  constexpr int kStreamCaptureUnsupported = 900;
  fail({"cuMemAlloc_v2", "hipMalloc"}, 1, api::kOutOfMemory);
  fail({"cuCtxSynchronize", "hipDeviceSynchronize"}, 1, kStreamCaptureUnsupported);
  first.reset();
  EXPECT_EQ(fake_state().mappings, both.mappings);
  EXPECT_OK(device().health());
  second.reset();
  EXPECT_EQ(fake_state().mappings, both.mappings - 2);
  EXPECT_EQ(fake_state().reservations, both.reservations - 2);
}

TEST_P(GpuFaults, PopulateIsAllOrNothing) {
  open();
  auto [memory, range] = take(device(), kGranule, 4096 * kMiB);
  const FakeGpuState before = fake_state();
  struct Plan {
    Names function;
    int n;
    api::Code code;
    int error;
  };
  for (const Plan& plan :
       {Plan{kMemoryCreate, 1, api::kOutOfMemory, ENOSPC}, Plan{kMemoryCreate, 3, api::kOutOfMemory, ENOSPC},
        Plan{kMemoryMap, 1, api::kInvalidValue, EIO}, Plan{kMemoryMap, 3, api::kOutOfMemory, ENOSPC},
        Plan{kMemorySetAccess, 1, api::kInvalidValue, EIO}, Plan{kFill, 1, api::kInvalidValue, EIO},
        Plan{kStreamSynchronize, 1, api::kInvalidValue, EIO}}) {
    SCOPED_TRACE(symbol(plan.function) + std::string(" ") + std::to_string(plan.n));
    fail(plan.function, plan.n, plan.code);
    const Status status = memory->populate(kGranule, 2700 * kMiB);
    EXPECT_EQ(status.error(), plan.error);
    EXPECT_EQ(status.device_code(), plan.code);
    EXPECT_NE(status.message().find("gpu 0: " + gpu::public_name(symbol(plan.function)) + ": "), std::string::npos)
        << status.message();
    EXPECT_EQ(fake_state().bytes_used, before.bytes_used);
    EXPECT_EQ(fake_state().handles, before.handles);
    EXPECT_EQ(fake_state().mappings, before.mappings);
  }
  EXPECT_OK(device().health());
  EXPECT_OK(memory->populate(kGranule, 2700 * kMiB));
  EXPECT_EQ(fake_state().handles, 4);  // 1024 + 1024 + 652 MiB beside the first
}

TEST_P(GpuFaults, ReserveFailsAndTheEarlierRangeStays) {
  open();
  Filled filled = fill(8);
  const FakeGpuState before = fake_state();
  fail(kAddressReserve, 1, api::kOutOfMemory);
  EXPECT_EQ(filled.memory->reserve(64 * kGranule).error(), ENOMEM);
  for (const Names& function : {kMemoryMap, kMemorySetAccess}) {
    fail(function, 1, api::kInvalidValue);
    EXPECT_EQ(filled.memory->reserve(64 * kGranule).error(), EIO);
    EXPECT_EQ(fake_state().mappings, before.mappings);
    EXPECT_EQ(fake_state().reservations, before.reservations);
  }
  expect_content(filled, 0, 8 * kGranule);
  EXPECT_OK(filled.memory->populate(8 * kGranule, kGranule));
}

TEST_P(GpuFaults, AFailedSplitLeavesThePieceAsItWas) {
  open();
  struct Plan {
    Names function;
    int n;
    int times = 1;
    api::Code code = api::kInvalidValue;
  };
  // Two parts of the piece stay: they are copied to memory that is mapped elsewhere and then unmapped there, and then
  // replace the old mapping.
  for (const auto& [function, n, times, code] :
       {Plan{kAddressReserve, 1}, Plan{kMemoryCreate, 1}, Plan{kMemoryCreate, 2}, Plan{kMemoryMap, 1},
        Plan{kMemoryMap, 3}, Plan{kMemoryMap, 3, 3}, Plan{kMemoryMap, 4}, Plan{kMemorySetAccess, 2},
        Plan{kMemorySetAccess, 3, 2}, Plan{kMemorySetAccess, 4, 3}, Plan{kMemoryUnmap, 3}, Plan{kCopyOnDevice, 1},
        Plan{kStreamSynchronize, 1}, Plan{kMemoryCreate, 1, 1, api::kOutOfMemory}}) {
    SCOPED_TRACE(symbol(function) + std::string(" ") + std::to_string(n) + ": " + std::to_string(code));
    Filled filled = fill(4);
    const FakeGpuState before = fake_state();
    fail(function, n, code, times);
    filled.memory->release(kGranule, kGranule);
    EXPECT_EQ(fake_state().bytes_used, before.bytes_used);
    EXPECT_EQ(fake_state().mappings, before.mappings);
    EXPECT_EQ(fake_state().reservations, before.reservations);
    expect_content(filled, 0, kGranule);
    expect_content(filled, 2 * kGranule, 2 * kGranule);
    // The next release of a part tries again, and succeeds.
    filled.memory->release(3 * kGranule, kGranule);
    EXPECT_EQ(fake_state().bytes_used, 2 * kGranule);
    expect_content(filled, 0, kGranule);
    expect_content(filled, 2 * kGranule, kGranule);
    EXPECT_OK(filled.memory->populate(kGranule, kGranule));
    expect_zeros(filled, kGranule, kGranule);
    EXPECT_OK(device().health());
  }
}

TEST_P(GpuFaults, MemoryThatCannotBeUnmappedIsReused) {
  open();
  Filled filled = fill(8);
  fail(kMemoryUnmap, 1, api::kInvalidValue);
  filled.memory->release(0, 8 * kGranule);
  EXPECT_EQ(fake_state().bytes_used, 8 * kGranule);
  EXPECT_OK(filled.memory->populate(2 * kGranule, 3 * kGranule));
  expect_zeros(filled, 2 * kGranule, 3 * kGranule);
  EXPECT_EQ(fake_state().bytes_used, 8 * kGranule);
  filled.memory->release(2 * kGranule, 3 * kGranule);
  EXPECT_EQ(fake_state().bytes_used, 0U);

  // Mapped, but without access: access is given before it is used.
  fail(kMemorySetAccess, 1, api::kInvalidValue);
  fail(kMemoryUnmap, 1, api::kInvalidValue);
  EXPECT_EQ(filled.memory->populate(0, 4 * kGranule).error(), EIO);
  EXPECT_EQ(fake_state().bytes_used, 4 * kGranule);
  EXPECT_OK(filled.memory->populate(0, 8 * kGranule));
  expect_zeros(filled, 0, 8 * kGranule);
  filled.memory->release(0, 8 * kGranule);
  EXPECT_EQ(fake_state().bytes_used, 0U);

  // A range that is released tries twice.
  ASSERT_OK(filled.memory->populate(0, 8 * kGranule));
  fail(kMemoryUnmap, 1, api::kInvalidValue);
  filled.memory.reset();
  filled.range.reset();
  EXPECT_EQ(fake_state().bytes_used, 0U);
  EXPECT_EQ(fake_state().reservations, 0);
}

TEST_P(GpuFaults, ALostMappingPutsTheDeviceOutOfService) {
  open();
  Filled filled = fill(8);
  fail(kMemoryMap, 3, api::kInvalidValue, 100);  // two for the copy, and then all fail
  filled.memory->release(3 * kGranule, kGranule);
  EXPECT_EQ(device().health().error(), EIO);
  EXPECT_NE(device().health().message().find("a mapping could not be restored"), std::string::npos);
}

TEST_P(GpuFaults, FailuresToPinHaveTheirOwnErrors) {
  open();
  std::vector<std::byte> memory(kMiB);
  fail(kHostRegister, 1, api::kOutOfMemory);
  EXPECT_EQ(device().pin(memory.data(), memory.size()).error(), ENOMEM);
  fail(kHostRegister, 1, api::kNotSupported);
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
  fail(kStreamSynchronize, 1, api::kIllegalAddress);
  const Status status = device().copy_out(&byte, filled.range->base(), 1);
  EXPECT_EQ(status.error(), EIO);
  EXPECT_EQ(status.device_code(), api::kIllegalAddress);
  const Status health = device().health();
  EXPECT_EQ(health.error(), EIO);
  EXPECT_EQ(health.device_code(), api::kIllegalAddress);
  EXPECT_NE(health.message().find(gpu::public_name(symbol(kStreamSynchronize))), std::string::npos) << health.message();
  const int copies = fake().calls(symbol(kCopyToHost));
  EXPECT_EQ(device().copy_out(&byte, filled.range->base(), 1).error(), EIO);
  EXPECT_EQ(fake().calls(symbol(kCopyToHost)), copies);  // the vendor is not called any more
  EXPECT_EQ(filled.memory->populate(4 * kGranule, kGranule).error(), EIO);
  filled.memory->release(0, kGranule);
  EXPECT_EQ(event->query().error(), EIO);
  EXPECT_EQ(stream->synchronize().error(), EIO);
  EXPECT_EQ(device().memory().error(), EIO);
  EXPECT_EQ(device().create_memory().error(), EIO);

  EXPECT_OK(device(1).health());
  auto [memory, range] = take(device(1), kGranule);
  EXPECT_OK(device(1).copy_out(&byte, range->base(), 1));
}

TEST_P(GpuFaults, ThreadsKeepTheirCurrentDevice) {
  FakeGpuSetup setup;
  setup.devices = 2;
  open(setup);
  const Filled filled = fill(2);
  std::thread([&] {
    std::byte byte{};
    const int before = fake().current();
    EXPECT_EQ(before, of_cuda() ? -1 : 0);
    auto [memory, range] = take(device(1), kGranule);
    EXPECT_EQ(fake().current(), before);
    EXPECT_OK(device(1).bind_thread());
    EXPECT_EQ(fake().current(), 1);
    EXPECT_OK(device(0).copy_out(&byte, filled.range->base(), 1));
    EXPECT_EQ(device(0).copy_out(&byte, filled.range->base() + (std::uint64_t{1} << 40), 1).error(), EIO);
    EXPECT_EQ(fake().current(), 1);
    constexpr Names kSetCurrent{"cuCtxSetCurrent", "hipSetDevice"};
    const int sets = fake().calls(symbol(kSetCurrent));
    EXPECT_OK(device(1).bind_thread());
    EXPECT_EQ(fake().calls(symbol(kSetCurrent)), sets);  // cheap if it is current already
    if (of_cuda()) {
      EXPECT_EQ(cuda_test::fake().depth(), 1);
    }
  }).join();
}

TEST_P(GpuFaults, AFailureToInitialiseIsReported) {
  std::thread([&] {  // a thread that has not initialised the library yet
    fail({"cuInit", "hipInit"}, 1, api::kNotInitialized);
    const Result<std::unique_ptr<Driver>> driver = open_driver();
    EXPECT_EQ(driver.error(), ENODEV);
    EXPECT_EQ(driver.status().device_code(), api::kNotInitialized);
    EXPECT_NE(driver.status().message().find("Init"), std::string::npos) << driver.status().message();
  })
      .join();
}

TEST_P(GpuFaults, FatalCodesAndOnlyTheyPutTheDeviceOutOfService) {
  const std::vector<api::Code> fatal =
      of_cuda() ? std::vector<api::Code>{214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 999}
                : std::vector<api::Code>{53, 214, 700, 702, 709, 710, 719};
  const std::vector<api::Code> harmless =
      of_cuda() ? std::vector<api::Code>{1, 2, 400, 701, 800, 801} : std::vector<api::Code>{1, 2, 400, 701, 801, 999};
  std::vector<api::Code> codes = fatal;
  codes.insert(codes.end(), harmless.begin(), harmless.end());
  for (std::size_t i = 0; i < codes.size(); ++i) {
    driver_.reset();
    open();
    fail(kStreamCreate, 1, codes[i]);
    EXPECT_FALSE(device().create_stream().ok());
    EXPECT_EQ(device().health().device_code(), i < fatal.size() ? codes[i] : 0);
  }
  driver_.reset();
}

TEST_P(GpuFaults, AFailedExportClosesItsDescriptors) {
  open();
  Filled filled = fill(2);
  ASSERT_OK(filled.memory->populate(4 * kGranule, kGranule));
  fail(kMemoryExport, 2, api::kInvalidValue);
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

TEST_P(GpuFaults, PlainMemoryReportsAFullDevice) {
  FakeGpuSetup setup;
  setup.virtual_memory = false;
  setup.memory_bytes = 64 * kMiB;
  open(setup);
  EXPECT_TRUE(device().info().reserve_copies);
  auto [memory, range] = take(device(), 32 * kMiB);
  EXPECT_EQ(memory->reserve(40 * kMiB).error(), ENOSPC);
  fail(kCopyOnDevice, 1, api::kInvalidValue);
  const Extent populated{0, 32 * kMiB};
  EXPECT_EQ(memory->reserve(32 * kMiB, {&populated, 1}).error(), EIO);
  EXPECT_EQ(fake_state().allocations, 1);
  EXPECT_OK(memory->reserve(32 * kMiB).status());
  EXPECT_EQ(fake_state().allocations, 2);  // `range` still shows the earlier one
}

}  // namespace
}  // namespace gpufs::gpu_test
