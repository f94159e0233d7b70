//===- VerifyPlanTest.cpp - every invariant, broken once ------------------===//
#include "Support/PlanMutations.h"

#include <limits>

namespace fsdp::test {
namespace {

using namespace plan;

/// Puts an instruction from the shards that the optimizer takes to new ones
/// before it.
template <typename Kind> Kind &insertBeforeStep(Plan &plan, Phase phase) {
  auto &step = first<OptimizerStep>(plan);
  Kind kind;
  kind.params = step.params;
  kind.ins = step.grads;
  for (ValueId &grad : step.grads) {
    plan.values.push_back(plan.values[size_t(grad)]);
    kind.outs.push_back(ValueId(plan.values.size()) - 1);
    grad = kind.outs.back();
  }
  plan.instructions.insert(plan.instructions.begin() +
                               long(find<OptimizerStep>(plan)),
                           {kind, phase, -1, {}});
  return first<Kind>(plan);
}
ClipGradNorm &clip(Plan &plan) {
  return insertBeforeStep<ClipGradNorm>(plan, Phase::Optimizer);
}
/// A gradient scaler, with all that it needs in the step.
Unscale &unscale(Plan &plan) {
  plan.gradScaler.emplace();
  plan.values.push_back({{}, DType::Float32});
  auto backward = std::find_if(
      plan.instructions.begin(), plan.instructions.end(),
      [](const Instruction &i) { return i.phase == Phase::Backward; });
  plan.instructions.insert(
      backward,
      {LossScale{ValueId(plan.values.size()) - 1}, Phase::Backward, -1, {}});
  return insertBeforeStep<Unscale>(plan, Phase::Optimizer);
}
Accumulate &accumulate(Plan &plan) {
  return insertBeforeStep<Accumulate>(plan, Phase::Backward);
}

/// Makes the first call an all-reduce of its operand over an axis.
Call &overAxis(Plan &plan, const char *axis) {
  auto &call = first<Call>(plan);
  call.op = "_c10d_functional::all_reduce";
  call.overload = "";
  call.schema = "_c10d_functional::all_reduce(Tensor input, Any reduce_op, Any "
                "group_name) -> Tensor";
  call.args = {{TensorArg{getOperands(call).front()}},
               {std::string("sum")},
               {std::string(axis)}};
  return call;
}

const std::vector<Mutation> kMutations = {
    {"WorldSizeZero", "P1", [](Plan &p) { p.worldSize = 0; }},
    {"ReplicasDivide", "P1", [](Plan &p) { p.replicas = 3; }},
    {"UnknownOptimizer", "P1", [](Plan &p) { p.optimizer.name = "lion"; }},
    {"InfiniteRate", "P1",
     [](Plan &p) { p.optimizer.lr = std::numeric_limits<double>::infinity(); }},
    {"UndefinedOption", "P1",
     [](Plan &p) {
       p.paramGroups.push_back(p.optimizer);
       p.paramGroups[0].options["beta3"] =
           std::numeric_limits<double>::quiet_NaN();
     }},
    {"OtherNamespace", "P36",
     [](Plan &p) { first<Call>(p).op = "c10d::barrier"; }},
    {"SchemaOfAnotherOperator", "P36",
     [](Plan &p) {
       first<Call>(p).op = "mine::f";
       first<Call>(p).schema = "mine::f.a(Tensor x) -> Tensor";
     }},
    {"SchemaOfAnOperatorOfAten", "P36",
     [](Plan &p) {
       first<Call>(p).schema = first<Call>(p).op + "(Tensor x) -> Tensor";
     }},
    {"StringWithoutTensor", "P36",
     [](Plan &p) { first<Call>(p).args = {{std::string("file")}}; }},
    {"WorldSizeTooLarge", "P1", [](Plan &p) { p.worldSize = 1048577; }},
    {"MicrobatchesTooMany", "P1",
     [](Plan &p) { p.accumulationSteps = 1048577; }},
    {"LearningRateRatioNaN", "P1",
     [](Plan &p) { p.lrSchedule = {1, "linear", 10, NAN}; }},
    {"UnitOutOfRange", "P1", [](Plan &p) { first<AllGather>(p).unit = 9; }},
    {"ModuleOutOfRange", "P1",
     [](Plan &p) { p.instructions[find<Call>(p)].module = 9; }},
    {"OperandOutOfRange", "P1",
     [](Plan &p) { first<Call>(p).args[0] = {TensorArg{999}}; }},
    {"BufferOutOfRange", "P1",
     [](Plan &p) { first<ReadBuffer>(p).buffer = 3; }},
    {"GatherCount", "P1", [](Plan &p) { first<AllGather>(p).outs.pop_back(); }},
    {"GradCount", "P1", [](Plan &p) { first<ReduceScatter>(p).ins.clear(); }},
    {"NoLoss", "P1", [](Plan &p) { p.loss = -1; }},
    {"SameName", "P2", [](Plan &p) { p.params[1].name = p.params[0].name; }},
    {"SameInput", "P2", [](Plan &p) { p.inputs[1].name = p.inputs[0].name; }},
    {"TwoUnits", "P2", [](Plan &p) { p.units[0].params.push_back(1); }},
    {"TwiceInUnit", "P2",
     [](Plan &p) { p.units[0].params.push_back(p.units[0].params[0]); }},
    {"IntegerReduceDtype", "P20",
     [](Plan &p) { first<ReduceScatter>(p).reduceDtype = DType::Int32; }},
    {"ComplexReduceDtype", "P20",
     [](Plan &p) { first<ReduceScatter>(p).reduceDtype = DType::Complex64; }},
    {"IntegerComputeDtype", "P20",
     [](Plan &p) { p.params[0].computeDtype = DType::Int8; }},
    {"ZeroDivisor", "P20",
     [](Plan &p) { first<ReduceScatter>(p).divisors = {{0.0, 2.0}}; }},
    {"GatheredInAnotherDtype", "P5",
     [](Plan &p) { p.params[0].computeDtype = DType::BFloat16; }},
    {"ScalarParam", "P2", [](Plan &p) { p.params[3].spec.shape = {}; }},
    {"DefinedTwice", "P3",
     [](Plan &p) { first<Call>(p, 1).outs = first<Call>(p).outs; }},
    {"UsedBeforeDefined", "P3",
     [](Plan &p) { first<Call>(p).args[0] = {TensorArg{p.loss}}; }},
    {"UsedInListBeforeDefined", "P3",
     [](Plan &p) {
       first<Call>(p).args.push_back({ArgList{{TensorArg{p.loss}}}});
     }},
    {"UsedAfterFree", "P4",
     [](Plan &p) {
       p.instructions[find<Call>(p)].frees.push_back(p.inputs[1].value);
     }},
    {"FreedTwice", "P4",
     [](Plan &p) {
       auto &frees = p.instructions[find<Call>(p, 2)].frees;
       frees.push_back(frees.at(0));
     }},
    {"GatherShape", "P5",
     [](Plan &p) { p.values[first<AllGather>(p).outs[0]].shape[0] += 1; }},
    {"GatherDType", "P5",
     [](Plan &p) {
       p.values[first<AllGather>(p).outs[0]].dtype = DType::Float64;
     }},
    {"ShardShape", "P5",
     [](Plan &p) { p.values[first<ReduceScatter>(p).outs[0]].shape[0] += 1; }},
    {"InputShape", "P5", [](Plan &p) { p.inputs[0].spec.shape[1] += 1; }},
    {"EmptyRange", "P5", [](Plan &p) { p.inputs[0].high = p.inputs[0].low; }},
    {"ConstantSize", "P5",
     [](Plan &p) {
       p.values.push_back({{2}, DType::Int64});
       p.instructions.insert(p.instructions.begin(),
                             {Constant{"123", ValueId(p.values.size()) - 1},
                              Phase::Forward,
                              -1,
                              {}});
     }},
    {"GatheredTwice", "P6", [](Plan &p) { take(p, find<Reshard>(p)); }},
    {"ReshardedTwice", "P6",
     [](Plan &p) {
       p.instructions.insert(p.instructions.begin() + long(find<Reshard>(p)),
                             {Reshard{0}, Phase::Forward, -1, {}});
     }},
    {"UsedAfterReshard", "P7",
     [](Plan &p) {
       Instruction reshard = take(p, find<Reshard>(p));
       p.instructions.insert(p.instructions.begin() + long(find<Call>(p)),
                             reshard);
     }},
    {"ForwardGatherUsedInBackward", "P7",
     [](Plan &p) {
       // The re-gather makes new values; the old one stays dead.
       first<Call>(p, 16).args[0] = {TensorArg{first<AllGather>(p, 1).outs[0]}};
     }},
    {"GatheredInOptimizer", "P8",
     [](Plan &p) { take(p, find<Reshard>(p, 2)); }},
    {"StepWithoutReduction", "P8",
     [](Plan &p) { first<OptimizerStep>(p).grads[0] = p.loss; }},
    {"StepOfOtherParam", "P8",
     [](Plan &p) {
       std::swap(first<OptimizerStep>(p).params[0],
                 first<OptimizerStep>(p).params[1]);
     }},
    {"SteppedTwice", "P8",
     [](Plan &p) {
       auto &step = first<OptimizerStep>(p);
       step.params.push_back(step.params[0]);
       step.grads.push_back(step.grads[0]);
     }},
    {"ReducedTwice", "P9",
     [](Plan &p) {
       auto &reduce = first<ReduceScatter>(p, 1);
       reduce.params[1] = reduce.params[0];
     }},
    {"FrozenReduced", "P9", [](Plan &p) { p.params[0].requiresGrad = false; }},
    {"ReducedByOtherUnit", "P9",
     [](Plan &p) { first<ReduceScatter>(p).unit = 1; }},
    {"ShardInCompute", "P9",
     [](Plan &p) {
       p.values.push_back({{}, DType::Float32});
       p.instructions.insert(
           p.instructions.begin() + long(find<ReduceScatter>(p)) + 1,
           {Call{{"aten::mean", ""},
                 {{TensorArg{first<ReduceScatter>(p).outs[0]}}, {NoneArg{}}},
                 {ValueId(p.values.size()) - 1}},
            Phase::Backward,
            -1,
            {}});
     }},
    {"ParamWritten", "P35",
     [](Plan &p) {
       first<Call>(p).mutates = {first<AllGather>(p, 1).outs[0]};
     }},
    {"ViewOfParamWritten", "P35",
     [](Plan &p) {
       // The transposed weight, in backward.
       auto isOfParam = [&](const Instruction &i) {
         const auto *call = std::get_if<Call>(&i.kind);
         return call && call->outs[0] != -1 &&
                p.values[call->outs[0]].storage == first<AllGather>(p).outs[0];
       };
       auto view = std::find_if(p.instructions.begin(), p.instructions.end(),
                                isOfParam);
       ValueId value = std::get<Call>(view->kind).outs[0];
       std::get<Call>((view + 1)->kind).mutates = {value};
     }},
    {"IgnoredParamWritten", "P35",
     [](Plan &p) {
       p.params[3].unit = -1;
       p.units[1].params.pop_back();
       auto &gather = first<AllGather>(p);
       ValueId value = gather.outs.back();
       gather.outs.pop_back();
       p.instructions.insert(p.instructions.begin(),
                             {ReadParam{3, value}, Phase::Forward, -1, {}});
       first<Call>(p, 3).mutates = {value};
     }},
    {"SteeredSize", "P10", [](Plan &p) { first<Call>(p).reduceInputOf = 0; }},
    {"SteeredFrozen", "P10",
     [](Plan &p) {
       p.values[first<Call>(p).outs[0]].shape = {1};
       first<Call>(p).reduceInputOf = 3;
     }},
    {"SteeredTwice", "P10",
     [](Plan &p) {
       // The transposed input has the bytes of the gradient of w1, 3 x 7.
       auto &mm = first<Call>(p, 16);
       ASSERT_EQ(mm.reduceInputOf, 0);
       size_t at = find<Call>(p, 16);
       p.values.push_back(p.values[mm.outs[0]]);
       Call again = mm;
       again.outs = {ValueId(p.values.size()) - 1};
       p.instructions.insert(p.instructions.begin() + long(at),
                             {again, Phase::Backward, -1, {}});
     }},
    {"SteeredButNotReduced", "P10",
     [](Plan &p) {
       auto &reduce = first<ReduceScatter>(p, 1);
       auto &step = first<OptimizerStep>(p);
       reduce.params.pop_back();
       reduce.ins.pop_back();
       reduce.outs.pop_back();
       step.params.pop_back();
       step.grads.pop_back();
     }},
    {"SecondStep", "P8",
     [](Plan &p) {
       p.instructions.push_back(
           {OptimizerStep{{}, {}, {}}, Phase::Optimizer, -1, {}});
     }},
    {"PluginWithoutLibrary", "P1",
     [](Plan &p) { p.optimizer.name = "plugin"; }},
    {"GroupOfOtherOptimizer", "P1",
     [](Plan &p) { p.paramGroups.emplace_back().name = "adam"; }},
    {"UnknownGroup", "P1",
     [](Plan &p) { first<OptimizerStep>(p).groups = {0, 1, 0}; }},
    {"GroupCount", "P1", [](Plan &p) { first<OptimizerStep>(p).groups = {0}; }},
    {"NoMicrobatch", "P1", [](Plan &p) { p.accumulationSteps = 0; }},
    {"UnknownDecay", "P1",
     [](Plan &p) { p.lrSchedule = LRSchedule{0, "square", 10, 0}; }},
    {"WarmupTooLong", "P1",
     [](Plan &p) { p.lrSchedule = LRSchedule{10, "linear", 10, 0}; }},
    {"ShardUsedTwice", "P9",
     [](Plan &p) {
       clip(p);
       first<OptimizerStep>(p).grads[1] = first<ClipGradNorm>(p).ins[1];
     }},
    {"AccumulatedTwice", "P14",
     [](Plan &p) {
       auto &shards = accumulate(p);
       shards.params[1] = shards.params[0];
     }},
    {"AccumulatedShardOfOtherParam", "P14",
     [](Plan &p) {
       auto &shards = accumulate(p);
       std::swap(shards.params[0], shards.params[1]);
     }},
    {"AccumulatedShape", "P14", [](Plan &p) { accumulate(p).ins[1] = p.loss; }},
    {"ClippingMaximum", "P15", [](Plan &p) { clip(p).maxNorm = 0; }},
    {"ClippingNormType", "P15", [](Plan &p) { clip(p).normType = 3; }},
    {"ClippingInBackward", "P15",
     [](Plan &p) {
       clip(p);
       p.instructions[find<ClipGradNorm>(p)].phase = Phase::Backward;
     }},
    {"ClippedShardOfOtherParam", "P15",
     [](Plan &p) {
       auto &norm = clip(p);
       std::swap(norm.params[0], norm.params[1]);
     }},
    {"NotUnscaled", "P22", [](Plan &p) { p.gradScaler.emplace(); }},
    {"UnscaledWithoutScaler", "P22",
     [](Plan &p) {
       unscale(p);
       p.gradScaler.reset();
     }},
    {"NoLossScale", "P22",
     [](Plan &p) {
       unscale(p);
       take(p, find<LossScale>(p));
     }},
    {"LossScaleShape", "P22",
     [](Plan &p) {
       unscale(p);
       p.values[first<LossScale>(p).out].shape = {1};
     }},
    {"UnscaledTwice", "P22",
     [](Plan &p) {
       unscale(p);
       auto &shards = insertBeforeStep<Unscale>(p, Phase::Optimizer);
       shards.deferred = false;
     }},
    {"UnscaledAfterClipping", "P22",
     [](Plan &p) {
       clip(p);
       unscale(p);
     }},
    {"DeferredWithoutFused", "P22",
     [](Plan &p) {
       unscale(p).deferred = true;
       p.optimizer.fused = false;
     }},
    {"UnscaledShardOfOtherParam", "P22",
     [](Plan &p) {
       auto &shards = unscale(p);
       std::swap(shards.params[0], shards.params[1]);
     }},
    {"GrowthFactor", "P22",
     [](Plan &p) {
       unscale(p);
       p.gradScaler->growthFactor = 1;
     }},
    {"NoDimToShard", "P2", [](Plan &p) { p.params[0].shardDim = 2; }},
    {"UnevenShardDim", "P2", [](Plan &p) { p.params[0].shardDim = 1; }},
    {"ShardOfOtherDim", "P5",
     [](Plan &p) {
       p.params[0].spec.shape = {3, 8};
       p.params[0].shardDim = 1;
     }},
    {"GradientLost", "P37",
     [](Plan &p) {
       auto &reduce = first<ReduceScatter>(p);
       reduce.params.pop_back();
       reduce.ins.pop_back();
       reduce.outs.pop_back();
       first<Call>(p, 16).reduceInputOf = -1;
       auto &step = first<OptimizerStep>(p);
       step.params.erase(step.params.begin());
       step.grads.erase(step.grads.begin());
     }},
    {"NotUpdated", "P37",
     [](Plan &p) {
       first<OptimizerStep>(p).params.pop_back();
       first<OptimizerStep>(p).grads.pop_back();
     }},
    {"NoUpdate", "P37", [](Plan &p) { take(p, find<OptimizerStep>(p)); }},
    {"UnusedButReduced", "P37", [](Plan &p) { p.params[1].unused = true; }},
    {"UnusedAndFrozen", "P37",
     [](Plan &p) {
       p.params[3].unused = true; // frozen
     }},
    {"LineOutOfRange", "P1",
     [](Plan &p) { p.instructions[find<Call>(p)].line = 0; }},
    {"UnknownSetting", "P41",
     [](Plan &p) {
       p.capturedFor = {"cpu", "", "2.15.0", {{"rounding", "up"}}};
     }},
    {"SettingValue", "P41",
     [](Plan &p) {
       p.capturedFor = {"cpu", "", "2.15.0", {{"mkldnn.enabled", "maybe"}}};
     }},
    {"AxisWithoutRanks", "P44",
     [](Plan &p) { p.modelParallel = {2, 2, {{"tensor", 0, 1}}}; }},
    {"AxisTwice", "P44",
     [](Plan &p) {
       p.modelParallel = {4, 4, {{"tensor", 2, 1}, {"tensor", 2, 2}}};
     }},
    {"CollectiveOverNoAxis", "P45",
     [](Plan &p) {
       p.modelParallel = {2, 2, {{"tensor", 2, 1}}};
       overAxis(p, "context");
     }},
    {"CollectiveWithoutAxes", "P45",
     [](Plan &p) { overAxis(p, "tensor"); }},
    {"CollectiveOfOtherRanks", "P45",
     [](Plan &p) {
       p.modelParallel = {2, 2, {{"tensor", 2, 1}}};
       overAxis(p, "tensor").args.insert(first<Call>(p).args.begin() + 1,
                                         {int64_t(4)});
     }},
    {"UnknownCollective", "P45",
     [](Plan &p) {
       p.modelParallel = {2, 2, {{"tensor", 2, 1}}};
       Call &call = overAxis(p, "tensor");
       call.op = "_c10d_functional::all_permute";
       call.schema = call.op + "(Tensor input) -> Tensor";
     }},
    {"StrideCount", "P38", [](Plan &p) { p.inputs[0].strides = {1}; }},
    {"NegativeStride", "P38",
     [](Plan &p) { p.values[first<Call>(p).outs[0]].strides = {-1, 1}; }},
    {"StrideOverflow", "P38",
     [](Plan &p) {
       p.values[first<Call>(p).outs[0]].strides = {INT64_MAX, 1};
     }},
    {"InputWithGaps", "P38",
     [](Plan &p) { p.inputs[0].strides = {p.inputs[0].spec.shape[1] + 1, 1}; }},
    {"InputExpanded", "P38", [](Plan &p) { p.inputs[0].strides = {0, 1}; }},
    {"BufferWithGaps", "P38", [](Plan &p) { p.buffers[0].strides = {2}; }},
    {"PhaseOrder", "P11",
     [](Plan &p) { p.instructions[0].phase = Phase::Backward; }},
    {"StepInBackward", "P11",
     [](Plan &p) { p.instructions.back().phase = Phase::Backward; }},
    {"LossFreed", "P12",
     [](Plan &p) { p.instructions.back().frees.push_back(p.loss); }},
    {"LossNotScalar", "P12", [](Plan &p) { p.loss = first<Call>(p).outs[0]; }},
    {"ParamNotInitialised", "P13",
     [](Plan &p) {
       addInit(p);
       p.init.erase(p.init.begin() + 2);
     }},
    {"BufferNotInitialised", "P13",
     [](Plan &p) {
       addInit(p);
       p.init.pop_back();
     }},
    {"ParamInitialisedTwice", "P13",
     [](Plan &p) {
       addInit(p);
       p.init[2].frees.clear();
       p.init.insert(p.init.begin() + 2, p.init[2]);
     }},
    {"BufferInitialisedTwice", "P13",
     [](Plan &p) {
       addInit(p);
       p.init.back().frees.clear();
       p.init.push_back(p.init.back());
     }},
    {"InitialisedWithOtherShape", "P13",
     [](Plan &p) {
       addInit(p);
       p.values[std::get<WriteParam>(p.init[2].kind).value].shape[0] += 1;
     }},
    {"BufferInitialisedWithOtherDType", "P13",
     [](Plan &p) {
       addInit(p);
       p.values[std::get<WriteBuffer>(p.init.back().kind).value].dtype =
           DType::Float64;
     }},
    {"GatherInInit", "P13",
     [](Plan &p) {
       addInit(p);
       p.init.insert(p.init.begin(), p.instructions[find<AllGather>(p)]);
     }},
    {"SteeredInInit", "P13",
     [](Plan &p) {
       addInit(p);
       std::get<Call>(p.init[0].kind).reduceInputOf = 0;
     }},
    {"WriteInStep", "P13",
     [](Plan &p) {
       addInit(p);
       p.instructions.push_back(
           {WriteParam{0, p.loss}, Phase::Optimizer, -1, {}});
     }},
    {"InitialisedOutOfRange", "P1",
     [](Plan &p) {
       addInit(p);
       std::get<WriteParam>(p.init[2].kind).param = 9;
     }},
    {"InitUsesInput", "P3",
     [](Plan &p) {
       addInit(p);
       std::get<Call>(p.init[1].kind).args[0] = {TensorArg{p.inputs[0].value}};
     }},
    {"StepUsesValueOfInit", "P4",
     [](Plan &p) {
       addInit(p);
       ValueId value = std::get<WriteParam>(p.init[2].kind).value;
       p.init[2].frees.clear();
       first<Call>(p).args[0] = {TensorArg{value}};
     }},
};

/// The first instruction of a kind in the evaluation.
template <typename Kind> Kind &firstOfEvaluation(Plan &plan) {
  for (Instruction &instruction : plan.evaluation)
    if (auto *kind = std::get_if<Kind>(&instruction.kind))
      return *kind;
  throw std::logic_error("no such instruction");
}

const std::vector<Mutation> kEvaluationMutations = {
    {"LossWithoutEvaluation", "P17", [](Plan &p) { p.evaluation.clear(); }},
    {"StaysGathered", "P17", [](Plan &p) { p.evaluation.pop_back(); }},
    {"Reduces", "P17",
     [](Plan &p) {
       p.evaluation.push_back(p.instructions[find<ReduceScatter>(p)]);
     }},
    {"Writes", "P17",
     [](Plan &p) {
       p.evaluation.push_back(
           {WriteBuffer{0, p.evaluationLoss}, Phase::Forward, -1, {}});
     }},
    {"Steered", "P17",
     [](Plan &p) { firstOfEvaluation<Call>(p).reduceInputOf = 0; }},
    {"Keeps", "P17", [](Plan &p) { firstOfEvaluation<Reshard>(p).keep = 2; }},
    {"GathersOnce", "P17",
     [](Plan &p) { p.evaluation.front().when = When::First; }},
    {"NoLoss", "P1", [](Plan &p) { p.evaluationLoss = -1; }},
    {"LossOfStep", "P3", [](Plan &p) { p.evaluationLoss = p.loss; }},
    {"LossIsFreed", "P12",
     [](Plan &p) { p.evaluation.back().frees.push_back(p.evaluationLoss); }},
    {"LossIsAnInput", "P12",
     [](Plan &p) {
       for (Instruction &instruction : p.evaluation)
         std::erase(instruction.frees, p.inputs[0].value);
       p.evaluationLoss = p.inputs[0].value;
     }},
    {"UsedAfterReshard", "P7",
     [](Plan &p) {
       auto &gather = firstOfEvaluation<AllGather>(p);
       p.evaluation.push_back(
           {Call{{"aten::alias", ""}, {{TensorArg{gather.outs[0]}}}, {-1}},
            Phase::Forward,
            -1,
            {}});
     }},
    {"UnitOutOfRange", "P1",
     [](Plan &p) { firstOfEvaluation<AllGather>(p).unit = 9; }},
    {"ModuleOutOfRange", "P1", [](Plan &p) { p.evaluation[0].module = 9; }},
    {"StepUsesItsValue", "P4",
     [](Plan &p) {
       first<Call>(p).args[0] = {TensorArg{firstOfEvaluation<Call>(p).outs[0]}};
     }},
};

class VerifyEvaluation : public testing::TestWithParam<Mutation> {};

TEST_P(VerifyEvaluation, CatchesMutation) {
  Plan plan = samplePlan(2);
  addEvaluation(plan);
  ASSERT_NO_THROW(verifyPlan(plan, "p.json"));
  GetParam().apply(plan);
  expectCaught(plan, GetParam().label);
}

INSTANTIATE_TEST_SUITE_P(All, VerifyEvaluation,
                         testing::ValuesIn(kEvaluationMutations),
                         [](const auto &info) { return info.param.name; });

class VerifyPlan : public testing::TestWithParam<Mutation> {};

TEST_P(VerifyPlan, CatchesMutation) {
  Plan plan = samplePlan(2);
  ASSERT_NO_THROW(verifyPlan(plan, "p.json"));
  GetParam().apply(plan);
  expectCaught(plan, GetParam().label);
}

TEST(VerifyPlanWhole, AcceptsAccumulationAndClipping) {
  Plan plan = samplePlan(2);
  accumulate(plan);
  clip(plan);
  plan.accumulationSteps = 2;
  EXPECT_NO_THROW(verifyPlan(plan, "p.json"));
}

INSTANTIATE_TEST_SUITE_P(All, VerifyPlan, testing::ValuesIn(kMutations),
                         [](const auto &info) { return info.param.name; });

} // namespace
} // namespace fsdp::test
