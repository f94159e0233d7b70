//===- Numerics.cpp - PyTorch's settings that decide bits -----------------===//
#include "fsdp/Runtime/Operators/Numerics.h"

#include <ATen/Context.h>

#include <map>
#include <string>
#include <string_view>

namespace fsdp::runtime {

namespace {

using Setter = void (*)(at::Context &, const std::string &);

/// For what is either on or off.
template <auto kSet> void set(at::Context &context, const std::string &value) {
  (context.*kSet)(value == "on");
}

const std::map<std::string_view, Setter> kSetters = {
    {"float32_matmul_precision",
     [](at::Context &context, const std::string &value) {
       context.setFloat32MatmulPrecision(value);
     }},
    {"deterministic_algorithms",
     [](at::Context &context, const std::string &value) {
       context.setDeterministicAlgorithms(value != "off", value == "warn");
     }},
    {"mkldnn.enabled", set<&at::Context::setUserEnabledMkldnn>},
    {"mkldnn.deterministic", set<&at::Context::setDeterministicMkldnn>},
    {"nnpack.enabled", set<&at::Context::setUserEnabledNNPACK>},
    {"cudnn.enabled", set<&at::Context::setUserEnabledCuDNN>},
    {"cudnn.benchmark", set<&at::Context::setBenchmarkCuDNN>},
    {"cudnn.deterministic", set<&at::Context::setDeterministicCuDNN>},
    {"cudnn.allow_tf32", set<&at::Context::setAllowTF32CuDNN>},
    {"cuda.matmul.allow_fp16_reduced_precision_reduction",
     [](at::Context &context, const std::string &value) {
       context.setAllowFP16ReductionCuBLAS(value == "on");
     }},
    {"cuda.matmul.allow_bf16_reduced_precision_reduction",
     [](at::Context &context, const std::string &value) {
       context.setAllowBF16ReductionCuBLAS(value == "on");
     }},
    {"cuda.matmul.allow_fp16_accumulation",
     set<&at::Context::setAllowFP16AccumulationCuBLAS>},
};

} // namespace

void applyNumerics(const plan::Plan &plan) {
  if (!plan.capturedFor)
    return;
  const plan::Numerics &numerics = plan.capturedFor->numerics;
  for (const plan::NumericSetting &setting : plan::numericSettings())
    if (auto found = numerics.find(std::string(setting.name));
        found != numerics.end())
      kSetters.at(setting.name)(at::globalContext(), found->second);
}

} // namespace fsdp::runtime
