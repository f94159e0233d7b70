//===- ProfileTest.cpp - measured seconds on disk -------------------------===//
#include "fsdp/Plan/Profile.h"

#include "Support/SamplePlan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

using namespace fsdp;
using namespace fsdp::plan;
using testing::HasSubstr;

namespace {

TEST(Profile, SignaturesNameOperatorsAndShapes) {
  Plan plan = test::samplePlan(2);
  auto of = [&](size_t index) {
    return signature(plan, plan.instructions[index]);
  };
  EXPECT_EQ(of(test::find<Call>(plan)),
            "aten::mm float32[4,3] float32[3,7] -> float32[4,7]");
  EXPECT_EQ(of(test::find<AllGather>(plan)),
            "all_gather 164 bytes over 2 ranks");
  EXPECT_EQ(of(test::find<Reshard>(plan)), "reshard 84 bytes");
  EXPECT_EQ(of(test::find<ReadBuffer>(plan)), "none");
  plan.instructions[test::find<AllGather>(plan)].records = 3;
  Instruction wait{Wait{}};
  wait.waits = {3};
  EXPECT_EQ(signature(plan, wait),
            "wait for all_gather 164 bytes over 2 ranks");
  Plan replicated = test::samplePlan(4, false, /*replicas=*/2);
  EXPECT_THAT(
      signature(replicated,
                replicated.instructions[test::find<AllReduce>(replicated)]),
      testing::MatchesRegex("all_reduce [0-9]+ bytes over 2 ranks"));
  EXPECT_THAT(of(test::find<OptimizerStep>(plan)),
              HasSubstr("optimizer_step "));
}

TEST(Profile, ReadsWhatItPrints) {
  Profile profile{"xxh3:00", 2, 7, 0.25, {{"aten::mm", 1e-4}, {"all \"", 0}}};
  EXPECT_EQ(parseProfile(printProfile(profile), "profile.json").scratchBytes,
            std::nullopt);
  profile.scratchBytes = 4096;
  Profile read = parseProfile(printProfile(profile), "profile.json");
  EXPECT_EQ(read.scratchBytes, 4096);
  EXPECT_EQ(read.planHash, profile.planHash);
  EXPECT_EQ(read.worldSize, 2);
  EXPECT_EQ(read.steps, 7);
  EXPECT_EQ(read.outsideSeconds, 0.25);
  ASSERT_EQ(read.instructions.size(), 2u);
  EXPECT_EQ(read.instructions[0].seconds, 1e-4);
  EXPECT_EQ(read.instructions[1].what, "all \"");
}

TEST(Profile, RefusesWhatIsNone) {
  auto error = [](const std::string &text) -> std::string {
    try {
      parseProfile(text, "profile.json");
    } catch (const PlanError &error) {
      return error.what();
    }
    return "";
  };
  std::string good = printProfile({"", 2, 7, 0.25, {{"aten::mm", 1e-4}}});
  auto with = [&](const std::string &from, const std::string &to) {
    std::string text = good;
    return text.replace(text.find(from), from.size(), to);
  };
  EXPECT_EQ(error(good), "");
  EXPECT_EQ(error(with("\"format\": 1", "\"format\": 2")),
            "profile.json: format: expected 1, got 2");
  EXPECT_THAT(error(with("1.000000e-04", "-1.0")),
              HasSubstr("instructions[0].seconds: expected seconds of at "
                        "least 0"));
  EXPECT_THAT(error(with("1.000000e-04", "1e308")),
              HasSubstr("expected seconds of at least 0 and at most 1e9"));
  EXPECT_THAT(
      error(with("\"instructions\"", "\"scratch_bytes\": 9223372036854775807, "
                                     "\"instructions\"")),
      HasSubstr("scratch_bytes: expected an integer in [0, "));
  EXPECT_THAT(error(with("\"what\"", "\"wat\"")), HasSubstr("\"what\""));
  EXPECT_THAT(error("[]"), HasSubstr("expected an object"));
  EXPECT_THROW(readProfile("/does/not/exist.json"), PlanError);
}

} // namespace
