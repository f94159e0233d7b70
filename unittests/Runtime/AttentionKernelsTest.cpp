//===- AttentionKernelsTest.cpp - a GPU's attention, its kernels faked ----===//
//
// The operators of a GPU are registered for the CPU here, by its own attention,
// with what is particular to each: heads of a multiple of 8, a padded or
// 4-dimensional logsumexp, another layout of the result, state that backward
// wants back. What they compute must then be the CPU's bits.
//
//===----------------------------------------------------------------------===//
#include "fsdp/Runtime/Operators/AttentionKernels.h"
#include "fsdp/Runtime/Error.h"
#include "fsdp/Runtime/Operators/CallTable.h"

#include <ATen/Context.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <cmath>
#include <tuple>

namespace fsdp::test {
namespace {

using at::Tensor;
using runtime::AttentionKernels;
using ::testing::HasSubstr;

constexpr const char *kForward =
    "aten::_scaled_dot_product_flash_attention_for_cpu";
constexpr const char *kBackward =
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward";

/// Calls of any fake, and the forward whose state a backward must bring.
int fakeCalls = 0;

Tensor state() { return at::scalar_tensor(++fakeCalls, at::kLong); }

void expectState(const Tensor &seed, const Tensor &offset) {
  ++fakeCalls;
  TORCH_CHECK(seed.item<int64_t>() + 1 == offset.item<int64_t>(),
              "not the state of one forward");
}

using Result9 = std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt,
                           c10::SymInt, Tensor, Tensor, Tensor>;
using Result3 = std::tuple<Tensor, Tensor, Tensor>;

Result9 flash(const Tensor &q, const Tensor &k, const Tensor &v, double dropout,
              bool causal, bool, std::optional<double> scale) {
  TORCH_CHECK(q.size(-1) % 8 == 0, "head size");
  auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(
      q, k, v, dropout, causal, {}, scale);
  Tensor seed = state(), offset = state();
  return {out,       lse,  Tensor(), Tensor(), q.size(2),
          k.size(2), seed, offset,   Tensor()};
}

Result3 flashBackward(const Tensor &grad, const Tensor &q, const Tensor &k,
                      const Tensor &v, const Tensor &out, const Tensor &lse,
                      const Tensor &, const Tensor &, c10::SymInt maxQ,
                      c10::SymInt maxK, double dropout, bool causal,
                      const Tensor &seed, const Tensor &offset,
                      std::optional<double> scale) {
  expectState(seed, offset);
  TORCH_CHECK(maxQ == q.size(2) && maxK == k.size(2), "lengths");
  TORCH_CHECK(out.sizes() == q.sizes() && grad.sizes() == q.sizes(), "sizes");
  return at::_scaled_dot_product_flash_attention_for_cpu_backward(
      grad, q, k, v, out, lse, dropout, causal, {}, scale);
}

std::tuple<Tensor, Tensor, Tensor, Tensor>
efficient(const Tensor &q, const Tensor &k, const Tensor &v,
          const std::optional<Tensor> &mask, bool needsLogsumexp,
          double dropout, bool causal, std::optional<double> scale) {
  TORCH_CHECK(!mask ||
                  (mask->stride(2) % 16 == 0 &&
                   mask->sizes() == at::IntArrayRef({q.size(0), q.size(1),
                                                     q.size(2), k.size(2)})),
              "mask");
  auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(
      q, k, v, dropout, causal, mask, scale);
  int64_t rows = needsLogsumexp ? (q.size(2) + 31) / 32 * 32 : 0;
  Tensor seed = state(), offset = state();
  return {out, at::constant_pad_nd(lse, {0, rows - q.size(2)}, 7.0), seed,
          offset};
}

std::tuple<Tensor, Tensor, Tensor, Tensor>
efficientBackward(const Tensor &grad, const Tensor &q, const Tensor &k,
                  const Tensor &v, const Tensor &mask, const Tensor &out,
                  const Tensor &lse, const Tensor &seed, const Tensor &offset,
                  double dropout, std::array<bool, 4> needs, bool causal,
                  std::optional<double> scale) {
  expectState(seed, offset);
  TORCH_CHECK(lse.size(-1) % 32 == 0, "logsumexp");
  TORCH_CHECK(needs[0] && needs[1] && needs[2] && !needs[3], "needs");
  std::optional<Tensor> given;
  if (mask.defined())
    given = mask;
  auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      grad, q, k, v, out, lse.slice(-1, 0, q.size(2)), dropout, causal, given,
      scale);
  return {dq, dk, dv, Tensor()};
}

Result9 cudnn(const Tensor &q, const Tensor &k, const Tensor &v,
              const std::optional<Tensor> &mask, bool, double dropout,
              bool causal, bool, std::optional<double> scale) {
  auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(
      q, k, v, dropout, causal, mask, scale);
  Tensor seed = state(), offset = state();
  // In the layout of a contiguous query.
  return {out.contiguous(), lse.unsqueeze(-1), Tensor(), Tensor(),
          q.size(2),        k.size(2),         seed,     offset,
          Tensor()};
}

Result3 cudnnBackward(const Tensor &grad, const Tensor &q, const Tensor &k,
                      const Tensor &v, const Tensor &out, const Tensor &lse,
                      const Tensor &seed, const Tensor &offset,
                      const Tensor &mask, const Tensor &, const Tensor &,
                      c10::SymInt, c10::SymInt, double dropout, bool causal,
                      std::optional<double> scale) {
  expectState(seed, offset);
  TORCH_CHECK(lse.dim() == 4, "logsumexp");
  std::optional<Tensor> given;
  if (mask.defined())
    given = mask;
  auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      grad, q, k, v, out, lse.squeeze(-1), dropout, causal, given, scale);
  return {dq.contiguous(), dk.contiguous(), dv.contiguous()};
}

/// Never taken back: at the end of the process ~Library would unlock in this
/// file a mutex that LibTorch, which ThreadSanitizer does not see, has locked.
const torch::Library &registration = []() -> torch::Library & {
  auto &library = *new torch::Library(
      torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
  library.impl("_scaled_dot_product_flash_attention", flash);
  library.impl("_scaled_dot_product_flash_attention_backward", flashBackward);
  library.impl("_scaled_dot_product_efficient_attention", efficient);
  library.impl("_scaled_dot_product_efficient_attention_backward",
               efficientBackward);
  library.impl("_scaled_dot_product_cudnn_attention", cudnn);
  library.impl("_scaled_dot_product_cudnn_attention_backward", cudnnBackward);
  return library;
}();

/// An attention and its backward as they stand in a plan, values 0 to 9:
/// query, key, value, result, logsumexp, gradient, the three gradients, mask.
struct Sample {
  int64_t batch = 2, heads = 3, rows = 20, head = 16;
  bool masked = false;
  std::optional<double> scale = std::nullopt;

  plan::Arg tensor(int32_t value) const { return {plan::TensorArg{value}}; }
  plan::Arg maskArg() const {
    return masked ? tensor(9) : plan::Arg{plan::NoneArg{}};
  }
  plan::Arg scaleArg() const {
    return scale ? plan::Arg{*scale} : plan::Arg{plan::NoneArg{}};
  }

  plan::Plan plan(double dropout = 0.0) const {
    plan::Plan plan;
    plan::Value whole({batch, heads, rows, head}, plan::DType::Float32);
    plan.values.assign(10, whole);
    plan.values[4].shape = {batch, heads, rows};
    plan.values[9].shape = {rows, rows};
    plan::Call forward{kForward,
                       "",
                       {tensor(0),
                        tensor(1),
                        tensor(2),
                        {dropout},
                        {!masked},
                        maskArg(),
                        scaleArg()},
                       {3, 4}};
    plan::Call backward{kBackward,
                        "",
                        {tensor(5),
                         tensor(0),
                         tensor(1),
                         tensor(2),
                         tensor(3),
                         tensor(4),
                         {dropout},
                         {!masked},
                         maskArg(),
                         scaleArg()},
                        {6, 7, 8}};
    plan.instructions = {{forward}, {backward}};
    return plan;
  }

  std::vector<Tensor> values(uint64_t seed = 1) const {
    at::manual_seed(seed);
    std::vector<Tensor> values(10);
    for (int i : {0, 1, 2, 5})
      values[i] = at::randn({batch, rows, heads, head}).transpose(1, 2);
    values[9] = at::randn({rows, rows});
    return values;
  }

  torch::jit::Stack forwardStack(const std::vector<Tensor> &v) const {
    return {v[0], v[1], v[2], 0.0, !masked, mask(v), scale};
  }
  torch::jit::Stack backwardStack(const std::vector<Tensor> &v) const {
    return {v[5], v[0], v[1], v[2], v[3], v[4], 0.0, !masked, mask(v), scale};
  }
  c10::IValue mask(const std::vector<Tensor> &v) const {
    return masked ? c10::IValue(v[9]) : c10::IValue();
  }
};

void forward(AttentionKernels &kernels, const Sample &sample,
             std::vector<Tensor> &values, size_t index = 0) {
  torch::jit::Stack stack = sample.forwardStack(values);
  kernels.run(index, stack);
  ASSERT_EQ(stack.size(), 2u);
  values[3] = stack[0].toTensor();
  values[4] = stack[1].toTensor();
}

void backward(AttentionKernels &kernels, const Sample &sample,
              std::vector<Tensor> &values, size_t index = 1) {
  torch::jit::Stack stack = sample.backwardStack(values);
  kernels.run(index, stack);
  ASSERT_EQ(stack.size(), 3u);
  for (int i = 0; i < 3; ++i)
    values[6 + i] = stack[i].toTensor();
}

/// What the CPU's own operators give.
std::vector<Tensor> reference(const Sample &sample,
                              std::vector<Tensor> values) {
  plan::Plan plan = sample.plan();
  runtime::CallTable calls(plan, plan.instructions);
  for (size_t i = 0; i < 2; ++i)
    calls.run(i, std::get<plan::Call>(plan.instructions[i].kind), values);
  return values;
}

AttentionKernels::Choose always(at::SDPBackend backend) {
  return [=](const AttentionKernels::Problem &) { return backend; };
}

void addAll(AttentionKernels &kernels, const plan::Plan &plan) {
  for (size_t i = 0; i < plan.instructions.size(); ++i)
    kernels.add(plan.instructions[i], i);
}

class EveryKernel : public ::testing::TestWithParam<at::SDPBackend> {};
INSTANTIATE_TEST_SUITE_P(Attention, EveryKernel,
                         ::testing::Values(at::SDPBackend::flash_attention,
                                           at::SDPBackend::efficient_attention,
                                           at::SDPBackend::cudnn_attention));

TEST_P(EveryKernel, GivesTheCpusBitsInTheCpusLayout) {
  c10::InferenceMode guard;
  for (int64_t rows : {20, 32}) {
    Sample sample{.rows = rows};
    plan::Plan plan = sample.plan();
    AttentionKernels kernels(plan, always(GetParam()));
    addAll(kernels, plan);
    std::vector<Tensor> values = sample.values();
    std::vector<Tensor> want = reference(sample, values);
    // Steps use one record after the other.
    for (int step = 0; step < 2; ++step) {
      int before = fakeCalls;
      forward(kernels, sample, values);
      backward(kernels, sample, values);
      EXPECT_EQ(fakeCalls - before, 3);
      for (int i : {3, 4, 6, 7, 8}) {
        EXPECT_TRUE(at::equal(values[i], want[i])) << rows << ", value " << i;
        EXPECT_EQ(values[i].sizes(), want[i].sizes()) << i;
        if (i != 4) {
          EXPECT_EQ(values[i].strides(), want[i].strides()) << i;
        }
      }
    }
  }
}

TEST_P(EveryKernel, KeepsNoLogsumexpWhereNobodyWantsIt) {
  c10::InferenceMode guard;
  Sample sample;
  plan::Plan plan = sample.plan();
  plan.instructions.pop_back();
  std::get<plan::Call>(plan.instructions[0].kind).outs[1] = -1;
  AttentionKernels kernels(plan, always(GetParam()));
  addAll(kernels, plan);
  std::vector<Tensor> values = sample.values();
  forward(kernels, sample, values);
  EXPECT_FALSE(values[4].defined());
  EXPECT_TRUE(at::equal(values[3], reference(sample, values)[3]));
}

/// The reference of heads filled up with zeros to a multiple of 8, cut again.
std::vector<Tensor> paddedReference(Sample sample, std::vector<Tensor> values) {
  int64_t head = sample.head, pad = (8 - head % 8) % 8;
  if (!sample.scale)
    sample.scale = 1 / std::sqrt(double(head));
  sample.head += pad;
  for (int i : {0, 1, 2, 5})
    values[i] = at::constant_pad_nd(values[i], {0, pad});
  values = reference(sample, values);
  for (int i : {3, 6, 7, 8})
    values[i] = values[i].slice(-1, 0, head);
  return values;
}

TEST(Attention, PadsHeadsAndMasksAsPyTorchDoes) {
  c10::InferenceMode guard;
  for (auto scale : {std::optional<double>(), std::optional<double>(0.5)}) {
    Sample heads{.head = 12, .scale = scale};
    Sample mask{.rows = 20, .masked = true, .scale = scale};
    for (auto [sample, backend] :
         {std::pair(heads, at::SDPBackend::flash_attention),
          std::pair(mask, at::SDPBackend::efficient_attention)}) {
      plan::Plan plan = sample.plan();
      AttentionKernels kernels(plan, always(backend));
      addAll(kernels, plan);
      std::vector<Tensor> values = sample.values();
      std::vector<Tensor> plain = reference(sample, values);
      std::vector<Tensor> padded = paddedReference(sample, values);
      forward(kernels, sample, values);
      backward(kernels, sample, values);
      for (int i : {3, 6, 7, 8}) {
        EXPECT_EQ(values[i].strides(), plain[i].strides()) << i;
        EXPECT_TRUE(at::equal(values[i], padded[i])) << i;
      }
    }
  }
}

TEST(Attention, ARecomputedForwardBringsItsOwnState) {
  c10::InferenceMode guard;
  // The first forward's logsumexp is not used; a second one makes it again.
  Sample sample;
  plan::Plan plan = sample.plan();
  plan.instructions.insert(plan.instructions.begin(), plan.instructions[0]);
  std::get<plan::Call>(plan.instructions[0].kind).outs = {3, -1};
  AttentionKernels kernels(plan, always(at::SDPBackend::efficient_attention));
  addAll(kernels, plan);
  std::vector<Tensor> values = sample.values();
  std::vector<Tensor> want = reference(sample, values);
  forward(kernels, sample, values, 0);
  forward(kernels, sample, values, 1);
  backward(kernels, sample, values, 2);
  for (int i : {6, 7, 8})
    EXPECT_TRUE(at::equal(values[i], want[i])) << i;
  // Nothing is kept behind the last backward.
  EXPECT_THROW(backward(kernels, sample, values, 2), runtime::RunError);
}

TEST(Attention, FindsTheRecordOfALogsumexpFromTheHost) {
  c10::InferenceMode guard;
  Sample sample;
  plan::Plan plan = sample.plan();
  plan.values.push_back(plan.values[4]);
  plan.values.push_back(plan.values[4]);
  plan::OffloadActivation offload{{4}, 10};
  plan::ReloadActivation reload{10, {11}};
  plan.instructions.insert(plan.instructions.begin() + 1,
                           {{offload}, {reload}});
  std::get<plan::Call>(plan.instructions[3].kind).args[5] = sample.tensor(11);
  AttentionKernels kernels(plan, always(at::SDPBackend::cudnn_attention));
  addAll(kernels, plan);
  std::vector<Tensor> values = sample.values();
  std::vector<Tensor> want = reference(sample, values);
  forward(kernels, sample, values);
  values[4] = values[4].clone();
  backward(kernels, sample, values, 3);
  EXPECT_TRUE(at::equal(values[6], want[6]));
}

TEST(Attention, ChoosesOnceAndTellsWhetherGradientsFollow) {
  c10::InferenceMode guard;
  for (bool trains : {true, false}) {
    Sample sample{.masked = true};
    plan::Plan plan = sample.plan();
    if (!trains)
      plan.instructions.pop_back();
    int asked = 0;
    std::vector<Tensor> values = sample.values();
    AttentionKernels kernels(plan, [&](const auto &problem) {
      ++asked;
      EXPECT_EQ(problem.query.requires_grad(), trains);
      EXPECT_EQ(problem.value.requires_grad(), trains);
      EXPECT_TRUE(at::GradMode::is_enabled());
      EXPECT_EQ(problem.query.data_ptr(), values[0].data_ptr());
      EXPECT_EQ(problem.query.strides(), values[0].strides());
      EXPECT_FALSE(problem.isCausal);
      EXPECT_TRUE(problem.mask.defined());
      // PyTorch's choice for CPU tensors.
      EXPECT_EQ(AttentionKernels::fusedChoice(problem),
                at::SDPBackend::flash_attention);
      return at::SDPBackend::efficient_attention;
    });
    addAll(kernels, plan);
    forward(kernels, sample, values);
    forward(kernels, sample, values);
    EXPECT_EQ(asked, 1);
  }
}

template <typename Error, typename Fn> std::string errorOf(Fn run) {
  try {
    run();
  } catch (const Error &error) {
    return error.what();
  }
  return "no error";
}

TEST(Attention, NamesWhatItCannotRun) {
  c10::InferenceMode guard;
  Sample sample;
  plan::Plan withDropout = sample.plan(0.25);
  AttentionKernels first(withDropout);
  EXPECT_EQ(errorOf<runtime::InputError>([&] { addAll(first, withDropout); }),
            "dropout of attention: expected 0, got 0.250000");

  plan::Plan alone = sample.plan();
  alone.instructions.erase(alone.instructions.begin());
  AttentionKernels second(alone);
  EXPECT_EQ(errorOf<runtime::InputError>([&] { addAll(second, alone); }),
            "expected the logsumexp of an earlier attention");

  plan::Plan plan = sample.plan();
  AttentionKernels third(plan, always(at::SDPBackend::math));
  addAll(third, plan);
  std::vector<Tensor> values = sample.values();
  EXPECT_THAT(
      errorOf<runtime::RunError>([&] { forward(third, sample, values); }),
      HasSubstr("no fused attention on cpu takes float queries of "
                "[2, 3, 20, 16]"));
}

TEST(Attention, OtherInstructionsAreNotItsOwn) {
  plan::Plan plan = Sample().plan();
  plan.instructions.push_back({plan::Call{{"aten::mm", ""}, {}, {}}});
  AttentionKernels kernels(plan);
  addAll(kernels, plan);
  EXPECT_TRUE(kernels.runs(0));
  EXPECT_TRUE(kernels.runs(1));
  EXPECT_FALSE(kernels.runs(2));
}

TEST(Attention, TheCpuKeepsItsOwn) {
  c10::InferenceMode guard;
  Sample sample;
  int before = fakeCalls;
  reference(sample, sample.values());
  EXPECT_EQ(fakeCalls, before);
}

} // namespace
} // namespace fsdp::test
