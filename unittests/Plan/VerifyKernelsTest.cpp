//===- VerifyKernelsTest.cpp - the invariants of kernels ------------------===//
#include "Support/PlanMutations.h"
#include "fsdp/Plan/Digest.h"

#include <algorithm>

namespace fsdp::test {
namespace {

using namespace plan;

/// Gives each code the hash that it has with the kernel.
void signCodes(Kernel &kernel) {
  for (KernelCode &code : kernel.code)
    code.hash = hashOf(kernel, code);
}

/// Makes a kernel of the call that squares the difference.
Plan fusedPlan() {
  Plan plan = samplePlan(2);
  auto at = std::find_if(plan.instructions.begin(), plan.instructions.end(),
                         [](const Instruction &instruction) {
                           const auto *call =
                               std::get_if<Call>(&instruction.kind);
                           return call && call->op == "aten::mul" &&
                                  call->args[0] == call->args[1];
                         });
  auto call = std::get<Call>(at->kind);
  ValueId in = std::get<TensorArg>(call.args[0].value).value;
  TensorSpec in0 = plan.values[size_t(in)];
  TensorSpec out0 = plan.values[size_t(call.outs[0])];
  Kernel kernel;
  kernel.name = "square";
  kernel.values = {Value(in0), Value(out0)};
  kernel.operands = 1;
  kernel.calls = {
      Call{{"aten::mul", "Tensor"}, {{TensorArg{0}}, {TensorArg{0}}}, {1}}};
  kernel.results = {1};
  kernel.trips = out0.numElements();
  std::string image = "\x90\xc3";
  kernel.code = {{"x86-64-v3", image, 0, ""},
                 {"x86-64-v4", image, 1, "", {"Sleef_expf16_u10"}}};
  signCodes(kernel);
  plan.kernels.push_back(kernel);
  at->kind = Fused{0, {in}, call.outs};
  return plan;
}

const std::vector<Mutation> kMutations = {
    {"UnknownKernel", "P1", [](Plan &p) { first<Fused>(p).kernel = 1; }},
    {"OperandMissing", "P1", [](Plan &p) { first<Fused>(p).ins.clear(); }},
    {"ResultMissing", "P1", [](Plan &p) { first<Fused>(p).outs.clear(); }},
    {"UnknownOperand", "P1", [](Plan &p) { first<Fused>(p).ins[0] = 1000; }},
    {"NoOperands", "P42", [](Plan &p) { p.kernels[0].operands = 0; }},
    {"MoreOperandsThanValues", "P42",
     [](Plan &p) { p.kernels[0].operands = 3; }},
    {"NoCalls", "P42", [](Plan &p) { p.kernels[0].calls.clear(); }},
    {"NoResults", "P42", [](Plan &p) { p.kernels[0].results.clear(); }},
    {"OperandAsResult", "P42", [](Plan &p) { p.kernels[0].results = {0}; }},
    {"UnknownResult", "P42", [](Plan &p) { p.kernels[0].results = {7}; }},
    {"WritesAnOperand", "P42",
     [](Plan &p) { p.kernels[0].calls[0].mutates = {0}; }},
    {"OfAnotherNamespace", "P42",
     [](Plan &p) { p.kernels[0].calls[0].op = "c10d::barrier"; }},
    {"ReducesInPlace", "P42",
     [](Plan &p) { p.kernels[0].calls[0].reduceInputOf = 0; }},
    {"DefinedTwice", "P42",
     [](Plan &p) { p.kernels[0].calls.push_back(p.kernels[0].calls[0]); }},
    {"UsedBefore", "P42",
     [](Plan &p) { p.kernels[0].calls[0].args[0] = {TensorArg{1}}; }},
    {"UnknownValue", "P42",
     [](Plan &p) { p.kernels[0].calls[0].args[0] = {TensorArg{-1}}; }},
    {"PlacedValue", "P42", [](Plan &p) { p.kernels[0].values[0].offset = 0; }},
    {"SharedValue", "P42", [](Plan &p) { p.kernels[0].values[1].storage = 0; }},
    {"TooFewStrides", "P42",
     [](Plan &p) { p.kernels[0].values[0].strides = {1}; }},
    {"ResultWithGaps", "P42",
     [](Plan &p) { p.kernels[0].values[1].strides = {100, 1}; }},
    {"RepeatedResult", "P42",
     [](Plan &p) { p.kernels[0].values[1].strides = {0, 1}; }},
    {"ChangedCall", "P42",
     [](Plan &p) { p.kernels[0].calls[0].op = "aten::add"; }},
    {"ChangedTrips", "P42", [](Plan &p) { ++p.kernels[0].trips; }},
    {"ChangedImports", "P42",
     [](Plan &p) { p.kernels[0].code[1].imports.clear(); }},
    {"ChangedImage", "P42",
     [](Plan &p) { p.kernels[0].code[0].image[0] = 'x'; }},
    {"EntryBehindImage", "P42",
     [](Plan &p) { p.kernels[0].code[0].entry = 2; }},
    {"TwoOfOneTarget", "P42",
     [](Plan &p) { p.kernels[0].code[0].target = "x86-64-v4"; }},
    {"OperandOfOtherShape", "P43",
     [](Plan &p) { p.kernels[0].values[0].shape = {1}; }},
    {"OperandOfOtherDtype", "P43",
     [](Plan &p) { p.kernels[0].values[0].dtype = DType::BFloat16; }},
    {"ResultOfOtherDtype", "P43",
     [](Plan &p) { p.kernels[0].values[1].dtype = DType::Float64; }},
    {"ResultOfOtherLayout", "P43",
     [](Plan &p) {
       Value &value = p.kernels[0].values[1];
       value.strides = {1, value.shape[0]};
     }},
    {"ResultInOtherStorage", "P23",
     [](Plan &p) {
       Fused &fused = first<Fused>(p);
       p.values[size_t(fused.outs[0])].storage = fused.ins[0];
     }},
};

class KernelMutations : public testing::TestWithParam<Mutation> {};

TEST_P(KernelMutations, AreCaught) {
  Plan plan = fusedPlan();
  verifyPlan(plan, "p.json");
  GetParam().apply(plan);
  if (!std::string(GetParam().name).starts_with("Changed"))
    signCodes(plan.kernels[0]);
  expectCaught(plan, GetParam().label);
}

INSTANTIATE_TEST_SUITE_P(All, KernelMutations, testing::ValuesIn(kMutations),
                         [](const auto &info) { return info.param.name; });

TEST(VerifyKernels, RoundTrip) {
  Plan plan = fusedPlan();
  plan.kernels[0].whole = true;
  signCodes(plan.kernels[0]);
  Plan read = parsePlan(printPlan(plan), "p.json");
  EXPECT_EQ(printPlan(read), printPlan(plan));
  EXPECT_EQ(read.kernels, plan.kernels);
}

} // namespace
} // namespace fsdp::test
