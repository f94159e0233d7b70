//===- KernelTableTest.cpp - how kernels run ------------------------------===//
//
// The code here is a few bytes that write a number no call would: which of the
// two ran can be seen in the result. That code has the bits of the calls is
// what test/parity/kernel_bits.py compares.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Runtime/Operators/KernelTable.h"
#include "fsdp/Runtime/Error.h"

#include <ATen/Parallel.h>
#include <ATen/ops/full.h>

#include <torch/version.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp::test {
namespace {

using namespace runtime;

/// mov rax, [rdi + 8]; mov dword [rax + 4 * begin], 42.0f; ret: the first
/// element of a range of the result is 42.
const std::string kImage =
    std::string("\xcc\x48\x8b\x47\x08\xc7\x04\x90\x00\x00\x28\x42\xc3", 13);

/// One kernel, which doubles 64 numbers.
plan::Plan doublingPlan(const std::string &target) {
  plan::Plan plan;
  plan.capturedFor = {"cpu", "", TORCH_VERSION, {}};
  plan::TensorSpec spec{{64}, plan::DType::Float32};
  plan.values = {plan::Value(spec), plan::Value(spec)};
  plan::Kernel kernel;
  kernel.name = "double";
  kernel.values = plan.values;
  kernel.operands = 1;
  kernel.calls = {
      plan::Call{{"aten::mul", "Scalar"}, {{plan::TensorArg{0}}, {2.0}}, {1}}};
  kernel.results = {1};
  kernel.trips = 64;
  kernel.code = {{target, kImage, 1, ""}};
  plan.kernels = {kernel};
  return plan;
}

/// The first element of the result.
float runOnce(const plan::Plan &plan, const at::Tensor &in) {
  std::unique_ptr<Device> cpu = makeCpuDevice();
  KernelTable table(plan, *cpu);
  std::vector<at::Tensor> values = {in, {}};
  table.run({0, {0}, {1}}, values);
  EXPECT_EQ(values[1].sizes(), in.sizes());
  return values[1].data_ptr<float>()[0];
}

int64_t countCompiled(const plan::Plan &plan) {
  std::unique_ptr<Device> cpu = makeCpuDevice();
  return KernelTable(plan, *cpu).compiled();
}

class KernelTables : public testing::Test {
protected:
  void SetUp() override {
    if (kernelTarget().empty())
      GTEST_SKIP() << "ATen uses no vectors on this processor";
  }
  void TearDown() override { setRunsKernelCode(true); }
};

TEST_F(KernelTables, RunsTheCodeForThisProcessor) {
  plan::Plan plan = doublingPlan(kernelTarget());
  EXPECT_EQ(runOnce(plan, at::full({64}, 3.0F)), 42);
  EXPECT_EQ(countCompiled(plan), 1);
}

TEST_F(KernelTables, RunsTheCallsWithoutCodeForIt) {
  plan::Plan plan = doublingPlan("riscv");
  EXPECT_EQ(runOnce(plan, at::full({64}, 3.0F)), 6);
  EXPECT_EQ(countCompiled(plan), 0);
  plan.kernels[0].code.clear();
  EXPECT_EQ(runOnce(plan, at::full({64}, 3.0F)), 6);
}

TEST_F(KernelTables, RunsTheCallsUnderAnotherPyTorch) {
  plan::Plan plan = doublingPlan(kernelTarget());
  EXPECT_EQ(whyNoKernelCode(plan, kernelTarget()), "");
  plan.capturedFor->torch = "1.0.0";
  EXPECT_EQ(whyNoKernelCode(plan, kernelTarget()),
            "it is for torch 1.0.0, this is torch " TORCH_VERSION);
  EXPECT_EQ(runOnce(plan, at::full({64}, 3.0F)), 6);
  plan.capturedFor.reset();
  EXPECT_EQ(whyNoKernelCode(plan, kernelTarget()),
            "it is for no version of torch, this is torch " TORCH_VERSION);
  EXPECT_EQ(runOnce(plan, at::full({64}, 3.0F)), 6);
}

TEST_F(KernelTables, RunsTheCallsIfAProgramSaysSo) {
  setRunsKernelCode(false);
  EXPECT_EQ(runOnce(doublingPlan(kernelTarget()), at::full({64}, 3.0F)), 6);
}

TEST_F(KernelTables, RunsTheCallsWhereAnImportIsMissing) {
  plan::Plan plan = doublingPlan(kernelTarget());
  plan.kernels[0].code[0].imports = {"system"};
  EXPECT_EQ(runOnce(plan, at::full({64}, 3.0F)), 6);
  plan.kernels[0].code[0].imports = {"Sleef_expf8_u10"};
  EXPECT_EQ(runOnce(plan, at::full({64}, 3.0F)), 42);
}

TEST_F(KernelTables, RunsTheCallsOnOtherLayouts) {
  plan::Plan plan = doublingPlan(kernelTarget());
  at::Tensor every = at::full({64, 2}, 3.0F).select(1, 0);
  EXPECT_EQ(runOnce(plan, every), 6);
  plan.kernels[0].values[0].strides = {2};
  EXPECT_EQ(runOnce(plan, every), 42);
  EXPECT_EQ(runOnce(plan, at::full({64}, 3.0F)), 6);
}

/// ATen's gelu is divided from 16,384 elements on, others from 32,768.
TEST_F(KernelTables, RunsTheCallsOfWholeKernelsOnSeveralThreads) {
  plan::Plan plan = doublingPlan(kernelTarget());
  plan.kernels[0].whole = true;
  at::Tensor in = at::full({64}, 3.0F);
  int before = at::get_num_threads();
  at::set_num_threads(1);
  EXPECT_EQ(runOnce(plan, in), 42);
  at::set_num_threads(2);
  EXPECT_EQ(runOnce(plan, in), 6);
  plan.kernels[0].whole = false;
  EXPECT_EQ(runOnce(plan, in), 42);
  at::set_num_threads(before);
}

TEST(KernelTable, RefusesAnUnknownOperator) {
  plan::Plan plan = doublingPlan("riscv");
  plan.kernels[0].calls[0].op = "aten::no_such";
  try {
    std::unique_ptr<Device> cpu = makeCpuDevice();
    KernelTable table(plan, *cpu);
    FAIL() << "not refused";
  } catch (const InputError &error) {
    EXPECT_THAT(error.what(), testing::StartsWith("kernel \"double\": "));
    EXPECT_THAT(error.what(), testing::HasSubstr("aten::no_such"));
  }
}

} // namespace
} // namespace fsdp::test
