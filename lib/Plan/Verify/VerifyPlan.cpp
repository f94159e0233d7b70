//===- VerifyPlan.cpp - the invariants of docs/plan-format.md -------------===//
#include "Verifier.h"
#include "fsdp/Plan/ModelCollectives.h"
#include "fsdp/Plan/Operands.h"

#include <algorithm>
#include <string>
#include <utility>

namespace fsdp::plan {

std::string quote(std::string_view text) {
  std::string result = "\"";
  result.append(text).append("\"");
  return result;
}

std::string describe(const TensorSpec &spec) {
  std::string text(dtypeName(spec.dtype));
  text += "[";
  for (size_t i = 0; i < spec.shape.size(); ++i)
    text += (i ? ", " : "") + std::to_string(spec.shape[i]);
  return text + "]";
}

namespace {

bool isWrite(const Instruction &instruction) {
  return std::holds_alternative<WriteParam>(instruction.kind) ||
         std::holds_alternative<WriteBuffer>(instruction.kind);
}

} // namespace

void Verifier::define(ValueId value) {
  checkIndex(value, plan.values, "a value");
  if (states[value].defined)
    fail("P3", "value " + std::to_string(value) + " is defined twice");
  states[value].defined = true;
  verifyStorage(value);
}

void Verifier::use(ValueId value) {
  checkIndex(value, plan.values, "a value");
  const ValueState &state = states[value];
  if (!state.defined)
    fail("P3", "value " + std::to_string(value) + " is used before it is " +
                   "defined");
  if (state.freed)
    fail("P4", "value " + std::to_string(value) + " is used after it is freed");
  if (state.isBuffer)
    fail("P34", "value " + std::to_string(value) +
                    " is a buffer and may only be gathered from");
  useOnDevice(value);
  if (state.gatheredFrom >= 0 && liveGather[state.gatheredFrom] != state.gather)
    fail("P7", "value " + std::to_string(value) + " is a parameter of unit " +
                   quote(plan.units[state.gatheredFrom].name) +
                   " and is used after the unit's reshard");
}

/// An operand of compute: any value but a shard.
void Verifier::useOperand(ValueId value) {
  use(value);
  if (states[value].shardOf >= 0)
    fail("P9", "value " + std::to_string(value) +
                   " is a gradient shard and may only go to the optimizer");
}

void Verifier::useArgs(const ArgList &args) {
  for (const Arg &arg : args) {
    if (const auto *tensor = std::get_if<TensorArg>(&arg.value))
      useOperand(tensor->value);
    else if (const auto *list = std::get_if<ArgList>(&arg.value))
      useArgs(*list);
  }
}

void Verifier::useMutated(ValueId value) {
  use(value);
  ValueId storage = plan.values[value].storage;
  const ValueState &state = states[storage == -1 ? value : storage];
  if (state.paramOf != -1)
    fail("P35", "value " + std::to_string(value) +
                    " is written, but its storage is that of parameter " +
                    quote(plan.params[state.paramOf].name));
}

void Verifier::visit(const Call &call) {
  bool isAten = call.op.starts_with("aten::");
  if (!isAten && call.schema.empty())
    fail("P36",
         "expected an operator of namespace \"aten\", got " + quote(call.op));
  std::string name =
      call.op + (call.overload.empty() ? "" : "." + call.overload);
  if (isAten ? !call.schema.empty() : !call.schema.starts_with(name + "("))
    fail("P36", "expected " +
                    (isAten ? "no schema of an ATen operator"
                            : "the schema of " + quote(name)) +
                    ", got " + quote(call.schema));
  bool hasText =
      std::any_of(call.args.begin(), call.args.end(), [](const Arg &arg) {
        return std::holds_alternative<std::string>(arg.value);
      });
  if (hasText && getOperands(*current).empty())
    fail("P36", "expected no string in a call that has no tensor to compute "
                "with, got a call of " +
                    quote(call.op));
  useArgs(call.args);
  for (ValueId value : call.mutates)
    useMutated(value);
  for (ValueId out : call.outs)
    if (out != -1) {
      define(out);
      checkStrides(plan.values[out].strides, plan.values[out],
                   "value " + std::to_string(out));
    }
  if (auto collective = modelCollective(plan, call))
    if (std::string defect = findDefect(*collective, plan.modelParallel);
        !defect.empty())
      fail("P45", call.op + ": " + defect);
  if (call.reduceInputOf == -1)
    return;
  checkIndex(call.reduceInputOf, plan.params, "a parameter");
  const Param &param = plan.params[call.reduceInputOf];
  if (call.outs.empty() || call.outs[0] == -1 ||
      plan.values[call.outs[0]].numBytes() != param.gradSpec().numBytes())
    fail("P10", "expected result 0 to have the bytes of the gradient of " +
                    quote(param.name));
  if (!steered.insert(call.reduceInputOf).second)
    fail("P10", "a second call writes the reduce-scatter input of " +
                    quote(param.name));
  if (reductionOf[call.reduceInputOf] != -1)
    fail("P10", "the gradient of " + quote(param.name) +
                    " is written after its reduce_scatter");
}

void Verifier::visit(const ReadBuffer &read) {
  define(read.out);
  checkSpec(read.out, plan.buffers[read.buffer].spec, "P5",
            "buffer " + quote(plan.buffers[read.buffer].name));
}

void Verifier::visit(const ReadParam &read) {
  const Param &param = plan.params[read.param];
  if (param.unit != -1)
    fail("P7", "parameter " + quote(param.name) + " of unit " +
                   quote(plan.units[param.unit].name) +
                   " is read without a gather");
  define(read.out);
  checkSpec(read.out, param.spec, "P5", "parameter " + quote(param.name));
  states[read.out].paramOf = read.param;
}

void Verifier::visit(const Constant &constant) {
  define(constant.out);
  int64_t want = plan.values[constant.out].numBytes();
  if (int64_t(constant.data.size()) != want)
    fail("P5", "expected " + std::to_string(want) +
                   " bytes of constant data, "
                   "got " +
                   std::to_string(constant.data.size()));
}

void Verifier::visit(const AllGather &gather) {
  const Unit &unit = plan.units[gather.unit];
  if (liveGather[gather.unit] != -1)
    fail("P6", "unit " + quote(unit.name) + " is gathered already");
  if (optimizerBegun)
    fail("P8", "unit " + quote(unit.name) +
                   " is gathered after the optimizer "
                   "began to write parameters");
  if (unit.cpuOffload && gather.group == 0 && !copiedToDevice[gather.unit])
    fail("P21", "unit " + quote(unit.name) +
                    " is gathered without a copy_to_device before");
  copiedToDevice[gather.unit] = false;
  checkSize(gather.outs.size(), unit.params.size(), "results");
  liveGather[gather.unit] = position;
  lives[gather.unit].push_back(current);
  if (gather.group != 0 && kept[gather.unit] != gather.group)
    fail("P18", "unit " + quote(unit.name) + " is gathered from groups of " +
                    std::to_string(gather.group) + " ranks, which keep " +
                    (kept[gather.unit] == 0
                         ? "nothing"
                         : "parts for " + std::to_string(kept[gather.unit])));
  kept[gather.unit] = 0;
  for (size_t i = 0; i < gather.outs.size(); ++i) {
    ValueId out = gather.outs[i];
    if (out == -1)
      continue;
    define(out);
    const Param &param = plan.params[unit.params[i]];
    checkSpec(out, param.computeSpec(), "P5", "parameter " + quote(param.name));
    states[out].gatheredFrom = gather.unit;
    states[out].gather = position;
    states[out].paramOf = unit.params[i];
  }
}

void Verifier::visit(const Reshard &reshard) {
  if (liveGather[reshard.unit] == -1)
    fail("P6", "unit " + quote(plan.units[reshard.unit].name) +
                   " is resharded but not gathered");
  liveGather[reshard.unit] = -1;
  lives[reshard.unit].push_back(current);
  if (reshard.keep != 0 && (reshard.keep < 2 || reshard.keep >= plan.shards() ||
                            plan.shards() % reshard.keep != 0))
    fail("P18", "expected groups that divide the " +
                    std::to_string(plan.shards()) +
                    " ranks of a replica, got groups of " +
                    std::to_string(reshard.keep));
  if (reshard.keep != 0 && current->when != When::Every)
    fail("P18", "expected a reshard that keeps parts in every microbatch");
  kept[reshard.unit] = reshard.keep;
  if (reshard.keep == 0)
    return;
  if (keepSize[reshard.unit] == 0)
    keepSize[reshard.unit] = reshard.keep;
  if (keepSize[reshard.unit] != reshard.keep)
    fail("P18", "expected unit " + quote(plan.units[reshard.unit].name) +
                    " to be kept in groups of one size, got " +
                    std::to_string(keepSize[reshard.unit]) + " and " +
                    std::to_string(reshard.keep));
}

void Verifier::verifyWhen(const Instruction &instruction) const {
  if (instruction.when == When::Every)
    return;
  if (plan.accumulationSteps == 1 || instruction.phase == Phase::Optimizer)
    fail("P40", "expected it to run in every microbatch, as the step has one "
                "or the phase runs once, got " +
                    quote(whenName(instruction.when)));
  bool isFirst = std::holds_alternative<AllGather>(instruction.kind) ||
                 std::holds_alternative<CopyToDevice>(instruction.kind) ||
                 std::holds_alternative<StageState>(instruction.kind);
  bool isLast = std::holds_alternative<Reshard>(instruction.kind) ||
                std::holds_alternative<ReduceScatter>(instruction.kind) ||
                std::holds_alternative<AllReduce>(instruction.kind) ||
                std::holds_alternative<CopyToHost>(instruction.kind);
  bool isWait = std::holds_alternative<Wait>(instruction.kind);
  if (!isWait && !(instruction.when == When::First ? isFirst : isLast))
    fail("P40",
         "expected such an instruction to run in every microbatch, got " +
             quote(whenName(instruction.when)));
}

void Verifier::verifyMicrobatches() const {
  for (size_t u = 0; u < lives.size(); ++u) {
    std::vector<ValueId> left; // by the last gather
    for (const Instruction *instruction : lives[u])
      if (const auto *gather = std::get_if<AllGather>(&instruction->kind))
        left = gather->outs;
    for (const Instruction *instruction : lives[u]) {
      const auto *gather = std::get_if<AllGather>(&instruction->kind);
      const auto *reshard = std::get_if<Reshard>(&instruction->kind);
      const auto *last = std::get_if<Reshard>(&lives[u].back()->kind);
      bool first = instruction == lives[u].front();
      // Whether it is marked, and whether the unit stays gathered so that it
      // must be.
      bool marked = instruction->when != When::Every;
      bool stays =
          lives[u].back()->when == When::Last && (first || reshard == last);
      if (marked != stays)
        fail("P19", "expected unit " + quote(plan.units[u].name) +
                        " to be gathered first in the first microbatch and "
                        "resharded last in the last one, or in every one");
      if (gather && gather->kept != (marked ? left : std::vector<ValueId>()))
        fail("P19", "expected the first gather of unit " +
                        quote(plan.units[u].name) +
                        " to keep the results of its last one where it runs in "
                        "the first microbatch, and no gather to keep others");
      for (size_t i = 0; gather && i < gather->kept.size(); ++i)
        if (gather->kept[i] == -1 && gather->outs[i] != -1)
          fail("P19", "expected the last gather of unit " +
                          quote(plan.units[u].name) +
                          " to have all results that its first one has");
    }
  }
  std::set<ValueId> left;
  for (const Instruction &instruction : plan.instructions)
    if (const auto *gather = std::get_if<AllGather>(&instruction.kind))
      left.insert(gather->kept.begin(), gather->kept.end());
    else if (const auto *sum = std::get_if<Accumulate>(&instruction.kind);
             sum && plan.accumulationSteps > 1)
      left.insert(sum->outs.begin(), sum->outs.end());
  for (const Instruction &instruction : plan.instructions)
    if (runsPerStep(plan, instruction) > 1)
      for (ValueId value : instruction.frees)
        if (left.contains(value))
          fail("P40", "value " + std::to_string(value) +
                          ", which a microbatch leaves to the next, is freed "
                          "in every microbatch");
}

void Verifier::visit(const WriteParam &write) {
  const Param &param = plan.params[write.param];
  use(write.value);
  checkSpec(write.value, param.spec, "P13",
            "the initial value of parameter " + quote(param.name));
  if (writtenParams[write.param])
    fail("P13", "parameter " + quote(param.name) + " is written twice");
  writtenParams[write.param] = true;
}

void Verifier::visit(const WriteBuffer &write) {
  const Buffer &buffer = plan.buffers[write.buffer];
  use(write.value);
  checkSpec(write.value, buffer.spec, "P13",
            "the initial value of buffer " + quote(buffer.name));
  if (writtenBuffers[write.buffer])
    fail("P13", "buffer " + quote(buffer.name) + " is written twice");
  writtenBuffers[write.buffer] = true;
}

void Verifier::verifyFrees(const Instruction &instruction, ValueId loss) {
  for (ValueId value : instruction.frees) {
    checkIndex(value, plan.values, "a value");
    if (!states[value].defined || states[value].freed)
      fail("P4", "value " + std::to_string(value) + " is freed but not alive");
    if (value == loss)
      fail("P12", "the loss, value " + std::to_string(value) + ", is freed");
    states[value].freed = true;
    ValueId storage = plan.values[value].storage;
    --states[storage == -1 ? value : storage].alive;
  }
}

void Verifier::verifyFields(const Instruction &instruction) const {
  auto checkEach = [&](const auto &indices, const auto &table,
                       const char *what) {
    if constexpr (std::is_same_v<decltype(indices), const int32_t &>)
      checkIndex(indices, table, what);
    else
      for (int32_t index : indices)
        checkIndex(index, table, what);
  };
  std::visit(
      [&]<typename KindT>(const KindT &kind) {
        forEachField<KindT>([&](const auto &field) {
          const auto &member = field.in(kind);
          using Member = std::remove_cvref_t<decltype(member)>;
          if constexpr (std::is_same_v<Member, int32_t> ||
                        std::is_same_v<Member, std::vector<int32_t>>) {
            if (field.role == Role::Unit)
              checkEach(member, plan.units, "a unit");
            else if (field.role == Role::Param)
              checkEach(member, plan.params, "a parameter");
            else if (field.role == Role::Buffer)
              checkEach(member, plan.buffers, "a buffer");
            else if (field.role == Role::Kernel)
              checkEach(member, plan.kernels, "a kernel");
          }
        });
        if constexpr (requires { kind.params.size(); })
          forEachField<KindT>([&](const auto &field) {
            if constexpr (requires { field.in(kind).size(); })
              if (field.role == Role::Operand || field.role == Role::Result)
                checkSize(field.in(kind).size(), kind.params.size(),
                          field.role == Role::Result ? "results" : "gradients");
          });
      },
      instruction.kind);
  if (instruction.module != -1)
    checkIndex(instruction.module, plan.modules, "a module");
  if (instruction.line != -1)
    checkIndex(instruction.line, plan.lines, "a line");
}

void Verifier::verifyInstruction(const Instruction &instruction, ValueId loss) {
  current = &instruction;
  verifyFields(instruction);
  std::visit([&](const auto &kind) { visit(kind); }, instruction.kind);
  verifyBuffer(instruction);
  verifyFrees(instruction, loss);
  current = nullptr;
}

void Verifier::verifyInit() {
  for (size_t i = 0; i < plan.init.size(); ++i) {
    const Instruction &instruction = plan.init[i];
    where = "init[" + std::to_string(i) + "]: ";
    const auto *call = std::get_if<Call>(&instruction.kind);
    bool allowed = (call && call->reduceInputOf == -1) ||
                   std::holds_alternative<Constant>(instruction.kind) ||
                   isWrite(instruction);
    if (!allowed || instruction.when != When::Every)
      fail("P13", "expected a call, constant, write_param or write_buffer in "
                  "the initialisation");
    verifyInstruction(instruction);
  }
  where.clear();
  if (plan.init.empty())
    return;
  for (size_t p = 0; p < plan.params.size(); ++p)
    if (!writtenParams[p])
      fail("P13",
           "parameter " + quote(plan.params[p].name) + " is not initialised");
  for (size_t b = 0; b < plan.buffers.size(); ++b)
    if (!writtenBuffers[b])
      fail("P13",
           "buffer " + quote(plan.buffers[b].name) + " is not initialised");
  for (ValueState &state : states)
    state.freed = state.defined;
}

void Verifier::verifyEvaluation() {
  if (plan.evaluation.empty()) {
    if (plan.evaluationLoss != -1)
      fail("P17", "expected evaluation_loss -1 without an evaluation, got " +
                      std::to_string(plan.evaluationLoss));
    return;
  }
  for (const Input &input : plan.inputs)
    define(input.value);
  for (size_t i = 0; i < plan.evaluation.size(); ++i) {
    const Instruction &instruction = plan.evaluation[i];
    position = int64_t(i);
    where = "evaluation[" + std::to_string(i) + "]: ";
    const auto *call = std::get_if<Call>(&instruction.kind);
    bool allowed = (call && call->reduceInputOf == -1) ||
                   std::holds_alternative<Fused>(instruction.kind) ||
                   std::holds_alternative<Constant>(instruction.kind) ||
                   std::holds_alternative<ReadBuffer>(instruction.kind) ||
                   std::holds_alternative<ReadParam>(instruction.kind) ||
                   std::holds_alternative<CopyToDevice>(instruction.kind) ||
                   std::holds_alternative<Wait>(instruction.kind);
    if (const auto *gather = std::get_if<AllGather>(&instruction.kind))
      allowed = gather->group == 0;
    else if (const auto *reshard = std::get_if<Reshard>(&instruction.kind))
      allowed = reshard->keep == 0;
    if (!allowed || instruction.when != When::Every)
      fail(
          "P17",
          "expected a call, fused, constant, read, all_gather, reshard or wait "
          "in the evaluation, for the whole axis and every microbatch");
    verifyInstruction(instruction, plan.evaluationLoss);
  }
  where = "evaluation: ";
  for (size_t u = 0; u < plan.units.size(); ++u)
    if (liveGather[u] != -1)
      fail("P17", "unit " + quote(plan.units[u].name) +
                      " is still gathered at the end of the evaluation");
  verifyLoss(plan.evaluationLoss);
  where.clear();
  for (auto &ops : lives)
    ops.clear();
  for (ValueState &state : states)
    state.freed = state.defined;
  // The step begins with new values for its inputs.
  for (const Input &input : plan.inputs)
    states[input.value] = {};
}

void Verifier::verifyLoss(ValueId value) {
  checkIndex(value, plan.values, "a value");
  use(value);
  const TensorSpec &loss = plan.values[value];
  if (!loss.shape.empty() || !isFloatingPoint(loss.dtype))
    fail("P12", "expected the loss to be a floating-point scalar, got " +
                    describe(loss));
}

void Verifier::verify() {
  verifyTables();
  verifyInit();
  verifyEvaluation();
  findPartialShards();
  for (const Input &input : plan.inputs)
    define(input.value);
  Phase phase = Phase::Forward;
  for (size_t i = 0; i < plan.instructions.size(); ++i) {
    const Instruction &instruction = plan.instructions[i];
    position = int64_t(i);
    where = "instructions[" + std::to_string(i) + "]: ";
    if (instruction.phase < phase)
      fail("P11", "a phase begins again after a later one");
    phase = instruction.phase;
    if (isWrite(instruction))
      fail("P13", "expected writes of parameters and buffers in the "
                  "initialisation only");
    verifyWhen(instruction);
    verifyInstruction(instruction, plan.loss);
  }
  where.clear();
  verifyMicrobatches();
  for (int32_t param : steered)
    if (reductionOf[param] == -1)
      fail("P10", "the reduce-scatter input of " +
                      quote(plan.params[param].name) +
                      " is written but never reduced");
  verifyUpdated();
  verifyStaged();
  verifyLoss(plan.loss);
  verifyArena();
  verifyHostArena();
  verifyStreams(plan, plan.init, origin, "init");
  verifyStreams(plan, plan.evaluation, origin, "evaluation");
  verifyStreams(plan, plan.instructions, origin, "instructions");
}

void verifyPlan(const Plan &plan, const std::string &origin) {
  Verifier(plan, origin).verify();
}

} // namespace fsdp::plan
