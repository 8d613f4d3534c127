// Scoring, splitting, and the reasons for refusals.

#include <gtest/gtest.h>

#include "io/backing_file.h"
#include "io/scoring.h"

namespace gpufs {
namespace {

constexpr std::uint64_t kMiB = 1 << 20;

struct Scored {
  BackingFacts file;
  ScoredRequest request;
  Scored(std::uint64_t offset, std::uint64_t bytes) {
    request.file = &file;
    request.file_offset = offset;
    request.bytes = bytes;
  }
};

bool has(RefusalMask mask, Refusal reason) { return (mask & mask_of(reason)) != 0; }

TEST(Scoring, EachReasonHasItsBit) {
  struct Case {
    Refusal reason;
    std::function<void(Scored&)> change;
  };
  const std::vector<Case> cases = {
      {Refusal::kDisabled, [](Scored& s) { s.request.fastpath = FastpathMode::kOff; }},
      {Refusal::kNothingToMove, [](Scored& s) { s.request.bytes = 0; }},
      {Refusal::kOffsetUnaligned, [](Scored& s) { s.request.file_offset = 512; }},
      {Refusal::kSizeUnaligned, [](Scored& s) { s.request.bytes = kMiB + 1; }},
      {Refusal::kMemoryUnaligned, [](Scored& s) { s.request.memory_phase = 512; }},
      {Refusal::kOffsetRange, [](Scored& s) { s.request.file_offset = (std::uint64_t{1} << 63) - 4096; }},
      {Refusal::kNoDirectDescriptor,
       [](Scored& s) { s.file.fastpath_refusals = mask_of(Refusal::kNoDirectDescriptor); }},
      {Refusal::kNoVendorCall, [](Scored& s) { s.request.vendor_refusals = mask_of(Refusal::kNoVendorCall); }},
  };
  for (const Case& one : cases) {
    Scored scored(0, kMiB);
    one.change(scored);
    const RefusalMask refusals = fastpath_refusals(scored.request);
    EXPECT_EQ(refusals, mask_of(one.reason)) << describe_refusals(refusals);
  }
}

TEST(Scoring, RequestsBelowTheBoundGoByFallback) {
  const auto path_of = [](Scored scored) {
    scored.request.fastpath_min_bytes = 2 * kMiB;
    RefusalMask refusals = 0;
    const Result<Plan> plan = plan_request(scored.request, &refusals);
    EXPECT_TRUE(plan.ok()) << plan.status().message();
    EXPECT_EQ(plan.value().size(), 1U);
    const bool small = has(refusals, Refusal::kTooSmall);
    EXPECT_EQ(small, plan.value()[0].path == Path::kFallback);
    return plan.value()[0].path;
  };
  EXPECT_EQ(path_of(Scored(0, 2 * kMiB)), Path::kFastpath);
  EXPECT_EQ(path_of(Scored(0, 2 * kMiB - 4096)), Path::kFallback);
  EXPECT_EQ(path_of(Scored(512, 2 * kMiB)), Path::kFallback) << "the aligned middle is below the bound";
  Scored required(0, kMiB);
  required.request.fastpath = FastpathMode::kRequire;
  EXPECT_EQ(path_of(required), Path::kFastpath);
  Scored without_fallback(0, kMiB);
  without_fallback.request.fallback = false;
  EXPECT_EQ(path_of(without_fallback), Path::kFastpath);
}

TEST(Scoring, TheOperatorMayOverruleARefusalOfTheFile) {
  Scored scored(0, kMiB);
  scored.file.fastpath_refusals = mask_of(Refusal::kFileSystem);
  scored.request.waived = mask_of(Refusal::kFileSystem);
  EXPECT_EQ(fastpath_refusals(scored.request), 0U);
  scored.file.fastpath_refusals |= mask_of(Refusal::kNoDirectDescriptor);
  EXPECT_EQ(fastpath_refusals(scored.request), mask_of(Refusal::kNoDirectDescriptor));
  EXPECT_TRUE(FileSystems({"nfs4", "lustre"}).allow("lustre"));
  EXPECT_FALSE(FileSystems({"nfs4"}).allow("nfs"));
  EXPECT_TRUE(FileSystems({"any"}).allow("zfs"));
  EXPECT_FALSE(FileSystems().allow("any"));
}

TEST(Scoring, UnalignedRequestIsSplit) {
  Scored scored(4096 - 100, kMiB);
  scored.request.memory_phase = 4096 - 100;
  RefusalMask refusals = 0;
  Result<Plan> plan = plan_request(scored.request, &refusals);
  ASSERT_TRUE(plan.ok());
  const Plan& parts = plan.value();
  ASSERT_EQ(parts.size(), 3U);
  EXPECT_EQ(parts[0].path, Path::kFallback);
  EXPECT_EQ(parts[0].bytes, 100U);
  EXPECT_EQ(parts[1].path, Path::kFastpath);
  EXPECT_EQ(parts[1].offset, 100U);
  EXPECT_EQ(parts[1].bytes, kMiB - 4096);
  EXPECT_EQ(parts[2].path, Path::kFallback);
  EXPECT_EQ(parts[2].offset + parts[2].bytes, kMiB);
  EXPECT_TRUE(has(refusals, Refusal::kOffsetUnaligned));
  EXPECT_FALSE(has(refusals, Refusal::kMemoryUnaligned));
}

TEST(Scoring, BodyWhoseMemoryDoesNotFitGoesByFallback) {
  Scored scored(100, kMiB);
  scored.request.memory_phase = 0;
  RefusalMask refusals = 0;
  Result<Plan> plan = plan_request(scored.request, &refusals);
  ASSERT_TRUE(plan.ok());
  ASSERT_EQ(plan.value().size(), 1U);
  EXPECT_EQ(plan.value()[0].path, Path::kFallback);
  EXPECT_TRUE(has(refusals, Refusal::kMemoryUnaligned));
}

TEST(Scoring, RequireAllowsTheEdgesButNotTheBody) {
  Scored split(4096 - 100, kMiB);
  split.request.memory_phase = 4096 - 100;
  split.request.fastpath = FastpathMode::kRequire;
  RefusalMask refusals = 0;
  EXPECT_TRUE(plan_request(split.request, &refusals).ok());

  Scored small(100, 1000);
  small.request.fastpath = FastpathMode::kRequire;
  const Result<Plan> refused = plan_request(small.request, &refusals);
  EXPECT_EQ(refused.error(), EOPNOTSUPP);
  EXPECT_NE(refused.status().message().find("too_small"), std::string::npos) << refused.status().message();

  Scored elsewhere(0, kMiB);
  elsewhere.file.fastpath_refusals = mask_of(Refusal::kFileSystem);
  elsewhere.request.fastpath = FastpathMode::kRequire;
  EXPECT_NE(plan_request(elsewhere.request, &refusals).status().message().find("file_system"), std::string::npos);
}

TEST(Scoring, FallbackOffLeavesOnlyWholeFastpathRequests) {
  Scored aligned(0, kMiB);
  aligned.request.fallback = false;
  RefusalMask refusals = 0;
  EXPECT_TRUE(plan_request(aligned.request, &refusals).ok());
  Scored unaligned(1, kMiB);
  unaligned.request.fallback = false;
  EXPECT_EQ(plan_request(unaligned.request, &refusals).error(), EOPNOTSUPP);
}

}  // namespace
}  // namespace gpufs
