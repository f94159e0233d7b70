//===- OptimizerPluginTest.cpp - the example plug-in, and what is none ----===//
#include "fsdp/Runtime/Optimizer/OptimizerPlugin.h"
#include "Support/Fixtures.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Optimizer/ShardedOptimizer.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp::test {
namespace {

using namespace runtime;
using testing::HasSubstr;

plan::Optimizer lion() {
  plan::Optimizer settings;
  settings.name = "plugin";
  settings.library = LION_PATH;
  settings.lr = 0.5;
  settings.options = {{"beta1", 0.5}, {"beta2", 0.25}, {"weight_decay", 0.5}};
  return settings;
}

std::string errorOf(const plan::Optimizer &settings) {
  try {
    ShardedOptimizer({settings}, {}, {at::tensor({1.f})});
  } catch (const InputError &error) {
    return error.what();
  }
  return "no error";
}

TEST(OptimizerPlugin, UpdatesWithItsState) {
  at::Tensor param = at::tensor({1.f, -2.f}), empty = at::empty({0, 3});
  ShardedOptimizer optimizer({lion()}, {}, {empty, param});
  // Direction: the sign of the gradient; the momentum becomes 0.75 of it.
  optimizer.step({empty, at::tensor({2.f, -4.f})});
  EXPECT_TRUE(param.equal(at::tensor({0.25f, -1.f})));
  // 0.5 m + 0.5 g: 0.75 - 0.5 > 0 and -1.5 + 2 > 0.
  optimizer.step({empty, at::tensor({-1.f, 4.f})});
  EXPECT_TRUE(param.equal(at::tensor({0.1875f - 0.5f, -0.75f - 0.5f})));
}

TEST(OptimizerPlugin, LearningRateFollowsTheSchedule) {
  at::Tensor param = at::tensor({1.f});
  ShardedOptimizer optimizer({lion()}, {}, {param});
  optimizer.step({at::tensor({1.f})}, /*lrFactor=*/0.5);
  EXPECT_TRUE(param.equal(at::tensor({0.875f - 0.25f})));
}

TEST(OptimizerPlugin, RefusedOptionIsAnInputError) {
  plan::Optimizer settings = lion();
  settings.options["beta3"] = 1;
  EXPECT_THAT(errorOf(settings), HasSubstr("lion has no option \"beta3\""));
}

TEST(OptimizerPlugin, MissingLibraryIsNamed) {
  plan::Optimizer settings = lion();
  settings.library = "none/libnone.so";
  EXPECT_THAT(errorOf(settings), HasSubstr("none/libnone.so"));
}

TEST(OptimizerPlugin, OtherLibraryIsRefused) {
  plan::Optimizer settings = lion();
  ScratchDir dir;
  settings.library = dir / "text.so";
  writeText(settings.library, "no library");
  EXPECT_THAT(errorOf(settings), HasSubstr("text.so"));
}

} // namespace
} // namespace fsdp::test
