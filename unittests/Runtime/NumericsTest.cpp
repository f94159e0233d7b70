//===- NumericsTest.cpp - PyTorch's settings that decide bits -------------===//
#include "fsdp/Runtime/Operators/Numerics.h"

#include <ATen/Context.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

using namespace fsdp;

namespace {

std::string onOff(bool value) { return value ? "on" : "off"; }

std::string reductions(at::CuBLASReductionOption option) {
  return onOff(option ==
               at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK);
}

/// What PyTorch's context has now, by the names that plans have.
plan::Numerics current() {
  const at::Context &context = at::globalContext();
  const std::map<at::Float32MatmulPrecision, std::string> precisions = {
      {at::Float32MatmulPrecision::HIGHEST, "highest"},
      {at::Float32MatmulPrecision::HIGH, "high"},
      {at::Float32MatmulPrecision::MEDIUM, "medium"}};
  std::string mode = "off";
  if (context.deterministicAlgorithms())
    mode = context.deterministicAlgorithmsWarnOnly() ? "warn" : "on";
  return {{"float32_matmul_precision",
           precisions.at(context.float32MatmulPrecision())},
          {"deterministic_algorithms", mode},
          {"mkldnn.enabled", onOff(context.userEnabledMkldnn())},
          {"mkldnn.deterministic", onOff(context.deterministicMkldnn())},
          {"nnpack.enabled", onOff(context.userEnabledNNPACK())},
          {"cudnn.enabled", onOff(context.userEnabledCuDNN())},
          {"cudnn.benchmark", onOff(context.benchmarkCuDNN())},
          {"cudnn.deterministic", onOff(context.deterministicCuDNN())},
          {"cudnn.allow_tf32", onOff(context.allowTF32CuDNN())},
          {"cuda.matmul.allow_fp16_reduced_precision_reduction",
           reductions(context.allowFP16ReductionCuBLAS())},
          {"cuda.matmul.allow_bf16_reduced_precision_reduction",
           reductions(context.allowBF16ReductionCuBLAS())},
          {"cuda.matmul.allow_fp16_accumulation",
           onOff(context.allowFP16AccumulationCuBLAS())}};
}

void apply(const plan::Numerics &numerics) {
  plan::Plan plan;
  plan.capturedFor = {"cpu", "", "2.15.0", numerics};
  runtime::applyNumerics(plan);
}

plan::Numerics defaults() {
  plan::Numerics values;
  for (const plan::NumericSetting &setting : plan::numericSettings())
    values.emplace(setting.name, setting.values.front());
  return values;
}

TEST(Numerics, DefaultsArePyTorchs) { EXPECT_EQ(current(), defaults()); }

TEST(Numerics, EachIsSetAlone) {
  for (const plan::NumericSetting &setting : plan::numericSettings())
    for (std::string_view value : setting.values) {
      plan::Numerics expected = defaults();
      expected[std::string(setting.name)] = value;
      apply({{std::string(setting.name), std::string(value)}});
      EXPECT_EQ(current(), expected) << setting.name << " " << value;
      apply(defaults());
    }
}

TEST(Numerics, WithoutACaptureNothingIsSet) {
  apply({{"mkldnn.enabled", "off"}});
  runtime::applyNumerics(plan::Plan());
  EXPECT_EQ(current().at("mkldnn.enabled"), "off");
  apply(defaults());
}

} // namespace
