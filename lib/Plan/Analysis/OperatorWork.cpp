//===- OperatorWork.cpp - FLOPs and bytes of an operator's call -----------===//
#include "fsdp/Plan/OperatorWork.h"
#include "fsdp/Plan/ModelCollectives.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <type_traits>

namespace fsdp::plan {

namespace {

/// "mul_" of "aten::mul_", with its trailing underscore taken off: a write in
/// place costs what the other costs.
std::string_view baseName(std::string_view op, bool &inPlace) {
  op.remove_prefix(std::min(op.size(), op.find("::") + 2));
  inPlace = op.ends_with('_') && !op.ends_with("__");
  if (inPlace)
    op.remove_suffix(1);
  return op;
}

template <size_t size>
bool isOneOf(std::string_view name, const std::string_view (&names)[size]) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

constexpr std::string_view kAllocations[] = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"};

/// Overwrite all of their first operand without reading it.
constexpr std::string_view kOverwrites[] = {
    "zero", "fill", "copy", "uniform", "normal", "bernoulli", "random"};

constexpr std::string_view kFusable[] = {
    "_log_softmax",
    "_log_softmax_backward_data",
    "_softmax",
    "_softmax_backward_data",
    "_to_copy",
    "abs",
    "add",
    "addcdiv",
    "addcmul",
    "amax",
    "amin",
    "arange",
    "bitwise_and",
    "bitwise_not",
    "bitwise_or",
    "cat",
    "clamp",
    "clamp_max",
    "clamp_min",
    "clone",
    "constant_pad_nd",
    "copy",
    "cos",
    "cumsum",
    "div",
    "elu",
    "eq",
    "erf",
    "exp",
    "fill",
    "full",
    "full_like",
    "fused_dropout",
    "ge",
    "gelu",
    "gelu_backward",
    "gt",
    "hardtanh",
    "le",
    "leaky_relu",
    "lerp",
    "log",
    "logical_and",
    "logical_not",
    "logical_or",
    "lt",
    "masked_fill",
    "maximum",
    "mean",
    "minimum",
    "mish",
    "mul",
    "native_dropout",
    "native_dropout_backward",
    "native_layer_norm",
    "native_layer_norm_backward",
    "ne",
    "neg",
    "new_zeros",
    "nll_loss_backward",
    "nll_loss_forward",
    "ones",
    "ones_like",
    "pow",
    "reciprocal",
    "relu",
    "rsqrt",
    "rsub",
    "scalar_tensor",
    "select_backward",
    "sigmoid",
    "sigmoid_backward",
    "silu",
    "silu_backward",
    "sin",
    "slice_backward",
    "sqrt",
    "square",
    "sub",
    "sum",
    "tanh",
    "tanh_backward",
    "threshold_backward",
    "tril",
    "triu",
    "var_mean",
    "where",
    "zero",
    "zeros",
    "zeros_like",
    "_fused_rms_norm",
    "_fused_rms_norm_backward",
};

/// Where an attention operator has its query, and its is_causal.
struct AttentionOp {
  std::string_view name;
  size_t query;
  size_t causal;
  bool backward;
};
constexpr AttentionOp kAttention[] = {
    {"_scaled_dot_product_flash_attention_for_cpu", 0, 4, false},
    {"_scaled_dot_product_flash_attention_for_cpu_backward", 1, 7, true},
    {"_scaled_dot_product_flash_attention", 0, 4, false},
    {"_scaled_dot_product_flash_attention_backward", 1, 11, true},
    {"_scaled_dot_product_efficient_attention", 0, 6, false},
    {"_scaled_dot_product_efficient_attention_backward", 1, 11, true},
    {"_scaled_dot_product_cudnn_attention", 0, 6, false},
    {"_scaled_dot_product_cudnn_attention_backward", 1, 14, true},
};

/// The operands of one call, by position in its schema.
class Operands {
public:
  Operands(const Plan &plan, const Call &call) : plan(plan), call(call) {}

  const Value *tensor(size_t position) const {
    if (position >= call.args.size())
      return nullptr;
    const auto *arg = std::get_if<TensorArg>(&call.args[position].value);
    return arg ? &plan.values[arg->value] : nullptr;
  }
  bool flag(size_t position) const {
    if (position >= call.args.size())
      return false;
    const auto *arg = std::get_if<bool>(&call.args[position].value);
    return arg && *arg;
  }
  /// Element `index` of a bool[] argument; true where it is not there.
  bool flag(size_t position, size_t index) const {
    if (position >= call.args.size())
      return true;
    const auto *list = std::get_if<ArgList>(&call.args[position].value);
    if (!list || index >= list->size())
      return true;
    const auto *element = std::get_if<bool>(&(*list)[index].value);
    return !element || *element;
  }
  const Value *out(size_t index = 0) const {
    return index < call.outs.size() && call.outs[index] >= 0
               ? &plan.values[call.outs[index]]
               : nullptr;
  }

private:
  const Plan &plan;
  const Call &call;
};

int64_t lastDim(const Value &value) {
  return value.shape.empty() ? 1 : value.shape.back();
}

/// Multiply-adds count as two.
double matmulFlops(std::string_view name, const Operands &args, DType &dtype) {
  auto product = [&](size_t left) {
    const Value *a = args.tensor(left), *b = args.tensor(left + 1);
    if (!a || !b)
      return 0.0;
    dtype = a->dtype;
    // [..., m, k] x [..., k, n], vectors included.
    double columns = b->shape.size() > 1 ? double(lastDim(*b)) : 1.0;
    return 2.0 * double(a->numElements()) * columns;
  };
  if (name == "mm" || name == "bmm" || name == "mv" || name == "dot" ||
      name == "matmul" || name == "vdot")
    return product(0);
  if (name == "addmm" || name == "baddbmm" || name == "addmv" ||
      name == "addbmm" || name == "_addmm_activation")
    return product(1);
  if (name == "linear") {
    const Value *input = args.tensor(0), *weight = args.tensor(1);
    if (!input || !weight)
      return 0;
    dtype = input->dtype;
    double features = weight->shape.size() > 1 ? double(weight->shape[0]) : 1;
    return 2.0 * double(input->numElements()) * features;
  }
  if (name == "convolution" || name == "convolution_overrideable") {
    const Value *input = args.tensor(0), *weight = args.tensor(1),
                *out = args.out();
    if (!input || !weight || !out || weight->shape.empty())
      return 0;
    dtype = input->dtype;
    // Each weight of a filter is used once for each output position; of a
    // transposed convolution, once for each input position.
    const Value *positions = args.flag(6) ? input : out;
    return 2.0 * double(positions->numElements()) *
           double(weight->numElements()) / double(weight->shape[0]);
  }
  if (name == "convolution_backward") {
    const Value *grad = args.tensor(0), *input = args.tensor(1),
                *weight = args.tensor(2);
    if (!grad || !input || !weight || weight->shape.empty())
      return 0;
    dtype = input->dtype;
    const Value *positions = args.flag(7) ? input : grad;
    double forward = 2.0 * double(positions->numElements()) *
                     double(weight->numElements()) / double(weight->shape[0]);
    return forward * (double(args.flag(10, 0)) + double(args.flag(10, 1)));
  }
  return 0;
}

/// Two products in forward, [s, d] x [d, t] and [s, t] x [t, d]; five in
/// backward, which makes the scores again. Causal kernels skip half the blocks.
bool attention(std::string_view name, const Operands &args,
               OperatorWork &work) {
  const auto *op = std::find_if(
      std::begin(kAttention), std::end(kAttention),
      [&](const AttentionOp &known) { return known.name == name; });
  if (op == std::end(kAttention))
    return false;
  const Value *query = args.tensor(op->query),
              *key = args.tensor(op->query + 1);
  if (!query || !key || query->shape.size() != 4 || key->shape.size() != 4)
    return false;
  double product = 2.0 * double(query->numElements()) * double(key->shape[2]);
  work.kind = OperatorWork::Kind::Attention;
  work.dtype = query->dtype;
  work.modelFlops = product * (op->backward ? 4 : 2);
  work.flops =
      product * (op->backward ? 5 : 2) * (args.flag(op->causal) ? 0.5 : 1.0);
  return true;
}

/// Bytes of operators that touch a part of an operand; negative for others.
double sparseBytes(std::string_view name, const Plan &plan, const Call &call,
                   const Operands &args) {
  auto bytes = [](const Value *value) {
    return value ? double(value->numBytes()) : 0.0;
  };
  double others = 0;
  std::vector<ValueId> operands = getOperands(call);
  for (size_t i = 1; i < operands.size(); ++i)
    others += double(touchedBytes(plan, operands[i]));
  if (name == "embedding" || name == "index" || name == "gather" ||
      name == "index_select")
    return 2 * bytes(args.out()) + others;
  if (name == "embedding_dense_backward")
    return bytes(args.out()) + 2 * bytes(args.tensor(0)) + others;
  if (name == "nll_loss_forward")
    return 2 * others;
  if (name == "nll_loss_backward")
    return bytes(args.out()) + bytes(args.tensor(2));
  return -1;
}

} // namespace

int64_t touchedBytes(const Plan &plan, ValueId id) {
  return std::min(plan.values[id].numBytes(),
                  plan.values[ownerOf(plan, id)].numBytes());
}

bool isProduct(std::string_view op) {
  op = op.substr(0, op.find('.'));
  if (std::optional<CollectiveKind> kind = modelCollectiveKind(op))
    return *kind != CollectiveKind::AllGather;
  bool inPlace = false;
  std::string_view name = baseName(op, inPlace);
  constexpr std::string_view products[] = {
      "mm",     "bmm",    "mv",          "dot",
      "matmul", "vdot",   "addmm",       "baddbmm",
      "addmv",  "addbmm", "linear",      "_addmm_activation",
      "addr",   "ger",    "convolution", "convolution_overrideable",
  };
  return isOneOf(name, products) ||
         name.find("scaled_dot_product") != std::string_view::npos ||
         name.find("_attention_forward") != std::string_view::npos;
}

OperatorWork workOf(const Plan &plan, const Call &call) {
  OperatorWork work;
  bool inPlace = false;
  std::string_view name = baseName(call.op, inPlace);
  Operands args(plan, call);

  bool allViews = !call.outs.empty();
  for (ValueId out : call.outs)
    allViews &= out < 0 || plan.values[out].storage >= 0;
  if ((allViews && !inPlace) || isOneOf(name, kAllocations)) {
    work.kind = OperatorWork::Kind::Free;
    return work;
  }

  std::vector<ValueId> touched = getOperands(call);
  if (inPlace && !touched.empty() && isOneOf(name, kOverwrites))
    touched.erase(touched.begin());
  std::sort(touched.begin(), touched.end());
  touched.erase(std::unique(touched.begin(), touched.end()), touched.end());
  for (ValueId id : touched)
    work.bytes += double(touchedBytes(plan, id));
  for (ValueId id : call.outs)
    if (id >= 0)
      work.bytes += double(touchedBytes(plan, id));
  if (double sparse = sparseBytes(name, plan, call, args); sparse >= 0)
    work.bytes = sparse;

  if (attention(name, args, work))
    return work;
  work.flops = work.modelFlops = matmulFlops(name, args, work.dtype);
  if (work.flops > 0)
    work.kind = OperatorWork::Kind::Matmul;
  work.fusable = isOneOf(name, kFusable);
  return work;
}

ModelWork modelWork(const Plan &plan) {
  ModelWork model;
  std::map<DType, double> flopsOf;
  for (const Instruction &instruction : plan.instructions) {
    const auto *call = std::get_if<Call>(&instruction.kind);
    if (!call || call->recompute)
      continue;
    OperatorWork work = workOf(plan, *call);
    double flops =
        work.modelFlops * double(instruction.phase == Phase::Optimizer
                                     ? 1
                                     : plan.accumulationSteps);
    if (flops == 0)
      continue;
    model.flops += flops;
    flopsOf[work.dtype] += flops;
  }
  double most = 0;
  for (const auto &[dtype, flops] : flopsOf)
    if (flops > most) {
      most = flops;
      model.dtype = dtype;
    }
  return model;
}

} // namespace fsdp::plan
