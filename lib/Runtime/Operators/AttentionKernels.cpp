//===- AttentionKernels.cpp - a GPU's attention in place of the CPU's -----===//
#include "fsdp/Runtime/Operators/AttentionKernels.h"
#include "fsdp/Runtime/Error.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>

#include <array>
#include <cmath>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

namespace fsdp::runtime {

namespace {

constexpr const char *kForward =
    "aten::_scaled_dot_product_flash_attention_for_cpu";
constexpr const char *kBackward =
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward";
/// Heads of other sizes are padded for the flash kernels.
constexpr int64_t kFlashHead = 8;
/// Memory-efficient kernels take rows of a mask at multiples of this.
constexpr int64_t kMaskAlign = 16;

/// What the device's operators take and give, by meaning.
enum Slot : size_t {
  kGradOut,
  kQuery,
  kKey,
  kValue,
  kMask,
  kOut,
  kLogsumexp,
  kCumSeqQ,
  kCumSeqK,
  kSeed,
  kOffset,
  kDebugMask,
  kMaxQ,
  kMaxK,
  kDropout,
  kIsCausal,
  kComputeLogsumexp,
  kReturnDebugMask,
  kInputMask,
  kScale,
  kNumSlots
};

/// The schemas' names of each, and the type with which it is called.
struct SlotName {
  Slot slot;
  c10::TypeKind kind;
  const char *name;
};
constexpr SlotName kNames[] = {
    {kGradOut, c10::TypeKind::TensorType, "grad_out"},
    {kGradOut, c10::TypeKind::TensorType, "grad_out_"},
    {kQuery, c10::TypeKind::TensorType, "query"},
    {kKey, c10::TypeKind::TensorType, "key"},
    {kValue, c10::TypeKind::TensorType, "value"},
    {kMask, c10::TypeKind::TensorType, "attn_bias"},
    {kOut, c10::TypeKind::TensorType, "out"},
    {kOut, c10::TypeKind::TensorType, "output"},
    {kLogsumexp, c10::TypeKind::TensorType, "logsumexp"},
    {kLogsumexp, c10::TypeKind::TensorType, "log_sumexp"},
    {kCumSeqQ, c10::TypeKind::TensorType, "cum_seq_q"},
    {kCumSeqK, c10::TypeKind::TensorType, "cum_seq_k"},
    {kSeed, c10::TypeKind::TensorType, "philox_seed"},
    {kSeed, c10::TypeKind::TensorType, "rng_state"},
    {kOffset, c10::TypeKind::TensorType, "philox_offset"},
    {kOffset, c10::TypeKind::TensorType, "unused"},
    {kDebugMask, c10::TypeKind::TensorType, "debug_attn_mask"},
    {kMaxQ, c10::TypeKind::SymIntType, "max_q"},
    {kMaxK, c10::TypeKind::SymIntType, "max_k"},
    {kDropout, c10::TypeKind::FloatType, "dropout_p"},
    {kIsCausal, c10::TypeKind::BoolType, "is_causal"},
    {kComputeLogsumexp, c10::TypeKind::BoolType, "compute_log_sumexp"},
    {kReturnDebugMask, c10::TypeKind::BoolType, "return_debug_mask"},
    {kInputMask, c10::TypeKind::ListType, "grad_input_mask"},
    {kScale, c10::TypeKind::FloatType, "scale"},
};

using Slots = std::array<c10::IValue, kNumSlots>;

/// An operator of the device, its arguments and results by slot.
class DeviceOperator {
public:
  explicit DeviceOperator(const char *name) : handle(find(name)) {
    for (const c10::Argument &formal : handle.schema().arguments())
      args.push_back(slotOf(name, formal));
  }

  /// The slots of the results, for an operator whose schema names them.
  std::vector<Slot> results() const {
    std::vector<Slot> slots;
    for (const c10::Argument &formal : handle.schema().returns())
      slots.push_back(slotOf(handle.schema().name(), formal));
    return slots;
  }

  torch::jit::Stack call(const Slots &values) const {
    torch::jit::Stack stack;
    for (size_t i = 0; i < args.size(); ++i) {
      const c10::IValue &value = values[args[i]];
      bool takesNone = handle.schema().arguments()[i].type()->kind() ==
                       c10::TypeKind::OptionalType;
      // What is absent is None where the schema has it, else undefined.
      bool absent = value.isTensor() && !value.toTensor().defined();
      stack.push_back(takesNone && absent ? c10::IValue() : value);
    }
    handle.callBoxed(stack);
    return stack;
  }

private:
  static c10::OperatorHandle find(const char *name) {
    auto found = c10::Dispatcher::singleton().findSchema({name, ""});
    if (!found)
      throw RunError(std::string("no operator \"") + name +
                     "\" in this LibTorch");
    return *found;
  }

  static Slot slotOf(const std::string &op, const c10::Argument &formal) {
    c10::TypePtr type = formal.real_type();
    if (auto optional = type->cast<c10::OptionalType>())
      type = optional->getElementType();
    for (const SlotName &known : kNames)
      if (formal.name() == known.name && type->kind() == known.kind)
        return known.slot;
    throw RunError("operator \"" + op + "\": \"" + formal.name() + "\" of " +
                   formal.real_type()->str() + " is not known");
  }

  c10::OperatorHandle handle;
  std::vector<Slot> args;
};

/// The CPU's layout of [batch, heads, rows, head]: heads next to each other.
at::Tensor laidOut(const at::Tensor &tensor) {
  return tensor.transpose(1, 2).contiguous().transpose(1, 2);
}

at::Tensor padHead(const at::Tensor &tensor, int64_t head) {
  if (tensor.size(-1) == head)
    return tensor;
  return at::constant_pad_nd(tensor, {0, head - tensor.size(-1)}, 0);
}

/// As scaled_dot_product_attention gives a mask to the efficient kernels.
at::Tensor alignedMask(const at::Tensor &mask, const at::Tensor &query,
                       const at::Tensor &key) {
  at::Tensor whole =
      mask.expand({query.size(0), query.size(1), query.size(2), key.size(2)});
  int64_t rows = whole.size(-1);
  if (rows % kMaskAlign != 0)
    return at::constant_pad_nd(whole, {0, kMaskAlign - rows % kMaskAlign}, 0)
        .slice(-1, 0, rows);
  for (int dim = 0; dim < 3; ++dim)
    if (whole.stride(dim) % kMaskAlign != 0)
      return whole.contiguous();
  return whole;
}

/// What forward and backward take, as scaled_dot_product_attention gives it.
void prepare(at::SDPBackend backend, const AttentionKernels::Problem &problem,
             Slots &slots) {
  int64_t head = problem.query.size(-1), padded = head;
  slots[kScale] = problem.scale;
  slots[kMask] = problem.mask;
  if (backend == at::SDPBackend::flash_attention) {
    padded = (head + kFlashHead - 1) / kFlashHead * kFlashHead;
    if (!problem.scale)
      slots[kScale] = 1.0 / std::sqrt(double(head));
  }
  if (backend == at::SDPBackend::efficient_attention && problem.mask.defined())
    slots[kMask] = alignedMask(problem.mask, problem.query, problem.key);
  slots[kQuery] = padHead(problem.query, padded);
  slots[kKey] = padHead(problem.key, padded);
  slots[kValue] = padHead(problem.value, padded);
  slots[kDropout] = 0.0;
  slots[kIsCausal] = problem.isCausal;
}

/// The same memory as a tensor that may require gradients; inference tensors
/// may not, outside inference mode.
at::Tensor probe(const at::Tensor &tensor, bool requiresGrad) {
  at::Tensor same = at::from_blob(tensor.data_ptr(), tensor.sizes(),
                                  tensor.strides(), tensor.options());
  return same.set_requires_grad(requiresGrad);
}

} // namespace

struct AttentionKernels::Kernel {
  Kernel(const char *forward, const char *backward)
      : forward(forward), backward(backward), results(this->forward.results()) {
  }

  DeviceOperator forward, backward;
  std::vector<Slot> results;
};

struct AttentionKernels::Forward {
  plan::ValueId logsumexp = -1;
  int backwards = 0;
  /// Chosen when it first runs.
  std::optional<at::SDPBackend> backend;
  /// Of the last run, until its last backward: what the plan's values do not
  /// carry. The logsumexp where its size is not the plan's.
  Slots kept;
  std::vector<int64_t> logsumexpSizes;
  int backwardsToCome = 0;
};

at::SDPBackend AttentionKernels::fusedChoice(const Problem &problem) {
  return at::SDPBackend(at::_fused_sdp_choice(
      problem.query, problem.key, problem.value,
      problem.mask.defined() ? std::optional(problem.mask) : std::nullopt, 0.0,
      problem.isCausal, problem.scale,
      /*enable_gqa=*/problem.query.size(1) != problem.key.size(1)));
}

AttentionKernels::AttentionKernels(const plan::Plan &plan, Choose choose)
    : plan(plan), chooseBackend(std::move(choose)) {
  auto add = [&](at::SDPBackend backend, const char *forward,
                 const char *backward) {
    kernels[backend] = std::make_unique<Kernel>(forward, backward);
  };
  add(at::SDPBackend::flash_attention,
      "aten::_scaled_dot_product_flash_attention",
      "aten::_scaled_dot_product_flash_attention_backward");
  add(at::SDPBackend::efficient_attention,
      "aten::_scaled_dot_product_efficient_attention",
      "aten::_scaled_dot_product_efficient_attention_backward");
  add(at::SDPBackend::cudnn_attention,
      "aten::_scaled_dot_product_cudnn_attention",
      "aten::_scaled_dot_product_cudnn_attention_backward");
}

AttentionKernels::~AttentionKernels() = default;

void AttentionKernels::add(const plan::Instruction &instruction, size_t index) {
  if (const auto *offload =
          std::get_if<plan::OffloadActivation>(&instruction.kind)) {
    offloaded[offload->out] = offload->ins;
    return;
  }
  if (const auto *reload =
          std::get_if<plan::ReloadActivation>(&instruction.kind)) {
    const std::vector<plan::ValueId> &ins = offloaded[reload->host];
    for (size_t i = 0; i < ins.size(); ++i)
      if (auto found = byLogsumexp.find(ins[i]); found != byLogsumexp.end())
        byLogsumexp[reload->outs[i]] = found->second;
    return;
  }
  const auto *call = std::get_if<plan::Call>(&instruction.kind);
  bool isForward = call && call->op == kForward;
  if (!isForward && !(call && call->op == kBackward))
    return;
  const plan::Arg &dropout = call->args.at(isForward ? 3 : 6);
  if (const auto *rate = std::get_if<double>(&dropout.value); rate && *rate > 0)
    throw InputError("dropout of attention: expected 0, got " +
                     std::to_string(*rate));
  if (isForward) {
    auto forward = std::make_shared<Forward>();
    forward->logsumexp = call->outs.at(1);
    if (forward->logsumexp != -1)
      byLogsumexp[forward->logsumexp] = forward;
    sites[index] = {forward, false};
    return;
  }
  const auto *logsumexp = std::get_if<plan::TensorArg>(&call->args.at(5).value);
  auto found = byLogsumexp.find(logsumexp ? logsumexp->value : -1);
  if (found == byLogsumexp.end())
    throw InputError("expected the logsumexp of an earlier attention");
  ++found->second->backwards;
  sites[index] = {found->second, true};
}

void AttentionKernels::choose(Forward &forward, const Problem &problem) {
  // The choice depends on whether gradients follow, which inference tensors do
  // not tell.
  c10::InferenceMode outside(false);
  bool trains = forward.backwards > 0;
  Problem same = problem;
  same.query = probe(problem.query, trains);
  same.key = probe(problem.key, trains);
  same.value = probe(problem.value, trains);
  if (problem.mask.defined())
    same.mask = probe(problem.mask, false);
  at::SDPBackend backend = chooseBackend(same);
  if (kernels.count(backend) == 0) {
    std::ostringstream message;
    message << "no fused attention on " << problem.query.device() << " takes "
            << problem.query.dtype() << " queries of " << problem.query.sizes()
            << " and keys of " << problem.key.sizes()
            << (problem.mask.defined() ? " with a mask" : "");
    throw RunError(message.str());
  }
  forward.backend = backend;
}

void AttentionKernels::run(size_t index, torch::jit::Stack &stack) {
  const Site &site = sites.at(index);
  if (site.isBackward)
    runBackward(*site.forward, stack);
  else
    runForward(*site.forward, stack);
}

void AttentionKernels::runForward(Forward &forward, torch::jit::Stack &stack) {
  Problem problem{stack[0].toTensor(),
                  stack[1].toTensor(),
                  stack[2].toTensor(),
                  stack[5].isNone() ? at::Tensor() : stack[5].toTensor(),
                  stack[4].toBool(),
                  stack[6].toOptional<double>()};
  if (!forward.backend)
    choose(forward, problem);
  Slots slots;
  prepare(*forward.backend, problem, slots);
  bool needsLogsumexp = forward.logsumexp != -1;
  slots[kComputeLogsumexp] = needsLogsumexp;
  slots[kReturnDebugMask] = false;
  const Kernel &kernel = *kernels.at(*forward.backend);
  torch::jit::Stack results = kernel.forward.call(slots);

  Slots kept;
  for (size_t i = 0; i < results.size(); ++i)
    kept[kernel.results[i]] = std::move(results[i]);
  at::Tensor out = std::exchange(kept[kOut], {}).toTensor();
  stack.clear();
  stack.emplace_back(laidOut(out.slice(-1, 0, problem.query.size(-1))));
  if (!needsLogsumexp) {
    stack.emplace_back(at::Tensor());
    return;
  }
  at::Tensor logsumexp = kept[kLogsumexp].toTensor();
  const std::vector<int64_t> &shape = plan.values[forward.logsumexp].shape;
  forward.logsumexpSizes = logsumexp.sizes().vec();
  if (logsumexp.numel() == plan.values[forward.logsumexp].numElements()) {
    kept[kLogsumexp] = {};
    stack.emplace_back(logsumexp.reshape(shape));
  } else {
    // Of its own, as the plan has it: padding does not fit in its place.
    stack.emplace_back(logsumexp.slice(-1, 0, shape.back()).contiguous());
  }
  kept[kDebugMask] = {};
  if (forward.backwards > 0)
    forward.kept = std::move(kept);
  forward.backwardsToCome = forward.backwards;
}

void AttentionKernels::runBackward(Forward &forward, torch::jit::Stack &stack) {
  if (forward.backwardsToCome == 0)
    throw RunError("expected its forward to have run earlier in this step");
  Slots slots = forward.kept;
  if (--forward.backwardsToCome == 0)
    forward.kept = {};
  Problem problem{stack[1].toTensor(),
                  stack[2].toTensor(),
                  stack[3].toTensor(),
                  stack[8].isNone() ? at::Tensor() : stack[8].toTensor(),
                  stack[7].toBool(),
                  stack[9].toOptional<double>()};
  prepare(*forward.backend, problem, slots);
  int64_t head = slots[kQuery].toTensor().size(-1);
  slots[kGradOut] = padHead(stack[0].toTensor(), head);
  slots[kOut] = padHead(stack[4].toTensor(), head);
  if (slots[kLogsumexp].isNone())
    slots[kLogsumexp] = stack[5].toTensor().reshape(forward.logsumexpSizes);
  // A mask that needs a gradient is not given to the CPU's kernel.
  slots[kInputMask] = c10::List<bool>({true, true, true, false});
  torch::jit::Stack results =
      kernels.at(*forward.backend)->backward.call(slots);

  stack.clear();
  for (size_t i = 0; i < 3; ++i)
    stack.emplace_back(
        laidOut(results[i].toTensor().slice(-1, 0, problem.query.size(-1))));
}

} // namespace fsdp::runtime
