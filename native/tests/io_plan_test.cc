// Plans: which path takes which bytes, why the fastpath refuses a request, and in which chunks the bytes go.

#include "io/plan.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <ostream>
#include <string>
#include <vector>

#include "base/pages.h"
#include "bytes.h"
#include "io/backing_file.h"

namespace gpufs {

void PrintTo(const Chunk& chunk, std::ostream* out) {
  *out << "[" << chunk.offset << ", " << chunk.end() << ") "
       << (chunk.hole                      ? "hole"
           : chunk.path == Path::kFastpath ? "fastpath"
                                           : "fallback");
}

namespace {

using testing::kMiB;

struct Planned {
  BackingFacts file;
  PlanRequest request;
  Planned(std::uint64_t offset, std::uint64_t bytes) {
    request.file = &file;
    request.file_offset = offset;
    request.bytes = bytes;
    request.chunk_bytes = kMiB;
  }
};

Chunk fast(std::uint64_t offset, std::uint64_t bytes) { return {offset, bytes, Path::kFastpath}; }
Chunk slow(std::uint64_t offset, std::uint64_t bytes) { return {offset, bytes, Path::kFallback}; }
Chunk hole(std::uint64_t offset, std::uint64_t bytes) { return {offset, bytes, Path::kFallback, true}; }

std::vector<Chunk> chunks_of(const Plan& plan) {
  std::vector<Chunk> chunks;
  for (std::uint64_t offset = 0; offset < plan.bytes(); offset += chunks.back().bytes) {
    chunks.push_back(plan.chunk_at(offset));
  }
  return chunks;
}

// ---- why the fastpath refuses ----

TEST(Plans, EachRefusalHasItsBit) {
  struct Reason {
    Refusal reason;
    std::function<void(Planned&)> change;
  };
  const std::vector<Reason> cases = {
      {Refusal::kDisabled, [](Planned& p) { p.request.fastpath = FastpathMode::kOff; }},
      {Refusal::kNothingToMove, [](Planned& p) { p.request.bytes = 0; }},
      {Refusal::kOffsetUnaligned, [](Planned& p) { p.request.file_offset = 512; }},
      {Refusal::kSizeUnaligned, [](Planned& p) { p.request.bytes = kMiB + 1; }},
      {Refusal::kMemoryUnaligned, [](Planned& p) { p.request.memory_phase = 512; }},
      {Refusal::kOffsetRange, [](Planned& p) { p.request.file_offset = (std::uint64_t{1} << 63) - 4096; }},
      {Refusal::kNoDirectDescriptor,
       [](Planned& p) { p.file.fastpath_refusals = mask_of(Refusal::kNoDirectDescriptor); }},
      {Refusal::kNoVendorCall, [](Planned& p) { p.request.vendor_refusals = mask_of(Refusal::kNoVendorCall); }},
  };
  for (const Reason& one : cases) {
    Planned planned(0, kMiB);
    one.change(planned);
    const RefusalMask refusals = fastpath_refusals(planned.request);
    EXPECT_EQ(refusals, mask_of(one.reason)) << describe_refusals(refusals);
  }
}

TEST(Plans, TheOperatorMayOverruleARefusalOfTheFile) {
  Planned planned(0, kMiB);
  planned.file.fastpath_refusals = mask_of(Refusal::kFileSystem);
  planned.request.waived = mask_of(Refusal::kFileSystem);
  EXPECT_EQ(fastpath_refusals(planned.request), 0U);
  planned.file.fastpath_refusals |= mask_of(Refusal::kNoDirectDescriptor);
  EXPECT_EQ(fastpath_refusals(planned.request), mask_of(Refusal::kNoDirectDescriptor));
  EXPECT_TRUE(FileSystems({"nfs4", "lustre"}).allow("lustre"));
  EXPECT_FALSE(FileSystems({"nfs4"}).allow("nfs"));
  EXPECT_TRUE(FileSystems({"any"}).allow("zfs"));
  EXPECT_FALSE(FileSystems().allow("any"));
}

// ---- which chunks go by which path ----

struct Row {
  std::string name;
  std::uint64_t offset;
  std::uint64_t bytes;
  std::function<void(Planned&)> change;
  std::vector<Chunk> chunks;  // empty: EOPNOTSUPP
  RefusalMask refusals;
};

TEST(Plans, RequestsAndTheirChunks) {
  const auto nothing = [](Planned&) {};
  const auto edges = mask_of(Refusal::kOffsetUnaligned);
  const std::vector<Row> rows = {
      {"aligned", 0, 2 * kMiB, nothing, {fast(0, kMiB), fast(kMiB, kMiB)}, 0},
      {"edges of chunks are multiples of their size in the file",
       kMiB - kPageBytes,
       kMiB + kPageBytes,
       nothing,
       {fast(0, kPageBytes), fast(kPageBytes, kMiB)},
       0},
      {"head and tail go by fallback",
       kPageBytes - 100,
       kMiB,
       [](Planned& p) { p.request.memory_phase = kPageBytes - 100; },
       {slow(0, 100), fast(100, kMiB - kPageBytes), slow(100 + kMiB - kPageBytes, kPageBytes - 100)},
       edges},
      {"a body whose memory does not fit",
       100,
       kMiB,
       nothing,
       {slow(0, kMiB - 100), slow(kMiB - 100, 100)},
       edges | mask_of(Refusal::kMemoryUnaligned)},
      {"no whole unit inside",
       100,
       1000,
       nothing,
       {slow(0, 1000)},
       edges | mask_of(Refusal::kSizeUnaligned) | mask_of(Refusal::kTooSmall)},
      {"required: the edges may go by fallback",
       kPageBytes - 100,
       kMiB,
       [](Planned& p) {
         p.request.memory_phase = kPageBytes - 100;
         p.request.fastpath = FastpathMode::kRequire;
       },
       {slow(0, 100), fast(100, kMiB - kPageBytes), slow(100 + kMiB - kPageBytes, kPageBytes - 100)},
       edges},
      {"required: the body may not",
       100,
       1000,
       [](Planned& p) { p.request.fastpath = FastpathMode::kRequire; },
       {},
       edges | mask_of(Refusal::kSizeUnaligned) | mask_of(Refusal::kTooSmall)},
      {"off",
       0,
       kMiB,
       [](Planned& p) { p.request.fastpath = FastpathMode::kOff; },
       {slow(0, kMiB)},
       mask_of(Refusal::kDisabled)},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.name);
    Planned planned(row.offset, row.bytes);
    row.change(planned);
    RefusalMask refusals = 0;
    const Result<Plan> plan = Plan::make(planned.request, &refusals);
    EXPECT_EQ(refusals, row.refusals) << describe_refusals(refusals);
    if (row.chunks.empty()) {
      EXPECT_EQ(plan.error(), EOPNOTSUPP);
      EXPECT_NE(plan.status().message().find(describe_refusals(refusals)), std::string::npos);
      continue;
    }
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    EXPECT_EQ(chunks_of(plan.value()), row.chunks);
  }
}

TEST(Plans, HolesAreChunksOfAnySize) {
  Planned planned(kPageBytes - 100, 4 * kMiB);
  planned.request.memory_phase = kPageBytes - 100;
  RefusalMask refusals = 0;
  const Plan whole = Plan::make(planned.request, &refusals).take();
  const Plan plan = whole.without_holes({{0, 50}, {100 + kPageBytes, 3 * kMiB}});
  EXPECT_EQ(plan.bytes(), whole.bytes());
  EXPECT_EQ(plan.hole_bytes(), 50 + 3 * kMiB);
  const std::uint64_t data = 100 + kPageBytes + 3 * kMiB;  // from here on
  EXPECT_EQ(chunks_of(plan), (std::vector<Chunk>{hole(0, 50), slow(50, 50), fast(100, kPageBytes),
                                                 hole(100 + kPageBytes, 3 * kMiB), fast(data, kMiB - 2 * kPageBytes),
                                                 slow(4 * kMiB - kPageBytes + 100, kPageBytes - 100)}));
}

TEST(Plans, WithoutFastpathTheSameBytesGoByFallback) {
  RefusalMask refusals = 0;
  const Plan plan = Plan::make(Planned(0, 2 * kMiB).request, &refusals).take().without_holes({{kMiB, kPageBytes}});
  EXPECT_TRUE(plan.uses_fastpath());
  const Plan rest = plan.without_fastpath();
  EXPECT_FALSE(rest.uses_fastpath());
  EXPECT_EQ(chunks_of(rest),
            (std::vector<Chunk>{slow(0, kMiB), hole(kMiB, kPageBytes), slow(kMiB + kPageBytes, kMiB - kPageBytes)}));
}

// ---- what remains of a plan ----

class PlanCursors : public ::testing::Test {
 protected:
  void SetUp() override {
    RefusalMask refusals = 0;
    cursor = PlanCursor(Plan::make(planned.request, &refusals).take());
  }
  Planned planned{0, 4 * kMiB};
  PlanCursor cursor;
};

TEST_F(PlanCursors, ThePrefixEndsAtTheFirstChunkInFlight) {
  const Chunk first = *cursor.next();
  const Chunk second = *cursor.next();
  EXPECT_EQ(cursor.position(), 2 * kMiB);
  EXPECT_EQ(cursor.remaining(), 2 * kMiB);
  cursor.complete(second, kMiB, {});
  EXPECT_EQ(cursor.prefix(), 0U);
  cursor.complete(first, kMiB, {});
  EXPECT_EQ(cursor.prefix(), 2 * kMiB);
}

TEST_F(PlanCursors, AShortChunkEndsTheTransferThere) {
  const Chunk first = *cursor.next();
  const Chunk second = *cursor.next();
  cursor.complete(second, 10, Status(EIO, "later"));
  EXPECT_EQ(cursor.end(), kMiB + 10);
  EXPECT_FALSE(cursor.next());
  cursor.complete(first, 100, Status(ENOSPC, "sooner"));
  EXPECT_EQ(cursor.end(), 100U);
  EXPECT_EQ(cursor.prefix(), 100U);
  EXPECT_EQ(cursor.status().error(), ENOSPC);
}

TEST_F(PlanCursors, AFailureWhereACancellationStoppedIsReported) {
  const Chunk first = *cursor.next();
  cursor.stop(Status(ECANCELED, "cancelled"));
  EXPECT_FALSE(cursor.has_next());
  EXPECT_EQ(cursor.status().error(), ECANCELED);
  cursor.complete(first, 0, Status(EIO, "the file"));
  EXPECT_EQ(cursor.status().error(), EIO);
  EXPECT_EQ(cursor.end(), 0U);
}

TEST_F(PlanCursors, WhatIsLeftGoesByFallbackOnceTheFastpathHasFailed) {
  EXPECT_EQ(cursor.next(), fast(0, kMiB));
  cursor.give_up_fastpath();
  EXPECT_EQ(cursor.next(), slow(kMiB, kMiB));
}

}  // namespace
}  // namespace gpufs
