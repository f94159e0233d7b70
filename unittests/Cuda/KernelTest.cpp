//===- KernelTest.cpp - code of a plan on a GPU ---------------------------===//
#include "CudaFixture.h"
#include "fsdp/Plan/KernelAbi.h"
#include "fsdp/Plan/Plan.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Memory/Layout.h"
#include "fsdp/Runtime/Operators/KernelTable.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp::test {
namespace {

using namespace runtime;
using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

class CudaKernelTest : public testing::TestWithParam<const char *> {
protected:
  void TearDown() override { setRunsKernelCode(true); }
};

at::Tensor randomOf(const plan::Value &value) {
  plan::Strides strides = plan::fullStrides(value.shape, value.strides);
  at::Tensor tensor = at::empty_strided(value.shape, strides,
                                        at::dtype(scalarType(value.dtype)));
  return tensor.copy_(at::randn(value.shape)).to(gpu().where());
}

/// A zero has a sign.
at::Tensor bitsOf(const at::Tensor &tensor) {
  return tensor.contiguous().view(tensor.element_size() == 2 ? at::kShort
                                                             : at::kInt);
}

/// Each kernel of a real plan, once by its code and once by its calls.
TEST_P(CudaKernelTest, HasTheBitsOfItsCalls) {
  plan::Plan plan =
      plan::readPlan(std::string(FSDP_TEST_INPUTS "/gpu/") + GetParam());
  ASSERT_FALSE(plan.kernels.empty());
  if (std::string why = whyNoKernelCode(plan, gpu().architecture());
      !why.empty())
    GTEST_SKIP() << why;
  KernelTable withCode(plan, gpu());
  EXPECT_EQ(withCode.compiled(), int64_t(plan.kernels.size()));
  setRunsKernelCode(false);
  KernelTable calls(plan, gpu());
  EXPECT_EQ(calls.compiled(), 0);
  std::vector<bool> isDone(plan.kernels.size(), false);
  for (const plan::Instruction &instruction : plan.instructions) {
    const auto *fused = std::get_if<plan::Fused>(&instruction.kind);
    if (!fused || isDone[size_t(fused->kernel)])
      continue;
    const plan::Kernel &kernel = plan.kernels[size_t(fused->kernel)];
    isDone[size_t(fused->kernel)] = true;
    std::vector<at::Tensor> values(plan.values.size());
    for (size_t i = 0; i < fused->ins.size(); ++i)
      values[fused->ins[i]] = randomOf(kernel.values[i]);
    std::vector<at::Tensor> expected = values;
    withCode.run(*fused, values);
    calls.run(*fused, expected);
    for (plan::ValueId out : fused->outs)
      EXPECT_TRUE(at::equal(bitsOf(values[out]), bitsOf(expected[out])))
          << kernel.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Plans, CudaKernelTest,
                         testing::Values("llama-1-fp32-sm_90.json",
                                         "llama-1-bf16-sm_90.json"));

TEST(CudaKernels, RefuseCodeThatTheDriverDoesNotTake) {
  for (const char *body : {"nonsense", ".visible .entry other() { ret; }"})
    EXPECT_THAT(
        [&] {
          gpu().loadKernel(
              std::string(".version 7.8\n.target sm_90\n.address_size 64\n") +
              body + "\n");
        },
        ThrowsMessage<RunError>(
            AllOf(HasSubstr("cannot load"), HasSubstr("(cudaError"))));
}

} // namespace
} // namespace fsdp::test
